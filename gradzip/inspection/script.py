"""A function in a user's Python file, for commands that are given FILE.py:FUNCTION."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def call(path: Path, function: str) -> Any:
    """Call a function of a Python file without arguments, and return its result.

    The file is run as by `python FILE.py`, but under another name than "__main__": it can import files beside it, and
    its command line is empty.

    Raises:
        ValueError: there is no such file or function, or its code fails or exits. The message is one line.
    """
    arguments, folders = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [str(path)], [str(path.resolve().parent)]
    try:
        with one_line_errors(f"{path}:{function}"):
            return runpy.run_path(str(path), run_name="gradzip_script")[function]()
    finally:
        sys.argv, sys.path[:] = arguments, folders


@contextlib.contextmanager
def one_line_errors(what: str) -> Iterator[None]:
    """Raise errors and exits of the user's own code as a ValueError of one line. what: the code's name in it."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
