"""The ring all-reduce in the compressed domain: real processes over gloo, against plain sums."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import gradzip
from gradzip import ops
from gradzip.codec_ring import codec_ring
from gradzip.collectives import RingSum, ring_segments, sent_nbytes
from gradzip.engines.local import drive
from gradzip.fusion import fused
from gradzip.state import Key
from launch import HERE, needs_network, processes, scenarios
from ring_worker import CUTS, LENGTH, QSGD, Projection, basis, cut, linear, plain, quantized, vector

WORLDS = [1, 2, 3, 5]

# `FOLDER COMMAND...`: runs the command on the first of two hosts, which are network namespaces with two cables between
# them, eth0 and eth1: 10.1.CABLE.HOST. Each has a loopback, and one more interface that leads nowhere, of the same
# address. On the first, `ssh` starts what it is given on the second, which ends with this shell. Horovod, which takes
# the interface that it is told, but resolves the host's name for process sets, finds the address that is the name.
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


def together(size, make):
    """Every rank's tensor, after the RingSum that make(rank) returns with it: of ranks in this process."""
    tensors, rings = zip(*[make(rank) for rank in range(size)])

    def routine(x, ring):
        assert (yield ring) is None
        return x

    return drive([routine(x, ring) for x, ring in zip(tensors, rings)])


def assert_identical(of_ranks):
    for got in of_ranks:
        assert torch.equal(got, of_ranks[0])
    return of_ranks[0]


def assert_is_sum(got, size, numel, whole=False):
    """Exact for whole numbers; otherwise within the n - 1 roundings of partial sums, each at most half an ulp of a
    magnitude that the sum of magnitudes bounds: (n - 1) 2^-24 sum |x|, to first order."""
    xs = np.stack([vector(rank, numel, whole).double().numpy() for rank in range(size)])
    error = np.abs(got.double().numpy() - xs.sum(0))
    bound = 0 if whole else 1.001 * (size - 1) * 2.0**-24 * np.abs(xs).sum(0)
    assert (error <= bound).all()
    if not whole and size > 2 and numel > 1000:
        assert error.max() > 0  # it was added up in float32, not elsewhere


def test_equals_the_plain_sum(world):
    size, results = world
    of_cases = list(zip(*results["sums"]))
    assert len(of_cases) == 3 * len(CUTS)
    for index, of_ranks in enumerate(of_cases):
        numel, whole = sum(CUTS[index // 3]), index % 3 == 1
        assert_is_sum(assert_identical(of_ranks), size, numel, whole)


def test_many_segments_and_their_bytes(world):
    size, results = world
    assert_is_sum(assert_identical([x for x, _ in results["large"]]), size, 300_001)
    numels = [s.stop - s.start for s in ring_segments(300_001, size, 4.0)]
    for rank, (_, nbytes) in enumerate(results["large"]):
        # All segments but the one that ends here as a sum, and all but the one that ends here complete.
        kept = sum(numels[(rank + 1) % size :: size]) + sum(numels[(rank + 2) % size :: size])
        assert nbytes == (4 * (2 * 300_001 - kept) if size > 1 else 0)


def test_bits_are_those_of_a_local_group(world):
    size, results = world
    for index, numels in enumerate(CUTS):

        def make(rank, numels=numels):
            x = vector(rank, sum(numels))
            return x, plain(x, cut(numels))

        wanted = assert_identical(together(size, make))
        assert torch.equal(results["sums"][0][3 * index], wanted)
        assert torch.equal(results["sums"][0][3 * index + 2], wanted)
    wanted = together(size, lambda rank: quantized(rank, size))
    assert torch.equal(results["merged"][0], assert_identical(wanted))


def test_sum_of_compressed_is_compressed_sum(world):
    """Equation (1) of the paper, against the projection of the plain sum in double."""
    size, results = world
    got = assert_identical(results["compressed"]).double().view(-1, 48)
    u, total = basis().double(), sum(vector(rank, 48 * 1001).double() for rank in range(size)).view(-1, 48)
    wanted = total @ u @ u.t()
    scale = sum(vector(rank, 48 * 1001).double().view(-1, 48).norm(dim=1) for rank in range(size)).max()
    # 48 + 6 products and size sums per element, each rounded to 2^-24 of at most the norm of a slice.
    assert (got - wanted).abs().max() <= (48 + 6 + size) * 2.0**-24 * scale
    assert (wanted - total).abs().max() > 1  # it is lossy


def test_other_types(world):
    size, results = world
    for got, dtype in zip(results["types"][0], (torch.float64, torch.float16, torch.int32)):
        wanted = sum(vector(rank, 101, whole=True) for rank in range(size))
        if (
            dtype == torch.float16
        ):  # exact up to 2048, from there on every partial sum is rounded to a multiple of 2 or 4
            assert (got.float() - wanted).abs().max() <= 2 * (size - 1)
        else:
            assert torch.equal(got, wanted.to(dtype))
    for index in range(3):
        assert_identical([of_rank[index] for of_rank in results["types"]])


def test_decode_add_encode_is_within_its_bound(world):
    size, results = world
    got = assert_identical(results["merged"]).double()
    segments = ring_segments(LENGTH, size, 50)
    xs = [vector(rank, LENGTH).double() for rank in range(size)]
    for i, s in enumerate(segments):
        # In the order of the ring: every encoding is off by less than a level, a seventh of the largest of the bucket.
        exact, bound = torch.zeros(s.stop - s.start), torch.zeros(-(-(s.stop - s.start) // 512), 1)
        for hop in range(size):
            exact = exact + xs[(i + hop) % size][s]
            largest = torch.nn.functional.pad(exact.abs(), (0, -len(exact) % 512)).view(-1, 512).amax(1, keepdim=True)
            bound = bound + (largest + bound) / 7
        error = torch.nn.functional.pad(got[s] - exact, (0, -len(exact) % 512)).view(-1, 512).abs()
        assert (error <= bound * (1 + 1e-5)).all()
        assert error.max() > 0.3 / 7  # it is lossy


def test_an_infinite_gradient_is_known_to_all(world):
    size, results = world
    for x, count in results["not_finite"]:
        last = ring_segments(LENGTH, size, 50)[-1]
        assert count == len(ring_segments(LENGTH, size, 50))
        assert x[last].isnan().all() and x[: last.start].isfinite().all()


def test_fused_sums(world):
    size, results = world
    for got in results["together"]:
        for x, numel in zip(got, (101, 64)):
            assert_is_sum(x, size, numel)


def test_compression_and_decompression_come_before_waiting(world):
    """While a partial sum is on the wire, what it is added to is compressed; while a complete segment is, the one
    before it is decompressed."""
    size, results = world
    if size == 1:
        pytest.skip("nothing is sent")
    count = 2 * size
    for rank, events in enumerate(results["order"]):
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


def test_payloads_that_are_cut_off_are_found():
    x = torch.randn(1024)
    payload = codec_ring(QSGD, x, [slice(0, 1024)], Key(0, 0, "w", 0)).encode(0)
    longer = torch.cat([payload, payload.new_zeros(16)])
    assert torch.equal(ops.first_payload(longer), payload)
    for nbytes in (0, 47, 48, payload.numel() - 1):
        with pytest.raises(gradzip.PayloadError, match="truncated"):
            ops.first_payload(payload[:nbytes])


def test_segments_of_a_wrong_size_are_refused(world):
    _, results = world
    for rank, messages in enumerate(results["wrong_size"]):
        assert f"got 3 elements of torch.float32 for segment {rank}, expected 4 of torch.float32" in messages[0]
        assert "got 4 elements of torch.float64" in messages[1]
        assert "not contiguous" in messages[2]


def test_ranks_that_run_different_sums_are_told_so(world):
    size, results = world
    for rank, message in enumerate(results["different_sums"]):
        if size == 1:
            assert message is None
        else:
            assert f"rank {rank}: could not" in message and "whether it ran the same sum" in message


@pytest.mark.parametrize("failure", ["dies", "stalls"])
def test_a_lost_neighbour_is_an_error_in_time(tmp_path, failure):
    results, statuses = processes(3, "ring_worker.py", tmp_path, failure)
    assert statuses == ([0, 7, 0] if failure == "dies" else [0, 0, 0])
    for rank in (0, 2):
        message, seconds, again = results[failure][rank]
        assert f"ring of 3 ranks, rank {rank}: could not" in message and "of 6" in message
        assert "s of 1 (" in message and seconds < 10
        assert "has failed before" in again
    # Rank 2 waits for rank 1 itself; rank 0 sends to it, and hears of it from rank 2 at the latest.
    assert "could not receive segment" in results[failure][2][0] and "from rank 1" in results[failure][2][0]


def test_beside_horovod(tmp_path):
    pytest.importorskip("horovod.torch")
    size = 3
    names = ["large", "merged", "beside_horovod", "horovod_engine", "as_one", "left_alone"]
    results = scenarios(size, "ring_worker.py", tmp_path, *names)
    assert_is_sum(assert_identical([x for x, _ in results["large"]]), size, 300_001)
    assert torch.equal(results["merged"][2], together(size, lambda rank: quantized(rank, size))[0])
    for rank, (of_rings, averages) in enumerate(results["beside_horovod"]):
        for step in range(3):
            if rank < 2:
                assert_is_sum(of_rings.pop(0), 2, 600)
            assert_is_sum(of_rings.pop(0), size, 5000 + step)
            wanted = sum(vector(r, 1019) for r in range(size)) / size
            torch.testing.assert_close(averages[step], wanted, rtol=1e-5, atol=1e-6)
        assert not of_rings
    exact = together(size, lambda rank: (x := vector(rank, 48 * 1001), linear(x, size)))[0]
    for x, y, average in results["horovod_engine"]:
        assert torch.equal(x, exact) and torch.equal(y, results["merged"][2])
        assert torch.equal(average, exact.view(1001, 48) / size)
    for x, nbytes, refusal in results["as_one"]:
        torch.testing.assert_close(x, exact, rtol=0, atol=1e-5)  # added up in another order
        assert nbytes == 4 * 6 * 1001
        assert refusal.startswith("quantized: got a RingSum that merges at every hop")
    for rank in (0, 2):
        assert f"ring of 3 ranks, rank {rank}: could not" in results["left_alone"][rank]


@needs_network
def test_between_hosts_it_takes_the_interface_it_is_told(tmp_path):
    """And any that leads to the others, where it is told none."""
    pytest.importorskip("horovod.torch")
    command = [
        Path(sys.executable).with_name("horovodrun"), "--network-interface", "eth1", "-np", "3",
        "-H", "10.1.1.1:1,10.1.1.2:2", sys.executable, HERE / "ring_worker.py", tmp_path, "between_hosts",
    ]  # fmt: skip
    job = subprocess.run(
        ["unshare", "--net", "--uts", "bash", "-c", TWO_HOSTS, "two_hosts", tmp_path, *command],
        env=dict(os.environ, OMP_NUM_THREADS="1"), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=90,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout[-4000:] + job.stderr[-4000:]
    of_ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True)["between_hosts"] for rank in range(3)]
    for index, wanted in enumerate(["eth1", "eth0", None]):
        assert_is_sum(assert_identical([of_rank[index][0] for of_rank in of_ranks]), 3, 300_001)
        for _, sent in (of_rank[index] for of_rank in of_ranks):
            # One rank of each host sends to the other host: 2 (n - 1) / n of the sum.
            cables = {name for name in ("eth0", "eth1") if sent[name] >= 4 / 3 * 4 * 300_000}
            assert cables == {wanted} or (wanted is None and len(cables) == 1), sent
            assert sent["away"] == 0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_hops_are_unbiased_and_as_wrong_as_theory_says(size):
    """Over many keys. A segment is one bucket: an encoding rounds to multiples of a seventh of its largest element,
    with variance f (1 - f) step^2, f the fraction: 1 / 6 of step^2 where elements lie evenly between levels."""
    numel, keys = 512, 400
    grads = [vector(rank, numel) for rank in range(size)]
    segments = [slice(0, numel)]
    exact, variance = torch.zeros(numel), 0.0
    for grad in grads:
        exact = exact + grad
        variance += (exact.abs().max().item() / 7) ** 2 / 6
    total, squares = torch.zeros(numel, dtype=torch.float64), 0.0
    for step in range(keys):

        def make(rank, step=step):
            x = grads[rank].clone()
            return x, codec_ring(QSGD, x, segments, Key(0, step, "w", rank))

        error = together(size, make)[0].double() - exact.double()
        total += error
        squares += error.square().mean().item()
    assert 0.8 * variance < squares / keys < 1.25 * variance
    # The mean over keys is off by its standard error: of 512 elements, the mean square lies within 40 %.
    assert 0.6 * variance < (total / keys).square().mean().item() * keys < 1.5 * variance


def test_codecs_of_varying_length_are_refused():
    x = torch.zeros(4096)
    what = codec_ring(gradzip.QSGD(coding="elias"), x, [slice(0, 4096)], Key(0, 0, "w", 0))
    x.normal_()
    with pytest.raises(ValueError, match="take a codec of one length, such as QSGD"):
        what.encode(0)


def test_damaged_payloads_are_found():
    x = torch.randn(4096)
    what = codec_ring(QSGD, x, [slice(0, 4096)], Key(0, 0, "w", 0))
    payload = what.encode(0)
    payload[100] ^= 1
    with pytest.raises(gradzip.PayloadError, match="checksum"):
        what.decode(0, payload)


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
def test_a_method_that_yields_it(size):
    group = gradzip.LocalGroup(Projection(), size)
    averages = group.average([vector(rank, 48 * 100).view(100, 48) for rank in range(size)], "w")
    wanted = together(size, lambda rank: (x := vector(rank, 48 * 100), linear(x, size)))[0] / size
    assert torch.equal(assert_identical(averages), wanted.view(100, 48))
    assert group.bytes_sent == 4 * 6 * 100


def test_what_a_ring_puts_on_the_wire_counts():
    what = RingSum((3, 4), torch.zeros, lambda i, t: None, dtype=torch.float64)
    assert sent_nbytes(what) == 56


def test_fused_keeps_kinds_apart():
    def routine(ring):
        yield ring

    x = torch.zeros(2000)
    add = plain(x, [slice(0, 2000)])
    merge = codec_ring(QSGD, x, [slice(0, 1500), slice(1500, 2000)], Key(0, 0, "w", 0))
    first = next(fused([routine(add), routine(merge), routine(linear(torch.zeros(4800), 2)), routine(merge)]))
    assert [len(ring.numels) for ring in first] == [3, 4]
    assert [ring.merge is None for ring in first] == [True, False]


def test_ranks_with_different_segments_are_told_so():
    x = torch.zeros(5)

    def routine(numels):
        yield plain(x, cut(numels))

    with pytest.raises(RuntimeError, match="expected equal ones"):
        drive([routine((2, 3)), routine((5,))])
