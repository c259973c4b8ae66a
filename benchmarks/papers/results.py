"""What benchmarks/papers finds: rows that set a paper's figures beside ours, their JSON file, and their tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.results import Blocks, ResultsError, provenance, stored, write_json
from benchmarks.common.tables import markdown

START = "<!-- table of {}: python -m benchmarks.papers --write -->\n\n"


@dataclass(frozen=True)
class Row:
    """A claim of a paper, and what was found.

    Args:
        source: the section or figure with the claim.
        paper: its figure there.
        ours: the same here.
        hit: whether ours bears the claim out. None for a fact: arithmetic, what could not be otherwise, or no claim.
    """

    claim: str
    source: str
    paper: str
    ours: str
    hit: bool | None
    remark: str = ""


@dataclass(frozen=True)
class Study:
    """The rows of a paper, and the numbers that its picture needs: dicts, lists, strings and finite numbers."""

    rows: list[Row]
    picture: dict[str, Any]


class Results:
    """The studies of all papers so far.

    Args:
        conditions: what they must have in common: the data set and the training runs.
        path: of the JSON file to keep them in; None keeps none.
    """

    def __init__(self, conditions: dict[str, Any], path: Path | None) -> None:
        self.conditions = json.loads(json.dumps(conditions))  # with lists for tuples, as they are read
        self.path = path
        self.papers: dict[str, dict[str, Any]] = {}

    def resume(self) -> None:
        """Read the file, if there is one.

        Raises:
            ResultsError: it has no results of this benchmark, or of other conditions.
        """
        if self.path is None or not self.path.exists():
            return
        with stored(self.path) as content:
            conditions, papers = content["conditions"], content["papers"]
            for paper in papers.values():
                _ = [Row(**row) for row in paper["rows"]], paper["picture"]
        if conditions != self.conditions:
            raise ResultsError(f"{self.path}: was measured with other data or runs; give another --json")
        self.papers = papers

    def add(self, name: str, study: Study, seconds: float) -> None:
        """Add the study of a paper, and write the file, whole or not at all."""
        self.papers[name] = {
            "provenance": provenance(), "seconds": round(seconds, 1), "rows": [asdict(row) for row in study.rows],
            "picture": rounded(study.picture),
        }  # fmt: skip
        if self.path is not None:
            write_json(self.path, {"conditions": self.conditions, "papers": self.papers})

    def rows(self, name: str) -> list[Row]:
        return [Row(**row) for row in self.papers[name]["rows"]]


def rounded(value: Any) -> Any:
    """The same with four significant digits in each float: more than a picture shows.

    Raises:
        ValueError: a number is not finite, which JSON cannot hold.
    """
    if isinstance(value, dict):
        return {str(key): rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"got {value} in a picture's numbers, expected finite ones")
        return float(f"{value:.4g}")
    return value


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def verdict(row: Row) -> str:
    return "fact" if row.hit is None else "hit" if row.hit else "**miss**"


def table(rows: Iterable[Row]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    header = ["claim", "source", "paper", "here", "", "remark"]
    cells = ([row.claim, row.source, row.paper, row.ours, verdict(row), row.remark] for row in rows)
    return markdown(header, cells, left=len(header))


def block(rows: list[Row]) -> str:
    """The text between the marks of a paper on the page."""
    judged = [row.hit for row in rows if row.hit is not None]
    return "\n".join([*table(rows), "", f"{sum(judged)} of {len(judged)} claims hold here."]) + "\n"


def blocks_of(page: Path, results: Results) -> Blocks:
    """The block of each paper that has results."""
    return {(page, START.format(name)): block(results.rows(name)) for name in results.papers}
