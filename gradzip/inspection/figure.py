"""Histograms of gradients before and after compression, as figure 15 of the FFT paper. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .cells import Report

FORMATS = (".png", ".svg", ".pdf")


def save(report: Report, path: Path) -> None:
    """Draw all layers that have histograms, one below the other. path: ends in one of FORMATS."""
    layers = list(dict.fromkeys(layer for layer, _ in report.histograms))
    _draw(report, layers).savefig(path, dpi=90, format=path.suffix.removeprefix("."))


def _draw(report: Report, layers: list[str]) -> Any:
    """For each layer, a panel for each method with the counts of x and x^, and one with the errors of all methods."""
    # Without pyplot: it would choose a window system, and keep the figure.
    from matplotlib.figure import Figure

    columns = min(4, len(report.methods) + 1)
    rows = -(-(len(report.methods) + 1) // columns)
    figure = Figure(figsize=(3.2 * columns, len(layers) * (2.4 * rows + 0.5)), layout="constrained")
    for part, layer in zip(np.atleast_1d(np.asarray(figure.subfigures(len(layers), 1))), layers):
        title = f"{_label(layer)}  {report.shape_text(layer)}"
        part.suptitle(title, fontsize=11, x=0.01, ha="left", fontweight="bold")
        axes = part.subplots(rows, columns, squeeze=False).reshape(-1)
        for i, method in enumerate(report.methods):
            _histogram(axes[i], report, layer, method, f"C{i}")
        _errors(axes[len(report.methods)], report, layer)
        for unused in axes[len(report.methods) + 1 :]:
            unused.set_visible(False)
    return figure


def _histogram(ax: Any, report: Report, layer: str, method: str, color: str) -> None:
    histogram, cell = report.histograms[layer, method], report.cells[layer, method]
    edges = np.linspace(histogram.low, histogram.high, len(histogram.wanted) + 1)
    ax.stairs(histogram.wanted, edges, fill=True, color="0.8")
    ax.stairs(histogram.sent, edges, color=color, linewidth=0.9)
    ax.set(yscale="log", ylim=(0.5, 3 * max(1, *histogram.wanted, *histogram.sent)), xlabel="value", ylabel="elements")
    ax.set_title(_label(method), fontsize=10)
    shown = f"α {cell.error:.3f}\n{cell.ratio:.1f}×" if cell.compressed else "uncompressed"
    ax.text(0.97, 0.95, shown, transform=ax.transAxes, ha="right", va="top", fontsize=9)
    _small(ax)


def _errors(ax: Any, report: Report, layer: str) -> None:
    scale = report.histograms[layer, report.methods[0]].high
    for i, method in enumerate(report.methods):
        errors = np.maximum(report.histograms[layer, method].errors, 1e-9 * scale)  # no logarithm of 0
        ax.plot(errors, np.linspace(0, 1, len(errors)), color=f"C{i}", linewidth=0.9)
    ax.set(xscale="log", xlim=(1e-5 * scale, 2 * scale), ylim=(0, 1))
    ax.set(xlabel="error of an element, at most", ylabel="share of elements")
    ax.set_title("errors of all methods", fontsize=10)
    _small(ax)


def _label(text: str) -> str:
    # Matplotlib reads text between dollar signs as mathematics.
    return text.replace("$", r"\$")


def _small(ax: Any) -> None:
    ax.tick_params(labelsize=8, length=2)
    for text in (ax.xaxis.label, ax.yaxis.label, ax.xaxis.get_offset_text()):
        text.set_fontsize(8)
    if ax.get_xscale() == "linear":
        ax.locator_params(axis="x", nbins=3)
