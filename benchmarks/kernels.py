#!/usr/bin/env python
"""Speed of the primitives: validated first, then timed against a copy of the data and against the same in torch ops.

Absolute times of shared machines are noise, so every row is a ratio: copy, ours and peer run in turns, and the medians
are compared. `x copy` is our time over that of copying the input (read + write): 1.0 is the speed of memory for what
reads and writes as much. `x peer` is the peer's time over ours. Nothing that computes a wrong result is timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import gradzip
from gradzip import _C, ops
from gradzip.compressor import Key

EXAMPLES = """\
examples:
  python benchmarks/kernels.py                                 all primitives, 25.6 M floats, 2 threads
  python benchmarks/kernels.py --only 'select|compact' --rounds 15
  python benchmarks/kernels.py --device cuda --json results.json
"""


@dataclass
class Case:
    """One primitive on one input."""

    name: str
    ours: Callable[[], object]
    peer: Callable[[], object]
    peer_name: str
    valid: Callable[[], bool]
    nbytes: int  # what the algorithm must read and write
    most_copies: float | None = None  # goals: time at most so many copies, at least so many times the peer's speed
    least_speedup: float | None = None


@dataclass
class Row:
    """What was measured of a case; times in milliseconds."""

    name: str
    ms: float
    gb_per_s: float
    copy_ms: float
    copies: float
    peer: str
    peer_ms: float
    speedup: float
    most_copies: float | None
    least_speedup: float | None


def cases(n: int, device: str) -> Iterator[Case]:
    x = torch.randn(n, device=device)
    yield Case(
        "abs_max", lambda: ops.abs_max(x), lambda: x.abs().max(), "x.abs().max()",
        lambda: float(ops.abs_max(x)) == float(x.abs().max()), 4 * n, 1.0, 2.0,
    )  # fmt: skip
    for share in (0.01, 0.15):
        yield from selection_cases(x, max(1, int(share * n)), f" {share:.0%}")
    number = ops.RangeFloat.fit(x, 10)
    packed = torch.empty(ops.packed_nbytes(n, 10), dtype=torch.uint8, device=device)
    yield Case(
        "range_float encode+pack", lambda: number.encode_packed(x, packed), lambda: range_float_torch(x, number),
        "torch integer ops", lambda: range_float_is_right(x, number, packed), 4 * n + packed.numel(), 2.0, 4.0,
    )  # fmt: skip
    codes = torch.randint(0, 1024, (n,), dtype=torch.int32, device=device)
    yield Case(
        "pack_bits 10", lambda: ops.pack_bits(codes, 10, out=packed), lambda: pack_torch(codes, 10), "torch int64 ops",
        lambda: torch.equal(ops.unpack_bits(ops.pack_bits(codes, 10), 10, n), codes), 4 * n + packed.numel(), 2.0, 4.0,
    )  # fmt: skip
    for block in (4096, None):
        yield fft_case(x, block)


def selection_cases(x: Tensor, k: int, suffix: str) -> Iterator[Case]:
    n = x.numel()
    threshold = ops.select_threshold(x, k)
    expected = torch.topk(x.abs(), k)
    yield Case(
        "select" + suffix, lambda: ops.select(x, k), lambda: torch.topk(x.abs(), k, sorted=False), "torch.topk",
        lambda: bool(ops.select_threshold(x, k) == expected.values[-1]), 4 * n, 4.0, 20.0 if k <= n // 50 else None,
    )  # fmt: skip
    t = float(threshold)
    yield Case(
        "compact" + suffix, lambda: ops.compact(x, t), lambda: x[x.abs() >= t], "x[x.abs() >= t]",
        lambda: torch.equal(ops.compact(x, t)[0], x[x.abs() >= t]), 4 * n + n // 8 + 4 * k, 2.0, 6.0,
    )  # fmt: skip
    values, bitmap = ops.compact(x, t)
    out = torch.empty_like(x)
    index = (x.abs() >= t).nonzero().view(-1)

    def scatter() -> Tensor:
        return torch.zeros(n, device=x.device).index_put_((index,), values)

    yield Case(
        "expand" + suffix, lambda: ops.expand(values, bitmap, n, out=out), scatter, "zeros().index_put_()",
        lambda: torch.equal(ops.expand(values, bitmap, n), scatter()), 4 * n + n // 8 + 4 * k, 2.0, None,
    )  # fmt: skip


def fft_case(x: Tensor, block: int | None) -> Case:
    codec, key = gradzip.FFTRange(block=block), Key(0, 0, "x", 0)

    def peer() -> tuple[Tensor, Tensor]:
        """The same in torch ops: transform, top-k, mask, gather, 16-bit values."""
        rows, length = (1, x.numel()) if block is None else (-(-x.numel() // block), block)
        signal = torch.nn.functional.pad(x, (0, rows * length - x.numel())).view(rows, length)
        spectrum = torch.fft.rfft(signal, norm="ortho").view(-1)
        power = spectrum.abs()
        threshold = torch.topk(power, int(0.15 * power.numel()), sorted=False).values.min()
        mask = power >= threshold
        return mask, torch.view_as_real(spectrum[mask]).half()

    def valid() -> bool:
        """Drops the energy that the best 15 % of the frequencies leave, within 1 %."""
        approximation = codec.decode([codec.encode(x, key)], x.numel())
        _, values = peer()
        kept = 2 * values.float().square().sum()
        dropped = x.double().square().sum() - kept
        error = (approximation - x).double().square().sum()
        return bool(abs(error / dropped - 1) < 0.01)

    name = "whole" if block is None else f"blocks of {block}"
    nbytes = 4 * x.numel() + gradzip.roundtrip(codec, x.view(2, -1))[1]
    return Case(f"FFTRange encode, {name}", lambda: codec.encode(x, key), peer, "rfft, topk, mask", valid, nbytes,
                None, 5.0)  # fmt: skip


def range_float_torch(x: Tensor, number: ops.RangeFloat) -> Tensor:
    shift = 23 - number.mantissa
    t = ((x.abs().view(torch.int32) + (1 << (shift - 1))) >> shift) - number.pbase + 1
    index = torch.where(t > 0, t, (x.abs() >= number.eps / 2).int())
    index = torch.minimum(index, torch.where(x < 0, number.negative, number.positive))
    return index + torch.where((x < 0) & (index > 0), number.positive, 0)


def range_float_is_right(x: Tensor, number: ops.RangeFloat, packed: Tensor) -> bool:
    number.encode_packed(x, packed)
    return torch.equal(ops.unpack_bits(packed, 10, x.numel()), range_float_torch(x, number).int())


def pack_torch(codes: Tensor, bits: int) -> Tensor:
    """Six codes of ten bits to a 64-bit word: what can be done without a kernel (and no dense stream)."""
    per_word = 64 // bits
    words = torch.nn.functional.pad(codes.long(), (0, -codes.numel() % per_word)).view(-1, per_word)
    return (words << (bits * torch.arange(per_word, device=codes.device))).sum(1)


def timed(function: Callable[[], object], device: str) -> float:
    """Milliseconds of one call."""
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)


def measure(case: Case, x: Tensor, rounds: int, device: str) -> Row:
    out = torch.empty_like(x)
    functions = [lambda: out.copy_(x), case.ours, case.peer]
    for function in functions:
        function()
    times = [[timed(function, device) for function in functions] for _ in range(rounds)]
    copy_ms, ms, peer_ms = (statistics.median(column) for column in zip(*times))
    return Row(
        case.name, ms, case.nbytes / ms / 1e6, copy_ms, ms / copy_ms, case.peer_name, peer_ms, peer_ms / ms,
        case.most_copies, case.least_speedup,
    )  # fmt: skip


def line(row: Row) -> str:
    def goal(met: bool | None, text: str) -> str:
        return "" if met is None else f"{'ok' if met else 'MISSED'} ({text})"

    copies = goal(row.most_copies and row.copies <= row.most_copies, f"<= {row.most_copies}")
    speedup = goal(row.least_speedup and row.speedup >= row.least_speedup, f">= {row.least_speedup}")
    return (
        f"{row.name:32} {row.ms:9.2f} {row.gb_per_s:8.1f} {row.copies:8.2f} {copies:16} "
        f"{row.speedup:8.1f} {speedup:17} {row.peer}"
    )


def provenance(args: argparse.Namespace) -> dict[str, object]:
    here = Path(__file__).parent
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True)
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) or [platform.machine()]
    return {
        "gradzip": gradzip.__version__,
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else names[0],
        "simd": _C.simd(),
        "threads": args.threads,
        "numel": args.numel,
        "rounds": args.rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--numel", type=int, default=25_600_000, help="floats (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of copy, ours, peer (default: %(default)s)")
    parser.add_argument("--only", metavar="REGEX", default="", help="cases whose name contains a match")
    parser.add_argument("--json", metavar="PATH", type=Path, help="write the rows and where they come from")
    args = parser.parse_args()
    if args.numel < 4096 or args.numel % 2:
        parser.error(f"got --numel {args.numel}, expected an even number of at least 4096")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    about = provenance(args)
    print("  ".join(f"{key} {value}" for key, value in about.items()))
    print(f"{'primitive':32} {'ms':>9} {'GB/s':>8} {'x copy':>8} {'':16} {'x peer':>8} {'':17} peer")
    x = torch.randn(args.numel, device=args.device)
    rows = []
    for case in cases(args.numel, args.device):
        if not re.search(args.only, case.name):
            continue
        if not case.valid():
            sys.exit(f"{case.name}: the result is wrong, so it is not timed")
        rows.append(measure(case, x, args.rounds, args.device))
        print(line(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"provenance": about, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
    missed = [r.name for r in rows if r.most_copies and r.copies > r.most_copies]
    missed += [r.name for r in rows if r.least_speedup and r.speedup < r.least_speedup]
    if missed:
        print(f"{len(missed)} goals missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
