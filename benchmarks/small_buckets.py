"""Time one compressed bucket against an uncompressed one, by size: up to which link does compressing it pay?

One rank of two, on one thread, in one process: what `Traffic` counts of seconds in a method's own code, and of bytes.
Compressed and uncompressed steps take turns; times are the least, since others may use the cores. A bucket pays on
links on which the bytes that it saves take longer than the seconds that it adds, if the backward pass hides neither.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import torch

import gradzip
from benchmarks.common.arguments import Parser, at_least, method
from benchmarks.common.results import RESULTS, ROOT, Blocks, provenance, stored_rows, write_json
from benchmarks.common.studies import Rows, block, run_study
from benchmarks.common.tables import markdown

FILE = RESULTS / "small_buckets.json"
PAGE, START = ROOT / "docs" / "methods.md", "<!-- table: python -m benchmarks.small_buckets --write -->\n\n"
SPECS = ("acpsgd", "block-float:bits=4", "qsgd", "topk")
NUMELS = tuple(1 << n for n in range(10, 23, 2))  # 4 KiB to 16 MiB
RANKS, WARM_UP = 2, 4
EXAMPLES = """\
examples:
  python -m benchmarks.small_buckets                 the methods of docs/methods.md, unless they are stored
  python -m benchmarks.small_buckets dct-range       another one, too
  python -m benchmarks.small_buckets --write         the table of docs/methods.md
"""


class Bucket:
    """A bucket of one square matrix, averaged by a method over simulated ranks."""

    def __init__(self, spec: str, numel: int) -> None:
        self.group = gradzip.LocalGroup(gradzip.parse(spec), RANKS)
        rows = 1 << (numel.bit_length() - 1) // 2
        self.gradients = [{"w": torch.randn(rows, numel // rows)} for _ in range(RANKS)]
        self.seconds: list[float] = []
        self.nbytes: list[int] = []

    def step(self) -> None:
        traffic = [compressor.traffic for compressor in self.group.compressors]
        seconds, nbytes = sum(one.seconds for one in traffic), self.group.bytes_sent
        self.group.step(self.gradients)
        self.seconds.append((sum(one.seconds for one in traffic) - seconds) / RANKS)
        self.nbytes.append(self.group.bytes_sent - nbytes)


def sizes(spec: str, steps: int) -> Iterator[dict[str, float]]:
    """Seconds of a rank and bytes of a bucket of each size, uncompressed and compressed."""
    for numel in NUMELS:
        buckets = {"none": Bucket("none", numel), "method": Bucket(spec, numel)}
        for _ in range(steps):
            for bucket in buckets.values():
                bucket.step()
        found: dict[str, float] = {"numel": numel}
        for name, bucket in buckets.items():
            found[f"{name}_seconds"] = min(bucket.seconds[WARM_UP:])
            found[f"{name}_nbytes"] = statistics.mean(bucket.nbytes[WARM_UP:])
        yield found


def pays_up_to(of: dict[str, float]) -> str:
    """The fastest link, in Gb/s, on which compressing a bucket of the size takes less time."""
    more, saved = of["method_seconds"] - of["none_seconds"], of["none_nbytes"] - of["method_nbytes"]
    return f"{8e-9 * saved / more:.2g}" if more > 0 else "any"


def tables(rows: Rows) -> Iterator[str]:
    yield f"Gb/s of a link up to which a bucket pays, by its size, on one core (`{FILE.name}`):"
    yield ""
    header = ["method", *(f"{4 * numel >> 10} KiB" for numel in NUMELS)]
    yield from markdown(header, ([f"`{row['method']}`", *map(pays_up_to, row["sizes"])] for row in rows))


def blocks() -> Blocks:
    """The block of docs/methods.md."""
    return {(PAGE, START): block(tables(stored_rows(FILE)))}


def measure(args: argparse.Namespace, rows: Rows, command: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for spec in args.specs or SPECS:
        about: dict[str, Any] = {"method": spec, "ranks": RANKS, "steps": args.steps}
        if not any(about.items() <= row.items() for row in rows):
            of_each = list(sizes(spec, args.steps))
            rows.append(about | {"sizes": of_each, **provenance(), "command": command})
            write_json(args.json, {"rows": rows})


def main() -> None:
    parser = Parser("small_buckets", __doc__, EXAMPLES)
    parser.add_argument("specs", nargs="*", type=method, metavar="SPEC", help=f"methods (default: {' '.join(SPECS)})")
    parser.add_argument(
        "--steps", type=at_least(8), default=60, metavar="N", help="of each bucket; default: %(default)s"
    )
    run_study(parser, FILE, measure, tables, blocks)


if __name__ == "__main__":
    main()
