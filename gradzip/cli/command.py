"""What the commands share: the error for bad input, checks of pictures to write, tables."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from ..inspection import figure


class CommandError(Exception):
    """Bad input. The message is one line: what was got, what was expected, what to do. The exit status is 2."""


def check_picture(path: Path) -> None:
    """Raise CommandError if no picture can be written at this path, its format is unknown, or matplotlib is missing."""
    # Not Path.is_dir, which raises some errors, such as that of a name that is too long.
    if os.path.isdir(path) or not os.path.isdir(path.absolute().parent):
        raise CommandError(f"got {path} to write, expected a file in a folder that exists")
    if path.suffix not in figure.FORMATS:
        raise CommandError(f"got {path} to write, expected a file that ends in {', '.join(figure.FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--png: matplotlib is not installed: pip install matplotlib")


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned text, the first column to the left, the others to the right. The header is the first row."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(t.rjust(w) if i else t.ljust(w) for i, (t, w) in enumerate(zip(row, widths))).rstrip() for row in rows
    ]
