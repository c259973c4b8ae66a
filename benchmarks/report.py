#!/usr/bin/env python
"""Print the tables of training speed in README.md and docs/benchmarks.md, from the results in benchmarks/results.

To refill them, measure again, then write the tables:

  python benchmarks/training.py VARIANT... --rate 1gbit --json benchmarks/results/training_cpu.json
  horovodrun -np 2 python examples/train.py --threads 1 --compression none --compression fp16 --compression SPEC \\
      --json runs.json
  python benchmarks/report.py --accuracy runs.json --write

README's table has the main variants of training_cpu.json for two ranks at 1 Gb/s on AlexNet and ResNet-18; `horovod`
and `ddp-fp16` must be among them: they are the baselines. The accuracy of a row is that of the run in
accuracy_digits.json with the same compression. docs/benchmarks.md has all rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import gradzip
from result_files import ResultsError, replace_block
from training_results import cells, table
from training_variants import FRONT_ENDS, STOCK, bandwidth, compression, label

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
TRAINING, ACCURACY = "training_cpu.json", "accuracy_digits.json"
START = "<!-- table: python benchmarks/report.py --write -->\n\n"
START_AUTO = "<!-- table of Auto: python benchmarks/report.py --write -->\n\n"

MODELS = {"alexnet": "AlexNet", "resnet18": "ResNet-18"}
RATE, RANKS = "1gbit", 2  # of README's table
SHOWN = (  # there
    *STOCK, "horovod:powersgd", "horovod:acpsgd", "horovod:fft-range", "horovod:dct-range:theta=0.95", "horovod:topk",
    "horovod:qsgd:coding=packed", "horovod:signsgd", "ddp:acpsgd", "ddp:fft-range",
)  # fmt: skip


def rows_of_readme(training: dict) -> list[dict]:
    """The rows of README's table."""
    return [
        row
        for row in training["rows"]
        if row["model"] in MODELS and row["rate"] == RATE and row["ranks"] == RANKS and "ms" in row
        if row["variant"] in SHOWN
    ]


def lines_of_readme(training: dict, accuracy: dict) -> Iterator[str]:
    """The lines of README's table: for each model its variants, from the slowest to the fastest."""
    accuracies = {run["compression"]: run["test_accuracy"] for run in accuracy["runs"]}
    yield "| | × fp32 | × fp16 | ms per step | MB sent | digits, % |"
    yield "|---|---:|---:|---:|---:|---:|"
    for (model, rate, _), rows in cells(rows_of_readme(training)):
        parameters = max(row["parameters"] for row in rows) / 1e6
        yield f"| **{MODELS[model]}**, {parameters:.1f} M parameters, {bandwidth(rate)} | | | | | |"
        for row in sorted(rows, key=lambda row: -row["ms"]):
            speedups = [f"{row[key]:.2f}" for key in ("times_fp32", "times_fp16")]
            megabytes = row["payload_bytes"] / 1e6
            sent = f"{megabytes:.{1 if megabytes >= 10 else 2}f}" if megabytes else "0"
            right = accuracies.get(compression(row["variant"]))
            shown = "" if right is None else f"{100 * right:.1f}"
            line = [label(row["variant"]), *speedups, f"{row['ms']:.0f}", sent, shown]
            yield f"| {' | '.join(line)} |"


def caption(training: dict) -> Iterator[str]:
    """How the figures of README's table were measured, in one paragraph."""
    spreads: dict[str, float] = {}  # by model: between the rounds of one row
    rows = rows_of_readme(training)
    for row in rows:
        spread = max(row["ms_of_rounds"]) / min(row["ms_of_rounds"]) - 1
        spreads[MODELS[row["model"]]] = max(spread, spreads.get(MODELS[row["model"]], 0.0))
    rounds = min(len(row["ms_of_rounds"]) for row in rows)
    yield (
        f"Medians of {rounds} round{'s' if rounds > 1 else ''}; {RANKS} ranks with {training['provenance']['threads']} "
        "CPU core each."
    )
    if rounds > 1:
        differ = ", ".join(f"{100 * spread:.0f} % ({model})" for model, spread in spreads.items())
        yield f"Rounds of the same row differ by up to {differ}: smaller differences between rows are noise."
    yield "Digits: one training run for each compression; one of the 500 test images is 0.2 %."


def block(training: dict, accuracy: dict) -> str:
    """The text between the markers in README.md."""
    return "\n".join([*lines_of_readme(training, accuracy), "", *caption(training)]) + "\n"


def fixed_choices(front: str) -> list[str]:
    """The variants of a front end that `Auto` is compared with: uncompressed, fp16, and what it chooses from."""
    _none, *allowed = gradzip.Auto().titles
    return [front, f"{front}-fp16", *(f"{front}:{spec}" for spec in allowed)]


def auto_block(training: dict) -> str:
    """What Auto chose: its step against the best of the fixed choices, and against fp32 and fp16."""
    lines = ["| model | network | front end | fp32 | fp16 | best fixed choice | `Auto` | `Auto` chose |"]
    lines.append("|---|---|---|---:|---:|---:|---:|---|")
    for (model, rate, _), rows in cells(training["rows"]):
        measured = {row["variant"]: row for row in rows if "ms" in row}
        for front, name in FRONT_ENDS.items():
            auto = measured.get(f"{front}:auto")
            if auto is None:
                continue
            ms = {variant: measured[variant]["ms"] for variant in fixed_choices(front)}
            best = min(ms, key=ms.__getitem__)
            fp16 = min(ms[f"{front}-fp16"], ms[f"{front}:fp16"])
            chosen = ", ".join(f"{count} × `{spec}`" for spec, count in sorted(auto["rounds"][-1]["choice"].items()))
            figures = [f"{ms[front]:.0f}", f"{fp16:.0f}", f"{ms[best]:.0f} (`{best}`)", f"{auto['ms']:.0f}"]
            lines.append(f"| {' | '.join([MODELS.get(model, model), bandwidth(rate), name, *figures, chosen])} |")
    return "\n".join(lines) + "\n"


def page_block(training: dict) -> str:
    """The text between the markers in docs/benchmarks.md: variants from the slowest to the fastest."""
    lines: list[str] = []
    for (model, rate, ranks), unsorted in cells(training["rows"]):
        rows = sorted(unsorted, key=lambda row: -row.get("ms", 0.0))
        lines += [f"**{MODELS.get(model, model)}**, {ranks} ranks, {bandwidth(rate)}", "", *table(rows, label), ""]
    return "\n".join(lines[:-1]) + "\n"


def read(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def blocks() -> list[tuple[Path, str, str]]:
    """(page, the mark before it, its text) for each block of tables, from the stored results."""
    training = read(TRAINING)
    return [
        (README, START, block(training, read(ACCURACY))),
        (PAGE, START, page_block(training)),
        (PAGE, START_AUTO, auto_block(training)),
    ]


def store_accuracy(path: Path) -> None:
    """Store the results of examples/train.py without times and loss curves."""
    results = json.loads(path.read_text())
    kept = ("compression", "test_accuracy", "test_loss", "ratio", "replicas_identical", "steps")
    results["runs"] = [{key: run[key] for key in kept} for run in results["runs"]]
    (RESULTS / ACCURACY).write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables into both pages, between their markers")
    parser.add_argument("--accuracy", metavar="PATH", type=Path, help="first store results of examples/train.py --json")
    args = parser.parse_args()
    if args.accuracy:
        store_accuracy(args.accuracy)
    for path, start, text in blocks():
        if not args.write:
            print(f"{path.relative_to(ROOT)}\n\n{text}")
            continue
        try:
            path.write_text(replace_block(path, path.read_text(), start, text))
        except ResultsError as error:
            sys.exit(f"report.py: error: {error}")


if __name__ == "__main__":
    main()
