"""Score the advice that predictions of training steps give: is what they choose fast?

  python -m benchmarks.training.decisions            print the table
  python -m benchmarks.training.decisions --write    also write benchmarks/results/decisions.json, and docs/advise.md

A group is a network, a link, a number of ranks and a front end, in which fp32 or fp16 and some methods have been
measured. In each group, `gradzip.advice.advice.decide` chooses by predicted steps, and what it has chosen is judged
by measured ones:

    regret          time lost against the fastest of the group
    false advice    advice to compress that takes more than 2 % longer than the faster of fp32 and fp16

Methods are allowed whatever they cost in accuracy. Two simpler models are scored alike, each with its own margin of
error: the same costs one after the other, and the step and the codec alone. Links are those that were measured, and
those that a user would state: the bandwidth, and a latency of 50 us. "typical core" adds to those the core time that
communication takes, the median of CALIBRATION for the front end, to see whether such a default would help.

The margin of error comes from the files in CALIBRATION: the excess of the predicted gain over the measured one that 19
of 20 methods with a predicted gain stay below, rounded up to a percent. Within CALIBRATION, advice is also scored with
the margin of the other networks. The files in HELD_OUT are used for no margin, and no other test compares the model
with them.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.common.arguments import Parser
from benchmarks.common.results import RESULTS, ROOT, Blocks, ResultsError, replace_blocks, write_json
from benchmarks.common.tables import markdown
from benchmarks.training.predictions import (
    Links,
    Model,
    measured_links,
    predict_cells,
    share_within,
    simulated,
)
from benchmarks.training.variants import STOCK, compression, front_end
from gradzip.advice.advice import FP16, FP32, decide
from gradzip.advice.cost import Compressed, Link, Step
from gradzip.cli.advise import LATENCY_US, bandwidth_of

CALIBRATION = ("training_cpu.json",)
HELD_OUT = (
    "training_block_float_cpu.json", "training_studies.json", "training_time_charlm.json",
    "training_time_charlm-small.json", "training_time_resnet20.json",
)  # fmt: skip
FILE, PAGE = RESULTS / "decisions.json", ROOT / "docs" / "advise.md"
START = "<!-- table: python -m benchmarks.training.decisions --write -->\n\n"

FALSE = 0.02  # loss against not compressing from which advice to compress counts as false
CONFIDENCE = 0.95  # share of the predicted gains that exceed the measured ones by less than the margin
TOLERANCE = 0.25  # of a predicted step


def one_after_the_other(step: Step, layers: Sequence[Compressed], link: Link, front: str, stock: bool = False) -> float:
    """Computation, codec and collectives, without overlap: one collective of each kind."""
    sizes: Counter[str] = Counter()
    for kind, nbytes in (pair for layer in layers for pair in layer.rounds):
        sizes[kind] += nbytes  # type: ignore[assignment]
    return step_and_codec(step, layers, link, front) + sum(link.seconds(kind, n) for kind, n in sizes.items())


def step_and_codec(step: Step, layers: Sequence[Compressed], link: Link, front: str, stock: bool = False) -> float:
    """Computation and codec: communication counts as nothing."""
    return step.seconds + sum(layer.encode + layer.decode for layer in layers)


MODELS: dict[str, Model] = {
    "cost model": simulated, "no overlap": one_after_the_other, "step + codec": step_and_codec,
}  # fmt: skip


def stated_links(results: Mapping[str, Any]) -> Links:
    """The links as a user would state them. Unshaped ones have no bandwidth to state."""
    return {
        key: Link(key[1], bandwidth_of(key[0]), LATENCY_US / 1e6) for key in measured_links(results) if key[0] != "none"
    }


_CORE = ("operation", "core_per_byte", "background", "half")  # fields of a link: core time of communication


def typical_links(results: Mapping[str, Any]) -> Links:
    """Stated links with the core time of communication that is typical of their front end."""
    known = [found for file in CALIBRATION for found in json.loads((RESULTS / file).read_text())["links"]]

    def core(front: str) -> dict[str, float]:
        of_front = [found["link"] for found in known if found["front_end"] == front]
        return {name: statistics.median(link[name] for link in of_front) for name in _CORE}

    return {key: replace(link, **core(key[2])) for key, link in stated_links(results).items()}


LINKS = {"measured": measured_links, "stated": stated_links, "typical core": typical_links}


class Group(NamedTuple):
    """Methods in the same situation. measured, predicted: ms of a step by method."""

    model: str
    rate: str
    ranks: int
    front_end: str
    measured: Mapping[str, float]
    predicted: Mapping[str, float]


class Choice(NamedTuple):
    """What predictions have chosen in a group. regret, loss: shares of the step of the fastest, of fp32 and fp16."""

    group: Group
    compresses: bool
    regret: float
    loss: float


def groups(results: Mapping[str, Any], model: Model, links: Links) -> list[Group]:
    """The groups with fp32 or fp16, and a method that may be chosen in its place."""
    found: dict[tuple[str, str, int, str], tuple[dict[str, float], dict[str, float]]] = {}
    # The front end's own fp16 counts, if it was measured, and not gradzip's.
    ordered = sorted(predict_cells(results, model, links), key=lambda cell: cell[0].variant in STOCK)
    for cell, ms, predicted in ordered:
        method = compression(cell.variant)
        assert method is not None
        key = cell.model, cell.rate, cell.ranks, front_end(cell.variant)
        of_group = found.setdefault(key, ({}, {}))
        of_group[0][method], of_group[1][method] = ms, predicted
    return [
        Group(*key, measured, predicted)
        for key, (measured, predicted) in found.items()
        if {FP32, FP16} & measured.keys() and measured.keys() - {FP32, FP16}
    ]


def _stock(times: Mapping[str, float]) -> float:
    return min(times[name] for name in (FP32, FP16) if name in times)


def excesses(of: Iterable[Group]) -> list[float]:
    """By how much predicted gains over fp32 and fp16 exceed the measured ones, for methods with a predicted gain."""
    found = []
    for group in of:
        for method in group.measured.keys() - {FP32, FP16}:
            predicted = 1 - group.predicted[method] / _stock(group.predicted)
            if predicted > 0:
                found.append(predicted - (1 - group.measured[method] / _stock(group.measured)))
    return sorted(found)


def margin_of(of: Iterable[Group]) -> float:
    """The margin of error: what `CONFIDENCE` of the excesses stay below, rounded up to a percent. 0 without any."""
    found = excesses(of)
    return max(0.0, math.ceil(100 * found[math.ceil(CONFIDENCE * len(found)) - 1]) / 100) if found else 0.0


def choose(group: Group, margin: float) -> Choice:
    decision = decide(group.predicted, margin=margin)
    ms = group.measured[decision.chosen]
    return Choice(group, decision.compresses, ms / min(group.measured.values()) - 1, ms / _stock(group.measured) - 1)


def score(choices: Sequence[Choice]) -> dict[str, Any]:
    regrets = [choice.regret for choice in choices]
    compressing = [choice for choice in choices if choice.compresses]
    return {
        "groups": len(choices),
        "median_regret": round(statistics.median(regrets), 4),
        "mean_regret": round(statistics.fmean(regrets), 4),
        "largest_regret": round(max(regrets), 4),
        "compress": len(compressing),
        "false": sum(choice.loss > FALSE for choice in compressing),
    }


def across_networks(of: Sequence[Group]) -> list[Choice]:
    """Choices with the margin of the other networks."""
    return [choose(group, margin_of(other for other in of if other.model != group.model)) for group in of]


def scores() -> list[dict[str, Any]]:
    """The scores of each model on each kind of link."""
    contents = {name: json.loads((RESULTS / name).read_text()) for name in (*CALIBRATION, *HELD_OUT)}
    found = []
    for link, links_of in LINKS.items():
        for name, model in MODELS.items():
            cells, by_file = [], {}
            for file, content in contents.items():
                cells += predict_cells(content, model, links_of(content))
                by_file[file] = groups(content, model, links_of(content))
            known = [group for file in CALIBRATION for group in by_file[file]]
            new = [group for file in HELD_OUT for group in by_file[file]]
            margin = margin_of(known)
            found.append({
                "model": name, "link": link, "margin": margin, "cells": len(cells),
                "within": round(share_within(cells, TOLERANCE), 4),
                "without_margin": score([choose(group, 0.0) for group in (*known, *new)]),
                "calibration": score([choose(group, margin) for group in known]),
                "across_networks": score(across_networks(known)),
                "held_out": score([choose(group, margin) for group in new]),
                "held_out_of": {
                    front: score([choose(group, margin) for group in new if group.front_end == front])
                    for front in sorted({group.front_end for group in new})
                },
            })  # fmt: skip
    return found


def table(of: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A row for each model and kind of link."""

    def regret(part: Mapping[str, Any]) -> str:
        return f"{part['median_regret']:.1%}, {part['mean_regret']:.1%}"

    def false(part: Mapping[str, Any]) -> str:
        return f"{part['false']} of {part['compress']}"

    header = [
        "link", "model", "steps within 25 %", "false advice without a margin", "margin of error",
        "regret: median, mean", "false advice to compress", "with other networks' margin", "held out: regret",
        "held out: false advice",
    ]  # fmt: skip
    rows = [
        [
            entry["link"], entry["model"], f"{entry['within']:.0%} of {entry['cells']}", false(entry["without_margin"]),
            f"{entry['margin']:.0%}", regret(entry["calibration"]), false(entry["calibration"]),
            false(entry["across_networks"]),
            regret(entry["held_out"]), false(entry["held_out"]),
        ]
        for entry in of
    ]  # fmt: skip
    yield from markdown(header, rows, left=2)


def blocks() -> Blocks:
    """The block of docs/advise.md, from the file of scores."""
    stored = json.loads(FILE.read_text())["scores"]
    return {(PAGE, START): "\n".join(table([score for score in stored if score["link"] != "typical core"])) + "\n"}


def main() -> None:
    parser = Parser("training.decisions", __doc__)
    parser.add_argument("--write", action="store_true", help="write the file of scores, and the table of the page")
    args = parser.parse_args()
    found = scores()
    print(*table(found), sep="\n")
    if args.write:
        about = {"calibration": list(CALIBRATION), "held_out": list(HELD_OUT), "false_from": FALSE}
        write_json(FILE, about | {"confidence": CONFIDENCE, "scores": found})
        try:
            replace_blocks(blocks())
        except ResultsError as error:
            parser.fail(str(error))


if __name__ == "__main__":
    main()
