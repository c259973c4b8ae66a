"""Files of results with their provenance, and pages with tables between marks."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import gradzip
from gradzip import _C
from gradzip.advice.cost import Link

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
END = "\n<!-- end of table -->\n"  # the mark after a table
WIDTH = 120  # of a line of JSON
Blocks = dict[tuple[Path, str], str]  # (page, mark before the block) -> its text


def link_of(stored: Mapping[str, float]) -> Link:
    """A link of a file of results. Those of gradzip 0.2 have the ranks' spread in speed, too."""
    fields: dict[str, Any] = {name: value for name, value in stored.items() if name != "spread"}
    return Link(**fields)


class ResultsError(Exception):
    """A file of results, or a page for them, cannot be used. The message is one line."""


def provenance(device: str = "cpu") -> dict[str, object]:
    """Versions, the commit, and the processor or GPU.

    The commit ends in -dirty if files were changed, besides results, and is empty without a checkout or without git. In
    stored results, "before COMMIT" stands for one that is not in this repository.
    """
    commit = _git("describe", "--always")
    if _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RESULTS.relative_to(ROOT)}"):
        commit += "-dirty"
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) or [platform.machine()]
    return {
        "gradzip": gradzip.__version__,
        "commit": commit,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else names[0],
        "simd": _C.simd(),
    }


def _git(*arguments: str) -> str:
    """What git prints. Shaped networks need root, for whom it refuses another user's checkout."""
    command = ["git", "-c", "safe.directory=*", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True) if shutil.which("git") else None
    return done.stdout.strip() if done else ""


def write_whole(path: Path, text: str) -> None:
    """Write a file, as a whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


def write_json(path: Path, value: Any) -> None:
    """Write a file of results, as a whole or not at all."""
    write_whole(path, to_json(value) + "\n")


def to_json(value: Any, indent: str = "") -> str:
    """JSON in which what fits takes a line, and so does a list of numbers or texts."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, (dict, list, tuple)) or len(indent) + len(line) <= WIDTH:
        return line
    inner = indent + " "
    if isinstance(value, dict):
        items = [f"{json.dumps(key, ensure_ascii=False)}: {to_json(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(inner + item for item in items) + f"\n{indent}}}"
    if not any(isinstance(item, (dict, list, tuple)) for item in value):
        return line
    return "[\n" + ",\n".join(inner + to_json(item, inner) for item in value) + f"\n{indent}]"


@contextlib.contextmanager
def stored(path: Path) -> Iterator[Any]:
    """The content of a file of results, for a block that takes it apart.

    Raises:
        ResultsError: the file cannot be read, or has other content than the block expects.
    """
    try:
        yield json.loads(path.read_text())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(
            f"{path}: got no results of this benchmark ({type(error).__name__}: {error}), expected a JSON file that "
            "--json has written; give another --json"
        ) from None


def stored_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of results; none if it is not there yet.

    Raises:
        ResultsError: the file cannot be read.
    """
    if not path.exists():
        return []
    with stored(path) as content:
        rows: list[dict[str, Any]] = content["rows"]
        assert isinstance(rows, list)
        return rows


def check_same(path: Path, what: str, known: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Check that a file has the conditions that are wanted.

    Raises:
        ResultsError: one differs.
    """
    different = [f"{k} {known.get(k)!r}, expected {v!r}" for k, v in wanted.items() if known.get(k) != v]
    if different:
        raise ResultsError(f"{path}: {what} with {'; '.join(different)}; give another --json")


def replace_block(page: Path, start: str, block: str) -> None:
    """Write another block of text to a page, between its mark and `END`.

    start: the mark before the block.

    Raises:
        ResultsError: there is no such page, or it has no such marks. What follows must not be overwritten.
    """
    try:
        before, found, rest = page.read_text().partition(start)
    except OSError as error:
        raise ResultsError(f"{page}: {error.strerror}, expected the page with the tables' marks") from None
    old, end, after = rest.partition(END)
    if not (found and end) or "<!--" in old:
        raise ResultsError(f"{page}: expected {start.strip()}, and {END.strip()} before the next mark; add both")
    write_whole(page, before + start + block + END + after)


def replace_blocks(blocks: Blocks) -> None:
    """Write blocks to their pages.

    Raises:
        ResultsError: a page or a mark is missing.
    """
    for (page, start), block in blocks.items():
        replace_block(page, start, block)
