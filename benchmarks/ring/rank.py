"""One rank of benchmarks/ring: the rings, their check, and their times. Rank 0 writes a line of JSON.

Usage: `rank.py ROUNDS TRACED FILE`. TRACED is 1 for the spans of a timeline, else 0.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import gradzip
from gradzip.collectives import RingSum, ring_segments
from gradzip.engines.ring import Ring
from gradzip.memory.state import Key
from models import resnet18

SLICE, DIMENSIONS = 768, 96
BITS, BUCKET = 4, 512  # of QSGD
ONLY_SENT, ONLY_COMPUTED = "subspace, only sent", "subspace, only computed"
DRAWN = ("QSGD, a segment per rank", "subspace")


def gradients(rank: int) -> Tensor:
    """Random gradients of ResNet-18's convolutions, flat, padded with zeros to whole slices."""
    with torch.device("meta"):
        numel = sum(p.numel() for p in resnet18(3, 10).parameters() if p.dim() == 4)
    x = torch.zeros(-(-numel // SLICE) * SLICE)
    x[:numel].normal_(generator=torch.Generator().manual_seed(rank))
    return x


def basis() -> Tensor:
    return torch.linalg.qr(torch.randn(SLICE, DIMENSIONS, generator=torch.Generator().manual_seed(99)))[0].contiguous()


def uncompressed(x: Tensor, size: int) -> RingSum:
    segments = ring_segments(x.numel(), size, 4)
    return RingSum(
        tuple(s.stop - s.start for s in segments), lambda i: x[segments[i]],
        lambda i, total: x[segments[i]].copy_(total),
    )  # fmt: skip


@dataclass(frozen=True)
class RequantizedSum(RingSum):
    """A sum of payloads that cannot be added. merge(i, partial) returns `partial` with this rank's segment i added."""

    merge: Callable[[int, Tensor], Tensor] = field(kw_only=True)


class RequantizingRing(Ring):
    """Runs `RequantizedSum`s: each of the n encodings of an element adds an error. Segments: a multiple of n."""

    def _run(self, ring: RequantizedSum, wire: Any) -> None:
        n = self.size
        for step in range(2 * n - 1):  # as `Ring`
            for first in range(0, len(ring.numels), n):
                leaving, arriving = (first + (self.rank - step - later) % n for later in (0, 1))
                data = wire.receive(step - 1, leaving) if step else ring.encode(leaving)
                if 0 < step < n:
                    data = ring.merge(leaving, data)
                if step < 2 * n - 2:
                    wire.exchange(step, leaving, data, arriving)
                if step >= n - 1:
                    ring.decode(leaving, data)


def requantized(x: Tensor, rank: int, size: int, pipelined: bool, norm: str = "l2") -> RequantizedSum:
    """The sum of x with QSGD. Payloads of equal segments have equal lengths, because levels are packed."""
    codec = gradzip.QSGD(BITS, BUCKET, norm, coding="packed")
    cut = ring_segments(x.numel() // BUCKET, size, 4 + BUCKET * BITS / 8 if pipelined else 0)
    parts = [x[s.start * BUCKET : s.stop * BUCKET] for s in cut]

    def encode(i: int, values: Tensor) -> Tensor:
        return codec.encode(values, Key(0, 0, f"gradients[{i}]", rank))

    def decoded(i: int, payload: Tensor) -> Tensor:
        return codec.decode([payload], [parts[i].shape])[0]

    return RequantizedSum(
        numels=tuple(encode(i, torch.zeros_like(part)).numel() for i, part in enumerate(parts)),
        encode=lambda i: encode(i, parts[i]),
        decode=lambda i, total: parts[i].copy_(decoded(i, total)),
        dtype=torch.uint8,
        merge=lambda i, partial: encode(i, decoded(i, partial).add_(parts[i])),
    )


class Subspace:
    """Slices as coordinates in a subspace. It is linear, so sums of coordinates are coordinates of sums.

    Uses torch's matrix products, not GradiVeQ's. Those add in the same order on all hardware and are made for few, long
    slices, where they take 0.5 to 0.9 of torch's time; for thousands of slices of 768 elements they take 1.1 times as
    long.
    """

    def __init__(self, x: Tensor, size: int, pipelined: bool) -> None:
        self.u = basis()
        self.ut = self.u.t().contiguous()
        self.slices = x.view(-1, SLICE)
        self.coordinates = torch.empty(self.slices.shape[0], DIMENSIONS)
        self.segments = ring_segments(self.slices.shape[0], size, 4 * DIMENSIONS if pipelined else 0)
        self.ring = RingSum(tuple(DIMENSIONS * (s.stop - s.start) for s in self.segments), self.encode, self.decode)

    def encode(self, i: int) -> Tensor:
        return torch.mm(self.slices[self.segments[i]], self.u, out=self.coordinates[self.segments[i]])

    def decode(self, i: int, total: Tensor) -> None:
        torch.mm(total.view(-1, DIMENSIONS), self.ut, out=self.slices[self.segments[i]])

    @property
    def only_sent(self) -> RingSum:
        """The same sum without computation: the coordinates exist already."""
        return replace(self.ring, encode=lambda i: self.coordinates[self.segments[i]], decode=lambda i, total: None)

    def only_computed(self, size: int) -> None:
        """The computation of one rank in the sum, without communication."""
        count = len(self.segments)
        for i in range(count):
            self.encode(i)
        for i in range(count * (size - 1) // size):
            coordinates = self.coordinates[self.segments[i]]
            coordinates.add_(coordinates)
        for i in range(count):
            self.decode(i, self.coordinates[self.segments[i]])


class Bench:
    """All rings on one rank."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.original = gradients(self.rank)
        self.x = torch.empty_like(self.original)
        self.subspace = Subspace(self.x, self.size, pipelined=True)
        self.rings: dict[str, RingSum] = {
            "uncompressed": uncompressed(self.x, self.size),
            "QSGD, a segment per rank": requantized(self.x, self.rank, self.size, pipelined=False),
            "QSGD": requantized(self.x, self.rank, self.size, pipelined=True),
            "subspace, a segment per rank": Subspace(self.x, self.size, pipelined=False).ring,
            "subspace": self.subspace.ring,
        }
        self.traffic = gradzip.Traffic()
        self.engines = engines(group, self.traffic)

    def run(self, ring: RingSum) -> None:
        self.engines[type(ring)].run(ring)

    def check(self) -> dict[str, int]:
        """Check the sum of each ring. Returns the bytes that this rank sends, by ring; exits if a sum is wrong."""
        xs = [gradients(rank).double() for rank in range(self.size)]
        total, magnitudes = sum(xs), sum(x.abs() for x in xs)
        u = basis().double()
        projected = (total.view(-1, SLICE) @ u @ u.t()).view(-1)
        # Rounding bounds: of a sum of n float32 terms, and of the products behind a coordinate and an element.
        rounding = 2.0**-24 * self.size * magnitudes.max()
        products = 2.0**-24 * (SLICE + DIMENSIONS) * xs[0].view(-1, SLICE).norm(dim=1).max() * self.size
        # A level of QSGD is a seventh of the norm of 512 elements; each of n encodings is off by less than that.
        level = sum((hop + 1) ** 0.5 for hop in range(self.size)) * 1.5 * BUCKET**0.5 / 7
        sent = {}
        for name, ring in self.rings.items():
            self.x.copy_(self.original)
            before = self.traffic.bytes_wire
            self.run(ring)
            sent[name] = self.traffic.bytes_wire - before
            wanted, bound = {
                "uncompressed": (total, rounding), "QSGD": (total, level), "subspace": (projected, products)
            }[name.partition(",")[0]]  # fmt: skip
            error = float((self.x.double() - wanted).abs().max())
            if not error <= bound:
                sys.exit(f"{name}: off by {error:.3g}, expected at most {float(bound):.3g}; the sum is wrong")
        return sent

    def time(self, rounds: int) -> dict[str, list[float]]:
        """Seconds until the last rank is done, for each run, in each turn."""
        runs: dict[str, Callable[[], object]] = {
            name: lambda ring=ring: self.run(ring) for name, ring in self.rings.items()
        }
        runs[ONLY_SENT] = lambda: self.run(self.subspace.only_sent)
        runs[ONLY_COMPUTED] = lambda: self.subspace.only_computed(self.size)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                self.prepare()
                begin = time.perf_counter()
                run()
                seconds = torch.tensor([time.perf_counter() - begin])
                options = dist.AllreduceOptions()
                options.reduceOp = dist.ReduceOp.MAX
                self.group.allreduce([seconds], options).wait()
                times[name].append(seconds.item())
        return times

    def prepare(self) -> None:
        self.x.copy_(self.original)
        self.group.barrier().wait()

    def trace(self, name: str) -> list[Span]:
        """The activities of this rank in one sum, but for additions of coordinates."""
        spans: list[Span] = []

        def timed(what: str, function: Callable) -> Callable:
            def call(i: int, *arguments: Any) -> Any:
                begin = time.perf_counter()
                result = function(i, *arguments)
                spans.append(Span(self.rank, what, i, begin, time.perf_counter()))
                return result

            return call

        ring = self.rings[name]
        names = {"encode": "compress", "decode": "decompress", "merge": "merge"}
        calls = {key: timed(what, getattr(ring, key)) for key, what in names.items() if hasattr(ring, key)}
        traced = engines(TracedGroup(self.group, spans), gradzip.Traffic())
        self.prepare()
        traced[type(ring)].run(replace(ring, **calls))
        return spans


def engines(group: Any, traffic: gradzip.Traffic) -> dict[type, Ring]:
    """What runs each kind of sum."""
    kinds = {RingSum: Ring, RequantizedSum: RequantizingRing}
    return {what: kind(group, traffic=traffic) for what, kind in kinds.items()}


class Span(NamedTuple):
    """An activity of a rank with a segment; times in seconds."""

    rank: int
    what: str
    segment: int
    begin: float
    end: float


class TracedGroup:
    """A process group that records when messages are sent and received."""

    def __init__(self, group: Any, spans: list[Span]) -> None:
        self.group, self.spans = group, spans
        self.rank, self.size = group.rank, group.size

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> TracedWork:
        return TracedWork("download", self.group.recv(tensors, peer, tag), tag, self)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> TracedWork:
        return TracedWork("send", self.group.send(tensors, peer, tag), tag, self)


class TracedWork(threading.Thread):
    """Waits for a message in the background, to see when it ends."""

    def __init__(self, what: str, work: Any, tag: int, group: TracedGroup) -> None:
        super().__init__(daemon=True)
        self.what, self.work, self.tag, self.group, self.begin = what, work, tag, group, time.perf_counter()
        self.start()

    def run(self) -> None:
        self.work.wait()
        self.group.spans.append(Span(self.group.rank(), self.what, self.tag, self.begin, time.perf_counter()))

    def wait(self, *timeout: Any) -> None:
        self.join()


def main() -> None:
    rounds, traced, path = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bench = Bench(dist.group.WORLD)
    result: dict[str, Any] = {"sent": bench.check(), "times": bench.time(int(rounds)), "spans": {}}
    for name in DRAWN if int(traced) else ():
        bench.trace(name)  # warm
        of_ranks: list[Any] = [None] * bench.size
        dist.all_gather_object(of_ranks, bench.trace(name))
        result["spans"][name] = [span for spans in of_ranks for span in spans]
    if bench.rank == 0:
        with open(path, "a") as file:
            file.write(json.dumps(result) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
