"""The plots of `gradzip advise`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import cost
from .advice import FP16, FP32, Advice, Row
from .error import CommandError


def plot(advice: Advice, rows: Sequence[Row], projection: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the least ratio that pays against the bandwidth, as Figure 10 of HPDC 2020; and the projection, if any.

    Needs matplotlib (`output.check_picture`). Raises CommandError if the file cannot be written.
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
    for number, row in enumerate(methods):
        kinds = {kind for codec in advice.codecs[row.method] for kind, _ in codec.compressed.rounds}
        kind = "all_gather" if "all_gather" in kinds else "all_reduce"
        ratios = []
        for bandwidth in bandwidths:
            link = replace(advice.link, bandwidth=bandwidth, latency=0.0)
            ratios.append(cost.minimal_ratio(link, dense, row.compression, kind))
        style = ("-", "--", ":")[number // 10 % 3]  # there are ten colours
        (line,) = axis.plot([8e-9 * b for b in bandwidths], ratios, style, label=row.method)
        paying = [8e-9 * b for b, k in zip(bandwidths, ratios) if k <= row.ratio]
        if paying:
            axis.plot(paying[-1], row.ratio, "o", color=line.get_color())
    axis.set(
        xscale="log", yscale="log", xlabel="bandwidth of a rank (Gb/s)", ylabel="least compression ratio that pays",
        ylim=(1, 3000), title="Pays above the line; dots: the methods' own ratios",
    )  # fmt: skip
    axis.axvline(8e-9 * advice.link.bandwidth, color="grey", linestyle=":", label="this network")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize="small")
