"""Histograms of gradients before and after compression, as figure 15 of the FFT paper. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..inspection.cells import Cell, Histogram, Report

FORMATS = (".png", ".svg", ".pdf")


def save(report: Report, path: Path) -> None:
    """Draw all layers that have histograms, one below the other. Needs matplotlib.

    A layer has a panel for each method, with the counts of x and x^, and one with the errors of all methods.

    Args:
        path: ends in one of FORMATS.
    """
    import matplotlib

    # Without pyplot: it would choose a window system, and keep the figure.
    from matplotlib.figure import Figure

    layers, panels = list(dict.fromkeys(layer for layer, _ in report.histograms)), len(report.totals) + 1
    columns = min(4, panels)
    rows = -(-panels // columns)
    with matplotlib.rc_context({"font.size": 8}):
        figure = Figure(figsize=(3.2 * columns, len(layers) * (2.4 * rows + 0.5)), layout="constrained")
        for part, layer in zip(figure.subfigures(len(layers), 1, squeeze=False)[:, 0], layers):
            part.suptitle(report.title(layer), fontsize=11, x=0.01, ha="left", fontweight="bold", parse_math=False)
            *axes, errors = [part.add_subplot(rows, columns, number) for number in range(1, panels + 1)]
            errors.set_title("errors of all methods")
            scale = report.histograms[layer, next(iter(report.totals))].high
            for i, (ax, method) in enumerate(zip(axes, report.totals)):
                histogram = report.histograms[layer, method]
                ax.set_title(method, parse_math=False)
                _counts(ax, histogram, report.cells[layer, method], f"C{i}")
                quantiles = np.maximum(histogram.errors, 1e-9 * scale)  # no logarithm of 0
                errors.plot(quantiles, np.linspace(0, 1, len(quantiles)), color=f"C{i}", linewidth=0.9)
            errors.set(xscale="log", xlim=(1e-5 * scale, 2 * scale), ylim=(0, 1))
            errors.set(xlabel="error of an element, at most", ylabel="share of elements")
    figure.savefig(path, dpi=90, format=path.suffix.removeprefix("."))


def _counts(ax: Any, histogram: Histogram, cell: Cell, color: str) -> None:
    edges = np.linspace(histogram.low, histogram.high, len(histogram.wanted) + 1)
    ax.stairs(histogram.wanted, edges, fill=True, color="0.8")
    ax.stairs(histogram.sent, edges, color=color, linewidth=0.9)
    ax.set(yscale="log", ylim=(0.5, 3 * max(1, *histogram.wanted, *histogram.sent)), xlabel="value", ylabel="elements")
    ax.locator_params(axis="x", nbins=3)
    shown = f"α {cell.error:.3f}\n{cell.ratio:.1f}×" if cell.compressed else "uncompressed"
    ax.text(0.97, 0.95, shown, transform=ax.transAxes, ha="right", va="top", fontsize=9)
