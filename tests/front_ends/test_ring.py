"""The ring all-reduce in the compressed domain, in real processes over gloo, against plain sums."""

import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch

import gradzip
from gradzip.collectives import RingSum, ring_segments
from gradzip.collectives.fusion import fused
from gradzip.collectives.traffic import sent_nbytes
from gradzip.engines.local import drive
from launch import assert_done, environment, executable, needs_network, processes, scenarios, worker_path
from ring_worker import (
    CUTS,
    Projection,
    basis,
    plain_sum,
    projected_sum,
    random_vector,
    slices_of,
)

WORLDS = [1, pytest.param(2, marks=pytest.mark.long), 3, pytest.param(5, marks=pytest.mark.long)]

# `FOLDER COMMAND...`: run a command on the first of two simulated hosts. Hosts are network namespaces. Two cables, eth0
# and eth1, connect them: 10.1.CABLE.HOST. Each host also has a loopback, and an interface `away` that leads nowhere and
# has the same address on both. On the first host, `ssh` starts a command on the second, which ends with this shell. The
# hostnames are addresses, because Horovod resolves them for process sets, whatever interface it is configured to use.
TWO_HOSTS = r"""
set -euo pipefail
coproc unshare --net --uts cat
while [[ /proc/self/ns/uts -ef /proc/$COPROC_PID/ns/uts ]]; do sleep 0.02; done
inside="nsenter --net=/proc/$COPROC_PID/ns/net --uts=/proc/$COPROC_PID/ns/uts"
for cable in 0 1; do
  ip link add eth$cable type veth peer name eth$cable netns $COPROC_PID
  ip address add 10.1.$cable.1/24 dev eth$cable
  $inside ip address add 10.1.$cable.2/24 dev eth$cable
done
hostname 10.1.1.1
$inside hostname 10.1.1.2
for host in "" "$inside"; do
  $host ip link add away type veth peer name nowhere
  $host ip address add 10.0.0.7/32 dev away
  for interface in lo eth0 eth1 away nowhere; do $host ip link set $interface up; done
done
cat >"$1/ssh" <<EOF
#!/bin/bash
while [[ \$1 == -o ]]; do shift 2; done
shift
while [[ \$1 == -o ]]; do shift 2; done
exec $inside bash -c "\$*"
EOF
chmod +x "$1/ssh"
PATH=$1:$PATH
shift
"$@"
exit 0
"""


@pytest.fixture(scope="module", params=WORLDS)
def world(request, tmp_path_factory):
    size = request.param
    results, statuses = processes(size, "ring_worker.py", tmp_path_factory.mktemp(f"ring{size}"))
    assert statuses == [0] * size
    return size, results


def local_sums(size, make):
    """Run a RingSum on ranks in this process. make(rank) returns (tensor, RingSum). Return the tensors of all ranks."""
    tensors, rings = zip(*[make(rank) for rank in range(size)])

    def routine(x, ring):
        assert (yield ring) is None
        return x

    return drive([routine(x, ring) for x, ring in zip(tensors, rings)])


def assert_identical(per_rank):
    for got in per_rank:
        assert torch.equal(got, per_rank[0])
    return per_rank[0]


def assert_is_sum(got, size, numel, whole=False):
    """Assert that a sum is exact for whole numbers, and within its error bound for floats.

    Each of the n - 1 partial sums is rounded by at most half an ulp of the sum of magnitudes. To first order, this is
    (n - 1) 2^-24 sum |x|.
    """
    xs = np.stack([random_vector(rank, numel, whole).double().numpy() for rank in range(size)])
    error = np.abs(got.double().numpy() - xs.sum(0))
    bound = 0 if whole else 1.001 * (size - 1) * 2.0**-24 * np.abs(xs).sum(0)
    assert (error <= bound).all()
    if not whole and size > 2 and numel > 1000:
        assert error.max() > 0  # it was added in float32, in this order


def test_sums(world):
    size, results = world
    cases = list(zip(*results["sums"]))
    assert len(cases) == 3 * len(CUTS)
    for index, per_rank in enumerate(cases):
        numel, whole = sum(CUTS[index // 3]), index % 3 == 1
        assert_is_sum(assert_identical(per_rank), size, numel, whole)


def test_many_segments_and_bytes_sent(world):
    size, results = world
    assert_is_sum(assert_identical([x for x, *_ in results["large"]]), size, 300_001)
    numels = [s.stop - s.start for s in ring_segments(300_001, size, 4.0)]
    for rank, (_, handed, nbytes) in enumerate(results["large"]):
        assert handed == 4 * 300_001
        # A rank sends all segments except one as partial sums, and all except one as complete sums.
        kept = sum(numels[(rank + 1) % size :: size]) + sum(numels[(rank + 2) % size :: size])
        assert nbytes == (4 * (2 * 300_001 - kept) if size > 1 else 0)


def test_bits_equal_those_of_a_local_group(world):
    size, results = world
    for index, numels in enumerate(CUTS):

        def make(rank, numels=numels):
            x = random_vector(rank, sum(numels))
            return x, plain_sum(x, slices_of(numels))

        wanted = assert_identical(local_sums(size, make))
        assert torch.equal(results["sums"][0][3 * index], wanted)
        assert torch.equal(results["sums"][0][3 * index + 2], wanted)


def test_sum_of_compressed_is_compressed_sum(world):
    """Equation (1) of the paper: compare with the projection of the plain sum in float64."""
    size, results = world
    got = assert_identical(results["compressed"]).double().view(-1, 48)
    u, total = basis().double(), sum(random_vector(rank, 48 * 1001).double() for rank in range(size)).view(-1, 48)
    wanted = total @ u @ u.t()
    scale = sum(random_vector(rank, 48 * 1001).double().view(-1, 48).norm(dim=1) for rank in range(size)).max()
    # 48 + 6 products and `size` sums per element, each rounded by at most 2^-24 times the norm of a slice.
    assert (got - wanted).abs().max() <= (48 + 6 + size) * 2.0**-24 * scale
    assert (wanted - total).abs().max() > 1  # it is lossy


def test_other_dtypes(world):
    size, results = world
    for got, dtype in zip(results["dtypes"][0], (torch.float64, torch.float16, torch.int32)):
        wanted = sum(random_vector(rank, 101, whole=True) for rank in range(size))
        if dtype == torch.float16:  # exact up to 2048; above, each partial sum is rounded to a multiple of 2 or 4
            assert (got.float() - wanted).abs().max() <= 2 * (size - 1)
        else:
            assert torch.equal(got, wanted.to(dtype))
    for index in range(3):
        assert_identical([of_rank[index] for of_rank in results["dtypes"]])


def test_fused_sums(world):
    size, results = world
    for got in results["fused_sums"]:
        for x, numel in zip(got, (101, 64)):
            assert_is_sum(x, size, numel)


def test_encoding_and_decoding_overlap_communication(world):
    """While a partial sum arrives, the segment it is added to is encoded. While a complete segment arrives, the
    previous one is decoded."""
    size, results = world
    if size == 1:
        pytest.skip("nothing is sent")
    count = 2 * size
    for rank, events in enumerate(results["event_order"]):
        assert events[0] == ("encode", rank) and events[1] == ("send", rank)
        at = {event: index for index, event in enumerate(events)}
        assert len(at) == len(events)
        assert {i for kind, i in events if kind == "encode"} == {i for kind, i in events if kind == "decode"}
        for step in range(2 * size - 2):
            for part in range(2):
                arriving, leaving = ((rank - step - 1) % size + part * size, (rank - step) % size + part * size)
                earlier = ("encode", arriving) if step < size - 1 else ("decode", leaving)
                assert at[earlier] < at["received", step * count + arriving]
                assert at["send", step * count + leaving] < at["received", step * count + arriving]


def test_wrong_segments_are_refused(world):
    _, results = world
    for rank, messages in enumerate(results["wrong_size"]):
        assert f"got 3 elements of torch.float32 for segment {rank}, expected 4 of torch.float32" in messages[0]
        assert "got 4 elements of torch.float64" in messages[1]
        assert "not contiguous" in messages[2]


def test_different_sums_are_an_error(world):
    size, results = world
    for rank, message in enumerate(results["different_sums"]):
        if size == 1:
            assert message is None
        else:
            assert f"rank {rank}: could not" in message and "whether it ran the same sum" in message


@pytest.mark.parametrize("failure", ["dies", "stalls"])
def test_failed_neighbour_is_an_error_in_time(tmp_path, failure):
    results, statuses = processes(3, "ring_worker.py", tmp_path, failure)
    assert statuses == ([0, 7, 0] if failure == "dies" else [0, 0, 0])
    for rank in (0, 2):
        message, seconds, second_message = results[failure][rank]
        assert f"ring of 3 ranks, rank {rank}: could not" in message and "of 6" in message
        assert "s of 1 (" in message and seconds < 10
        assert "has failed before" in second_message
    # Rank 2 receives from rank 1. Rank 0 sends to rank 1, and notices the failure when rank 2 stops, at the latest.
    assert "could not receive segment" in results[failure][2][0] and "from rank 1" in results[failure][2][0]


@pytest.mark.long
def test_beside_horovod(tmp_path):
    pytest.importorskip("horovod.torch")
    size = 3
    names = ["large", "beside_horovod", "horovod_engine", "as_one_allreduce", "closed_neighbour"]
    results = scenarios(size, "ring_worker.py", tmp_path, *names)
    assert_is_sum(assert_identical([x for x, *_ in results["large"]]), size, 300_001)
    for rank, (ring_sums, averages) in enumerate(results["beside_horovod"]):
        for step in range(3):
            if rank < 2:
                assert_is_sum(ring_sums.pop(0), 2, 600)
            assert_is_sum(ring_sums.pop(0), size, 5000 + step)
            wanted = sum(random_vector(r, 1019) for r in range(size)) / size
            torch.testing.assert_close(averages[step], wanted, rtol=1e-5, atol=1e-6)
        assert not ring_sums
    exact = local_sums(size, lambda rank: (x := random_vector(rank, 48 * 1001), projected_sum(x, size)))[0]
    for x, average in results["horovod_engine"]:
        assert torch.equal(x, exact)
        assert torch.equal(average, exact.view(1001, 48) / size)
    for x, nbytes in results["as_one_allreduce"]:
        torch.testing.assert_close(x, exact, rtol=0, atol=1e-5)  # added in another order
        assert nbytes == 4 * 6 * 1001
    for rank in (0, 2):
        assert f"ring of 3 ranks, rank {rank}: could not" in results["closed_neighbour"][rank]


@needs_network
@pytest.mark.long
def test_configured_interface_is_used_between_hosts(tmp_path):
    """Without a configured interface, any that connects the hosts is used."""
    pytest.importorskip("horovod.torch")
    command = [
        executable().with_name("horovodrun"), "--network-interface", "eth1", "-np", "3",
        "-H", "10.1.1.1:1,10.1.1.2:2", executable(), str(worker_path("ring_worker.py")), tmp_path, "between_hosts",
    ]  # fmt: skip
    job = subprocess.run(
        ["unshare", "--net", "--uts", "bash", "-c", TWO_HOSTS, "two_hosts", tmp_path, *command],
        env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=90,
    )  # fmt: skip
    assert_done(job)
    per_rank = [torch.load(tmp_path / f"{rank}.pt", weights_only=True)["between_hosts"] for rank in range(3)]
    for index, wanted in enumerate(["eth1", "eth0", None]):
        assert_is_sum(assert_identical([of_rank[index][0] for of_rank in per_rank]), 3, 300_001)
        for _, sent in (of_rank[index] for of_rank in per_rank):
            # On each host, one rank sends to the other host: 2 (n - 1) / n times the bytes of the sum.
            cables = {name for name in ("eth0", "eth1") if sent[name] >= 4 / 3 * 4 * 300_000}
            assert cables == {wanted} or (wanted is None and len(cables) == 1), sent
            assert sent["away"] < 1000  # packets of the kernel itself, such as router solicitations


def test_segments():
    for rows in (0, 1, 2, 7, 1000, 99_991, 1_000_003):
        for size in (1, 2, 3, 5):
            segments = ring_segments(rows, size, 16.0)
            assert [i for s in segments for i in range(s.start, s.stop)] == list(range(rows))
            lengths = [s.stop - s.start for s in segments]
            assert not lengths or (max(lengths) - min(lengths) <= 1 and min(lengths) >= 1)
            assert len(segments) % size == 0 or len(segments) == rows < size
            assert not lengths or 16 * (max(lengths) - 1) < 2**18 or len(segments) == 32 * size
    with pytest.raises(ValueError, match="size = 0"):
        ring_segments(5, 0, 4.0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_method_that_yields_a_ring_sum(size):
    group = gradzip.LocalGroup(Projection(), size)
    averages = group.average([random_vector(rank, 48 * 100).view(100, 48) for rank in range(size)], "w")
    wanted = local_sums(size, lambda rank: (x := random_vector(rank, 48 * 100), projected_sum(x, size)))[0] / size
    assert torch.equal(assert_identical(averages), wanted.view(100, 48))
    assert group.bytes_sent == 4 * 6 * 100


def test_bytes_sent_by_a_ring():
    ring = RingSum((3, 4), torch.zeros, lambda i, t: None, dtype=torch.float64)
    assert sent_nbytes(ring) == 56


def test_fused_sums_do_not_mix_kinds():
    def routine(ring):
        yield ring

    x = torch.zeros(2000)
    add = plain_sum(x, [slice(0, 2000)])
    double = replace(plain_sum(x.double(), [slice(0, 1500), slice(1500, 2000)]), dtype=torch.float64)
    first = next(fused([routine(add), routine(double), routine(projected_sum(torch.zeros(4800), 2)), routine(double)]))
    assert [(len(ring.numels), ring.dtype) for ring in first] == [(3, torch.float32), (4, torch.float64)]


def test_different_segments_are_an_error():
    x = torch.zeros(5)

    def routine(numels):
        yield plain_sum(x, slices_of(numels))

    with pytest.raises(RuntimeError, match="expected equal ones"):
        drive([routine((2, 3)), routine((5,))])
