"""A function in a user's Python file, for commands that are given FILE.py:FUNCTION."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class UserError(ValueError):
    """The user's own code is missing or has failed. The message is one line: where, and what happened."""


def call(path: Path, function: str) -> Any:
    """Call a function of a Python file without arguments, and return its result.

    The file can import files beside it, as if it were run.

    Raises:
        UserError: there is no such file or function, or its code fails.
    """
    if not path.is_file():
        raise UserError(f"{path}:{function}: got no such file")
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        with user_errors(f"{path}:{function}"):
            found = getattr(_module(path), function, None)
        if not callable(found):
            raise UserError(f"{path}: got no function {function!r}")
        with user_errors(f"{path}:{function}"):
            returned = found()
    finally:
        with contextlib.suppress(ValueError):  # the file may have removed it
            sys.path.remove(folder)
    return returned


@contextlib.contextmanager
def user_errors(what: str) -> Iterator[None]:
    """Raise errors of the user's own code as UserError. what: the code's name in the message."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise UserError(f"{what}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Format an error as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"gradzip_script_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError("expected a Python file, FILE.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module
