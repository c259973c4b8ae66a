"""The commands of studies that continue: they measure what a file of results lacks, or write its tables to pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import Parser, output_file
from benchmarks.common.jobs import JobError
from benchmarks.common.results import Blocks, ResultsError, replace_blocks, stored_rows

Rows = list[dict[str, Any]]


def run_study(
    parser: Parser,
    file: Path,
    measure: Callable[[Any, Rows, str], None],
    tables: Callable[[Rows], Iterable[str]],
    blocks: Callable[[], Blocks],
) -> None:
    """Add `--json` and `--write`, and do what the command line says. Exits with one line if it cannot.

    Args:
        file: of results, by default.
        measure: adds to the rows what is missing of the arguments' study, and writes them. The text is the command.
        tables: lines about the rows, printed at the end.
        blocks: of pages, for `--write`.
    """
    parser.add_argument("--json", metavar="PATH", type=output_file, default=file, help=f"default: {file.name}")
    parser.add_argument("--write", action="store_true", help=f"write the tables of {file.name}, and measure nothing")
    args = parser.parse_args()
    try:
        if args.write:
            replace_blocks(blocks())
            return
        rows = stored_rows(args.json)
        measure(args, rows, parser.command)
        print("\n".join(tables(rows)))
    except (ResultsError, JobError) as error:
        parser.fail(str(error))


def block(lines: Iterable[str]) -> str:
    """The text of a block: lines, without empty ones at the end."""
    return "\n".join(lines).rstrip("\n") + "\n"
