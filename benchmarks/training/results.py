"""The results of benchmarks/training: what was measured, and what follows from it.

Layout of the JSON file: `provenance`; `cells` (model, rate and number of ranks) with the variants that they compare;
`rows`, one for each variant in each cell, with its rounds and the figures below; and what a cost model needs, with the
fields of the classes of gradzip.advice.cost: `profiles` (Step) for each model and number of ranks, `links` (Link) for
each rate, number of ranks and front end, and `codecs` (Compressed) for each model, number of ranks and method.

Variants are compared within a round, because times on shared machines drift. The figures are medians over the rounds.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import tables
from benchmarks.common.results import ResultsError, check_same, stored, write_json
from benchmarks.training.variants import COMPUTE, FP16, FP32, bandwidth, floor

Cell = tuple[str, str, int]  # model, rate, ranks


@dataclass
class Round:
    """One round of one variant: a measurement, or the error that ended it. Times are in milliseconds.

    ms: of rank 0's steps.
    compression_ms: median over rank 0's steps, in the methods' own code.
    wire_bytes: of a step and rank, as the loopback counts them; None if other jobs use the same loopback, or if
        variants took turns.
    payload_bytes: of a step and rank, as the method counts them.
    choice: of Auto: its methods, with the number of parameters of each.
    """

    number: int
    ms: list[float] = field(default_factory=list)
    compression_ms: float = 0.0
    wire_bytes: float | None = None
    payload_bytes: float = 0.0
    choice: dict[str, int] | None = None
    error: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.ms)


@dataclass
class Row:
    """All rounds of one variant in one cell."""

    model: str
    rate: str
    ranks: int
    variant: str
    parameters: int = 0
    rounds: list[Round] = field(default_factory=list)

    @property
    def cell(self) -> Cell:
        return self.model, self.rate, self.ranks

    @property
    def measured(self) -> dict[int, Round]:
        """The rounds without an error, by number."""
        return {r.number: r for r in self.rounds if r.error is None}

    @property
    def done(self) -> set[int]:
        return {r.number for r in self.rounds}


class Results:
    """All rows, and what a cost model needs.

    Args:
        provenance: how it was measured.
        path: file to keep them in.
    """

    def __init__(self, provenance: dict[str, Any], path: Path | None = None) -> None:
        self.provenance = provenance
        self.path = path
        self.variants: dict[Cell, list[str]] = {}
        self.rows: dict[tuple[Cell, str], Row] = {}
        self.profiles: list[dict[str, Any]] = []
        self.links: list[dict[str, Any]] = []
        self.codecs: list[dict[str, Any]] = []

    def row(self, cell: Cell, variant: str) -> Row:
        """The row of a variant in a cell, which is made if it is missing."""
        return self.rows.setdefault((cell, variant), Row(*cell, variant))

    def resume(self) -> bool:
        """Read what the file has. Returns whether there is one.

        Raises:
            ResultsError: the file has no results, or they were measured in another way.
        """
        if self.path is None or not self.path.exists():
            return False
        with stored(self.path) as content:
            known = {"hosts": 1, "interleave": False, **content["provenance"]}
            self.variants = {
                (cell["model"], cell["rate"], cell["ranks"]): list(cell["variants"]) for cell in content["cells"]
            }
            for row in content["rows"]:
                of = self.row((row["model"], row["rate"], row["ranks"]), row["variant"])
                of.parameters, of.rounds = row["parameters"], [Round(**r) for r in row["rounds"]]
            self.profiles, self.links, self.codecs = (content[name] for name in ("profiles", "links", "codecs"))
            commands = known.pop("commands")
        mine = self.provenance.pop("commands")
        check_same(self.path, "was measured", known, self.provenance)
        self.provenance["commands"] = list(dict.fromkeys([*commands, *mine]))
        return True

    def plan(self, cells: Iterable[Cell], variants: Sequence[str]) -> None:
        """Set the variants of cells. A cell keeps its variants, because they are compared within a round.

        Raises:
            ResultsError: a cell of the file has others.
        """
        wanted = set(variants)
        for cell in cells:
            known = set(self.variants.setdefault(cell, list(variants)))
            if known != wanted:
                raise ResultsError(
                    f"{self.path}: {', '.join(map(str, cell))} was measured with the variants "
                    f"{' '.join(sorted(known))}, expected {' '.join(sorted(wanted))}; give another --json"
                )

    def save(self) -> None:
        """Write the file, as a whole or not at all."""
        if self.path is None:
            return
        content = {
            "provenance": self.provenance,
            "cells": [
                {"model": model, "rate": rate, "ranks": ranks, "variants": variants}
                for (model, rate, ranks), variants in self.variants.items()
            ],
            "rows": self.reports(),
            "profiles": self.profiles, "links": self.links, "codecs": self.codecs,
        }  # fmt: skip
        write_json(self.path, content)

    def reports(self) -> list[dict[str, Any]]:
        """The rows of the JSON file, in the order of the cells and their variants."""
        planned = [(cell, variant) for cell, variants in self.variants.items() for variant in variants]
        rows = [self.rows[key] for key in planned if key in self.rows]
        return [self._report(row) for row in rows if row.rounds]

    def _report(self, row: Row) -> dict[str, Any]:
        measured = row.measured
        about = asdict(row)
        about["rounds"] = [{k: v for k, v in r.items() if v is not None} for r in about["rounds"]]
        if not measured:
            return about

        def against(variant: str, figure: Callable[[Round, Round], float]) -> float | None:
            """The median of a figure of this row's rounds and those of another variant."""
            other = self.rows.get((row.cell, variant))
            rounds = other.measured if other else {}
            figures = [figure(mine, rounds[number]) for number, mine in measured.items() if number in rounds]
            return statistics.median(figures) if figures else None

        def quotient(mine: Round, other: Round) -> float:
            return other.median / mine.median

        steps = list(itertools.chain(*(r.ms for r in measured.values())))
        deciles = statistics.quantiles(steps, n=10, method="inclusive") if len(steps) > 1 else steps * 9
        wire = [r.wire_bytes for r in measured.values() if r.wire_bytes is not None]
        return about | {
            "ms": statistics.median(steps),
            "ms_p20": deciles[1],
            "ms_p80": deciles[7],
            "ms_of_rounds": [r.median for r in measured.values()],
            "compute_ms": against(COMPUTE, lambda mine, compute: compute.median),
            "compression_ms": statistics.median(r.compression_ms for r in measured.values()),
            "communication_ms": against(
                COMPUTE, lambda mine, compute: max(0.0, mine.median - compute.median - mine.compression_ms)
            ),
            "share_of_ideal": against(COMPUTE, quotient),
            "share_of_floor": against(floor(row.variant), quotient),
            "times_fp32": against(FP32, quotient),
            "times_fp16": against(FP16, quotient),
            "wire_bytes": statistics.median(wire) if wire else None,
            "payload_bytes": statistics.median(r.payload_bytes for r in measured.values()),
        }


def cells(reports: Iterable[dict[str, Any]]) -> Iterator[tuple[Cell, list[dict[str, Any]]]]:
    """The rows of each cell."""
    for cell, group in itertools.groupby(reports, key=lambda row: (row["model"], row["rate"], row["ranks"])):
        yield cell, list(group)


def markdown(reports: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The lines of a table for each cell."""
    for (model, rate, ranks), rows in cells(reports):
        parameters = max(row["parameters"] for row in rows)
        network = "unshaped loopback" if rate == "none" else f"{bandwidth(rate)} for each"
        yield f"\n**{model}** ({parameters / 1e6:.1f} M parameters), {ranks} ranks, {network}\n"
        yield from table(rows)
    yield (
        "\nTimes are of rank 0. Compression is the time in the methods' own code; communication is what the step takes "
        "longer than compute and compression, with the front end's own work. Bytes are per step and rank: wire as "
        "counted by the loopback, payload as counted by each method."
    )


HEADER = (
    "variant", "ms per step (p20–p80)", "share of ideal", "× fp32", "× fp16", "compute", "compression", "communication",
    "wire MB", "payload MB",
)  # fmt: skip


def table(rows: Iterable[dict[str, Any]], label: Callable[[str], str] = str) -> Iterator[str]:
    """The lines of a table of one cell. label: names a variant."""

    def figure(row: dict[str, Any], key: str, text: str, scale: float = 1.0) -> str:
        return "-" if row[key] is None else format(row[key] / scale, text)

    def cells_of(row: dict[str, Any]) -> list[str]:
        errors = [r["error"] for r in row["rounds"] if "error" in r]
        aborts = f"aborts in {len(errors)} of {len(row['rounds'])} rounds: {errors[0]}" if errors else ""
        if "ms" not in row:
            return [label(row["variant"]), aborts, *[""] * (len(HEADER) - 2)]
        time = f"{row['ms']:.1f} ({row['ms_p20']:.1f}–{row['ms_p80']:.1f})"
        return [
            label(row["variant"]), "; ".join(filter(None, (time, aborts))), figure(row, "share_of_ideal", ".0%"),
            figure(row, "times_fp32", ".2f"), figure(row, "times_fp16", ".2f"), figure(row, "compute_ms", ".1f"),
            figure(row, "compression_ms", ".1f"), figure(row, "communication_ms", ".1f"),
            figure(row, "wire_bytes", ".3f", 1e6), figure(row, "payload_bytes", ".3f", 1e6),
        ]  # fmt: skip

    return tables.markdown(HEADER, map(cells_of, rows))
