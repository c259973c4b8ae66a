"""A training run with simulated workers, its record and its checkpoint."""

from __future__ import annotations

import hashlib
import math
import pickle
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import data
import gradzip
from benchmarks.common.workers import Batch, Workers, save
from benchmarks.convergence.handed import Counts
from benchmarks.convergence.recipes import Run, compressor, steps_per_epoch
from models import MODELS, make_optimizer
from train import evaluate, learning_rate

WINDOW = 50  # steps whose training loss is averaged


@dataclass
class Record:
    """What a run has found so far. Lists have an item for each finished epoch.

    Args:
        parameters: of the network.
        scores: on the test set, by the data set's measure.
        test_losses: in nats.
        train_losses: means over 50 steps each, and over what is left at the end of the epoch, in nats.
        payload_bytes: that one rank has handed to collectives since the start; of the rank that sent most.
        handed: what that rank has handed to them in all, by fields of `Bytes`. Empty in records of older versions, and
            with local steps.
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
    handed: dict[str, int] = field(default_factory=dict)


class CheckpointError(Exception):
    """A checkpoint cannot be used. The message is one line."""


class Alone:
    """The engine of `evaluate`: one process tests on the whole test set."""

    rank, size = 0, 1

    @staticmethod
    def average(tensor: Tensor, name: str) -> Tensor:
        return tensor


class Training(Workers):
    """A run with its record."""

    def __init__(self, run: Run, dataset: data.Images | data.Text) -> None:
        self.run, self.dataset = run, dataset
        self.per_epoch = steps_per_epoch(run, dataset)
        self.steps = run.epochs * self.per_epoch
        torch.manual_seed(run.seed)
        network = MODELS[run.network].build(*dataset.dimensions)
        made = self.of_gradients()
        options = dict(zip(("momentum", "beta2"), run.betas))
        optimizer = make_optimizer(run.optimizer, network, run.lr, made, **options)
        super().__init__(network, optimizer, made, run.workers)
        for clone in self.group.compressors:
            clone.traffic = Counts()
        self.record = Record(sum(p.numel() for p in network.parameters()))

    def of_gradients(self) -> gradzip.Compressor:
        """What compresses gradients."""
        return compressor(self.run.method, self.steps)

    def synchronize(self) -> None:
        """Make `network` what is tested."""

    @property
    def bytes_sent(self) -> int:
        """Payload bytes of one rank so far."""
        return self.group.bytes_sent

    @property
    def handed(self) -> dict[str, int]:
        """Those bytes by kind of collective."""
        traffics = [clone.traffic for clone in self.group.compressors]
        return dict(max(traffics, key=lambda traffic: traffic.bytes_sent).handed)

    @property
    def position(self) -> int:
        """Steps of the finished epochs."""
        return len(self.record.scores) * self.per_epoch

    def epoch(self, steps: Iterable[list[Batch]], report: Callable[[int, float], None]) -> None:
        """Train and test one epoch, and record it. A loss that is not finite ends the run."""
        record, losses = self.record, []
        for number, shards in enumerate(steps, self.position):
            losses.append(self.step(learning_rate(self.run.lr, number, self.steps), shards))
            if not math.isfinite(losses[-1]):
                record.diverged, record.done = number, True
                return
            report(number + 1, losses[-1])
        self.synchronize()
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
        record.payload_bytes.append(self.bytes_sent)
        record.handed = self.handed
        whole = b"".join(p.detach().numpy().tobytes() for p in self.parameters.values())
        record.digest = hashlib.sha256(whole).hexdigest()
        record.done = len(record.scores) == self.run.epochs

    def save(self, checkpoint: Path) -> None:
        """Write all that the next epoch depends on, whole or not at all."""
        save(
            {
                "record": asdict(self.record),
                "network": self.network.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "compressors": [clone.state_dict() for clone in self.group.compressors],
                "handed": [dict(clone.traffic.handed) for clone in self.group.compressors],
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
        for clone, state, handed in zip(clones, stored["compressors"], stored["handed"], strict=True):
            clone.load_state_dict(state)
            clone.traffic = Counts(handed)
        torch.set_rng_state(stored["generator"])
