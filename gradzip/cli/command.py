"""What the commands share: the error for bad input, checks of files to write, a progress bar."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ..inspection import figure


class CommandError(Exception):
    """Bad input. The message is one line: what was got, what was expected, what to do. The exit status is 2."""


def check_file(path: Path) -> None:
    """Raise CommandError if no file can be written at this path."""
    # Not Path.is_dir, which raises some errors, such as that of a name that is too long.
    if os.path.isdir(path) or not os.path.isdir(path.absolute().parent):
        raise CommandError(f"got {path} to write, expected a file in a folder that exists")


def check_picture(path: Path) -> None:
    """Raise CommandError if no picture can be written at this path, its format is unknown, or matplotlib is missing."""
    check_file(path)
    if path.suffix not in figure.FORMATS:
        raise CommandError(f"got {path} to write, expected a file that ends in .png, .svg or .pdf")
    if not figure.available():
        raise CommandError(f"--png: {figure.MISSING}")


@contextlib.contextmanager
def progress(steps: int, title: str, quiet: bool = False) -> Iterator[Callable[[], object]]:
    """Show a progress bar on stderr, if that is a terminal and rich is installed. Yields a function to advance it."""
    if quiet or not (sys.stderr.isatty() and importlib.util.find_spec("rich")):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TimeRemainingColumn

    columns = (title, BarColumn(None), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), expand=True, transient=True) as bar:
        task = bar.add_task("", total=steps)
        yield lambda: bar.advance(task)
