"""The table of the floor: how close steps with a method come to what the front end costs by itself.

The results are those of variants that took turns in each step (`--interleave`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from benchmarks.common.tables import markdown
from benchmarks.training.results import cells
from benchmarks.training.variants import label

RATE = "1gbit"


def floor_table(rows: Iterable[dict[str, Any]], names: dict[str, str]) -> str:
    """The lines of the table. names: of the models, which are its columns."""
    of_models = {
        model: {row["variant"]: row for row in of_cell if "ms" in row}
        for (model, rate, _), of_cell in cells(rows)
        if rate == RATE
    }
    models = [model for model in names if model in of_models]
    header = ["", *(title for model in models for title in (f"{names[model]}, ms", "share of the floor, %"))]
    lines = []
    for variant in of_models[models[0]]:
        of_variant = [of_models[model][variant] for model in models]
        figures = ((f"{row['ms']:.0f}", f"{100 * row['share_of_floor']:.0f}") for row in of_variant)
        lines.append([label(variant), *itertools.chain(*figures)])
    return "\n".join(markdown(header, lines)) + "\n"
