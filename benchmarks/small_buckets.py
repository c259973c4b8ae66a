"""Time one compressed bucket against an uncompressed one, by size: up to which link does compressing it pay?

One rank of two, on one thread, in one process: what `Traffic` counts of seconds in a method's own code, and of bytes.
Compressed and uncompressed steps take turns; times are the least, since others may use the cores. A bucket pays on
links on which the bytes that it saves take longer than the seconds that it adds, if the backward pass hides neither.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

import gradzip
from benchmarks.common.arguments import Parser, at_least, method
from benchmarks.common.tables import markdown

SPECS = ("acpsgd", "block-float:bits=4", "qsgd", "topk")
NUMELS = tuple(1 << n for n in range(10, 23, 2))  # 4 KiB to 16 MiB
RANKS, WARM_UP = 2, 4


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


def rows(specs: list[str], steps: int) -> Iterator[list[str]]:
    """The cells of the table."""
    for spec in specs:
        for numel in NUMELS:
            buckets = Bucket(spec, numel), Bucket("none", numel)
            for _ in range(steps):
                for bucket in buckets:
                    bucket.step()
            compressed, none = (min(bucket.seconds[WARM_UP:]) for bucket in buckets)
            sent, dense = (statistics.mean(bucket.nbytes[WARM_UP:]) for bucket in buckets)
            more, saved = compressed - none, dense - sent
            link = f"{8e-9 * saved / more:.2f}" if more > 0 else "any"
            yield [f"`{spec}`", f"{dense / 1024:g}", f"{1e6 * none:.0f}", f"{1e6 * compressed:.0f}",
                   f"{compressed / none:.1f}", f"{dense / sent:.1f}", link]  # fmt: skip


def main() -> None:
    parser = Parser("small_buckets", __doc__)
    parser.add_argument("specs", nargs="*", type=method, default=SPECS, help="methods (default: %(default)s)")
    parser.add_argument("--steps", type=at_least(8), default=60, help="steps of each bucket (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    header = "method", "KiB", "us uncompressed", "us compressed", "times slower", "times fewer bytes", "pays up to Gb/s"
    for line in markdown(header, rows(list(args.specs), args.steps)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
