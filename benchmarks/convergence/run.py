"""Runs of benchmarks/convergence: train with simulated workers to the end.

A run continues from the last finished epoch of its checkpoint, bit for bit; one with local steps starts anew. It
reports {"step", "steps", "loss"} now and then, and {"record"} after each epoch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import data
from benchmarks.common.local_steps import local_steps
from benchmarks.common.workers import batches
from benchmarks.convergence.local_training import LocalTraining
from benchmarks.convergence.recipes import Run, load_data
from benchmarks.convergence.training import Record, Training

SECONDS = 2.0  # between two reports of a step


def train(
    run: Run, dataset: data.Images | data.Text, checkpoint: Path, report: Callable[[dict[str, Any]], None]
) -> Record:
    """Train to the end, from where the checkpoint is. Returns the record, which is also reported after each epoch."""
    kind = Training if local_steps(run.method)[0] is None else LocalTraining
    training = kind(run, dataset)
    if checkpoint.exists():
        training.load(checkpoint)
        report({"record": asdict(training.record)})
    last = time.monotonic()

    def on_step(step: int, loss: float) -> None:
        nonlocal last
        if time.monotonic() - last > SECONDS:
            last = time.monotonic()
            report({"step": step, "steps": training.steps, "loss": loss})

    steps = batches(dataset, run.batch_size, run.workers, run.seed, training.position)
    while not training.record.done:
        training.epoch(itertools.islice(steps, training.per_epoch), on_step)
        training.save(checkpoint)
        report({"record": asdict(training.record)})
    return training.record


def work(run: Run, path: str | None, threads: int, checkpoint: Path, report: Callable[[dict[str, Any]], None]) -> None:
    """Train in a process of its own, with the data of a path."""
    torch.set_num_threads(threads)
    train(run, load_data(run, path), checkpoint, report)
