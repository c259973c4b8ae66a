"""What command lines of several benchmarks have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import data


def output_file(text: str) -> Path:
    """The path of a file to write. Raises ArgumentTypeError."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"got {text}, expected a file in a folder that exists")
    return path


def data_path(load: Callable[..., Any], paths: Sequence[str]) -> str | None:
    """The path with a network's data: the last folder for images, the last file for text; None for the default.

    Args:
        load: what loads the data: `data.images` or `data.text`.
        paths: of the command line. They exist.
    """
    chosen = [str(Path(path).absolute()) for path in paths if Path(path).is_file() == (load is data.text)]
    return chosen[-1] if chosen else None
