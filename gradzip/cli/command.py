"""What the commands share: the error for bad input, checks of numbers, tables."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence


class CommandError(Exception):
    """Bad input. The message is one line: what was got, what was expected, what to do. The exit status is 2."""


def check_least(options: argparse.Namespace, **least: float) -> None:
    """Raise CommandError if an option that is given is below its least value, or is not finite."""
    for name, limit in least.items():
        value = getattr(options, name)
        if value is not None and not limit <= value < math.inf:
            kind = "an integer" if isinstance(value, int) else "a number"
            raise CommandError(f"got --{name.replace('_', '-')} {value}, expected {kind} >= {limit}")


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned text, the first column to the left, the others to the right. The header is the first row.

    Rows may be short.
    """
    widths = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]
    return [
        "  ".join(t.rjust(w) if i else t.ljust(w) for i, (t, w) in enumerate(zip(row, widths))).rstrip() for row in rows
    ]
