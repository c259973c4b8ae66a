"""What tests/test_ring.py runs in real processes: `ring_worker.py FOLDER [NAME ...]`, by itself or under horovodrun.

By itself, RANK and WORLD_SIZE are in the environment, and ranks meet in FOLDER. Results are saved to FOLDER/RANK.pt.
"""

import datetime
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

import gradzip
from gradzip.codec_ring import codec_ring
from gradzip.collectives import RingSum, ring_segments
from gradzip.engines.horovod_group import group_from_horovod
from gradzip.engines.ring import Ring, RingError
from gradzip.fusion import fused
from gradzip.state import Key

UNDER_HOROVOD = "HOROVOD_SIZE" in os.environ
if UNDER_HOROVOD:
    import horovod.torch as hvd
    from horovod.common.exceptions import HorovodInternalError

    from gradzip.engines.horovod import HorovodEngine

    SUBSET = hvd.ProcessSet(range(int(os.environ["HOROVOD_SIZE"]) - 1))

SCENARIOS = {}
# Elements of each segment: none, fewer than ranks, an empty one among them, no multiple of any world's size.
CUTS = [(), (1,), (3, 0, 7), (5, 5, 5, 5), (33, 31, 1000, 1, 2, 129, 64)]
QSGD = gradzip.QSGD(bits=4, norm="max", coding="packed")
LENGTH = 40_001


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def vector(rank, numel, whole=False):
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    if whole:
        return torch.randint(-1000, 1000, (numel,), generator=generator).float()
    return torch.randn(numel, generator=generator)


def plain(x, segments):
    """The RingSum that replaces x by its sum, as it is."""
    return RingSum(
        tuple(s.stop - s.start for s in segments),
        encode=lambda i: x[segments[i]],
        decode=lambda i, total: x[segments[i]].copy_(total),
    )


def cut(numels):
    ends = [sum(numels[: i + 1]) for i in range(len(numels))]
    return [slice(end - numel, end) for end, numel in zip(ends, numels)]


def basis(rows=48, columns=6):
    return torch.linalg.qr(torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)))[0]


def linear(x, size):
    """A compressor that commutes with the sum: slices of 48 elements as their 6 coordinates in a subspace."""
    u, slices = basis(), x.view(-1, 48)
    segments = ring_segments(slices.shape[0], size, 4800)  # as if they weighed more: several for each rank
    return RingSum(
        tuple(6 * (s.stop - s.start) for s in segments),
        encode=lambda i: slices[segments[i]] @ u,
        decode=lambda i, total: torch.mm(total.view(-1, 6), u.t(), out=slices[segments[i]]),
    )


@dataclass
class Projection(gradzip.Compressor):
    """A method that yields a RingSum."""

    def reduce(self, grad, state):
        yield linear(grad, state.size)
        return grad.div_(state.size)


def quantized(rank, size):
    x = vector(rank, LENGTH)
    return x, codec_ring(QSGD, x, ring_segments(LENGTH, size, 50), Key(0, 0, "w", rank))


@scenario
def sums(ring):
    """Of every cut: floats, whole numbers, and floats with each receive bound to a send."""
    results = []
    lockstep = Ring(ring.group, lockstep=True) if dist.is_initialized() else ring
    for numels in CUTS:
        for engine, whole in ((ring, False), (ring, True), (lockstep, False)):
            x = vector(ring.rank, sum(numels), whole)
            engine.run(plain(x, cut(numels)))
            results.append(x)
    return results


@scenario
def large(ring):
    x = vector(ring.rank, 300_001)
    before = ring.traffic.bytes_sent
    ring.run(plain(x, ring_segments(300_001, ring.size, 4.0)))
    return [x, ring.traffic.bytes_sent - before]


@scenario
def compressed(ring):
    x = vector(ring.rank, 48 * 1001)
    ring.run(linear(x, ring.size))
    return x


@scenario
def types(ring):
    results = []
    for dtype in (torch.float64, torch.float16, torch.int32):
        x = vector(ring.rank, 101, whole=True).to(dtype)
        ring.run(replace(plain(x, cut((50, 51))), dtype=dtype))
        results.append(x)
    return results


@scenario
def merged(ring):
    x, what = quantized(ring.rank, ring.size)
    ring.run(what)
    return x


@scenario
def not_finite(ring):
    x, what = quantized(ring.rank, ring.size)
    if ring.rank == ring.size - 1:
        x[-1] = float("inf")
    ring.run(what)
    return [x, len(what.numels)]


@scenario
def together(ring):
    """Two sums in one."""
    x, y = vector(ring.rank, 101), vector(ring.rank, 64)

    def routine(z, numels):
        yield plain(z, cut(numels))
        return z

    both = fused([routine(x, (50, 51)), routine(y, (64,))])
    (collective,) = next(both)
    ring.run(collective)
    try:
        both.send([None])
    except StopIteration as done:
        return done.value


class Spy:
    """A process group, and what happens to it in which order."""

    def __init__(self, group):
        self.group, self.log = group, []
        self.rank, self.size = group.rank, group.size

    def recv(self, tensors, peer, tag):
        return SpiedWork(self.group.recv(tensors, peer, tag), self.log, ("received", tag))

    def send(self, tensors, peer, tag):
        self.log.append(("send", tag))
        return self.group.send(tensors, peer, tag)


class SpiedWork:
    def __init__(self, work, log, event):
        self.work, self.log, self.event = work, log, event

    def wait(self, *timeout):
        self.work.wait(*timeout)
        self.log.append(self.event)


@scenario
def order(ring):
    """What a rank does, with two segments for each rank."""
    spy = Spy(ring.group)
    x = vector(ring.rank, 8 * ring.size)
    what = plain(x, cut((4,) * (2 * ring.size)))

    def encode(i):
        spy.log.append(("encode", i))
        return what.encode(i)

    def decode(i, total):
        spy.log.append(("decode", i))
        what.decode(i, total)

    Ring(spy).run(RingSum(what.numels, encode, decode))
    if ring.size == 1:
        return spy.log
    first = spy.log[1][1] - ring.rank  # the tag of the first segment's first message
    return [(what, i if what.endswith("code") else i - first) for what, i in spy.log]


@scenario
def wrong_size(ring):
    """On all ranks, and found before anything is sent."""
    messages = []
    for encode in (lambda i: torch.zeros(3), lambda i: torch.zeros(4).double(), lambda i: torch.zeros(4, 2)[:, 0]):
        try:
            Ring(ring.group).run(RingSum((4,) * ring.size, encode, lambda i, total: None))
        except ValueError as error:
            messages.append(str(error))
    return messages


@scenario
def different_sums(ring):
    """Rank 0 has longer segments than the others. The group is of no use afterwards."""
    numels = (50,) * ring.size if ring.rank else (60,) * ring.size
    try:
        Ring(ring.group, timeout=1.0).run(plain(vector(ring.rank, sum(numels)), cut(numels)))
    except RingError as error:
        return str(error)


def failing(ring, numels, at, act):
    x = vector(ring.rank, sum(numels))
    what = plain(x, cut(numels))

    def encode(i):
        if ring.rank == 1 and i == at:
            act()
        return what.encode(i)

    begin = time.monotonic()
    ring = Ring(ring.group, timeout=1.0)
    message = again = ""
    try:
        ring.run(RingSum(what.numels, encode, what.decode))
    except RingError as error:
        message = str(error)
    seconds = time.monotonic() - begin
    try:
        ring.run(what)
    except RingError as error:
        again = str(error)
    return [message, seconds, again]


def dies(ring):
    return failing(ring, (5000,) * 6, 3, lambda: os._exit(7))


def stalls(ring):
    return failing(ring, (5000,) * 6, 3, lambda: time.sleep(4))


def beside_horovod(ring):
    """Rings between Horovod's own all-reduces, some of them under way meanwhile; on two groups, one of some ranks."""
    results, averages = [], []
    few = group_from_horovod(SUBSET) if SUBSET.included() else None
    for step in range(3):
        handles = [hvd.allreduce_async(vector(ring.rank, 1000 + i), name=f"{step}.{i}") for i in range(20)]
        x = vector(ring.rank, 5000 + step)
        ring.run(plain(x, ring_segments(5000 + step, ring.size, 4.0)))
        if few is not None:
            y = vector(ring.rank, 600)
            Ring(few).run(plain(y, ring_segments(600, few.size(), 4.0)))
            results.append(y)
        averages.append([hvd.synchronize(handle) for handle in handles][-1])
        results.append(x)
    return [results, averages]


def horovod_engine(ring):
    """Sums on a ring that Horovod's engine makes, and through an optimizer."""
    engine = HorovodEngine(hvd.global_process_set, gradzip.Traffic())
    x = vector(ring.rank, 48 * 1001)
    assert engine.run(linear(x, ring.size), "linear") is None
    y, what = quantized(ring.rank, ring.size)
    assert engine.run(what, "quantized") is None
    parameter = torch.nn.Parameter(torch.zeros(1001, 48))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0), named_parameters=[("w", parameter)], compression=Projection()
    )
    (parameter * vector(ring.rank, 48 * 1001).view(1001, 48)).sum().backward()
    optimizer.synchronize()
    return [x, y, parameter.grad]


def as_one(ring):
    """The same sums as one all-reduce; what cannot be added is refused."""
    engine = HorovodEngine(hvd.global_process_set, gradzip.Traffic())
    x = vector(ring.rank, 48 * 1001)
    assert engine.launch_as_allreduce(linear(x, ring.size), "linear").result() is None
    assert engine.launch_as_allreduce(plain(torch.empty(0), []), "nothing").result() is None
    try:
        engine.launch_as_allreduce(quantized(ring.rank, ring.size)[1], "quantized")
    except ValueError as error:
        return [x, engine.traffic.bytes_sent, str(error)]


def sent_by_interface():
    """Bytes so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return {name.strip(): int(counts.split()[8]) for name, _, counts in (line.partition(":") for line in lines)}


def between_hosts(ring):
    """A sum, and what each of this host's interfaces has sent of it: one that Horovod is told to use, one that gloo is,
    and any."""
    results = []
    for gloo, horovod in (("", os.environ["HOROVOD_GLOO_IFACE"]), ("eth0", "eth1"), ("", "")):
        os.environ |= {"GLOO_SOCKET_IFNAME": gloo, "HOROVOD_GLOO_IFACE": horovod}
        ring = Ring(group_from_horovod())
        x = vector(ring.rank, 300_001)
        hvd.barrier()
        before = sent_by_interface()
        hvd.barrier()  # ranks of one host count the same
        ring.run(plain(x, ring_segments(300_001, ring.size, 4.0)))
        hvd.barrier()
        results.append([x, {name: nbytes - before[name] for name, nbytes in sent_by_interface().items()}])
    return results


def left_alone(ring):
    """Rank 1 closes its end of an engine's ring: what Horovod's elastic training is told on the others."""
    engine = HorovodEngine(hvd.global_process_set, gradzip.Traffic())
    engine.ring.timeout = 20.0
    if ring.rank == 1:
        del engine.ring
        return ""
    try:
        engine.run(linear(vector(ring.rank, 48 * 1001), ring.size), "linear")
    except HorovodInternalError as error:
        return str(error)


def own_group(folder):
    store = dist.FileStore(str(folder / "store"), int(os.environ["WORLD_SIZE"]))
    dist.init_process_group(
        "gloo", store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    return dist.group.WORLD


def main():
    folder, *names = sys.argv[1:]
    folder = Path(folder)
    torch.set_num_threads(1)
    others = (dies, stalls, beside_horovod, horovod_engine, as_one, between_hosts, left_alone)
    known = SCENARIOS | {f.__name__: f for f in others}
    if UNDER_HOROVOD:
        hvd.init(process_sets=[SUBSET])
        group = group_from_horovod()
    else:
        group = own_group(folder)
    ring = Ring(group, timeout=30.0)
    results = {name: known[name](ring) for name in names or SCENARIOS}
    torch.save(results, folder / f"{ring.rank}.pt")


if __name__ == "__main__":
    main()
