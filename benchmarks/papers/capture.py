"""Gradients for benchmarks/papers: of several workers at a few steps, and of some layers in successive steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import data
from benchmarks.common.workers import Workers, batches, save
from models import MODELS
from train import cross_entropy, learning_rate


@dataclass(frozen=True)
class Run:
    """A training run of one worker with the recipe of examples/models.py, seed 0.

    Args:
        batch_size: images in a step of training, and in each worker's batch of a snapshot.
        snapshots: steps at which the gradients of `workers` disjoint batches are kept, all with the same weights.
        series: parameters whose training gradient is kept in every step from `first` on.
    """

    model: str
    batch_size: int
    steps: int
    snapshots: tuple[int, ...]
    workers: int = 1
    series: tuple[str, ...] = ()
    first: int = 0


# One 3x3 convolution of each stage of ResNet-20, with 16, 32 and 64 channels, and its first layer.
STEM, *STAGES = "0.weight", "4.body.0.weight", "7.body.0.weight", "10.body.0.weight"
RUNS = {
    "resnet20": Run("resnet20", 64, 500, (5, 25, 75, 150, 250, 350, 499), 8, (STEM, *STAGES), first=250),
    "resnet18": Run("resnet18", 16, 60, (2, 20, 59)),
    "alexnet": Run("alexnet", 32, 60, (20, 59)),
}
QUICK = {
    "resnet20": Run("resnet20", 16, 60, (5, 59), 8, (STEM, *STAGES), first=10),
    "resnet18": Run("resnet18", 4, 5, (1, 4)),
    "alexnet": Run("alexnet", 8, 5, (4,)),
}


@dataclass(frozen=True)
class Captured:
    """The gradients of a run.

    Args:
        snapshots: step -> {parameter: gradients of the workers, (workers, *shape)}.
        series: parameter -> gradients of successive steps, (steps, *shape).
    """

    snapshots: dict[int, dict[str, Tensor]]
    series: dict[str, Tensor]


def capture(run: Run, dataset: data.Images, cache: Path | None, report: Callable[[float], None]) -> Captured:
    """Train, unless `cache` has a file with the gradients of this run; write one to it.

    report: called with the share of the run that is done.
    """
    file = cache / f"papers-{run.model}-{dataset.name}.pt" if cache else None
    if file and file.exists():
        stored = torch.load(file)
        if stored["run"] == repr(run):
            return Captured(stored["snapshots"], stored["series"])
    captured = train(run, dataset, report)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        save({"run": repr(run), **vars(captured)}, file)
    return captured


def train(run: Run, dataset: data.Images, report: Callable[[float], None]) -> Captured:
    recipe = MODELS[run.model]
    torch.manual_seed(0)
    model = recipe.build(*dataset.dimensions)
    training = Workers(model, recipe.make_optimizer(model, recipe.lr))
    # Not those of training, so that all workers are alike.
    batches_of_workers = batches(dataset, run.workers * run.batch_size, seed=1)
    snapshots: dict[int, dict[str, Tensor]] = {}
    series: dict[str, list[Tensor]] = {name: [] for name in run.series}
    for step, of_step in zip(range(run.steps), batches(dataset, run.batch_size)):
        if step in run.snapshots:
            snapshots[step] = gradients_of_workers(model, *next(batches_of_workers)[0], run.workers)
        training.step(learning_rate(recipe.lr, step, run.steps), of_step)
        if step >= run.first:
            for name, gradients in series.items():
                gradients += training.gradients[name]
        report((step + 1) / run.steps)
    return Captured(snapshots, {name: torch.stack(gradients) for name, gradients in series.items()})


def gradients_of_workers(model: nn.Module, inputs: Tensor, targets: Tensor, workers: int) -> dict[str, Tensor]:
    """Parameter -> (workers, *shape): each worker has an equal part of the batch."""
    gradients: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for part, wanted in zip(inputs.chunk(workers), targets.chunk(workers)):
        model.zero_grad()
        cross_entropy(model(part), wanted).backward()
        for name, parameter in model.named_parameters():
            gradients[name].append(parameter.grad.clone())
    return {name: torch.stack(parts) for name, parts in gradients.items()}
