"""Draw the results of benchmarks/training: the three parts of each variant's step, and speeds on networks of all rates.

The parts are those of Zhang et al., Evaluation and Optimization of Gradient Compression for Distributed Deep Learning,
ICDCS 2023, figures 3 and 8: forward and backward pass, compression, communication that does not overlap with them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.charts import open_frame, pyplot, save
from benchmarks.common.palette import METHOD_COLORS
from benchmarks.training.results import cells
from benchmarks.training.variants import COMPUTE, FLOORS, FRONT_ENDS, MODELS, STOCK, SUMMARY, bandwidth, front_end

PARTS = {  # hatches tell them apart without colours
    "compute_ms": ("forward, backward, optimizer", "#9DB0C3", ""),
    "compression_ms": ("compression", "#2F3E4E", "//"),
    "communication_ms": ("communication not overlapped", "#E3E3E3", ".."),
}
WIDTH, BAR_HEIGHT = 6.4, 0.21  # inches, of a panel and of a bar
LONGEST_SPEC = 24  # characters; longer ones are cut
SERIES = {  # of SUMMARY, the lines of the picture of speeds, with their methods
    "fp32": "none", "fp16": "fp16", "torch's PowerSGD": "powersgd", "`ACPSGD()`": "acpsgd",
    "`FFTRange(error_feedback=false)`": "fft-range", "`QSGD(coding=packed)`": "qsgd",
}  # fmt: skip
LONGEST = 4.0  # an axis ends at this multiple of the step of `compute`; longer bars are cut, with their value


def short(variant: str) -> str:
    """Name a variant in a chart."""
    if variant == COMPUTE:
        return "no communication"
    if variant in STOCK:
        front, _, what = variant.partition("-")
        return f"stock {FRONT_ENDS[front]} {what or 'fp32'}"
    if variant in FLOORS:
        return f"{FRONT_ENDS[front_end(variant)]}, no gradients averaged"
    front, _, spec = variant.partition(":")
    name = spec.partition(":")[0]
    return f"{FRONT_ENDS[front]} {spec if len(spec) <= LONGEST_SPEC else f'{name}:…'}"


def draw(reports: Sequence[dict[str, Any]], path: Path, title: str = "") -> None:
    """Write a chart, in the format of the path's suffix: a panel for each model and number of ranks.

    Each panel has a group of bars for each rate, from the slowest variant to the fastest.
    """
    measured = [row for row in reports if row.get("compute_ms") is not None]
    panels: dict[tuple[str, int], list[tuple[str, list[dict[str, Any]]]]] = {}
    for (model, rate, ranks), rows in cells(measured):
        panels.setdefault((model, ranks), []).append((rate, sorted(rows, key=lambda row: -row["ms"])))
    if not panels:
        return
    plt = pyplot()
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    bars = max(sum(len(rows) + 1.5 for _, rows in groups) for groups in panels.values())
    figure, axes = plt.subplots(
        lines, columns, figsize=(WIDTH * columns, lines * (BAR_HEIGHT * bars + 0.9) + 0.5), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, panel in itertools.zip_longest(axes.flat, panels.items()):
        if panel is None:
            axis.set_axis_off()
        else:
            _draw_panel(axis, *panel)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color, hatch=hatch, ec="white") for _, color, hatch in PARTS.values()]
    ideal = plt.Line2D([], [], color="black", linestyle="--", linewidth=1)
    labels = [label for label, *_ in PARTS.values()]
    figure.legend(
        [*handles, ideal], [*labels, "no communication"], loc="outside lower center", ncols=4 if columns > 1 else 2
    )
    figure.suptitle(title)
    save(figure, path, dpi=120)
    plt.close(figure)


def fastest(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The row of the fastest variant of each series, of the rows of a cell."""
    found = {}
    for name in SERIES:
        of_series = [row for row in rows if row["variant"] in SUMMARY[name] and "ms" in row]
        if of_series:
            found[name] = min(of_series, key=lambda row: row["ms"])
    return found


def draw_rates(reports: Sequence[dict[str, Any]], path: Path, ranks: int) -> None:
    """Write a chart of steps with so many ranks: for each model, speeds over fp16 on networks of all rates.

    A rate at which a series was not measured is left out of its line.
    """
    of_ranks = list(cells([row for row in reports if row["ranks"] == ranks]))
    models = list(dict.fromkeys(model for (model, _, _), _ in of_ranks))
    plt = pyplot()
    size = (4.0 * len(models), 4.2)
    figure, axes = plt.subplots(1, len(models), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis, model in zip(axes[0], models):
        rates = {rate: rows for (name, rate, _), rows in of_ranks if name == model}
        order = sorted(rates, key=lambda rate: float("inf") if rate == "none" else parse_rate(rate))
        steps = [fastest(rates[rate]) for rate in order]
        ideals = [next(row["ms"] for row in rates[rate] if row["variant"] == COMPUTE) for rate in order]
        for name, method in SERIES.items():
            points = [(i, of["fp16"]["ms"] / of[name]["ms"]) for i, of in enumerate(steps) if name in of]
            if points:
                axis.plot(*zip(*points), "o-", color=METHOD_COLORS[method], markersize=4, label=name.strip("`"))
        bound = [of["fp16"]["ms"] / ideal for of, ideal in zip(steps, ideals)]
        axis.plot(range(len(order)), bound, ":", color="0.3", linewidth=1, label="no communication")
        axis.set_xticks(range(len(order)), ["unshaped" if rate == "none" else bandwidth(rate) for rate in order])
        axis.tick_params(axis="x", labelsize=8)
        axis.set(title=MODELS.get(model, model), xlabel="network, for each rank", yscale="log")
        axis.set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"], minor=False)
        axis.yaxis.set_minor_formatter("")
        axis.grid(alpha=0.3)
        open_frame(axis)
    axes[0][0].set_ylabel("speed of a step, as times fp16")
    figure.suptitle(f"Compression pays on slow networks: speed of training steps over fp16, {ranks} ranks")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=7, fontsize=7.5)
    save(figure, path)
    plt.close(figure)


def parse_rate(rate: str) -> float:
    """Bits per second of a rate such as 250mbit."""
    number, unit = re.fullmatch(r"([\d.]+)([kmg])bit", rate).groups()  # type: ignore[union-attr]
    return float(number) * {"k": 1e3, "m": 1e6, "g": 1e9}[unit]


def _draw_panel(axis: Any, of: tuple[str, int], groups: list[tuple[str, list[dict[str, Any]]]]) -> None:
    model, ranks = of
    ideals = [row["compute_ms"] for _, rows in groups for row in rows]
    longest = max(row["ms"] for _, rows in groups for row in rows)
    limit = min(1.12 * longest, LONGEST * max(ideals))
    ticks, names = [], []
    y = 0.0
    for rate, rows in groups:
        axis.text(0, y, bandwidth(rate), weight="bold", va="center", ha="left")
        y += 1
        top = y - 0.5
        for row in rows:
            left = 0.0
            for key, (_, color, hatch) in PARTS.items():
                axis.barh(y, row[key], left=left, height=0.8, color=color, hatch=hatch, edgecolor="white", linewidth=0)
                left += row[key]
            value = f"{row['ms']:.0f}"
            if left < 0.93 * limit:
                axis.text(left + 0.01 * limit, y, value, va="center", fontsize=8)
            else:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
                shown = f"{value} →" if left > limit else value
                axis.text(0.99 * limit, y, shown, va="center", ha="right", fontsize=8, bbox=box)
            ticks.append(y)
            names.append(short(row["variant"]))
            y += 1
        ideal = rows[0]["compute_ms"]
        axis.plot([ideal, ideal], [top, y - 0.5], color="black", linestyle="--", linewidth=1)
        y += 0.5
    axis.set_yticks(ticks, names, fontsize=8)
    axis.set_ylim(y - 0.5, -1)
    axis.set_xlim(0, limit)
    axis.set_xlabel("ms per step")
    axis.set_title(f"{MODELS.get(model, model)}, {ranks} ranks")
    open_frame(axis)
