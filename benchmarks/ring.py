#!/usr/bin/env python
"""Measure ring all-reduces: the speed-up by compression, and how much of the compression time is hidden.

Each rank is a process with one thread. It holds random numbers in the shapes of the gradients of ResNet-18's
convolutions. Rings (gradzip.engines.ring) sum them in three ways:

- uncompressed;
- quantized to 4 bits, decoded, added and encoded again at every hop (GradiVeQ paper, figure 2a);
- as coordinates of slices of 768 elements in a subspace of 96 dimensions, which are added as they are (figure 2b).

Rings take turns, because times on shared machines drift, and medians are compared. The subspace ring runs three times
in each turn: whole, without computation, and without communication. `hidden` is the share of the shorter of computation
and communication that adds no time to the whole. Results are checked before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import gradzip
from gradzip.codec_ring import codec_ring
from gradzip.collectives import RingSum, ring_segments
from gradzip.engines.ring import Ring
from gradzip.state import Key

HERE = Path(__file__).parent
SLICE, DIMENSIONS = 768, 96
QSGD = gradzip.QSGD(bits=4, coding="packed")
# Least speed-up of the subspace ring over the uncompressed one, by bandwidth per rank.
GOALS = {"250mbit": 5.25, "1gbit": 4.0}
LEAST_HIDDEN = 0.9

EXAMPLES = """\
examples:
  python benchmarks/ring.py                                    two ranks, unshaped loopback
  python benchmarks/ring.py --rate 250mbit --rate 1gbit        on two networks (needs root)
  python benchmarks/ring.py --ranks 3 --rounds 9 --json ring.json
  python benchmarks/ring.py --rate 1gbit --picture ring.png    also draw a timeline (needs matplotlib)
"""


class Span(NamedTuple):
    """An activity of a rank with a segment; times in seconds."""

    rank: int
    what: str
    segment: int
    begin: float
    end: float


# --- the rings


def gradients(rank: int) -> Tensor:
    """Random gradients of ResNet-18's convolutions, flat, padded with zeros to whole slices."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    from models import resnet18

    with torch.device("meta"):
        numel = sum(p.numel() for p in resnet18(3, 10).parameters() if p.dim() == 4)
    x = torch.zeros(-(-numel // SLICE) * SLICE)
    x[:numel].normal_(generator=torch.Generator().manual_seed(rank))
    return x


def basis() -> Tensor:
    return torch.linalg.qr(torch.randn(SLICE, DIMENSIONS, generator=torch.Generator().manual_seed(99)))[0].contiguous()


def uncompressed(x: Tensor, size: int) -> RingSum:
    segments = ring_segments(x.numel(), size, 4)

    def decode(i: int, total: Tensor) -> None:
        x[segments[i]] = total

    return RingSum(tuple(s.stop - s.start for s in segments), lambda i: x[segments[i]], decode)


def quantized(x: Tensor, rank: int, size: int, pipelined: bool) -> RingSum:
    rows = x.numel() // QSGD.bucket
    cut = ring_segments(rows, size, 4 + QSGD.bucket * QSGD.bits / 8 if pipelined else 0)
    segments = [slice(s.start * QSGD.bucket, s.stop * QSGD.bucket) for s in cut]
    return codec_ring(QSGD, x, segments, Key(0, 0, "gradients", rank))


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


# --- one rank


def meet(folder: Path, rank: int, size: int) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    return gloo(dist.FileStore(str(folder / "store"), size), rank, size, options)


class Bench:
    """All rings on one rank."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.original = gradients(self.rank)
        self.x = torch.empty_like(self.original)
        subspace = Subspace(self.x, self.size, pipelined=True)
        apart = Subspace(self.x, self.size, pipelined=False)
        self.rings: dict[str, RingSum] = {
            "uncompressed": uncompressed(self.x, self.size),
            "QSGD, a segment per rank": quantized(self.x, self.rank, self.size, pipelined=False),
            "QSGD": quantized(self.x, self.rank, self.size, pipelined=True),
            "subspace, a segment per rank": apart.ring,
            "subspace": subspace.ring,
        }
        self.engine = Ring(group)
        self.runs: dict[str, Callable[[], object]] = {
            name: lambda what=what: self.engine.run(what) for name, what in self.rings.items()
        }
        self.runs[ONLY_SENT] = lambda: self.engine.run(subspace.only_sent)
        self.runs[ONLY_COMPUTED] = lambda: subspace.only_computed(self.size)

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
        level = sum((hop + 1) ** 0.5 for hop in range(self.size)) * 1.5 * QSGD.bucket**0.5 / 7
        sent = {}
        for name, what in self.rings.items():
            self.x.copy_(self.original)
            before = self.engine.traffic.bytes_sent
            self.engine.run(what)
            sent[name] = self.engine.traffic.bytes_sent - before
            wanted, bound = {
                "uncompressed": (total, rounding), "QSGD": (total, level), "subspace": (projected, products)
            }[name.partition(",")[0]]  # fmt: skip
            error = float((self.x.double() - wanted).abs().max())
            if not error <= bound:
                sys.exit(f"{name}: off by {error:.3g}, expected at most {float(bound):.3g}; the sum is wrong")
        return sent

    def time(self, rounds: int) -> dict[str, list[float]]:
        """Seconds until the last rank is done, for each run, in each turn."""
        times: dict[str, list[float]] = {name: [] for name in self.runs}
        for _ in range(rounds):
            for name, run in self.runs.items():
                self.x.copy_(self.original)
                self.barrier()
                begin = time.perf_counter()
                run()
                seconds = torch.tensor([time.perf_counter() - begin])
                options = dist.AllreduceOptions()
                options.reduceOp = dist.ReduceOp.MAX
                self.group.allreduce([seconds], options).wait()
                times[name].append(seconds.item())
        return times

    def barrier(self) -> None:
        self.group.barrier().wait()

    def trace(self, name: str) -> list[Span]:
        """The activities of this rank in one sum."""
        group = TracedGroup(self.group)
        spans = group.spans

        def timed(what: str, function: Callable, i: int, *arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(i, *arguments)
            finally:
                spans.append(Span(self.rank, what, i, begin, time.perf_counter()))

        class Traced(RingSum):
            def add(traced, i: int, partial: Tensor, own: Tensor | None = None) -> Tensor:
                return timed("sum" if traced.merge is None else "merge", super().add, i, partial, own)

        what = self.rings[name]
        traced = Traced(
            what.numels, lambda i: timed("compress", what.encode, i),
            lambda i, total: timed("decompress", what.decode, i, total), what.merge, what.dtype, what.device,
        )  # fmt: skip
        self.x.copy_(self.original)
        self.barrier()
        Ring(group).run(traced)
        group.close()
        return spans


class TracedGroup:
    """A process group that records when messages are sent and received, in one thread for each direction."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = group.rank, group.size
        self.spans: list[Span] = []
        self._queues = {what: queue.SimpleQueue() for what in ("download", "send")}
        self._threads = [threading.Thread(target=self._watch, args=item) for item in self._queues.items()]
        for thread in self._threads:
            thread.start()

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> TracedWork:
        return self._add("download", self.group.recv(tensors, peer, tag), tag)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> TracedWork:
        return self._add("send", self.group.send(tensors, peer, tag), tag)

    def _add(self, what: str, work: Any, tag: int) -> TracedWork:
        traced = TracedWork(work, tag, time.perf_counter())
        self._queues[what].put(traced)
        return traced

    def _watch(self, what: str, works: queue.SimpleQueue) -> None:
        while (traced := works.get()) is not None:
            traced.work.wait()
            self.spans.append(Span(self.rank(), what, traced.tag, traced.begin, time.perf_counter()))
            traced.done.set()

    def close(self) -> None:
        for works in self._queues.values():
            works.put(None)
        for thread in self._threads:
            thread.join()


@dataclass
class TracedWork:
    work: Any
    tag: int
    begin: float
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self, *timeout: Any) -> None:
        self.done.wait()


def work(rank: int, args: argparse.Namespace) -> None:
    """One rank's process."""
    torch.set_num_threads(1)
    bench = Bench(meet(args.folder, rank, args.ranks))
    sent = bench.check()
    times = bench.time(args.rounds)
    result: dict[str, Any] = {"sent": sent, "times": times, "spans": {}}
    if args.picture:
        for name in DRAWN:
            bench.trace(name)  # warm
            result["spans"][name] = bench.trace(name)
            bench.barrier()
    (args.folder / f"{rank}.json").write_text(json.dumps(result))


# --- all ranks


ONLY_SENT, ONLY_COMPUTED = "subspace, only sent", "subspace, only computed"
DRAWN = ["QSGD, a segment per rank", "subspace"]


@dataclass
class Row:
    """One ring on one network; times in milliseconds, medians."""

    rate: str
    ring: str
    ms: float
    speedup: float  # over the uncompressed ring
    megabytes: float  # that a rank sends
    goal: float | None = None


@dataclass
class Overlap:
    """The hidden share of the shorter of computation and communication; times in milliseconds."""

    rate: str
    whole: float
    computation: float
    communication: float
    hidden: float


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all ranks on this machine. Returns {"sent", "times", "spans"}."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, __file__, "--folder", name, "--ranks", str(args.ranks), "--rounds", str(args.rounds)]
        command += ["--picture", "yes"] if args.picture else []
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        jobs = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(args.ranks)]
        try:
            statuses = [job.wait(timeout=600) for job in jobs]
        finally:
            for job in jobs:
                job.kill()
        if any(statuses):
            sys.exit(f"ranks ended with {statuses}, expected 0 of each")
        results = [json.loads((Path(name) / f"{rank}.json").read_text()) for rank in range(args.ranks)]
    spans = {ring: [s for result in results for s in result["spans"][ring]] for ring in results[0]["spans"]}
    return {"sent": results[0]["sent"], "times": results[0]["times"], "spans": spans}


def measure_at(rate: str, args: argparse.Namespace) -> dict[str, Any]:
    """The same on a network with that bandwidth per rank."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "raw.json"
        command = [
            str(HERE.parent / "scripts" / "shaped_net.sh"), rate, str(args.ranks), "--", sys.executable, __file__,
        ]  # fmt: skip
        command += ["--ranks", str(args.ranks), "--rounds", str(args.rounds), "--raw", str(path)]
        command += ["--picture", "yes"] if args.picture else []
        if subprocess.run(command).returncode:
            sys.exit(f"could not measure at {rate}; scripts/shaped_net.sh needs root, ip and tc")
        return json.loads(path.read_text())


def rows_of(rate: str, raw: dict[str, Any]) -> tuple[list[Row], Overlap]:
    ms = {name: 1000 * statistics.median(seconds) for name, seconds in raw["times"].items()}
    rows = [
        Row(rate, name, ms[name], ms["uncompressed"] / ms[name], nbytes / 1e6)
        for name, nbytes in raw["sent"].items()
    ]  # fmt: skip
    rows[-1].goal = GOALS.get(rate)
    # Within a turn: a disturbance often affects neighbouring runs alike.
    of_turns = zip(*(raw["times"][name] for name in ("subspace", ONLY_COMPUTED, ONLY_SENT)))
    hidden = statistics.median((c + w - whole) / min(c, w) for whole, c, w in of_turns)
    return rows, Overlap(rate, ms["subspace"], ms[ONLY_COMPUTED], ms[ONLY_SENT], hidden)


def table(rows: list[Row], overlaps: list[Overlap], markdown: bool) -> str:
    def line(*cells: str) -> str:
        if markdown:
            return "| " + " | ".join(cells) + " |"
        return f"{cells[0]:10} {cells[1]:30}" + "".join(f"{cell:>12}" for cell in cells[2:-1]) + f"  {cells[-1]}"

    def goal(value: float, least: float | None) -> str:
        return "" if least is None else f"{'ok' if value >= least else 'MISSED'} (>= {least})"

    lines = [line("rate", "ring", "ms", "speed-up", "MB sent", "goal")]
    lines += [
        line(r.rate, r.ring, f"{r.ms:.1f}", f"{r.speedup:.2f}", f"{r.megabytes:.2f}", goal(r.speedup, r.goal))
        for r in rows
    ]
    lines += ["", line("rate", "subspace", "computed", "sent", "hidden", "goal")]
    lines += [
        line(o.rate, f"{o.whole:.1f} ms", f"{o.computation:.1f} ms", f"{o.communication:.1f} ms", f"{o.hidden:.0%}",
             goal(o.hidden, LEAST_HIDDEN))
        for o in overlaps
    ]  # fmt: skip
    if markdown:
        for at, columns in ((1, 6), (len(rows) + 3, 6)):
            lines.insert(at, "|" + "---|" * columns)
    return "\n".join(lines)


def draw(rate: str, spans_of_rings: dict[str, list], path: Path) -> None:
    """Draw a timeline of the ranks, as in figure 2 of the paper."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {
        "compress": "tab:orange", "decompress": "tab:green", "sum": "tab:red", "merge": "tab:purple",
        "download": "tab:blue",
    }  # fmt: skip
    figure, axes = plt.subplots(len(spans_of_rings), 1, figsize=(12, 2.6 * len(spans_of_rings)), squeeze=False)
    for axis, (ring, raw) in zip(axes[:, 0], spans_of_rings.items()):
        spans = [Span(*s) for s in raw]
        start = min(s.begin for s in spans if s.what == "compress")
        ranks = sorted({s.rank for s in spans})
        for rank in ranks:
            for span in on_the_wire(spans, rank, len(ranks)) + [s for s in spans if s.rank == rank]:
                if span.what in colours and not (span.what == "download" and span in spans):
                    y = 2 * rank + (span.what == "download")
                    left, width = 1000 * (span.begin - start), 1000 * (span.end - span.begin)
                    axis.barh(y, width, left=left, color=colours[span.what], edgecolor="white", linewidth=0.4)
        axis.set_yticks([2 * rank + i for rank in ranks for i in (0, 1)])
        axis.set_yticklabels([f"rank {rank}: {row}" for rank in ranks for row in ("computes", "downloads")])
        axis.set_title(f"{ring}, {rate}")
        axis.set_xlabel("ms")
    figure.legend(
        handles=[plt.Rectangle((0, 0), 1, 1, color=c, label=w) for w, c in colours.items()],
        loc="lower center",
        ncols=len(colours),
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=120)


def on_the_wire(spans: list[Span], rank: int, size: int) -> list[Span]:
    """When each message to `rank` was on the wire: after it was sent and the one before it had arrived."""
    sent = {s.segment: s.begin for s in spans if s.what == "send" and s.rank == (rank - 1) % size}
    arrived = sorted((s for s in spans if s.what == "download" and s.rank == rank), key=lambda s: s.end)
    result, before = [], -math.inf
    for span in arrived:
        result.append(span._replace(begin=min(span.end, max(before, sent[span.segment]))))
        before = span.end
    return result


def provenance(args: argparse.Namespace) -> dict[str, object]:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True)
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) or [platform.machine()]
    return {
        "gradzip": gradzip.__version__,
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "processor": names[0],
        "cores": os.cpu_count(),
        "ranks": args.ranks,
        "threads": 1,
        "numel": gradients(0).numel(),
        "rounds": args.rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=7, help="turns of all rings, for the medians (default: %(default)s)"
    )
    parser.add_argument(
        "--rate", action="append", metavar="RATE", default=[],
        help="bandwidth of each rank, for example 250mbit; repeat for several (default: unshaped loopback)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="PATH", type=Path, help="write results and provenance")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--picture", metavar="PATH", type=Path, help="draw a timeline, at the last rate (PNG)")
    # For the processes that this script starts.
    for name, kind in (("--rank", int), ("--folder", Path), ("--raw", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ranks < 2 or args.rounds < 1:
        parser.error(f"got --ranks {args.ranks} --rounds {args.rounds}, expected at least 2 and 1")
    if args.rank is not None:
        work(args.rank, args)
        return
    if args.raw:
        args.raw.write_text(json.dumps(measure(args)))
        return
    about = provenance(args)
    print("  ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    rows: list[Row] = []
    overlaps: list[Overlap] = []
    rate, raw = "", {}
    for rate in args.rate or ["unshaped"]:
        raw = measure_at(rate, args) if args.rate else measure(args)
        of_rate, overlap = rows_of(rate, raw)
        rows += of_rate
        overlaps.append(overlap)
    print(table(rows, overlaps, args.markdown))
    if args.picture:
        draw(rate, raw["spans"], args.picture)
    if args.json:
        report = {"provenance": about, "rows": [vars(r) for r in rows], "overlaps": [vars(o) for o in overlaps]}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
