"""Scenarios for tests/front_ends/test_ring.py: under horovodrun, or in processes without a launcher."""

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import gradzip
from gradzip.collectives import RingSum, ring_segments
from gradzip.collectives.fusion import fused
from gradzip.engines.horovod_group import group_from_horovod
from gradzip.engines.ring import Ring, RingError
from gradzip.methods.base.compressor import Average
from harness import SIZE, UNDER_HOROVOD, main, on_request, scenario

if UNDER_HOROVOD:
    import horovod.torch as hvd
    from horovod.common.exceptions import HorovodInternalError

    from gradzip.engines.horovod import HorovodEngine

    SUBSET = hvd.ProcessSet(range(SIZE - 1))

# Elements of each segment: no segments, fewer than ranks, an empty one, numbers that are no multiple of the world size.
CUTS = [(), (1,), (3, 0, 7), (5, 5, 5, 5), (33, 31, 1000, 1, 2, 129, 64)]


def random_vector(rank, numel, whole=False):
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    if whole:
        return torch.randint(-1000, 1000, (numel,), generator=generator).float()
    return torch.randn(numel, generator=generator)


def plain_sum(x, segments):
    """Return a RingSum that replaces x by its sum, without compression."""
    return RingSum(
        tuple(s.stop - s.start for s in segments),
        encode=lambda i: x[segments[i]],
        decode=lambda i, total: x[segments[i]].copy_(total),
    )


def slices_of(numels):
    ends = [sum(numels[: i + 1]) for i in range(len(numels))]
    return [slice(end - numel, end) for end, numel in zip(ends, numels)]


def basis(rows=48, columns=6):
    return torch.linalg.qr(torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)))[0]


def projected_sum(x, size):
    """Return a RingSum whose compression commutes with the sum: 48 elements become 6 coordinates in a subspace."""
    u, slices = basis(), x.view(-1, 48)
    segments = ring_segments(slices.shape[0], size, 4800)  # the large row size gives several segments for each rank
    return RingSum(
        tuple(6 * (s.stop - s.start) for s in segments),
        encode=lambda i: slices[segments[i]] @ u,
        decode=lambda i, total: torch.mm(total.view(-1, 6), u.t(), out=slices[segments[i]]),
    )


@dataclass
class Projection(gradzip.Compressor):
    """A method that yields a RingSum."""

    def reduce(self, group):
        yield projected_sum(group.vector, group.size)
        return Average([group.vector.div_(group.size)])


@scenario
def sums(ring):
    """Sum each of CUTS: floats, whole numbers, and floats with a `lockstep` ring."""
    results = []
    lockstep = Ring(ring.group, lockstep=True) if dist.is_initialized() else ring
    for numels in CUTS:
        for engine, whole in ((ring, False), (ring, True), (lockstep, False)):
            x = random_vector(ring.rank, sum(numels), whole)
            engine.run(plain_sum(x, slices_of(numels)))
            results.append(x)
    return results


@scenario
def large(ring):
    x = random_vector(ring.rank, 300_001)
    before = replace(ring.traffic)
    ring.run(plain_sum(x, ring_segments(300_001, ring.size, 4.0)))
    return [x, ring.traffic.bytes_sent - before.bytes_sent, ring.traffic.bytes_wire - before.bytes_wire]


@scenario
def compressed(ring):
    x = random_vector(ring.rank, 48 * 1001)
    ring.run(projected_sum(x, ring.size))
    return x


@scenario
def dtypes(ring):
    results = []
    for dtype in (torch.float64, torch.float16, torch.int32):
        x = random_vector(ring.rank, 101, whole=True).to(dtype)
        ring.run(replace(plain_sum(x, slices_of((50, 51))), dtype=dtype))
        results.append(x)
    return results


@scenario
def fused_sums(ring):
    """Fuse two sums into one."""
    x, y = random_vector(ring.rank, 101), random_vector(ring.rank, 64)

    def routine(z, numels):
        yield plain_sum(z, slices_of(numels))
        return z

    exchange = fused([routine(x, (50, 51)), routine(y, (64,))])
    (collective,) = next(exchange)
    ring.run(collective)
    try:
        exchange.send([None])
    except StopIteration as done:
        return done.value


class RecordingGroup:
    """A process group that records sends and receives in order."""

    def __init__(self, group):
        self.group, self.log = group, []
        self.rank, self.size = group.rank, group.size

    def recv(self, tensors, peer, tag):
        return RecordingWork(self.group.recv(tensors, peer, tag), self.log, ("received", tag))

    def send(self, tensors, peer, tag):
        self.log.append(("send", tag))
        return self.group.send(tensors, peer, tag)


class RecordingWork:
    def __init__(self, work, log, event):
        self.work, self.log, self.event = work, log, event

    def wait(self, *timeout):
        self.work.wait(*timeout)
        self.log.append(self.event)


@scenario
def event_order(ring):
    """Return what a rank does in which order, with two segments for each rank."""
    recorder = RecordingGroup(ring.group)
    x = random_vector(ring.rank, 8 * ring.size)
    what = plain_sum(x, slices_of((4,) * (2 * ring.size)))

    def encode(i):
        recorder.log.append(("encode", i))
        return what.encode(i)

    def decode(i, total):
        recorder.log.append(("decode", i))
        what.decode(i, total)

    Ring(recorder).run(RingSum(what.numels, encode, decode))
    if ring.size == 1:
        return recorder.log
    first = recorder.log[1][1] - ring.rank  # the tag of the first segment's first message
    return [(event, i if event.endswith("code") else i - first) for event, i in recorder.log]


@scenario
def wrong_size(ring):
    """Encode segments of a wrong size, dtype or layout, on all ranks. They are refused before anything is sent."""
    messages = []
    for encode in (lambda i: torch.zeros(3), lambda i: torch.zeros(4).double(), lambda i: torch.zeros(4, 2)[:, 0]):
        try:
            Ring(ring.group).run(RingSum((4,) * ring.size, encode, lambda i, total: None))
        except ValueError as error:
            messages.append(str(error))
    return messages


@scenario
def different_sums(ring):
    """Rank 0 has longer segments than the others. The group cannot be used afterwards."""
    numels = (50,) * ring.size if ring.rank else (60,) * ring.size
    try:
        Ring(ring.group, timeout=1.0).run(plain_sum(random_vector(ring.rank, sum(numels)), slices_of(numels)))
    except RingError as error:
        return str(error)


def run_with_fault(ring, numels, fault_segment, fault):
    x = random_vector(ring.rank, sum(numels))
    collective = plain_sum(x, slices_of(numels))

    def encode(i):
        if ring.rank == 1 and i == fault_segment:
            fault()
        return collective.encode(i)

    start = time.monotonic()
    ring = Ring(ring.group, timeout=1.0)
    message = second_message = ""
    try:
        ring.run(RingSum(collective.numels, encode, collective.decode))
    except RingError as error:
        message = str(error)
    seconds = time.monotonic() - start
    try:
        ring.run(collective)
    except RingError as error:
        second_message = str(error)
    return [message, seconds, second_message]


@on_request
def dies(ring):
    return run_with_fault(ring, (5000,) * 6, 3, lambda: os._exit(7))


@on_request
def stalls(ring):
    return run_with_fault(ring, (5000,) * 6, 3, lambda: time.sleep(4))


@on_request
def beside_horovod(ring):
    """Run rings while Horovod's all-reduces are pending: on all ranks, and on a subset of them."""
    results, averages = [], []
    subset_group = group_from_horovod(SUBSET) if SUBSET.included() else None
    for step in range(3):
        handles = [hvd.allreduce_async(random_vector(ring.rank, 1000 + i), name=f"{step}.{i}") for i in range(20)]
        x = random_vector(ring.rank, 5000 + step)
        ring.run(plain_sum(x, ring_segments(5000 + step, ring.size, 4.0)))
        if subset_group is not None:
            y = random_vector(ring.rank, 600)
            Ring(subset_group).run(plain_sum(y, ring_segments(600, subset_group.size(), 4.0)))
            results.append(y)
        averages.append([hvd.synchronize(handle) for handle in handles][-1])
        results.append(x)
    return [results, averages]


@on_request
def horovod_engine(ring):
    """Sum on the ring of the Horovod engine, directly and with an optimizer."""
    engine = HorovodEngine(hvd.global_process_set, gradzip.Traffic())
    x = random_vector(ring.rank, 48 * 1001)
    assert engine.run(projected_sum(x, ring.size), "linear") is None
    parameter = torch.nn.Parameter(torch.zeros(1001, 48))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0), named_parameters=[("w", parameter)], compression=Projection()
    )
    (parameter * random_vector(ring.rank, 48 * 1001).view(1001, 48)).sum().backward()
    optimizer.synchronize()
    return [x, parameter.grad]


@on_request
def as_one_allreduce(ring):
    """Launch the same sums as one all-reduce, as without gloo."""
    engine = HorovodEngine(hvd.global_process_set, gradzip.Traffic())
    x = random_vector(ring.rank, 48 * 1001)
    with mock.patch.object(dist, "is_gloo_available", lambda: False):
        assert engine.run(projected_sum(x, ring.size), "linear") is None
        assert engine.run(plain_sum(torch.empty(0), []), "nothing") is None
    return [x, engine.traffic.bytes_sent]


def sent_by_interface():
    """Return the bytes that each network interface has sent so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return {name.strip(): int(counts.split()[8]) for name, _, counts in (line.partition(":") for line in lines)}


@on_request
def between_hosts(ring):
    """Return a sum and the bytes that each interface has sent for it.

    The interface is that of Horovod's configuration, that of gloo's, or any.
    """
    results = []
    for gloo, horovod in (("", os.environ["HOROVOD_GLOO_IFACE"]), ("eth0", "eth1"), ("", "")):
        os.environ |= {"GLOO_SOCKET_IFNAME": gloo, "HOROVOD_GLOO_IFACE": horovod}
        ring = Ring(group_from_horovod())
        x = random_vector(ring.rank, 300_001)
        hvd.barrier()
        before = sent_by_interface()
        hvd.barrier()  # ranks of one host read the same counters
        ring.run(plain_sum(x, ring_segments(300_001, ring.size, 4.0)))
        hvd.barrier()
        results.append([x, {name: nbytes - before[name] for name, nbytes in sent_by_interface().items()}])
    return results


@on_request
def closed_neighbour(ring):
    """Rank 1 closes its ring. Return the error that the other ranks raise, which elastic training handles."""
    engine = HorovodEngine(hvd.global_process_set, gradzip.Traffic())
    engine.ring.timeout = 20.0
    if ring.rank == 1:
        del engine.ring
        return ""
    try:
        engine.run(projected_sum(random_vector(ring.rank, 48 * 1001), ring.size), "linear")
    except HorovodInternalError as error:
        return str(error)


def connected_ring():
    return Ring(group_from_horovod() if UNDER_HOROVOD else dist.group.WORLD, timeout=30.0)


if __name__ == "__main__":
    main(process_sets=[SUBSET] if UNDER_HOROVOD else [], ring=connected_ring)
