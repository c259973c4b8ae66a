"""Progress on standard error: a bar on a terminal with rich, lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

try:
    from rich.progress import Progress as Bar
except ImportError:
    Bar = None


def spelled(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class Progress:
    """Counts what is done. A context, which ends the bar.

    total: number of measurements.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.count = 0
        self._begin = time.monotonic()
        self._bar: Any = None
        if Bar is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[left]}"),
            )
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("starting", total=total, left="")

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def now(self, what: str) -> None:
        """Show what is in progress."""
        if self._bar:
            self._bar.update(self._task, description=what)

    def note(self, text: str) -> None:
        """Print a line."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def done(self, what: str) -> None:
        """Count and print a measurement."""
        self.count += 1
        left = (time.monotonic() - self._begin) / self.count * (self.total - self.count)
        about = f"about {spelled(left)} left" if self.count < self.total else "the last one"
        self.note(f"[{self.count}/{self.total}] {what} ({about})")
        if self._bar:
            self._bar.update(self._task, advance=1, left=about)


@contextlib.contextmanager
def tenths(title: str) -> Iterator[Callable[[float], None]]:
    """Yield report(share): shows which tenths of some work are done."""
    with Progress(10) as progress:

        def report(share: float) -> None:
            while progress.count < int(10 * share):
                progress.done(title)

        progress.now(title)
        yield report
