"""A progress bar on stderr."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(steps: int, title: str, quiet: bool = False) -> Iterator[Callable[[], object]]:
    """Yield a function to call after each step: a bar on stderr, if that is a terminal and rich is installed."""
    if quiet or not (sys.stderr.isatty() and importlib.util.find_spec("rich")):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TimeRemainingColumn

    columns = (title, BarColumn(None), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), expand=True, transient=True) as bar:
        task = bar.add_task("", total=steps)
        yield lambda: bar.advance(task)
