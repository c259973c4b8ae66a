"""The table of the floor: how close steps with a method come to what the front end costs by itself.

The results are those of variants that took turns in each step (`--interleave`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.common.tables import markdown
from benchmarks.training.results import cells
from benchmarks.training.variants import FP32, floor, front_end, label

SHAPED, UNSHAPED = "1gbit", "none"


def rows_of(rows: Iterable[dict[str, Any]], rate: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The measured rows of a network: model -> variant -> row."""
    return {
        model: {row["variant"]: row for row in of_cell if "ms" in row}
        for (model, of_rate, _), of_cell in cells(rows)
        if of_rate == rate
    }


def share_of_unshaped(rows: Iterable[dict[str, Any]], model: str, variant: str) -> float:
    """The step of stock Horovod on an unshaped loopback, divided by the step of a variant of Horovod at `SHAPED`.

    They were not measured at the same time: each is compared with the floor of its own rounds.
    """
    rows = list(rows)
    own, stock = rows_of(rows, SHAPED)[model][variant], rows_of(rows, UNSHAPED)[model][FP32]
    return float(own["share_of_floor"] / stock["share_of_floor"])


def floor_table(rows: Iterable[dict[str, Any]], names: dict[str, str]) -> str:
    """The lines of the table. names: of the models, which are its columns.

    Models for which stock Horovod was measured on an unshaped loopback have a column more.
    """
    rows = list(rows)
    of_models, unshaped = rows_of(rows, SHAPED), rows_of(rows, UNSHAPED)
    models = [model for model in names if model in of_models]
    header = [""]
    for model in models:
        header += [f"{names[model]}, ms", "share of the floor, %"]
        header += ["of stock Horovod, unshaped, %"] * (model in unshaped)
    lines = []
    for variant in of_models[models[0]]:
        line = [label(variant)]
        for model in models:
            row = of_models[model][variant]
            line += [f"{row['ms']:.0f}", f"{100 * row['share_of_floor']:.0f}"]
            if model in unshaped:
                compared = front_end(variant) == "horovod" and variant != floor(variant)
                line += [f"{100 * share_of_unshaped(rows, model, variant):.0f}" if compared else ""]
        lines.append(line)
    return "\n".join(markdown(header, lines)) + "\n"
