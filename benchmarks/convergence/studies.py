"""Write the table of studies that `gradzip advise` and `Auto` read: the best study of each method and optimizer.

The best one has the most learning rates, of which each method has its best, and among those the most steps, and then
the best score. Methods with phases count for their last one.

  python -m benchmarks.convergence.studies --write    from benchmarks/results/convergence_*.json and peers.json

Of torch's hooks, the one for bfloat16 counts, which no other study has. Left out: optimizers with other settings than
the recipes' own; methods whose arguments depend on the length of the study.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import gradzip
from benchmarks.common.arguments import Parser
from benchmarks.common.results import RESULTS, stored_rows, write_json
from benchmarks.convergence.report import NONE
from benchmarks.convergence.results import Results, rows
from gradzip.advice.studies import FILE, OPTIMIZERS, Study, studied
from gradzip.methods.spec import unparse

PEERS = "peers.json"
BFLOAT16 = "fp16:dtype=bfloat16"
MEASURES = {"test accuracy, %": "points of test accuracy", "bits per character": "bits per character"}


def studies_of(path: Path) -> Iterator[tuple[int, Study]]:
    """The studies in a file of results, each with its number of learning rates: one for each method that has ended."""
    results = Results({}, path)
    results.resume()
    for name, settings in results.recipes.items():
        if settings["optimizer"] not in OPTIMIZERS or settings["betas"]:
            continue
        found = rows(results, name)
        baseline = next((row.score for row in found if row.method == NONE), None)
        for row in found:
            if baseline is None or row.score is None or row.method == NONE or not is_spec(row.method):
                continue
            difference = row.score - baseline
            yield len(row.by_lr), Study(
                settings["optimizer"], row.method, round(difference if settings["lower_is_better"] else -difference, 4),
                settings["margin"], MEASURES[settings["measure"]], settings["network"], row.records[0].parameters,
                settings["data"].removesuffix(".txt"), settings["epochs"] * settings["steps"], len(row.records),
                path.name,
            )  # fmt: skip


def of_bfloat16() -> Study:
    """The study of torch's bf16 hook, with real ranks and one learning rate."""
    ends: dict[str, list[float]] = {"float32": [], "bf16 hook": []}
    rows = stored_rows(RESULTS / PEERS)
    for row in rows:
        if row["variant"] in ends:
            ends[row["variant"]].append(row["scores"][-1])
    base, hook = map(fmean, ends.values())
    ((optimizer, network, steps),) = {(row["optimizer"], row["network"], row["steps"]) for row in rows}
    text = next(study for study in of_files() if study[1].network == network)[1]
    return replace(
        text, optimizer=optimizer, method=BFLOAT16, worse_by=round(hook - base, 4), steps=steps,
        seeds=len(ends["bf16 hook"]), source=PEERS,
    )  # fmt: skip


def of_files() -> Iterator[tuple[int, Study]]:
    for path in sorted(RESULTS.glob("convergence_*.json")):
        yield from studies_of(path)


def is_spec(text: str) -> bool:
    """Whether a method is written as for `gradzip.parse`, and does not depend on the length of the study."""
    try:
        gradzip.parse(text)
    except ValueError:
        return False
    return True


def best() -> list[Study]:
    """The best study of each method with each optimizer, by optimizer and method."""
    found: dict[tuple[str, str], tuple[tuple[float, ...], Study]] = {}
    for lrs, study in (*of_files(), (1, of_bfloat16())):
        key = study.optimizer, unparse(studied(gradzip.parse(study.method)))
        rank = lrs, study.steps, -study.worse_by
        if key not in found or rank > found[key][0]:
            found[key] = rank, study
    return sorted((study for _, study in found.values()), key=lambda study: (study.optimizer, study.method))


def main() -> None:
    parser = Parser("convergence.studies", __doc__)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    found = best()
    for study in found:
        print(f"{study.optimizer:8} {study.method:50} {study.difference:18} {study.conditions} ({study.source})")
    if parser.parse_args().write:
        write_json(FILE, [asdict(study) for study in found])


if __name__ == "__main__":
    main()
