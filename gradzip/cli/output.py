"""Checks of files to write, before the work for them begins."""

from __future__ import annotations

import os
from pathlib import Path

from ..inspection import figure
from .error import CommandError


def check_file(path: Path) -> None:
    """Raise CommandError if a file cannot be at this path."""
    # Not Path.is_dir, which raises some errors, such as that of a name that is too long.
    if os.path.isdir(path) or not os.path.isdir(path.absolute().parent):
        raise CommandError(f"got {path} to write, expected a file in a folder that exists")


def check_picture(path: Path) -> None:
    """Raise CommandError if a picture cannot be at this path, is of an unknown format, or if matplotlib is missing."""
    check_file(path)
    if path.suffix not in figure.FORMATS:
        raise CommandError(f"got {path} to write, expected a file that ends in .png, .svg or .pdf")
    if not figure.available():
        raise CommandError(f"--png: {figure.MISSING}")
