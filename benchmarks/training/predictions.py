"""Compare the measured steps of benchmarks/training with what the cost model predicts for them.

The prediction of a cell uses what was measured without it: the profile of the model's step without communication, the
link of the network, and the time and bytes of the method on each layer. Only the step without communication is taken
from the cell's own rounds, because machines drift.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gradzip
from benchmarks.common.arguments import Parser
from benchmarks.common.results import RESULTS, link_of
from benchmarks.common.tables import markdown
from benchmarks.training.variants import COMPUTE, compression, front_end
from gradzip.advice.advice import FP16, FP32
from gradzip.advice.cost import Compressed, Layer, Link, Step, joined, predict

# Seconds of a step: of its profile, the costs of its layers, a link and a front end.
Model = Callable[[Step, Sequence[Compressed], Link, str, bool], float]
# By rate, ranks and front end.
Links = Mapping[tuple[str, int, str], Link]


class Cell(NamedTuple):
    """A variant on a model, a network and a number of ranks."""

    model: str
    rate: str
    ranks: int
    variant: str


def simulated(step: Step, layers: Sequence[Compressed], link: Link, front: str, stock: bool = False) -> float:
    """The cost model: that of `gradzip advise`."""
    return predict(step, layers, link, **joined(front, stock)).seconds


def measured_links(results: Mapping[str, Any]) -> Links:
    """The links as `gradzip.advice.measure` has measured them."""
    return {(found["rate"], found["ranks"], found["front_end"]): link_of(found["link"]) for found in results["links"]}


def predict_cells(
    results: Mapping[str, Any], model: Model = simulated, links: Links | None = None
) -> list[tuple[Cell, float, float]]:
    """The cells that can be predicted: (cell, measured ms, predicted ms).

    Left out: `compute`, which is the prediction's base; variants that failed, or that no method of gradzip stands for;
    `Auto`, whose choice is not predicted; and cells for which the results have no profile, link or codec.

    Args:
        results: the content of a JSON file of benchmarks/training.
        links: None: the measured ones.
    """
    profiles = {(p["model"], p["ranks"]): p for p in results["profiles"]}
    links = measured_links(results) if links is None else links
    codecs = {(c["model"], c["ranks"], c["compression"]): c["layers"] for c in results["codecs"]}
    cells = []
    for row in results["rows"]:
        cell = Cell(row["model"], row["rate"], row["ranks"], row["variant"])
        front, method = front_end(cell.variant), compression(cell.variant)
        if cell.variant == COMPUTE or "ms" not in row or method is None:
            continue
        profile, link = profiles.get((cell.model, cell.ranks)), links.get((cell.rate, cell.ranks, front))
        layers = codecs.get((cell.model, cell.ranks, method))
        if not profile or not link or not layers or isinstance(gradzip.parse(method), gradzip.Auto):
            continue
        step = _step(profile, (row["compute_ms"] or 1e3 * profile["seconds"]) / 1e3)
        by_name = {layer["name"]: layer for layer in layers}
        compressed = [_compressed(by_name[layer.name]) for layer in step.layers]
        cells.append((cell, row["ms"], 1e3 * model(step, compressed, link, front, method in (FP32, FP16))))
    return cells


def _step(profile: Mapping[str, Any], seconds: float) -> Step:
    """The profile of a step that takes `seconds`."""
    scale = seconds / profile["seconds"]
    layers = [Layer(p["name"], tuple(p["shape"]), p["ready"] * scale) for p in profile["layers"]]
    return Step(tuple(replace(layer, ready=min(layer.ready, seconds)) for layer in layers), seconds)


def _compressed(fields: Mapping[str, Any]) -> Compressed:
    rounds = tuple((kind, nbytes) for kind, nbytes in fields["rounds"])
    return Compressed(rounds, fields["encode"], fields["decode"])


def share_within(cells: Sequence[tuple[Cell, float, float]], tolerance: float) -> float:
    """The share of cells whose prediction differs from the measurement by at most `tolerance` of it."""
    return statistics.fmean(abs(predicted - ms) <= tolerance * ms for _, ms, predicted in cells)


def main() -> None:
    parser = Parser("training.predictions", __doc__)
    parser.add_argument("json", type=Path, nargs="?", default=RESULTS / "training_cpu.json")
    cells = predict_cells(json.loads(parser.parse_args().json.read_text()))
    rows = (
        [*map(str, cell), f"{ms:.0f}", f"{predicted:.0f}", f"{predicted / ms - 1:+.0%}"]
        for cell, ms, predicted in cells
    )
    header = ["model", "rate", "ranks", "variant", "measured ms", "predicted ms", "difference"]
    print(*markdown(header, rows, left=4), sep="\n")
    if cells:
        print(f"\n{share_within(cells, 0.25):.0%} of {len(cells)} cells are within 25 %.")


if __name__ == "__main__":
    main()
