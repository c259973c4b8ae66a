"""Write the tables and the picture of docs/scale.md from the results of benchmarks/scale.

python -m benchmarks.scale.report            print the tables
python -m benchmarks.scale.report --write    write them to docs/scale.md, and docs/images/scale.png
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import Parser
from benchmarks.common.charts import open_frame, pyplot, save
from benchmarks.common.palette import method_color
from benchmarks.common.results import RESULTS, ROOT, Blocks, ResultsError, replace_blocks
from benchmarks.common.tables import markdown
from benchmarks.scale.predictions import EVERY, LOCAL, bucket, codec, sent_nbytes
from benchmarks.scale.variants import AUTO, GBITS, MODELS, PROJECTED, RANKS, label

FILE, PAGE, PICTURE = RESULTS / "scale_cpu.json", ROOT / "docs" / "scale.md", ROOT / "docs" / "images" / "scale.png"
START = "<!-- table of {}: python -m benchmarks.scale.report --write -->\n\n"
SIZES = [1 << shift for shift in range(1, 11)]  # numbers of ranks
PICTURED = "gpt2-xl"  # the network of the third panel: it hardly matters which
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


def measured_table(results: Results, key: str, auto: bool = True) -> Iterator[str]:
    """Measured, and predicted in parentheses: CPU milliseconds, or megabytes sent. auto: also `exchange="auto"`."""
    found, scale, field = measured(results, key), *((1e3, 0) if key == "cpu_seconds" else (1e-6, 1))
    sizes = sorted({ranks for _, ranks in found})

    def cell(variant: str, ranks: int) -> str:
        value = found.get((variant, ranks))
        return "" if value is None else f"{scale * value:.3g} ({scale * bucket(results, variant, ranks)[field]:.3g})"

    variants = dict.fromkeys(variant for variant, _ in found if auto or not variant.endswith(f"exchange={AUTO}"))
    rows = ([f"`{label(variant)}`", *(cell(variant, ranks) for ranks in sizes)] for variant in variants)
    return markdown(["", *(f"{ranks} ranks" for ranks in sizes)], rows)


def measured_tables(results: Results) -> str:
    parts = {"MB that a rank sends in a step": "wire_bytes", "CPU milliseconds of a rank in a step": "cpu_seconds"}
    return "\n\n".join("\n".join([f"{title}:\n", *measured_table(results, key)]) for title, key in parts.items())


def cells(results: Results) -> Iterator[tuple[str, Mapping[int, Any]]]:
    """The projection by model and link, of those up to 100 Gb/s: its name, and the cells by number of ranks."""
    rows: dict[tuple[str, int], dict[int, Any]] = {}
    for cell in (cell for cell in results["projection"] if cell["gbit"] <= 100):
        rows.setdefault((cell["model"], cell["gbit"]), {})[cell["ranks"]] = cell
    for (model, gbit), of_ranks in rows.items():
        yield f"{MODELS.get(model, model)}, {gbit} Gb/s", of_ranks


def both(values: Iterable[float]) -> str:
    """Milliseconds with few and with many ranks."""
    few, many = (f"{float(f'{1e3 * value:.2g}'):g}" for value in values)
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
            *(rates(cell["rate"][variant] for cell in of_ranks.values()) for variant in shown[2:]),
        ]
        for name, of_ranks in cells(results)
    )  # fmt: skip
    header = [*(f"`{label(v)}`" for v in shown), *(f"{EVERY} local steps, `{label(v)}`" for v in LOCAL)]
    return markdown(["", *header, *(f"codec of `{label(v)}`, GB/s" for v in shown[2:])], rows)


def rates(values: Iterable[float | None]) -> str:
    """GB/s with few and with many ranks."""
    few, many = ("never" if value is None else f"{value / 1e9:.2g}" for value in values)
    return few if few == many else f"{few} → {many}"


TABLES: dict[str, Callable[[Results], Iterator[str]]] = {
    "bytes": lambda results: measured_table(results, "wire_bytes", auto=False),
    "communication": communication_table,
    "steps": step_table,
}


def blocks() -> Blocks:
    """The blocks of docs/scale.md."""
    results = json.loads(FILE.read_text())
    return {(PAGE, START.format(name)): "\n".join(table(results)) + "\n" for name, table in TABLES.items()}


def codec_rate(results: Results, variant: str) -> float:
    """Bytes of gradients that one core encodes and decodes in a second, with as few ranks as were measured."""
    cost = codec(results, variant, min(map(int, results["links"])))
    return 4 * results["provenance"]["side"] ** 2 / (cost.encode + cost.decode)


def draw(results: Results, path: Path) -> None:
    """Write the picture: what a rank sends and computes with more ranks, and how fast codecs must be."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.8), layout="constrained")
    styles = {
        variant: {"color": method_color(variant), "linestyle": line, "marker": marker, "label": label(variant)}
        for variant, line, marker in zip(PROJECTED, ("-", "--", "-.", ":", "-", "--"), "os^vDP")
    }
    about = results["provenance"]
    dense = 4 * about["parameters"] * about["side"] ** 2
    sent, cpu = measured(results, "wire_bytes"), measured(results, "cpu_seconds")
    ranks = sorted({ranks for _, ranks in cpu})
    for variant, style in styles.items():
        if (variant, ranks[0]) not in cpu:
            continue
        line, marks = style | {"marker": ""}, style | {"linestyle": ""}
        axes[0].plot(SIZES, [sent_nbytes(results, variant, p) / dense for p in SIZES], **line)
        axes[0].plot(ranks, [sent.get((variant, p), math.nan) / dense for p in ranks], **marks)
        axes[1].plot(ranks, [1e3 * bucket(results, variant, p).cpu_seconds for p in ranks], **line)
        axes[1].plot(ranks, [1e3 * cpu[variant, p] for p in ranks], **marks)
    for variant in PROJECTED[2:]:
        wanted = [c for c in results["projection"] if (c["model"], c["ranks"]) == (PICTURED, RANKS[0])]
        pays = {cell["gbit"]: cell["rate"][variant] / 1e9 for cell in wanted if cell["rate"][variant]}
        if pays:
            axes[2].plot(list(pays), list(pays.values()), **styles[variant])
            own = {"color": styles[variant]["color"], "linestyle": styles[variant]["linestyle"], "linewidth": 0.8}
            axes[2].axhline(codec_rate(results, variant) / 1e9, **own)
    for axis, title, unit, marks in (
        (axes[0], "Bytes sent by a rank, per byte of gradients\n(lines: predicted; marks: measured)", "ranks", SIZES),
        (axes[1], f"CPU ms of a rank for {dense / 1e6:.1f} MB of gradients\n(lines: predicted)", "ranks", ranks),
        (axes[2], f"GB/s that a codec must do to pay, {RANKS[0]} ranks\n(thin lines: one core here)", "Gb/s", GBITS),
    ):  # fmt: skip
        axis.set_title(title)
        axis.set_xlabel(unit)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xticks(marks, list(map(str, marks)))
        axis.minorticks_off()
        open_frame(axis)
    handles = [plt.Line2D([], [], **style) for style in styles.values()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    save(figure, path)
    plt.close(figure)


def main() -> None:
    parser = Parser("scale.report", __doc__)
    parser.add_argument("--write", action="store_true", help="write the tables and the picture")
    args = parser.parse_args()
    if not args.write:
        print(*blocks().values(), sep="\n")
        return
    draw(json.loads(FILE.read_text()), PICTURE)
    try:
        replace_blocks(blocks())
    except ResultsError as error:
        parser.fail(str(error))


if __name__ == "__main__":
    main()
