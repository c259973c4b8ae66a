"""Tables of what scripts/gpu_check.sh has measured on a GPU, for docs/gpu.md.

A run may have had only some of the steps (`--only`): each table is of the last run that has measured it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.common.arguments import Parser
from benchmarks.common.results import RESULTS, ROOT, Blocks, ResultsError, replace_blocks, stored
from benchmarks.common.tables import markdown

PAGE = ROOT / "docs" / "gpu.md"
START = "<!-- table: python -m benchmarks.gpu --write -->\n\n"
SLOW = 3  # copies: slower kernels are on the page
EXAMPLES = """\
examples:
  scripts/gpu_check.sh                   on a machine with a GPU: measures, and writes gpu_check.json
  python -m benchmarks.gpu               the tables of benchmarks/results/gpu_check*.json
  python -m benchmarks.gpu --write       the same, to docs/gpu.md
"""


def measured(part: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last measurement of "training" or "kernels": about the machine, and the measurement."""
    found = []
    for path in sorted(RESULTS.glob("gpu_check*.json")):
        with stored(path) as results:
            if results[part] is not None:
                found.append((results["about"]["started"], results["about"], results[part]))
    if not found:
        raise ResultsError(f"{RESULTS}/gpu_check*.json: got no run with {part}, expected one of scripts/gpu_check.sh")
    return max(found, key=lambda run: run[0])[1:]


def lines() -> Iterator[str]:
    """The lines of both tables, with what they were measured on."""
    about, training = measured("training")
    settings = training["provenance"]
    side = settings["image_size"]
    yield (
        f"{machine(about)}. A training step of ResNet-50 with {settings['batch_size']} images of {side} x {side}, in "
        f"float32, under DDP with one rank; {settings['rounds']} rounds of {settings['steps']} steps, in turns:"
    )
    yield ""
    header = ["variant", "ms a step", "20 % to 80 %", "ms more than without a hook", "MB sent"]
    yield from markdown(header, map(step_cells, training["rows"]))
    yield ""
    about, kernels = measured("kernels")
    numel = kernels["provenance"]["numel"]
    yield (
        f"{machine(about)}. Kernels on {numel} floats ({4 * numel / 2**20:.0f} MiB), of which a copy takes "
        f"{kernels['rows'][0]['copy_ms']:.2f} ms. *Copies* is a kernel's time in copies of its input; *speed-up* is "
        f"over the same in operations of PyTorch. Of {len(kernels['rows'])} kernels, those that take more than "
        f"{SLOW} copies, or longer than PyTorch:"
    )
    yield ""
    slow = [row for row in kernels["rows"] if row["copies"] > SLOW or row["speedup"] < 1]
    yield from markdown(["kernel", "ms", "copies", "speed-up", "over"], map(kernel_cells, slow))


def machine(about: dict[str, Any]) -> str:
    return f"{about['device']}, driver {about['driver']}, PyTorch {about['torch']}"


def step_cells(row: dict[str, Any]) -> list[str]:
    spread = f"{row['ms_p20']:.1f} to {row['ms_p80']:.1f}"
    sent = "" if row["nbytes"] is None else f"{row['nbytes'] / 1e6:.2f}"
    return [f"`{row['variant']}`", f"{row['ms']:.1f}", spread, f"{row['added_ms']:+.1f}", sent]


def kernel_cells(row: dict[str, Any]) -> list[str]:
    return [row["name"], f"{row['ms']:.2f}", f"{row['copies']:.2f}", f"{row['speedup']:.1f}", f"`{row['peer']}`"]


def blocks() -> Blocks:
    """The block of docs/gpu.md."""
    return {(PAGE, START): "\n".join(lines()) + "\n"}


def main() -> int:
    parser = Parser("gpu", __doc__, EXAMPLES)
    parser.add_argument("--write", action="store_true", help="write the tables to docs/gpu.md")
    args = parser.parse_args()
    try:
        if args.write:
            replace_blocks(blocks())
        else:
            print(*blocks().values(), end="")
    except ResultsError as error:
        parser.fail(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
