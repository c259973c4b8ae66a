"""Files that benchmarks write: results, and pages with tables between marks."""

from __future__ import annotations

import os
from pathlib import Path

END = "\n<!-- end of table -->\n"  # the mark after a table


class ResultsError(Exception):
    """A file of results, or a page for them, cannot be used. The message is one line."""


def write_whole(path: Path, text: str) -> None:
    """Write a file, as a whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


def replace_block(page: Path, content: str, start: str, block: str) -> str:
    """The content of a page, with another block of text between its mark and `END`.

    Args:
        page: its path, for errors.
        start: the mark before the block.

    Raises:
        ResultsError: the page has no such marks. What follows must not be overwritten.
    """
    before, found, rest = content.partition(start)
    old, end, after = rest.partition(END)
    if not (found and end) or "<!--" in old:
        raise ResultsError(f"{page}: expected {start.strip()}, and {END.strip()} before the next mark; add both")
    return before + start + block + END + after
