"""The tables and the plots of `gradzip advise`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import cost
from ..auto.studies import OPTIMIZERS
from ..inspection.palette import line_styles, method_color
from .advice import Advice, Row
from .command import CommandError
from .decision import FP16, FP32


def method_table(advice: Advice, rows: Iterable[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells."""
    header = [
        "method", "ms/step", "× fp32", "× fp16", "of ideal", "compression", "exposed", "MB/step", "ratio", "pays from",
        *(f"with {OPTIMIZERS[optimizer]}" for optimizer in advice.optimizers),
    ]  # fmt: skip
    names = {FP32: "fp32 (none)"}
    cells = []
    for row in rows:
        pays = (
            "never" if math.isinf(row.least_ratio) else f"{row.least_ratio:.1f}" if row.least_ratio > 0.05 else "always"
        )
        cells.append([
            names.get(row.method, row.method), f"{1e3 * row.seconds:.1f}", f"{row.times_fp32:.2f}",
            f"{row.times_fp16:.2f}", f"{row.share_of_ideal:.0%}", f"{1e3 * row.compression:.1f}",
            f"{1e3 * row.exposed:.1f}", f"{row.nbytes / 1e6:.2f}", f"{row.ratio:.1f}",
            "-" if row.method == FP32 else pays, *(accuracy(advice, row.method, name) for name in advice.optimizers),
        ])  # fmt: skip
    return header, cells


def accuracy(advice: Advice, method: str, optimizer: str) -> str:
    """What a study has found about a method with an optimizer, as a cell."""
    if method == FP32:
        return "-"
    study = advice.study(method, optimizer)
    return "not measured" if study is None else study.difference


def projection_table(projection: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and cells: ms/step and efficiency of each method."""
    methods = list(projection[0]["seconds"]) if projection else []
    cells = [
        [
            str(row["ranks"]),
            *(f"{1e3 * row['seconds'][m]:.1f} ({row['efficiency'][m]:.0%})" for m in methods),
        ]
        for row in projection
    ]
    return ["ranks", *("fp32" if m == FP32 else m for m in methods)], cells


def print_table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Print a table: by rich on a terminal, if it is installed, else as aligned text."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        Console = None  # type: ignore[assignment,misc]
    if Console is not None and Console().is_terminal:
        table = Table(*header)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in cells:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(len(row[i]) for row in [header, *cells]) for i in range(len(header))]
    for row in [header, *cells]:
        first, *others = (text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths)))
        print("  ".join([first, *others]).rstrip())


def plot(advice: Advice, rows: Sequence[Row], projection: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the least ratio that pays against the bandwidth, as figure 10 of HPDC 2020, and the projection, if any.

    Needs matplotlib. Raises CommandError if the file cannot be written.
    """
    # Without pyplot: it would choose a window system, and keep the figure.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12 if projection else 6.5, 4.8), layout="constrained")
    axes = figure.subplots(1, 2 if projection else 1, squeeze=False)[0]
    _plot_ratios(advice, rows, axes[0])
    if projection:
        ranks = [row["ranks"] for row in projection]
        for method in projection[0]["seconds"]:
            label = "fp32" if method == FP32 else method
            style = "--" if method in (FP32, FP16) else "-"
            axes[1].plot(ranks, [row["efficiency"][method] for row in projection], style, marker=".", label=label)
        axes[1].set(xscale="log", xlabel="ranks", ylabel="share of the ideal", ylim=(0, 1.05), title="Weak scaling")
        axes[1].set_xticks(ranks, [str(n) for n in ranks], minor=False)
        axes[1].minorticks_off()
        axes[1].grid(alpha=0.3)
        axes[1].legend()
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise CommandError(
            f"got --png {path}, which cannot be written ({error}); expected a file such as k.png"
        ) from None


def _plot_ratios(advice: Advice, rows: Sequence[Row], axis: Any) -> None:
    dense = sum(4 * layer.numel for layer in advice.step.layers)
    bandwidths = [10 ** (8 + i / 200) / 8 for i in range(601)]  # 0.1 to 100 Gb/s
    methods = [row for row in rows if row.method not in (FP32, FP16)]
    for row, style in zip(methods, line_styles(row.method for row in methods)):
        kinds = {kind for layer in advice.costs[row.method] for kind, _ in layer.compressed.rounds}
        kind = "all_gather" if "all_gather" in kinds else "all_reduce"
        ratios = []
        for bandwidth in bandwidths:
            link = replace(advice.link, bandwidth=bandwidth, latency=0.0)
            ratios.append(cost.minimal_ratio(link, dense, row.compression, kind))
        color = method_color(row.method)
        axis.plot([8e-9 * b for b in bandwidths], ratios, style, color=color, label=row.method)
        paying = [8e-9 * b for b, k in zip(bandwidths, ratios) if k <= row.ratio]
        if paying:
            axis.plot(paying[-1], row.ratio, "o", color=color)
    axis.set(
        xscale="log", yscale="log", xlabel="bandwidth of a rank (Gb/s)", ylabel="least compression ratio that pays",
        ylim=(1, 3000), title="Pays above the line; dots: the methods' own ratios",
    )  # fmt: skip
    axis.axvline(8e-9 * advice.link.bandwidth, color="grey", linestyle=":", label="this network")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize="small")
