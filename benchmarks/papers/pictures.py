"""The pictures of docs/results.md, from the numbers in the JSON file of benchmarks/papers. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.charts import OTHER_COLORS, save
from benchmarks.common.palette import METHOD_COLORS

DPI = 90
MARKS = ("o", "s", "^", "D", "v")
SMALL = 7  # points, of texts in a panel
Picture = Mapping[str, Any]
NAMES = {  # how names of methods begin
    "FFT": "fft-range", "Top-k": "topk", "QSGD": "qsgd", "TernGrad": "terngrad", "ACP-SGD": "acpsgd",
    "Power-SGD": "powersgd",
}  # fmt: skip


def draw(name: str, picture: Picture, file: Path) -> None:
    """Write the picture of a paper as a PNG. name: of the paper, as on the command line."""
    from matplotlib.figure import Figure  # without pyplot, which would choose a window system

    panels, columns = DRAWN[name]
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.9 * rows), layout="constrained", dpi=DPI)
    for ax, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels):
        panel(ax, picture)
        ax.tick_params(labelsize=SMALL)
        ax.grid(alpha=0.3)
    save(figure, file, DPI)


def label(ax: Any, title: str, x: str, y: str, legend: bool = True) -> None:
    ax.set_title(title, fontsize=SMALL + 2)
    ax.set_xlabel(x, fontsize=SMALL + 1)
    ax.set_ylabel(y, fontsize=SMALL + 1)
    if legend:
        ax.legend(fontsize=SMALL, frameon=False)


def color(name: str) -> str:
    """The colour of a method by its name in the papers; grey for what is none of gradzip's."""
    return next((METHOD_COLORS[method] for start, method in NAMES.items() if name.startswith(start)), "0.5")


def method_style(name: str) -> dict[str, Any]:
    """Whole gradients have dashed lines, layers solid ones."""
    return {"color": color(name), "linestyle": "--" if "whole" in name else "-", "marker": ".", "linewidth": 1.2}


# FFT


def fft_steps(ax: Any, picture: Picture) -> None:
    for name, errors in picture["errors"]["resnet20"].items():
        ax.plot(picture["steps"], errors, label=name, **method_style(name))
    ax.set_ylim(0)
    label(ax, "Sparsification, θ = 0.85 (lines as right)", "step", "relative error", legend=False)


def fft_thetas(ax: Any, picture: Picture) -> None:
    for name, errors in picture["sweep"].items():
        ax.plot(picture["thetas"], errors, label=name, **method_style(name))
    label(ax, f"Against θ, step {picture['steps'][-1]}", "θ, share dropped", "relative error")


def fft_alpha(ax: Any, picture: Picture) -> None:
    for (workers, values), shade in zip(picture["alpha"].items(), OTHER_COLORS):
        ax.plot(
            picture["steps"], values, ".-", color=shade, label="1 worker" if workers == "1" else f"{workers} workers"
        )
    ax.set_ylim(0, max(1.05, *map(max, picture["alpha"].values())))
    label(ax, "α of assumption 3.2, FFTs of 64, θ = 0.85", "step", "α")


def fft_histograms(ax: Any, picture: Picture) -> None:
    for number, (name, histogram) in enumerate(picture["histograms"].items()):
        edges = np.linspace(histogram["low"], histogram["high"], len(histogram["wanted"]) + 1)
        if number == 0:
            ax.stairs(histogram["wanted"], edges, fill=True, color="0.8", label="gradient")
        ax.stairs(histogram["sent"], edges, color=color(name), linewidth=1, label=name)
    ax.set_yscale("log")
    ax.set_ylim(1, 1e7)  # room for the legend
    ax.locator_params(axis="x", nbins=5)
    label(ax, "Values before and after", "value", "elements")


def fft_errors(ax: Any, picture: Picture) -> None:
    for name, histogram in picture["histograms"].items():
        errors = np.maximum(histogram["errors"], 1e-9 * histogram["high"])  # no logarithm of 0
        ax.plot(errors, np.linspace(0, 1, len(errors)), color=color(name), label=name)
        ax.set_xlim(1e-4 * histogram["high"], 2 * histogram["high"])
    ax.set_xscale("log")
    label(ax, "Share of elements with a smaller error", "|g − ĝ|", "share")


def fft_formats(ax: Any, picture: Picture) -> None:
    formats = picture["formats"]
    for name, shade in zip(("range float", "uniform"), OTHER_COLORS):
        ax.plot(formats["bits"], formats[name], ".-", color=shade, label=name)
    for (name, (bits, error)), mark in zip(formats["casts"].items(), cycle(MARKS)):
        ax.plot(bits, error, "k" + mark, markersize=4, label=name)
    ax.set_yscale("log")
    label(ax, "Number formats", "bits", "relative error")


# GradiVeQ


def gradiveq_held(ax: Any, picture: Picture) -> None:
    for number, (name, curves) in enumerate(picture["held"].items()):
        for kind, shares in curves.items():
            x = np.arange(1, len(shares) + 1) / len(shares)
            style = {"color": OTHER_COLORS[number], "linestyle": "-" if kind == "collocated" else ":"}
            ax.plot(x, shares, label=f"{name}, {kind}" if kind == "shuffled" else name, **style)
    ax.axhline(0.99, color="0.5", linewidth=0.8)
    label(ax, "Variance of collocated gradients", "share of the components", "share of the variance")


def gradiveq_slices(ax: Any, picture: Picture) -> None:
    slices = picture["slices"]
    ax.plot(slices["sizes"], slices["loss"], ".-", color=OTHER_COLORS[2], label="energy lost")
    for multiple in range(slices["unit"], slices["sizes"][-1] + 1, slices["unit"]):
        ax.axvline(multiple, color="0.6", linewidth=0.8, linestyle="--")
    label(ax, "The first slice's basis on the others", "K (dashed: multiples of F D)", "energy lost", legend=False)
    right = ax.twinx()
    right.plot(slices["sizes"], slices["ratio"], ".-", color=OTHER_COLORS[0], label="K / d")
    right.set_ylabel("K / d", fontsize=SMALL + 1, color=OTHER_COLORS[0])
    right.tick_params(labelsize=SMALL, colors=OTHER_COLORS[0])
    ax.yaxis.label.set_color(OTHER_COLORS[2])
    ax.set_ylim(0)
    right.set_ylim(0)


def gradiveq_later(ax: Any, picture: Picture) -> None:
    later = picture["later"]
    kinds = {"sampled": ("sampled slices", ":"), "others": ("other slices", "--"), "later": ("later steps", "-")}
    for kind, (title, line) in kinds.items():
        for number, losses in enumerate(later[kind].values()):
            channels = 16 << number
            ax.plot(
                later["lambdas"], losses, line, color=OTHER_COLORS[number], marker=".", linewidth=1.2,
                label=f"{channels} channels, {title}" if kind == "later" else title if number == 0 else "_",
            )  # fmt: skip
    ax.plot(later["lambdas"], later["lambdas"], color="k", linewidth=0.8, label="λ")
    ax.set(xscale="log", yscale="log", ylim=(1e-5, 1))  # room for the legend
    label(ax, "Energy lost against λ", "λ", "share of energy")


# ATOMO


def atomo_spectra(ax: Any, picture: Picture) -> None:
    for number, (layer, of_steps) in enumerate(picture["spectra"].items()):
        for (step, sigma), line in zip(of_steps.items(), cycle(("-", "--", ":"))):
            of_first = {"label": f"step {step}"} if number == 0 else {}
            ax.plot(range(1, len(sigma) + 1), sigma, line, color=OTHER_COLORS[number], **of_first)
        ax.plot([], [], "s", color=OTHER_COLORS[number], label=layer)
    ax.set_ylim(0)
    ax.set_xticks(range(1, 19, 3))
    label(ax, "Singular values of convolutions", "number", "σ / σ₁")


def atomo_variance(layer: int) -> Callable[[Any, Picture], None]:
    def panel(ax: Any, picture: Picture) -> None:
        title, found = list(picture["variance"].items())[layer]
        for number, (name, points) in enumerate(found["curves"].items()):
            ax.plot(*zip(*points), ".-", color=OTHER_COLORS[number], label=name)
        for (name, (bits, variance)), mark in zip(found["points"].items(), cycle(MARKS)):
            ax.plot(bits, variance, "k" + mark, markersize=4, label=name)
        ax.set(xscale="log", yscale="log")
        label(ax, f"Variance, {title}", "bits per element", "relative variance", legend=layer == 0)

    return panel


# ACP-SGD


def approximation_style(name: str) -> dict[str, Any]:
    return {"color": color(name), "linestyle": ":" if "best" in name else "--" if "without" in name else "-"}


def ranks(ax: Any, picture: Picture) -> None:
    for (name, errors), mark in zip(picture["errors"].items(), cycle(MARKS)):
        ax.plot(picture["ranks"], errors, marker=mark, markersize=4, label=name, **approximation_style(name))
    ax.set_xscale("log", base=2)
    ax.set_xticks(picture["ranks"], list(map(str, picture["ranks"])))
    ax.set_ylim(0, 1.05)
    label(ax, "Error against rank, 32 and 64 channels", "rank", "relative error")


def ratios(ax: Any, picture: Picture) -> None:
    for (name, values), mark in zip(picture["ratios"].items(), cycle(MARKS)):
        ax.plot(values, picture["errors"][name], marker=mark, markersize=4, label=name, **approximation_style(name))
    ax.set_xscale("log")
    ax.set_ylim(0, 1.05)
    label(ax, "Error against bytes", "compression ratio", "relative error")


def tensors(ax: Any, picture: Picture) -> None:
    for (network, numels), shade in zip(picture["tensors"].items(), OTHER_COLORS):
        for (name, of), line in zip(numels.items(), ("-", "--", ":")):
            ax.plot(of, np.linspace(0, 1, len(of)), line, color=shade, label=f"{network}, {name}")
    ax.set_xscale("log")
    label(ax, "Share of smaller tensors", "elements", "share")


DRAWN: dict[str, tuple[Sequence[Callable[[Any, Picture], None]], int]] = {
    "fft": ((fft_steps, fft_thetas, fft_alpha, fft_histograms, fft_errors, fft_formats), 3),
    "gradiveq": ((gradiveq_held, gradiveq_slices, gradiveq_later), 3),
    "atomo": ((atomo_spectra, *map(atomo_variance, range(3))), 2),
    "acp": ((ranks, ratios, tensors), 3),
}
