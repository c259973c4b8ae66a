"""An exchange, from differences to new parameters: what ranks of a job and workers in one process share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .global_copy import GlobalCopy, MakeOptimizer, trained


class Worker:
    """A model that is trained alone between exchanges.

    Attributes:
        parameters: those that the optimizer steps, by name.
        steps: of the optimizer, since the last exchange.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, what: str) -> None:
        self.parameters = trained(model, optimizer, what)
        self.optimizer = optimizer
        self.steps = 0
        self._what = what

    def check_parameters(self) -> None:
        """Refuse parameters that were added to the optimizer: no other worker may have them."""
        stepped = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        if added := len(stepped - {id(p) for p in self.parameters.values()}):
            raise ValueError(
                f"{self._what}: got {added} parameters that were added to the optimizer, expected those at the start: "
                f"make a new {self._what} on all ranks"
            )


@dataclass
class Exchanged:
    """What all workers know after an exchange.

    averages: of the differences, by name; None if no worker has changed anything.
    skipped: whether an average is not finite.
    diverged: of each worker here, whether its own differences were not finite.
    all_stay: whether all ranks stay in `synchronize`.
    """

    averages: dict[str, Tensor] | None
    skipped: bool
    diverged: list[bool]
    all_stay: bool


class OuterLoop(ABC):
    """Counts steps of optimizers, and exchanges after each `every`-th one.

    An exchange: differences of each worker, their averages, a step of the outer optimizer, new local parameters.

    Attributes:
        exchanges: so far.
    """

    def __init__(self, workers: Sequence[Worker], every: Any, what: str) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"{what}: got every = {every!r}, expected an integer >= 1")
        self.every = every
        self.exchanges = 0
        self._what = what
        self._workers = workers
        self._equal = True  # whether all parameters are the global ones

    def _begin(self, outer: MakeOptimizer | None) -> None:
        """Make the parameters of the first worker here the global ones, and count steps from now on."""
        self._global = GlobalCopy(self._workers[0].parameters, outer, self._what)
        for worker in self._workers:
            self._global.write(worker.parameters)
        self._hooks = [
            worker.optimizer.register_step_post_hook(lambda *_, worker=worker: self._count(worker))
            for worker in self._workers
        ]

    def synchronize(self) -> None:
        """Make the parameters of all workers equal, bit for bit: exchange what has changed since the last exchange.

        In a job, call it on all ranks, before a test or an export. It waits until all ranks have called it.
        """
        while not self._exchange(stays=True):
            pass

    def remove(self) -> None:
        """Stop counting steps: exchange no more."""
        for hook in self._hooks:
            hook.remove()

    def _count(self, worker: Worker) -> None:
        """Called after each step of an optimizer."""
        worker.steps += 1
        self._equal = False
        if min(worker.steps for worker in self._workers) >= self.every:
            self._exchange(stays=False)

    def _exchange(self, stays: bool) -> bool:
        """Exchange what has changed. Returns whether all ranks stay.

        stays: whether this rank takes part in exchanges until all ranks do.
        """
        for worker in self._workers:
            worker.check_parameters()
        differences = [self._global.differences(worker.parameters) for worker in self._workers]
        exchanged = self._average(differences, stays)
        if exchanged.averages is not None:
            self._step(exchanged.averages, exchanged.skipped)
            for rank, worker in enumerate(self._workers):
                if not exchanged.skipped:
                    self._global.write(worker.parameters)
                elif exchanged.diverged[rank]:
                    self._global.restart(worker.parameters, worker.optimizer, self._rank + rank)
            self.exchanges += 1
            self._equal = not exchanged.skipped
        for worker in self._workers:
            worker.steps = 0
        return exchanged.all_stay

    # --- what jobs and workers in one process do differently

    @property
    @abstractmethod
    def _rank(self) -> int:
        """The rank of the first worker here."""

    @abstractmethod
    def _average(self, differences: list[dict[str, Tensor]], stays: bool) -> Exchanged:
        """Average the differences of all workers. They may be changed."""

    @abstractmethod
    def _step(self, averages: dict[str, Tensor], skipped: bool) -> None:
        """Complete the step of the method, and have the outer optimizer take its own, unless it is skipped."""
