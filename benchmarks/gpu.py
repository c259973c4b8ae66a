"""Tables of what scripts/gpu_check.sh has measured on a GPU, for docs/gpu.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import Parser
from benchmarks.common.results import RESULTS, ROOT, ResultsError, replace_block, stored
from benchmarks.common.tables import markdown

PAGE = ROOT / "docs" / "gpu.md"
START = "<!-- table: python -m benchmarks.gpu --write -->\n\n"
EXAMPLES = """\
examples:
  scripts/gpu_check.sh                   on a machine with a GPU: measures, and writes the file
  python -m benchmarks.gpu               the tables of the file
  python -m benchmarks.gpu --write       the same, to docs/gpu.md
"""


def lines(results: dict[str, Any]) -> Iterator[str]:
    """The lines of both tables, with what they were measured on."""
    about, training, kernels = results["about"], results["training"], results["kernels"]
    settings = training["provenance"]
    yield (
        f"{about['device']}, driver {about['driver']}, PyTorch {about['torch']}. A training step of ResNet-50 with "
        f"{settings['batch_size']} images of {settings['image_size']} x {settings['image_size']}, float32, DDP with one "
        f"rank; {settings['rounds']} rounds of {settings['steps']} steps, variants in turns:"
    )
    yield ""
    header = ["variant", "ms a step", "20 % to 80 %", "ms more than without a hook", "MB sent"]
    yield from markdown(header, map(step_cells, training["rows"]))
    yield ""
    numel = kernels["provenance"]["numel"]
    yield (
        f"Kernels on {numel} floats ({4 * numel / 2**20:.0f} MiB). A copy of them takes "
        f"{kernels['rows'][0]['copy_ms']:.2f} ms. *Copies* is a kernel's time in copies of its input; *speed-up* is over "
        "the same in operations of PyTorch:"
    )
    yield ""
    yield from markdown(["kernel", "ms", "copies", "speed-up", "over"], map(kernel_cells, kernels["rows"]))


def step_cells(row: dict[str, Any]) -> list[str]:
    spread = f"{row['ms_p20']:.1f} to {row['ms_p80']:.1f}"
    sent = "" if row["nbytes"] is None else f"{row['nbytes'] / 1e6:.2f}"
    return [f"`{row['variant']}`", f"{row['ms']:.1f}", spread, f"{row['added_ms']:+.1f}", sent]


def kernel_cells(row: dict[str, Any]) -> list[str]:
    return [row["name"], f"{row['ms']:.2f}", f"{row['copies']:.2f}", f"{row['speedup']:.1f}", f"`{row['peer']}`"]


def main() -> int:
    parser = Parser("gpu", __doc__, EXAMPLES)
    parser.add_argument("--json", metavar="PATH", type=Path, default=RESULTS / "gpu_check.json", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="write the tables to docs/gpu.md")
    args = parser.parse_args()
    try:
        with stored(args.json) as results:
            text = "\n".join(lines(results)) + "\n"
        if args.write:
            replace_block(PAGE, START, text)
        else:
            print(text, end="")
    except ResultsError as error:
        parser.fail(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
