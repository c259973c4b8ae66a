"""Draw the results of benchmarks/convergence: the score during training, and at its end against the bytes sent."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.charts import MOST_SERIES, open_frame, pyplot, save
from benchmarks.common.palette import method_color
from benchmarks.convergence import wire
from benchmarks.convergence.results import Results, Row, rows

STYLES = (("-", "o"), ("--", "s"), (":", "^"))  # of the variants of a method
NEAREST = "block-float:bits=4,rounding=nearest"


@dataclass(frozen=True)
class Picture:
    """What the picture of a study on docs/accuracy.md shows of it.

    Args:
        title: what to see.
        methods: by recipe. All others are in the tables.
    """

    title: str
    methods: Mapping[str, Sequence[str]]


PICTURES = {
    "text": Picture(
        "AdamW, each method at its best learning rate: integers of 4 bits and compressed momenta lose least",
        {
            "text": (
                "none", NEAREST, "momentum:inner=signsgd(majority=False),warmup_steps=75", "powersgd:rank=16", "qsgd",
                "acpsgd:rank=4",
            ),
        },
    ),
    "momentum": Picture(
        "Compressed momenta after 200 steps of a compressed warm-up end where no compression does",
        {
            "text": (
                "none",
                "phases:0=block-float(bits=4,rounding=nearest),75=momentum(inner=signsgd(majority=False))",
                "phases:0=qsgd,160=block-float(bits=4,rounding=nearest),200=momentum(inner=signsgd(majority=False))",
            ),
        },
    ),
    "muon": Picture(
        "With Muon, integers of 4 bits lose least, and one bit an element most",
        {"text-muon": ("none", NEAREST, "powersgd:rank=32", "onebit")},
    ),
    "long": Picture(
        "Error feedback catches up in twelve epochs; what FFTRange loses without it does not come back",
        {
            "images": (
                "none", "fft-range", "fft-range:error_feedback=false", "powersgd", "acpsgd", "qsgd",
            ),
        },
    ),
    "resnet20": Picture(
        "ResNet-20: FFTRange and integers of 4 bits end where no compression does",
        {"images": ("none", "fft-range", NEAREST)},
    ),
    "block_float": Picture(
        "Integers of 8 bits train as no compression does, those of 4 bits nearly so",
        {
            "text": ("none", "block-float", "block-float:bits=4", NEAREST),
            "images": ("none", "block-float", "block-float:bits=4"),
        },
    ),
    "default": Picture(
        "After four epochs, transforms with error feedback lose least of what compresses",
        {
            "images": ("none", "fft-range", "dct-range:theta=0.95", "powersgd", "qsgd", "topk"),
        },
    ),
}  # fmt: skip


def first_methods(results: Results) -> Picture:
    """The picture of a study that has none of its own: the first methods of each recipe."""
    shown = {name: [row.method for row in rows(results, name) if row.curve][:MOST_SERIES] for name in results.recipes}
    return Picture(f"{results.path.stem}: score against epochs and bytes", shown)


def draw(results: Results, path: Path, picture: Picture | None = None) -> bool:
    """Write a chart, in the format of the path's suffix: a line of two panels for each recipe with finished runs.

    Both panels have one axis of scores, so that differences at the end are seen beside what training changes. On the
    right, a vertical line spans the seeds of a method.

    Returns:
        Whether there was something to draw: a run of more than one epoch.
    """
    picture = picture or first_methods(results)
    of_recipe = {name: [row for row in rows(results, name) if row.curve] for name in picture.methods}
    of_recipe = {name: found for name, found in of_recipe.items() if max((len(r.curve) for r in found), default=0) > 1}
    if not of_recipe:
        return False
    plt = pyplot()
    figure, axes = plt.subplots(
        len(of_recipe), 2, figsize=(11.5, 3.9 * len(of_recipe) + 0.4), squeeze=False, sharey="row", layout="constrained"
    )
    figure.suptitle(picture.title, fontsize=12)
    for (curves, ends), (name, found) in zip(axes, of_recipe.items()):
        by_method = {row.method: row for row in found}
        shown = [by_method[method] for method in picture.methods[name] if method in by_method]
        _draw_recipe(curves, ends, results.recipes[name], shown, sent_bytes(results, name, shown))
        curves.set_title(f"{name}: {results.recipes[name]['network']} on {results.recipes[name]['data']}", fontsize=10)
    save(figure, path)
    plt.close(figure)
    return True


def sent_bytes(results: Results, recipe: str, shown: Sequence[Row]) -> tuple[str, list[float]]:
    """What is sent in a run, with a title: on the wire where that was counted, else what is handed to collectives."""
    ranks = wire.RANKS[0]
    known = [wire.stored().get((results.path.name, recipe, row.method)) for row in shown]
    if all(known):
        return f"sent by each of {ranks} ranks in a step, kB", [of["wire_bytes"][str(ranks)] for of in known if of]
    return "handed to collectives by a rank in a step, kB", [row.payload_bytes[-1] for row in shown]


def _draw_recipe(
    curves: Any, ends: Any, settings: Mapping[str, Any], shown: Sequence[Row], sent: tuple[str, list[float]]
) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    styles: dict[str, itertools.cycle[tuple[str, str]]] = {}  # by color: a variant takes the next one
    for row, nbytes in zip(shown, sent[1]):
        color = method_color(row.method)
        line, marker = next(styles.setdefault(color, itertools.cycle(STYLES)))
        label = _lines(row.method if row.score is not None else f"{row.method} (diverged)")
        epochs = range(1, len(row.curve) + 1)
        curves.plot(epochs, row.curve, line, color=color, marker=marker, markersize=4, linewidth=1.3, label=label)
        if row.score is not None:
            kilobytes = nbytes / (len(row.curve) * settings["steps"]) / 1e3
            finals = [record.scores[-1] for record in row.records]
            ends.plot([kilobytes] * len(finals), finals, color=color, linewidth=1)
            ends.plot(kilobytes, row.score, marker, color=color)
    curves.set(xlabel="epoch", ylabel=settings["measure"])
    curves.xaxis.get_major_locator().set_params(integer=True)
    ends.set(xlabel=sent[0], ylabel=settings["measure"], xscale="log")
    ends.set_title("at the end, against what is sent", fontsize=10)
    ends.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ends.xaxis.set_major_formatter("{x:g}")
    ends.xaxis.set_minor_formatter(NullFormatter())
    ends.tick_params(labelleft=True)
    free = "upper" if settings["lower_is_better"] else "lower"  # points are at the other end
    ends.legend(*curves.get_legend_handles_labels(), fontsize=7.5, loc=f"{free} right")
    for axis in (curves, ends):
        axis.grid(alpha=0.3)
        open_frame(axis)


def _lines(spec: str, width: int = 48) -> str:
    """A spec with line breaks after commas."""
    lines = [""]
    for part in re.split(r"(?<=,)", spec):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
