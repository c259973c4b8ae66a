#!/usr/bin/env python
"""Print README's table of training speed and accuracy, from the results in benchmarks/results.

To refill it, measure again, then write the table into README.md:

  python benchmarks/training.py VARIANT... --rate 1gbit --json benchmarks/results/training_cpu.json
  horovodrun -np 2 python examples/train.py --threads 1 --compression none --compression fp16 --compression SPEC \\
      --json runs.json
  python benchmarks/report.py --accuracy runs.json --write

Every row of training_cpu.json becomes a row of the table. `horovod` and `ddp-fp16` must be among them: they are the
baselines. The accuracy of a row is that of the run in accuracy_digits.json with the same compression.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import gradzip

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
TRAINING, ACCURACY = "training_cpu.json", "accuracy_digits.json"
START, END = "<!-- table: python benchmarks/report.py --write -->\n\n", "\n<!-- end of table -->\n"

FP32, FP16 = "horovod", "ddp-fp16"  # the variants that speed-ups are relative to
MODELS = {"alexnet": "AlexNet", "resnet18": "ResNet-18"}
STOCK = {
    "compute": "no exchange (upper bound)",
    "horovod": "stock Horovod, fp32",
    "horovod-fp16": "Horovod, `Compression.fp16`",
    "ddp": "stock DDP, fp32",
    "ddp-fp16": "DDP, torch's `fp16_compress_hook`",
    "ddp-powersgd": "DDP, torch's `powerSGD_hook`, rank 4",
}
FRONT_ENDS = {"horovod": "Horovod", "ddp": "DDP"}


def label(variant: str) -> str:
    """Name a variant of benchmarks/training.py for people."""
    if variant in STOCK:
        return STOCK[variant]
    front_end, _, spec = variant.partition(":")
    arguments = spec.partition(":")[2].replace(",", ", ")
    return f"{FRONT_ENDS[front_end]}, `{type(gradzip.parse(spec)).__name__}({arguments})`"


def compression(variant: str) -> str | None:
    """The spec whose accuracy a variant has; None if there is none."""
    if ":" in variant:
        return variant.partition(":")[2]
    return {"horovod": "none", "ddp": "none", "horovod-fp16": "fp16", "ddp-fp16": "fp16"}.get(variant)


def bandwidth(rate: str) -> str:
    """Spell a rate: 1gbit becomes 1 Gb/s."""
    for unit, spelled in {"gbit": " Gb/s", "mbit": " Mb/s", "kbit": " kb/s"}.items():
        if rate.endswith(unit):
            return rate.removesuffix(unit) + spelled
    return "unshaped loopback"


def table(training: dict, accuracy: dict) -> Iterator[str]:
    """The lines of the table: for each model and network its variants, from the slowest to the fastest."""
    accuracies = {run["compression"]: run["test_accuracy"] for run in accuracy["runs"]}
    yield "| | × fp32 | × fp16 | ms per step | MB sent | digits, % |"
    yield "|---|---:|---:|---:|---:|---:|"
    measured = [row for row in training["rows"] if "ms" in row]
    for (model, rate), group in itertools.groupby(measured, key=lambda row: (row["model"], row["rate"])):
        rows = {row["variant"]: row for row in group}
        parameters = rows[FP32]["parameters"] / 1e6
        yield f"| **{MODELS.get(model, model)}**, {parameters:.1f} M parameters, {bandwidth(rate)} | | | | | |"
        for variant, row in sorted(rows.items(), key=lambda item: -item[1]["ms"]):
            speedups = [f"{rows[baseline]['ms'] / row['ms']:.2f}" for baseline in (FP32, FP16)]
            megabytes = row["payload_bytes"] / 1e6
            sent = f"{megabytes:.{1 if megabytes >= 10 else 2}f}" if megabytes else "0"
            right = accuracies.get(compression(variant))
            cells = [label(variant), *speedups, f"{row['ms']:.0f}", sent, "" if right is None else f"{100 * right:.1f}"]
            yield f"| {' | '.join(cells)} |"


def caption(training: dict) -> Iterator[str]:
    """How the figures were measured, in one paragraph."""
    about = training["provenance"]
    spreads: dict[str, float] = {}  # by model: between the rounds of one row
    for row in training["rows"]:
        if "ms" in row:
            model = MODELS.get(row["model"], row["model"])
            spread = max(row["ms_of_rounds"]) / min(row["ms_of_rounds"]) - 1
            spreads[model] = max(spread, spreads.get(model, 0.0))
    yield (
        f"Medians of {about['rounds'] * about['steps']} steps in {about['rounds']} rounds; {about['ranks']} ranks with "
        f"{about['threads']} CPU core each. Rounds of the same row differ"
    )
    yield (
        f"by up to {', '.join(f'{100 * spread:.0f} % ({model})' for model, spread in spreads.items())}: smaller "
        "differences between rows are noise."
    )
    yield "Digits: one training run for each compression; one of the 500 test images is 0.2 %."


def block(training: dict, accuracy: dict) -> str:
    """The text between the markers in README.md."""
    return "\n".join([*table(training, accuracy), "", *caption(training)]) + "\n"


def read(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def store_accuracy(path: Path) -> None:
    """Store the results of examples/train.py without times and loss curves."""
    results = json.loads(path.read_text())
    kept = ("compression", "test_accuracy", "test_loss", "ratio", "replicas_identical", "steps")
    results["runs"] = [{key: run[key] for key in kept} for run in results["runs"]]
    (RESULTS / ACCURACY).write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into README.md, between its markers")
    parser.add_argument("--accuracy", metavar="PATH", type=Path, help="first store results of examples/train.py --json")
    args = parser.parse_args()
    if args.accuracy:
        store_accuracy(args.accuracy)
    text = block(read(TRAINING), read(ACCURACY))
    if not args.write:
        print(text, end="")
        return
    before, _, rest = README.read_text().partition(START)
    _, _, after = rest.partition(END)
    README.write_text(before + START + text + END + after)


if __name__ == "__main__":
    main()
