"""What command lines of several benchmarks have in common."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import data
import gradzip


class Parser(argparse.ArgumentParser):
    """The parser of `python -m benchmarks.NAME`. An error is one line."""

    def __init__(self, name: str, description: str | None = None, examples: str | None = None) -> None:
        super().__init__(
            prog=f"python -m benchmarks.{name}", description=description, epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip

    def error(self, message: str) -> NoReturn:
        self.fail(f"{message}; see --help", 2)

    def fail(self, message: str, status: int = 1) -> NoReturn:
        """Exit with an error that is not one of the command line."""
        self.exit(status, f"{self.prog}: error: {message}\n")

    @property
    def command(self) -> str:
        """The command that this process was started with."""
        return shlex.join([*self.prog.split(), *sys.argv[1:]])


def output_file(text: str) -> Path:
    """The path of a file to write. Raises ArgumentTypeError."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"got {text}, expected a file in a folder that exists")
    return path


def picture_file(text: str) -> Path:
    """The path of a chart to write. Raises ArgumentTypeError, also without matplotlib."""
    path = output_file(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"got {text}, expected a name that ends in .png, .svg or .pdf")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("matplotlib is not installed; pip install '.[bench]', or leave this out")
    return path


def at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least {least}")
        return int(text)

    return parse


def method(text: str) -> str:
    """Check the spec of a method. Raises ArgumentTypeError."""
    try:
        gradzip.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def data_path(load: Callable[..., Any], paths: Sequence[str]) -> str | None:
    """The path with a network's data: the last folder for images, the last file for text; None for the default.

    Args:
        load: what loads the data: `data.images` or `data.text`.
        paths: of the command line. They exist.
    """
    chosen = [str(Path(path).absolute()) for path in paths if Path(path).is_file() == (load is data.text)]
    return chosen[-1] if chosen else None
