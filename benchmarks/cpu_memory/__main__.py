"""Measure the memory of a CPU that methods take: allocated and resident in real DDP processes, beyond DDP alone.

Each job trains equal matrices for a few steps, with stock DDP and SGD over gloo. Bytes are for each element of the
gradients. Page faults show if scratch memory is reused. What DDP alone takes has Python and torch in it, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.common import jobs
from benchmarks.common.arguments import Parser, method
from benchmarks.common.results import RESULTS, ROOT, Blocks, provenance, stored_rows, write_json
from benchmarks.common.studies import Rows, block, run_study
from benchmarks.common.tables import markdown
from benchmarks.device_ops.memory import specs

EXAMPLES = """\
examples:
  python -m benchmarks.cpu_memory                                 minutes, on two cores
  python -m benchmarks.cpu_memory powersgd topk --json /tmp/try.json
"""
FILE = RESULTS / "cpu_memory.json"
PAGE = ROOT / "docs" / "methods.md"
START = "<!-- table: python -m benchmarks.cpu_memory --write -->\n\n"
RANKS = 2
SIDE, MATRICES = 1024, 64
NUMEL = SIDE * SIDE * MATRICES
COLUMNS = "allocated between steps", "resident between steps", "resident at most", "new pages of a step"
ALONE = ""  # in place of a method: DDP averages


def measure(args: Any, rows: Rows, command: str) -> None:
    about = {"ranks": RANKS, "numel": NUMEL}
    for spec in (ALONE, *(args.methods or specs())):
        if any((about | {"method": spec}).items() <= row.items() for row in rows):
            continue
        job = [*jobs.network("none", RANKS), *jobs.launcher("ddp", RANKS), "benchmarks.cpu_memory.rank", spec]
        for found in jobs.run(job, 1, 300):
            rows.append({"method": spec} | about | found | provenance() | {"command": command})
            write_json(args.json, {"rows": rows})


def tables(rows: Rows) -> Iterator[str]:
    (alone,) = (row for row in rows if row["method"] == ALONE)
    cells = []
    for row in sorted(rows, key=lambda row: row["method"]):
        names = "allocated", "between", "in_step"
        beyond = [row[name] - (alone[name] if row is not alone else 0) for name in names]
        found = *beyond, 4096 * row["faults"]
        cells.append([f"`{row['method']}`" if row is not alone else "DDP alone", *(f"{x / NUMEL:.1f}" for x in found)])
    yield from markdown(["method", *COLUMNS], cells)


def blocks() -> Blocks:
    """The block of docs/methods.md."""
    return {(PAGE, START): block(tables(stored_rows(FILE)))}


def main() -> None:
    parser = Parser("cpu_memory", __doc__, EXAMPLES)
    parser.add_argument("methods", metavar="SPEC", nargs="*", type=method, help="methods (default: those of the table)")
    run_study(parser, FILE, measure, tables, blocks)


if __name__ == "__main__":
    main()
