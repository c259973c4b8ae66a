"""Write the tables of training speed: in docs/benchmarks.md, and a page for each file of results.

To refill them, measure again, then write the tables:

  python -m benchmarks.training stock VARIANT... --rate 1gbit --json benchmarks/results/training_main_cpu.json
  python -m benchmarks.training.report --write

The main rows are those of training_main_cpu.json; `horovod` and `ddp-fp16` must be among them: they are the
baselines. benchmarks/results/training*.md have all rows.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import Parser
from benchmarks.common.results import RESULTS, ROOT, Blocks, ResultsError, replace_blocks, write_whole
from benchmarks.common.tables import markdown
from benchmarks.training import chart
from benchmarks.training.results import cells, table
from benchmarks.training.variants import (
    COMPUTE,
    FRONT_ENDS,
    MODELS,
    SUMMARY,
    bandwidth,
    label,
)  # fmt: skip

PAGE = ROOT / "docs" / "benchmarks.md"
TRAINING = RESULTS / "training_cpu.json"
MAIN = RESULTS / "training_main_cpu.json"  # the main rows: fewer variants, and more rounds
HOSTS = RESULTS / "training_hosts_cpu.json"
START = "<!-- table: python -m benchmarks.training.report --write -->\n\n"
MAIN_START = "<!-- table of main rows: python -m benchmarks.training.report --write -->\n\n"
FLOOR = RESULTS / "floor_cpu.json"
HOSTS_START = "<!-- table of hosts: python -m benchmarks.training.report --write -->\n\n"

NO_BOUND = "no communication (no bound here: noise, another row is faster)"
AUTO = ("fp16", "qsgd:coding=packed", "acpsgd")  # what it chose from as measured: once the default

ON_HOSTS = {  # rows of the table of two hosts
    "compute": "no communication",
    "ddp-fp16": "DDP, torch's fp16 hook",
    "ddp:acpsgd": "DDP, `ACPSGD()`",
    "ddp:hierarchical:inner=acpsgd(rank=4)": "DDP, `Hierarchical(ACPSGD())`",
    "fsdp-noop": "FSDP2, shards alone",
    "fsdp": "FSDP2's own averages",
    "fsdp:acpsgd": "FSDP2, `ACPSGD()`",
}


def labels(rows: list[dict]) -> Callable[[str], str]:
    """What names the variants of a cell: a step without communication that another one beats is noise, no bound."""
    ms = {row["variant"]: row["ms"] for row in rows if "ms" in row}
    beaten = COMPUTE in ms and min(ms.values()) < ms[COMPUTE]
    return lambda variant: NO_BOUND if beaten and variant == COMPUTE else label(variant)


def measured(training: dict) -> list[dict]:
    """The rows with a step time: those of variants that did not fail."""
    return [row for row in training["rows"] if "ms" in row]


def table_of_main_rows(training: dict) -> Iterator[str]:
    """The lines of the table of the main rows: for each model its variants, from the slowest to the fastest."""
    lines: list[list[str]] = []
    for (model, rate, _), rows in cells(measured(training)):
        parameters = max(row["parameters"] for row in rows) / 1e6
        lines.append([f"**{MODELS.get(model, model)}**, {parameters:.1f} M parameters, {bandwidth(rate)}", *[""] * 4])
        for row in sorted(rows, key=lambda row: -row["ms"]):
            speedups = [f"{row[key]:.2f}" for key in ("times_fp32", "times_fp16")]
            megabytes = row["payload_bytes"] / 1e6
            sent = f"{megabytes:.{1 if megabytes >= 10 else 2}f}" if megabytes else "0"
            lines.append([labels(rows)(row["variant"]), *speedups, f"{row['ms']:.0f}", sent])
    return markdown(["", "× fp32", "× fp16", "ms per step", "MB handed"], lines)


def caption(training: dict) -> Iterator[str]:
    """How the figures of the main rows were measured, in one paragraph."""
    spreads: dict[str, float] = {}  # by model: between the rounds of one row
    rows = measured(training)
    for row in rows:
        spread = max(row["ms_of_rounds"]) / min(row["ms_of_rounds"]) - 1
        spreads[row["model"]] = max(spread, spreads.get(row["model"], 0.0))
    rounds = min(len(row["ms_of_rounds"]) for row in rows)
    steps = {sum(len(r.get("ms", ())) for r in row["rounds"]) for row in rows}
    timed = " to ".join(map(str, dict.fromkeys([min(steps), max(steps)])))
    about = training["provenance"]
    yield (
        f"Medians of {timed} steps in {rounds} round{'s' if rounds > 1 else ''}, of the code of commit "
        f"{about['commit']}; {rows[0]['ranks']} ranks with {about['threads']} CPU core each."
    )
    if about.get("interleave"):
        yield "The variants of a front end took turns in each step."
    if rounds == 1:
        yield "How much rows differ by chance is not known."
    else:
        differ = ", ".join(f"{100 * spread:.0f} % ({MODELS.get(model, model)})" for model, spread in spreads.items())
        yield f"Rounds of the same row differ by up to {differ}: smaller differences between rows are noise."


def block(training: dict) -> str:
    """The text between the marks of the main rows."""
    return "\n".join([*table_of_main_rows(training), "", *caption(training)]) + "\n"


def summary(training: dict) -> str:
    """The text between the marks in docs/benchmarks.md: the fastest step of each kind with two ranks, in ms."""
    lines = []
    for (model, rate, ranks), rows in cells(training["rows"]):
        if ranks != 2:
            continue
        ms = {row["variant"]: row["ms"] for row in rows if "ms" in row}
        fastest = [min((ms[name] for name in names if name in ms), default=None) for names in SUMMARY.values()]
        figures = ["" if value is None else f"{value:.0f}" for value in fastest]
        lines.append([MODELS.get(model, model), bandwidth(rate), *figures])
    return "\n".join(markdown(["model", "network", *SUMMARY], lines, left=2)) + "\n"


def hosts_table(training: dict) -> str:
    """The text between the marks of two hosts in docs/benchmarks.md: ms per step and × fp16 of each variant.

    A cell is a column here, and a variant a row.
    """
    header, of_cells = [""], []
    for (model, rate, _), rows in cells(training["rows"]):
        header += [f"{MODELS.get(model, model)}, {bandwidth(rate)}", "× fp16"]
        of_cells.append({row["variant"]: row for row in rows})
    lines = [
        [name, *(text for cell in of_cells for text in (f"{cell[v]['ms']:.0f}", f"{cell[v]['times_fp16']:.2f}"))]
        for v, name in ON_HOSTS.items()
    ]
    return "\n".join(markdown(header, lines)) + "\n"


def fixed_choices(front: str) -> list[str]:
    """The variants of a front end that `Auto` is compared with: uncompressed, fp16, and what it chose from."""
    return [front, f"{front}-fp16", *(f"{front}:{spec}" for spec in AUTO)]


def auto_table(rows: list[dict]) -> Iterator[str]:
    """What Auto chose: its step against the best of the fixed choices, fp32 and fp16. Empty without Auto."""
    lines = []
    for (model, rate, _), of_cell in cells(rows):
        measured = {row["variant"]: row for row in of_cell if "ms" in row}
        for front, name in FRONT_ENDS.items():
            auto = measured.get(f"{front}:auto")
            if auto is None:
                continue
            ms = {variant: measured[variant]["ms"] for variant in fixed_choices(front)}
            best = min(ms, key=ms.__getitem__)
            fp16 = min(ms[f"{front}-fp16"], ms[f"{front}:fp16"])
            chosen = ", ".join(f"{count} × `{spec}`" for spec, count in sorted(auto["rounds"][-1]["choice"].items()))
            figures = [f"{ms[front]:.0f}", f"{fp16:.0f}", f"{ms[best]:.0f} (`{best}`)", f"{auto['ms']:.0f}"]
            lines.append([MODELS.get(model, model), bandwidth(rate), name, chosen, *figures])
    if lines:
        yield "## Auto\n"
        header = ["model", "network", "front end", "`Auto` chose", "fp32", "fp16", "best fixed choice", "`Auto`"]
        yield from markdown(header, lines, left=4)
        yield ""


def page(path: Path) -> str:
    """The page of a file of results: its conditions, and all its rows, from the slowest to the fastest of a cell."""
    content = json.loads(path.read_text())
    lines = [f"# {path.name}", "", "By `python -m benchmarks.training.report --write`; what the columns are:",
             "[benchmarks.md](../../docs/benchmarks.md#training-steps).", ""]  # fmt: skip
    for part in content.get("runs", [content]):
        about, rows = part["provenance"], part["rows"]
        lines += [f"* {key}: {stated(value)}" for key, value in about.items()]
        lines += ["", *auto_table(rows)]
        for (model, rate, ranks), of_cell in cells(rows):
            slowest_first = sorted(of_cell, key=lambda row: -row.get("ms", 0.0))
            lines += [f"## {MODELS.get(model, model)}, {ranks} ranks, {bandwidth(rate)}", ""]
            lines += [*table(slowest_first, labels(of_cell)), ""]
    return "\n".join(lines)


def stated(value: Any) -> str:
    """A condition, for people."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items()) or "none"
    return "; ".join(f"`{item}`" for item in value) if isinstance(value, list) else str(value)


def pages() -> dict[Path, str]:
    """The pages of all files of training steps."""
    files = itertools.chain(RESULTS.glob("training*.json"), [RESULTS / "horovod_settings.json", FLOOR])
    return {path.with_suffix(".md"): page(path) for path in sorted(files)}


def blocks() -> Blocks:
    """The blocks of docs/benchmarks.md."""
    return {
        (PAGE, MAIN_START): block(json.loads(MAIN.read_text())),
        (PAGE, START): summary(json.loads(TRAINING.read_text())),
        (PAGE, HOSTS_START): hosts_table(json.loads(HOSTS.read_text())),
    }


def write_pictures() -> None:
    """Draw the pictures of docs/benchmarks.md."""
    rows, images = json.loads(TRAINING.read_text())["rows"], PAGE.parent / "images"
    chart.draw_rates(rows, images / "training.png", ranks=2)
    at_1gbit = [of for (model, rate, ranks), of in cells(rows) if (rate, ranks) == ("1gbit", 2) and model in MODELS]
    fastest = [row for of_cell in at_1gbit for row in chart.fastest(of_cell).values()]
    chart.draw(fastest, images / "training-parts.png", "Where the time of a step goes")


def main() -> None:
    parser = Parser("training.report", __doc__)
    parser.add_argument(
        "--write", action="store_true", help="write all tables, and draw the pictures (needs matplotlib)"
    )
    args = parser.parse_args()
    if not args.write:
        print(*blocks().values(), sep="\n")
        return
    for path, content in pages().items():
        write_whole(path, content)
    write_pictures()
    try:
        replace_blocks(blocks())
    except ResultsError as error:
        parser.fail(str(error))


if __name__ == "__main__":
    main()
