"""Training with workers in one process, and files of what it needs to continue."""

from __future__ import annotations

import functools
import itertools
import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import data
import gradzip
from train import cross_entropy

Batch = tuple[Tensor, Tensor]


class Workers:
    """Workers in one process, which train one network.

    Replicas are equal bit for bit, so one copy of the parameters stands for all. A step takes each worker's gradients
    in turn, averages them through a `LocalGroup`, and updates the parameters once. BatchNorm normalizes by the worker's
    own batch, as in a real job. There, though, each rank has running statistics of its own, of which rank 0's are
    tested; here, one copy is updated by all workers in turn.
    """

    def __init__(
        self, network: nn.Module, optimizer: Optimizer, compressor: gradzip.Compressor | None = None, workers: int = 1
    ) -> None:
        self.network, self.optimizer = network, optimizer
        self.parameters = dict(network.named_parameters())
        self.group = gradzip.LocalGroup(compressor or gradzip.NoCompression(), workers)
        self.gradients: dict[str, list[Tensor]] = {}  # of the workers, in the last step

    def step(self, lr: float, shards: Iterable[Batch]) -> float:
        """Train one step with a batch for each worker. Returns the mean of their losses."""
        for options in self.optimizer.param_groups:
            options["lr"] = lr
        losses = []
        self.gradients = {name: [] for name in self.parameters}
        for inputs, targets in shards:
            self.optimizer.zero_grad()  # sets gradients to None: the next ones have memory of their own
            loss = self.loss(inputs, targets)
            loss.backward()
            losses.append(loss.detach())
            for name, parameter in self.parameters.items():
                self.gradients[name].append(parameter.grad)
        for name, average in self.average().items():
            self.parameters[name].grad = average
        self.group.tell_optimizers(self.parameters)
        self.optimizer.step()
        return statistics.fmean(loss.item() for loss in losses)  # waits for a device once

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.network(inputs), targets)

    def average(self) -> dict[str, Tensor]:
        """The averages of `gradients`, by name: in buckets, as in a real job."""
        of_ranks = [dict(zip(self.gradients, of_rank)) for of_rank in zip(*self.gradients.values())]
        return self.group.step(of_ranks)[0]


class Deferred:
    """A data set whose batches are functions that make them: to skip those of earlier steps costs nothing."""

    def __init__(self, dataset: data.Images | data.Text) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, *arguments: Any) -> Callable[[], Batch]:
        return functools.partial(self.dataset.batch, *arguments)


def batches(
    dataset: data.Images | data.Text, batch_size: int, workers: int = 1, seed: int = 0, start: int = 0
) -> Iterator[list[Batch]]:
    """Yield each step's batches, one for each worker, from step `start` on: those of the ranks of examples/train.py."""
    shards = [
        data.batches(Deferred(dataset), batch_size=batch_size, rank=rank, size=workers, seed=seed)
        for rank in range(workers)
    ]
    for of_step in itertools.islice(zip(*shards), start, None):
        yield [make() for make in of_step]


def save(contents: object, file: Path) -> None:
    """Write a file, whole or not at all."""
    part = file.with_suffix(".part")
    torch.save(contents, part)
    os.replace(part, file)
