"""The tables of `gradzip advise`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .advice import FP32, Row


def method_table(rows: Iterable[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells."""
    header = [
        "method", "ms/step", "× fp32", "× fp16", "of ideal", "compression", "exposed", "MB/step", "ratio", "pays from",
    ]  # fmt: skip
    names = {FP32: "fp32 (none)"}
    cells = []
    for row in rows:
        pays = (
            "never" if math.isinf(row.least_ratio) else f"{row.least_ratio:.1f}" if row.least_ratio > 0.05 else "always"
        )
        cells.append([
            names.get(row.method, row.method), f"{1e3 * row.seconds:.1f}", f"{row.times_fp32:.2f}",
            f"{row.times_fp16:.2f}", f"{row.share_of_ideal:.0%}", f"{1e3 * row.compression:.1f}",
            f"{1e3 * row.exposed:.1f}", f"{row.nbytes / 1e6:.2f}", f"{row.ratio:.1f}",
            "-" if row.method == FP32 else pays,
        ])  # fmt: skip
    return header, cells


def projection_table(projection: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and cells: ms/step and efficiency of each method."""
    methods = list(projection[0]["seconds"]) if projection else []
    cells = [
        [
            str(row["ranks"]),
            *(f"{1e3 * row['seconds'][m]:.1f} ({row['efficiency'][m]:.0%})" for m in methods),
        ]
        for row in projection
    ]
    return ["ranks", *("fp32" if m == FP32 else m for m in methods)], cells


def print_table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Print a table: by rich on a terminal, if it is installed, else as aligned text."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        Console = None  # type: ignore[assignment,misc]
    if Console is not None and Console().is_terminal:
        table = Table(*header)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in cells:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(len(row[i]) for row in [header, *cells]) for i in range(len(header))]
    for row in [header, *cells]:
        first, *others = (text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths)))
        print("  ".join([first, *others]).rstrip())
