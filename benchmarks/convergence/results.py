"""The results of benchmarks/convergence: what each run has found, and which learning rate is best for each method.

Layout of the JSON file: `provenance`; `recipes`, how runs train; `runs`, with the fields of `Run` that tell it from
others and those of `Record`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.results import check_same, stored, write_json
from benchmarks.convergence.recipes import Run
from benchmarks.convergence.run import Record

Key = tuple[str, str, float, int]  # recipe, method, learning rate, seed
GROWING = ("commits", "commands")  # of the provenance: may differ when a study continues, and are collected


class Results:
    """All records.

    Args:
        provenance: how they were measured.
        path: file to keep them in.
    """

    def __init__(self, provenance: Mapping[str, Any], path: Path) -> None:
        self.provenance = dict(provenance)
        self.path = path
        self.recipes: dict[str, dict[str, Any]] = {}
        self.records: dict[Key, Record] = {}
        self.order: list[Key] = []

    def resume(self) -> bool:
        """Read what the file has. Returns whether there is one.

        Raises:
            ResultsError: the file has no results, or they were measured in another way.
        """
        if not self.path.exists():
            return False
        with stored(self.path) as content:
            known, self.recipes = content["provenance"], content["recipes"]
            for fields in content["runs"]:
                key = tuple(fields.pop(name) for name in ("recipe", "method", "lr", "seed"))
                self.records[key] = Record(**fields)  # type: ignore[index]
            for name in GROWING:
                self.provenance[name] = list(dict.fromkeys([*known[name], *self.provenance.get(name, ())]))
        self.order = list(self.records)
        fixed = {name: value for name, value in self.provenance.items() if name not in GROWING}
        check_same(self.path, "was measured", known, fixed)
        return True

    def plan(self, recipes: Mapping[str, Mapping[str, Any]], runs: Iterable[Run]) -> None:
        """Set what is going to be run, in order.

        Args:
            recipes: how the runs of each name train.

        Raises:
            ResultsError: the file has runs of a recipe that train in another way.
        """
        for name, settings in recipes.items():
            check_same(self.path, f"trained {name}", self.recipes.setdefault(name, dict(settings)), settings)
        self.order = list(dict.fromkeys([*(run.key for run in runs), *self.order]))

    def finished_epochs(self, run: Run) -> int:
        """Epochs of the run that need not be trained any more: all of them if it has diverged."""
        record = self.records.get(run.key)
        if record is None:
            return 0
        return run.epochs if record.done else len(record.scores)

    def save(self) -> None:
        """Write the file, as a whole or not at all."""
        runs = [
            dict(zip(("recipe", "method", "lr", "seed"), key)) | asdict(self.records[key])
            for key in self.order
            if key in self.records
        ]
        write_json(self.path, {"provenance": self.provenance, "recipes": self.recipes, "runs": runs})

    def finished(self, recipe: str) -> dict[str, dict[float, dict[int, Record]]]:
        """The records of finished runs by method, learning rate and seed, in the order of the study."""
        found: dict[str, dict[float, dict[int, Record]]] = {}
        for name, method, lr, seed in self.order:
            record = self.records.get((name, method, lr, seed))
            if name == recipe and record is not None and record.done:
                found.setdefault(method, {}).setdefault(lr, {})[seed] = record
        return found


@dataclass(frozen=True)
class Row:
    """A method at the learning rate that is best for it.

    Args:
        records: of its seeds.
        score: mean over the seeds of the last epoch's score; None if a run has diverged.
        by_lr: the same for each learning rate that all methods have been run with.
    """

    method: str
    lr: float
    records: list[Record]
    score: float | None
    by_lr: dict[float, float | None]

    @property
    def curve(self) -> list[float]:
        """The mean score over the seeds after each epoch that all of them have finished."""
        return [statistics.fmean(scores) for scores in zip(*(record.scores for record in self.records))]

    @property
    def payload_bytes(self) -> list[float]:
        """The mean payload bytes of one rank until the end of each epoch."""
        return [statistics.fmean(sizes) for sizes in zip(*(record.payload_bytes for record in self.records))]

    def reaches(self, target: float, lower_is_better: bool) -> int | None:
        """The first epoch, from 1, after which the mean score is at least as good as the target."""
        for epoch, score in enumerate(self.curve, 1):
            if (score <= target) if lower_is_better else (score >= target):
                return epoch
        return None


def mean_score(records: Sequence[Record]) -> float | None:
    """The mean of the final scores; None if a run has diverged."""
    if any(record.diverged is not None for record in records):
        return None
    return statistics.fmean(record.scores[-1] for record in records)


def rows(results: Results, recipe: str) -> list[Row]:
    """A row for each method.

    The learning rate is chosen for all methods alike: by the mean final score, out of those that every method has been
    run with. Where some runs are still missing, a method is not judged by more learning rates than the others.
    """
    finished = results.finished(recipe)
    lower_is_better = results.recipes[recipe]["lower_is_better"]
    common = [lr for lr in dict.fromkeys(lr for lrs in finished.values() for lr in lrs) if lr_of_all(finished, lr)]
    found = []
    for method, by_lr in finished.items():
        means = {lr: mean_score(list(records.values())) for lr, records in by_lr.items() if lr in (common or by_lr)}
        good = {lr: score for lr, score in means.items() if score is not None}
        lr = (min if lower_is_better else max)(good, key=good.__getitem__) if good else next(iter(means))
        shown = {lr: means[lr] for lr in common}
        found.append(Row(method, lr, list(by_lr[lr].values()), means[lr], shown))
    return found


def lr_of_all(finished: Mapping[str, Mapping[float, object]], lr: float) -> bool:
    return all(lr in lrs for lrs in finished.values())
