"""A training run whose workers train alone between exchanges."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

import data
import gradzip
from benchmarks.common.local_steps import local_steps
from benchmarks.common.workers import Batch
from benchmarks.convergence.recipes import Run
from benchmarks.convergence.training import Training
from train import cross_entropy


class LocalTraining(Training):
    """A run with local steps from the last phase of its method on; earlier phases average gradients.

    Each worker has a network and an optimizer of its own then, and running statistics of BatchNorm, of which the first
    worker's are tested. At the end of an epoch, before the test, workers exchange what they have changed.

    It has no checkpoints: a run that was stopped starts anew.
    """

    def __init__(self, run: Run, dataset: data.Images | data.Text) -> None:
        super().__init__(run, dataset)
        self.taken = 0
        self.pairs: list[tuple[nn.Module, torch.optim.Optimizer]] = []  # of the workers, once they train alone
        self.local: gradzip.outer.LocalWorkers | None = None

    def of_gradients(self) -> gradzip.Compressor:
        made = super().of_gradients()
        self.start, self.of_differences = 0, made
        if isinstance(made, gradzip.Phases):
            *earlier, (self.start, self.of_differences) = made.phases.items()
            return gradzip.Phases(dict(earlier)) if earlier else self.of_differences
        return made

    @property
    def bytes_sent(self) -> int:
        return super().bytes_sent + (0 if self.local is None else self.local.bytes_sent)

    @property
    def handed(self) -> dict[str, int]:
        return {}

    def step(self, lr: float, shards: Iterable[Batch]) -> float:
        if self.taken == self.start:
            self.part()
        self.taken += 1
        if self.local is None:
            return super().step(lr, shards)
        losses = []
        for (network, optimizer), (inputs, targets) in zip(self.pairs, shards):
            for options in optimizer.param_groups:
                options["lr"] = lr
            optimizer.zero_grad()
            loss = cross_entropy(network(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return statistics.fmean(losses)

    def part(self) -> None:
        """Give each worker a copy of the network and the optimizer."""
        local, _ = local_steps(self.run.method)
        assert local is not None
        copies = [copy.deepcopy((self.network, self.optimizer)) for _ in range(1, self.run.workers)]
        self.pairs = [(self.network, self.optimizer), *copies]
        self.local = gradzip.outer.LocalWorkers(*zip(*self.pairs), self.of_differences, **local.options)

    def synchronize(self) -> None:
        if self.local is not None:
            self.local.synchronize()

    def save(self, checkpoint: Path) -> None:
        """Keep nothing."""
