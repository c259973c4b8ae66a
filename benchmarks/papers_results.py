"""What benchmarks/papers.py finds: rows that set a paper's figures beside ours, their JSON file, and their tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from provenance import provenance
from result_files import ResultsError, replace_block, write_whole

START = "<!-- table of {}: python benchmarks/papers.py --write -->\n\n"


@dataclass(frozen=True)
class Row:
    """A claim of a paper, and what was found.

    Args:
        source: the section or figure with the claim.
        paper: its figure there.
        ours: the same here.
        hit: whether ours bears the claim out; None if the paper makes none.
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
        try:
            stored = json.loads(self.path.read_text())
            conditions, papers = stored["conditions"], stored["papers"]
            for paper in papers.values():
                _ = [Row(**row) for row in paper["rows"]], paper["picture"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResultsError(
                f"{self.path}: got no results of this benchmark ({type(error).__name__}: {error}), expected a JSON "
                "file that --json has written; give another --json"
            ) from None
        if conditions != self.conditions:
            raise ResultsError(f"{self.path}: was measured with other data or runs; give another --json")
        self.papers = papers

    def add(self, name: str, study: Study, seconds: float) -> None:
        """Add the study of a paper, and write the file, whole or not at all."""
        self.papers[name] = {
            "provenance": provenance(), "seconds": round(seconds, 1), "rows": [asdict(row) for row in study.rows],
            "picture": rounded(study.picture),
        }  # fmt: skip
        if self.path is None:
            return
        content = {"conditions": self.conditions, "papers": self.papers}
        write_whole(self.path, to_json(content) + "\n")

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


def to_json(value: Any, indent: str = "") -> str:
    """JSON with a line for each list of numbers."""
    inner = indent + " "
    if isinstance(value, dict) and value:
        items = [f"{inner}{json.dumps(key)}: {to_json(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        return "[\n" + ",\n".join(inner + to_json(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


VERDICTS = {True: "hit", False: "**miss**", None: ""}


def table(rows: Iterable[Row]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    yield "| claim | source | paper | here | | remark |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        cells = (row.claim, row.source, row.paper, row.ours, VERDICTS[row.hit], row.remark)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def block(rows: list[Row]) -> str:
    """The text between the marks of a paper on the page."""
    judged = [row.hit for row in rows if row.hit is not None]
    return "\n".join([*table(rows), "", f"{sum(judged)} of {len(judged)} claims hold here."]) + "\n"


def write_page(page: Path, results: Results) -> None:
    """Write the tables of all papers that have results to a page, between their marks.

    Raises:
        ResultsError: the page, or a mark, is missing.
    """
    try:
        text = page.read_text()
    except OSError as error:
        raise ResultsError(f"{page}: {error.strerror}, expected the page with the tables' marks") from None
    for name in results.papers:
        text = replace_block(page, text, START.format(name), block(results.rows(name)))
    page.write_text(text)
