"""Workers with local steps in one process, without a network: for studies, and as a reference of real ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .. import ops
from ..averaging.local import LocalGroup
from ..methods.base.compressor import Compressor
from ..methods.none import NoCompression
from .global_copy import GlobalCopy, MakeOptimizer, nesterov, trained
from .local_steps import check_every


class LocalWorkers:
    """The workers of `LocalSteps` in one process: the same bits as in a job of as many ranks.

    An exchange takes place when the last worker has taken its `every`-th step.

    Args:
        models, optimizers: one of each worker, in rank order. All models get the parameters of the first one.
        compressor, every, outer: as of `LocalSteps`.

    The example of `LocalSteps` shows it.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        compressor: Compressor | None = None,
        *,
        every: int = 30,
        outer: MakeOptimizer | None = nesterov,
    ) -> None:
        check_every(every, "LocalWorkers")
        if len(models) != len(optimizers) or not models:
            raise ValueError(
                f"LocalWorkers: got {len(models)} models and {len(optimizers)} optimizers, expected one of each worker"
            )
        self.every = every
        self.exchanges = 0
        self._optimizers = optimizers
        self._parameters = [trained(*pair, "LocalWorkers") for pair in zip(models, optimizers)]
        self._steps = [0 for _ in models]
        self._group = LocalGroup(NoCompression() if compressor is None else compressor, len(models))
        self._global = GlobalCopy(self._parameters[0], outer, "LocalWorkers")
        for parameters in self._parameters:
            self._global.write(parameters)
        for rank, optimizer in enumerate(optimizers):
            optimizer.register_step_post_hook(lambda *_, rank=rank: self._count(rank))

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that each worker has sent so far."""
        return self._group.bytes_sent

    def synchronize(self) -> None:
        """Make the parameters of all workers equal: exchange what has changed since the last exchange."""
        if any(self._steps):
            self._exchange()

    def _count(self, rank: int) -> None:
        self._steps[rank] += 1
        if min(self._steps) >= self.every:
            self._exchange()

    def _exchange(self) -> None:
        differences = [self._global.differences(parameters) for parameters in self._parameters]
        averages: list[dict[str, Any]] = self._group.step(differences)
        compressor = self._group.compressors[0]
        self._steps = [0 for _ in self._steps]
        self.exchanges += 1
        if not compressor.last_step_skipped:
            self._group.tell_optimizers(self._global.tensors)
            self._global.step(averages[0])
            for parameters in self._parameters:
                self._global.write(parameters)
            return
        for rank, difference in enumerate(differences):
            if not ops.all_finite(list(difference.values())):
                self._global.restart(self._parameters[rank], self._optimizers[rank], rank)
