"""Write the tables and the picture of docs/scale.md from the results of benchmarks/scale.

python -m benchmarks.scale.report            print the tables
python -m benchmarks.scale.report --write    write them to docs/scale.md, and docs/images/scale.png
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import Parser
from benchmarks.common.charts import COLORS, open_frame, pyplot, save
from benchmarks.common.results import RESULTS, ROOT, ResultsError, replace_block
from benchmarks.common.tables import markdown
from benchmarks.scale.predictions import LOCAL, bucket
from benchmarks.scale.variants import MODELS, PROJECTED, label

FILE, PAGE, PICTURE = RESULTS / "scale_cpu.json", ROOT / "docs" / "scale.md", ROOT / "docs" / "images" / "scale.png"
START = "<!-- table of {}: python -m benchmarks.scale.report --write -->\n\n"
Results = Mapping[str, Any]


def measured(results: Results, key: str) -> dict[tuple[str, int], float]:
    """By variant and ranks, the median over the rounds of "cpu_seconds" (mean of the ranks) or "wire_bytes"."""
    rounds: dict[tuple[str, int], list[float]] = {}
    for row in results["rows"]:
        value = statistics.fmean(row[key]) if key == "cpu_seconds" else row[key]
        if value is not None:
            rounds.setdefault((row["variant"], row["ranks"]), []).append(value)
    return {pair: statistics.median(values) for pair, values in rounds.items()}


def differences(results: Results, key: str) -> dict[tuple[str, int], float]:
    """Predicted / measured - 1, by variant and ranks."""
    field = 0 if key == "cpu_seconds" else 1  # of a Bucket
    return {pair: bucket(results, *pair)[field] / value - 1 for pair, value in measured(results, key).items()}


def measured_table(results: Results, key: str) -> Iterator[str]:
    """Measured, and predicted in parentheses: CPU milliseconds, or megabytes sent."""
    found, scale, field = measured(results, key), *((1e3, 0) if key == "cpu_seconds" else (1e-6, 1))
    sizes = sorted({ranks for _, ranks in found})

    def cell(variant: str, ranks: int) -> str:
        value = found.get((variant, ranks))
        return "" if value is None else f"{scale * value:.3g} ({scale * bucket(results, variant, ranks)[field]:.3g})"

    variants = dict.fromkeys(variant for variant, _ in found)
    rows = ([f"`{label(variant)}`", *(cell(variant, ranks) for ranks in sizes)] for variant in variants)
    return markdown(["", *(f"{ranks} ranks" for ranks in sizes)], rows)


def measured_tables(results: Results) -> str:
    parts = {"MB that a rank sends in a step": "wire_bytes", "CPU milliseconds of a rank in a step": "cpu_seconds"}
    return "\n\n".join("\n".join([f"{title}:\n", *measured_table(results, key)]) for title, key in parts.items())


def cells(results: Results) -> Iterator[tuple[str, Mapping[int, Any]]]:
    """The projection by model and link: its name, and the cells by number of ranks."""
    rows: dict[tuple[str, int], dict[int, Any]] = {}
    for cell in results["projection"]:
        rows.setdefault((cell["model"], cell["gbit"]), {})[cell["ranks"]] = cell
    for (model, gbit), of_ranks in rows.items():
        yield f"{MODELS.get(model, model)}, {gbit} Gb/s", of_ranks


def both(values: Iterator[float]) -> str:
    """Milliseconds with few and with many ranks."""
    few, many = (f"{1e3 * value:.2g}" if value < 0.1 else f"{1e3 * value:.0f}" for value in values)
    return few if few == many else f"{few} → {many}"


def communication_table(results: Results) -> Iterator[str]:
    rows = (
        [name, *(both(cell["seconds"][variant] for cell in of_ranks.values()) for variant in PROJECTED)]
        for name, of_ranks in cells(results)
    )
    return markdown(["", *(f"`{label(variant)}`" for variant in PROJECTED)], rows)


def step_table(results: Results) -> Iterator[str]:
    shown = PROJECTED[:4]
    rows = (
        [
            name,
            *(both(cell["least_step"][variant] for cell in of_ranks.values()) for variant in shown),
            *(both(cell["local_step"][variant] for cell in of_ranks.values()) for variant in LOCAL),
            rate(of_ranks[max(of_ranks)]["rate"]["block-float"]), rate(of_ranks[max(of_ranks)]["rate"]["acpsgd"]),
        ]
        for name, of_ranks in cells(results)
    )  # fmt: skip
    header = [*(f"`{label(v)}`" for v in shown), *(f"30 local steps, `{label(v)}`" for v in LOCAL)]
    return markdown(["", *header, *(f"codec of `{label(v)}`, GB/s" for v in shown[2:])], rows)


def rate(value: float | None) -> str:
    return "never" if value is None else f"{value / 1e9:.2g}"


BLOCKS: dict[str, Callable[[Results], Iterator[str]]] = {
    "bytes": lambda results: measured_table(results, "wire_bytes"),
    "CPU time": lambda results: measured_table(results, "cpu_seconds"),
    "communication": communication_table,
    "steps": step_table,
}


def blocks(results: Results) -> dict[str, str]:
    """Mark on the page -> the text after it."""
    return {START.format(name): "\n".join(table(results)) + "\n" for name, table in BLOCKS.items()}


def draw(results: Results, path: Path) -> None:
    """Write the picture: what a rank sends and computes with more ranks, and how fast a codec must be."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(16, 4.8), layout="constrained")
    styles = dict(zip(PROJECTED, zip(COLORS, ("-", "--", "-.", ":", "-", "--"), ("o", "s", "^", "v", "D", "P"))))
    sizes = [1 << shift for shift in range(1, 11)]
    about = results["provenance"]
    dense = 4 * about["parameters"] * about["side"] ** 2
    for axis, key, field, unit in ((axes[0], "wire_bytes", 1, dense), (axes[1], "cpu_seconds", 0, 1e-3)):
        points = measured(results, key)
        for variant, (color, line, marker) in styles.items():
            predicted = [bucket(results, variant, ranks)[field] / unit for ranks in sizes]
            axis.plot(sizes, predicted, color=color, linestyle=line, label=label(variant))
            mine = {ranks: value / unit for (name, ranks), value in points.items() if name == variant}
            axis.plot(list(mine), list(mine.values()), color=color, linestyle="", marker=marker)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("ranks")
        axis.set_xticks(sizes, list(map(str, sizes)))
    axes[0].set_title("bytes that a rank sends, per byte of gradient\nlines: predicted, marks: measured")
    axes[1].set_title(f"CPU ms of a rank for {dense / 1e6:.1f} MB of gradients\nlines: predicted, marks: measured")
    wanted = [cell for cell in results["projection"] if cell["ranks"] == 1024]
    for variant in PROJECTED[2:]:
        color, line, marker = styles[variant]
        mine = {cell["gbit"]: cell["rate"][variant] for cell in wanted if cell["model"] == "gpt2-xl"}
        mine = {gbit: value / 1e9 for gbit, value in mine.items() if value}
        axes[2].plot(list(mine), list(mine.values()), color=color, linestyle=line, marker=marker)
        own = bucket(results, variant, 2)
        link_seconds = 0 * own.sent_nbytes
        axes[2].axhline(dense / (own.cpu_seconds - link_seconds) / 1e9, color=color, linestyle=line, linewidth=0.8)
    axes[2].set_xscale("log")
    axes[2].set_yscale("log")
    for axis in axes:
        open_frame(axis)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(PROJECTED))
    save(figure, path)
    plt.close(figure)


def main() -> None:
    parser = Parser("scale.report", __doc__)
    parser.add_argument("--write", action="store_true", help="write the tables and the picture")
    args = parser.parse_args()
    results = json.loads(FILE.read_text())
    if not args.write:
        print(*blocks(results).values(), sep="\n")
        return
    draw(results, PICTURE)
    try:
        for start, block in blocks(results).items():
            replace_block(PAGE, start, block)
    except ResultsError as error:
        parser.fail(str(error))


if __name__ == "__main__":
    main()
