"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def markdown(header: Sequence[str], rows: Iterable[Iterable[str]], left: int = 1) -> Iterator[str]:
    """The lines of a table. left: columns that are aligned to the left; those after them have numbers."""

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    yield line(header)
    yield "|" + "---|" * left + "---:|" * (len(header) - left)
    yield from map(line, rows)


def goal(value: float, limit: float | None, most: bool = False) -> str:
    """Whether a value is within its limit: the least, or the most, that it should be. Empty without a limit."""
    if limit is None:
        return ""
    return f"{'ok' if (value <= limit if most else value >= limit) else 'MISSED'} ({'<=' if most else '>='} {limit})"


def span(values: Iterable[float]) -> str:
    """The least and the largest number."""
    least, most = min(found := list(values)), max(found)
    return f"{least:g}" if least == most else f"{least:g} to {most:g}"
