"""A function in a user's Python file, for commands that are given FILE.py:FUNCTION."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


class UserError(ValueError):
    """The user's own code is missing or has failed. The message is one line: where, and what happened."""


def call(path: Path, function: str) -> Any:
    """Call a function of a Python file without arguments, and return its result.

    The file is run as by `python FILE.py`, but under another name than "__main__": it can import files beside it, and
    its command line is empty.

    Raises:
        UserError: there is no such file or function, or its code fails or exits.
    """
    if not path.is_file():
        raise UserError(f"{path}:{function}: got no such file")
    with _as_script(path):
        with user_errors(f"{path}:{function}"):
            module = _module(path)
        found = getattr(module, function, None)
        if not callable(found):
            raise UserError(f"{path}: got no function {function!r}{_others(path, module)}")
        with user_errors(f"{path}:{function}"):
            return found()


def _others(path: Path, module: ModuleType) -> str:
    """A part of a message that says how to name another function of the file, if there is one."""
    defined = [
        n for n, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    return f"; name another one, as in {path}:{defined[0]} (it has {', '.join(defined[:8])})" if defined else ""


@contextlib.contextmanager
def user_errors(what: str) -> Iterator[None]:
    """Raise errors and exits of the user's own code as UserError. what: the code's name in the message.

    Writes what the code has written to stderr, unless it exits: then the last line is a part of the message.
    """
    written = io.StringIO()
    try:
        with contextlib.redirect_stderr(written):
            yield
    except SystemExit as error:
        (reason,) = written.getvalue().splitlines()[-1:] or [f"exit status {error.code}"]
        written = io.StringIO()
        raise UserError(
            f"{what}: the file exits ({' '.join(reason.split())[:200]}); run its own command line only under "
            "if __name__ == '__main__'"
        ) from error
    except Exception as error:
        raise UserError(f"{what}: {one_line(error)}") from error
    finally:
        sys.stderr.write(written.getvalue())


def one_line(error: BaseException) -> str:
    """Format an error as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


@contextlib.contextmanager
def _as_script(path: Path) -> Iterator[None]:
    """Let the file's folder be the first to import from, and its name the only argument."""
    folder, arguments = str(path.resolve().parent), sys.argv
    sys.path.insert(0, folder)
    sys.argv = [str(path)]
    try:
        yield
    finally:
        sys.argv = arguments
        with contextlib.suppress(ValueError):  # the file may have removed it
            sys.path.remove(folder)


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"gradzip_script_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError("expected a Python file, FILE.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module
