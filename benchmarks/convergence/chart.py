"""Draw the results of benchmarks/convergence: the score during training, and at its end against the bytes sent."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common.charts import COLORS, open_frame, pyplot, save
from benchmarks.convergence.results import Results, rows

STYLES = (("-", "o"), ("--", "s"), (":", "^"))


def draw(results: Results, path: Path) -> None:
    """Write a chart, in the format of the path's suffix: a line of two panels for each recipe with finished runs.

    On the right, a vertical line spans the seeds of a method.
    """
    recipes = [name for name in results.recipes if any(row.score is not None for row in rows(results, name))]
    if not recipes:
        return
    plt = pyplot()
    figure, axes = plt.subplots(len(recipes), 2, figsize=(15, 4.2 * len(recipes)), squeeze=False, layout="constrained")
    for (curves, ends), name in zip(axes, recipes):
        settings = results.recipes[name]
        shown = [row for row in rows(results, name) if row.curve]
        for i, row in enumerate(shown):
            color, (line, marker) = COLORS[i % len(COLORS)], STYLES[i // len(COLORS) % len(STYLES)]
            label = row.method if row.score is not None else f"{row.method} (diverged)"
            epochs = range(1, len(row.curve) + 1)
            curves.plot(epochs, row.curve, line, color=color, marker=marker, markersize=4, linewidth=1.3, label=label)
            if row.score is not None:
                kilobytes = row.payload_bytes[-1] / (len(row.curve) * settings["steps"]) / 1e3
                finals = [record.scores[-1] for record in row.records]
                ends.plot([kilobytes] * len(finals), finals, color=color, linewidth=1)
                ends.plot(kilobytes, row.score, marker, color=color)
        title = f"{name}: {settings['network']}, {settings['data']}"
        curves.set(xlabel="epoch", ylabel=settings["measure"], title=title)
        ends.set(xlabel="payload of a rank and step, kB", xscale="log", title="at the end")
        curves.xaxis.get_major_locator().set_params(integer=True)
        ends.legend(*curves.get_legend_handles_labels(), fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5))
        for axis in (curves, ends):
            axis.grid(alpha=0.3)
            open_frame(axis)
    save(figure, path)
    plt.close(figure)
