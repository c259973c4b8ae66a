"""Real gradients of one worker, captured while the networks of examples/ train, and cached in a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import data
from benchmarks.common.workers import Workers, batches, save
from models import MODELS
from train import learning_rate

CHECKPOINT_STEPS = 50  # a run that was stopped repeats at most as many


@dataclass(frozen=True)
class Capture:
    """A training run as by `examples/train.py --model MODEL --batch-size BATCH --steps STEPS`, seed 0, one rank.

    Args:
        share: of the training examples that is used: the first ones.
        captured: steps whose gradient is kept, after as many updates.
    """

    model: str
    batch_size: int
    steps: int
    captured: tuple[int, ...]
    share: float = 1.0


CAPTURES = [
    Capture("resnet20", 64, 1562, (20, 120, 1500)),
    Capture("charlm", 32, 640, (20, 150, 600)),
    Capture("alexnet", 32, 640, (20, 120, 600)),
    Capture("resnet18", 16, 780, (40, 100, 750), share=0.125),
]
QUICK = [Capture("resnet20", 16, 24, (5, 20)), Capture("charlm", 4, 12, (10,))]


def load_data(run: Capture, folder: str | None, text: str | None) -> data.Images | data.Text:
    """The data set of a run. Raises data.DataError."""
    dataset = MODELS[run.model].data(text if run.model == "charlm" else folder)
    if run.share < 1:
        used = int(run.share * len(dataset))
        dataset = replace(dataset, train=tuple(array[:used] for array in dataset.train))
    return dataset


def counts(parameter: Tensor) -> bool:
    """Whether a parameter is studied. The others are a hundredth of a gradient, or less."""
    return parameter.dim() >= 2 and parameter.numel() >= 1024


def gradient_files(
    run: Capture, dataset: data.Images | data.Text, cache: Path, report: Callable[[float], None]
) -> dict[int, Path]:
    """Step -> file of {layer: gradient, float32}. Trains only for what `cache` lacks, from the last checkpoint.

    report: called with the share of the run that is done.
    """
    folder = cache / f"{run.model}-{dataset.name}-{run.batch_size}x{run.steps}-{run.share:g}".replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    files = {step: folder / f"step-{step}.pt" for step in run.captured}
    if not all(file.exists() for file in files.values()):
        train(run, dataset, folder, report)
    return files


def train(run: Capture, dataset: data.Images | data.Text, folder: Path, report: Callable[[float], None]) -> None:
    """Train until the last step to capture, and store the gradients. Continues from the folder's checkpoint."""
    recipe = MODELS[run.model]
    torch.manual_seed(0)
    model = recipe.build(*dataset.dimensions)
    workers = Workers(model, recipe.make_optimizer(model, recipe.lr))
    torch.manual_seed(0)  # as train.py: of dropout
    checkpoint, start = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        stored = torch.load(checkpoint)
        start = stored["step"]
        model.load_state_dict(stored["model"])
        workers.optimizer.load_state_dict(stored["optimizer"])
        torch.set_rng_state(stored["generator"])
    last = max(run.captured)
    for step, of_step in zip(range(start, last + 1), batches(dataset, run.batch_size, start=start)):
        workers.step(learning_rate(recipe.lr, step, run.steps), of_step)
        if step in run.captured:
            named = {name: gradients[0] for name, gradients in workers.gradients.items() if counts(gradients[0])}
            save(named, folder / f"step-{step}.pt")
        if (step + 1) % CHECKPOINT_STEPS == 0:
            state = {"model": model.state_dict(), "optimizer": workers.optimizer.state_dict()}
            save({**state, "step": step + 1, "generator": torch.get_rng_state()}, checkpoint)
        report((step + 1) / (last + 1))
    checkpoint.unlink(missing_ok=True)
