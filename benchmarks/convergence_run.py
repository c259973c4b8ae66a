#!/usr/bin/env python
"""Runs of benchmarks/convergence.py, one after the other: train with simulated workers to the end.

A run continues from the last finished epoch of its checkpoint, bit for bit. It prints lines of JSON: {"step", "steps",
"loss"} now and then, {"record"} after each epoch, and {"end"}.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradzip
from convergence_recipes import Run, compressor, load_data, steps_per_epoch
from gradients import save

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import data
from models import MODELS, OPTIMIZERS
from train import cross_entropy, evaluate, learning_rate

WINDOW = 50  # steps whose training loss is averaged
SECONDS = 2.0  # between two reports of a step

Batch = tuple[Tensor, Tensor]


@dataclass
class Record:
    """What a run has found so far. Lists have an item for each finished epoch.

    Args:
        parameters: of the network.
        scores: on the test set, by the data set's measure.
        test_losses: in nats.
        train_losses: means over 50 steps each, and over what is left at the end of the epoch, in nats.
        payload_bytes: that one rank has handed to collectives since the start; of the rank that sent most.
        diverged: the step whose loss was not finite, at which the run ended; -1: the loss on the test set.
        digest: SHA-256 of the parameters.
    """

    parameters: int
    scores: list[float] = field(default_factory=list)
    test_losses: list[float] = field(default_factory=list)
    train_losses: list[list[float]] = field(default_factory=list)
    payload_bytes: list[int] = field(default_factory=list)
    diverged: int | None = None
    digest: str = ""
    done: bool = False


class Deferred:
    """A data set whose batches are functions that make them: to skip those of finished epochs costs nothing."""

    def __init__(self, dataset: data.Images | data.Text) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, *arguments: Any) -> Callable[[], Batch]:
        return functools.partial(self.dataset.batch, *arguments)


def batches(run: Run, dataset: data.Images | data.Text, start: int) -> Iterator[list[Batch]]:
    """Yield each step's batches, one for each worker, from step `start` on: those of the ranks of examples/train.py."""
    shards = [
        data.batches(Deferred(dataset), batch_size=run.batch_size, rank=rank, size=run.workers, seed=run.seed)
        for rank in range(run.workers)
    ]
    for of_step in itertools.islice(zip(*shards), start, None):
        yield [make() for make in of_step]


class CheckpointError(Exception):
    """A checkpoint cannot be used. The message is one line."""


class Alone:
    """The engine of `evaluate`: one process tests on the whole test set."""

    rank, size = 0, 1

    @staticmethod
    def average(tensor: Tensor, name: str) -> Tensor:
        return tensor


class Training:
    """Workers in one process, which train one network.

    Replicas are equal bit for bit, so one copy of the parameters stands for all. A step takes each worker's gradients
    in turn, averages them through a `LocalGroup`, and updates the parameters once. BatchNorm normalizes by the worker's
    own batch, as in a real job. There, though, each rank has running statistics of its own, of which rank 0's are
    tested; here, one copy is updated by all workers in turn.
    """

    def __init__(self, run: Run, dataset: data.Images | data.Text) -> None:
        self.run, self.dataset = run, dataset
        self.per_epoch = steps_per_epoch(run, dataset)
        self.steps = run.epochs * self.per_epoch
        kind = MODELS[run.network]
        torch.manual_seed(run.seed)
        self.network = kind.build(*dataset.dimensions)
        self.names, self.parameters = zip(*self.network.named_parameters())
        made = compressor(run.method, self.steps)
        own_momentum = {"momentum": 0.0} if isinstance(made, gradzip.DGC) else {}
        options = dict(zip(("momentum", "beta2"), run.betas)) | own_momentum
        self.optimizer = OPTIMIZERS[run.optimizer](self.parameters, run.lr, **options)
        self.group = gradzip.LocalGroup(made, run.workers)
        self.record = Record(sum(p.numel() for p in self.parameters))

    @property
    def position(self) -> int:
        """Steps of the finished epochs."""
        return len(self.record.scores) * self.per_epoch

    def step(self, number: int, shards: Iterable[Batch]) -> float:
        """Train one step with a batch for each worker. Returns the mean of their losses."""
        for options in self.optimizer.param_groups:
            options["lr"] = learning_rate(self.run.lr, number, self.steps)
        losses, gradients = [], []
        for inputs, targets in shards:
            self.optimizer.zero_grad()  # sets gradients to None: the next ones have memory of their own
            loss = cross_entropy(self.network(inputs), targets)
            loss.backward()
            losses.append(loss.item())
            gradients.append([parameter.grad for parameter in self.parameters])
        for name, parameter, *of_workers in zip(self.names, self.parameters, *gradients):
            parameter.grad = self.group.average(of_workers, name)[0]
        self.optimizer.step()
        return statistics.fmean(losses)

    def epoch(self, steps: Iterable[list[Batch]], report: Callable[[int, float], None]) -> None:
        """Train and test one epoch, and record it. A loss that is not finite ends the run."""
        record, losses = self.record, []
        for number, shards in enumerate(steps, self.position):
            losses.append(self.step(number, shards))
            if not math.isfinite(losses[-1]):
                record.diverged, record.done = number, True
                return
            report(number + 1, losses[-1])
        accuracy, loss = evaluate(self.network, self.dataset, Alone)
        self.network.train()
        if not math.isfinite(loss):
            record.diverged, record.done = -1, True
            return
        record.scores.append(self.dataset.measure.value(accuracy, loss))
        record.test_losses.append(loss)
        record.train_losses.append(
            [round(statistics.fmean(losses[i : i + WINDOW]), 5) for i in range(0, len(losses), WINDOW)]
        )
        record.payload_bytes.append(self.group.bytes_sent)
        record.digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in self.parameters)).hexdigest()
        record.done = len(record.scores) == self.run.epochs

    def save(self, checkpoint: Path) -> None:
        """Write all that the next epoch depends on, whole or not at all."""
        save(
            {
                "record": asdict(self.record),
                "network": self.network.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "compressors": [clone.state_dict() for clone in self.group.compressors],
                "payload_bytes": [clone.traffic.bytes_sent for clone in self.group.compressors],
                "generator": torch.get_rng_state(),
            },
            checkpoint,
        )

    def load(self, checkpoint: Path) -> None:
        """Continue after the last epoch that was saved.

        Raises:
            CheckpointError: the file is damaged.
        """
        try:
            stored = torch.load(checkpoint, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"{checkpoint}: got a damaged file ({type(error).__name__}), expected a checkpoint; delete it to start "
                "its run again"
            ) from None
        self.record = Record(**stored["record"])
        self.network.load_state_dict(stored["network"])
        self.optimizer.load_state_dict(stored["optimizer"])
        clones = self.group.compressors
        for clone, state, sent in zip(clones, stored["compressors"], stored["payload_bytes"], strict=True):
            clone.load_state_dict(state)
            clone.traffic.bytes_sent = sent
        torch.set_rng_state(stored["generator"])


def train(
    run: Run, dataset: data.Images | data.Text, checkpoint: Path, report: Callable[[dict[str, Any]], None]
) -> Record:
    """Train to the end, from where the checkpoint is. Returns the record, which is also reported after each epoch."""
    training = Training(run, dataset)
    if checkpoint.exists():
        training.load(checkpoint)
        report({"record": asdict(training.record)})
    last = time.monotonic()

    def on_step(step: int, loss: float) -> None:
        nonlocal last
        if time.monotonic() - last > SECONDS:
            last = time.monotonic()
            report({"step": step, "steps": training.steps, "loss": loss})

    steps = batches(run, dataset, training.position)
    while not training.record.done:
        training.epoch(itertools.islice(steps, training.per_epoch), on_step)
        training.save(checkpoint)
        report({"record": asdict(training.record)})
    return training.record


def main() -> None:
    """Serve the requests on standard input: a line of JSON each, with `run`, `data`, `threads` and `checkpoint`."""

    def report(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)

    try:
        for request in sys.stdin:
            job = json.loads(request)
            run = Run(**job["run"])
            torch.set_num_threads(job["threads"])
            train(run, load_data(run, job["data"]), Path(job["checkpoint"]), report)
            report({"end": None})
    except CheckpointError as error:
        sys.exit(str(error))
    except BrokenPipeError:  # whoever started this is gone
        os._exit(1)


if __name__ == "__main__":
    main()
