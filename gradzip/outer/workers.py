"""Workers with local steps in one process, without a network: for studies, and as a reference of real ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..averaging.local import LocalGroup
from ..methods.base.compressor import Compressor
from ..methods.none import NoCompression
from ..ops import tensors as ops
from .exchange import Exchanged, OuterLoop, Worker
from .fragments import Schedule
from .global_copy import MakeOptimizer, nesterov


class LocalWorkers(OuterLoop):
    """The workers of `LocalSteps` in one process: the same bits as in a job of as many ranks.

    An exchange takes place when the last worker has taken the step after which it is due.

    Args:
        models, optimizers: one of each worker, in rank order. All models get the parameters of the first one.
        compressor, outer: as of `LocalSteps`.
        schedule: every, fragments, delay and blend, as of `LocalSteps`.

    The example of `LocalSteps` shows it.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        compressor: Compressor | None = None,
        *,
        outer: MakeOptimizer | None = nesterov,
        **schedule: Any,
    ) -> None:
        if len(models) != len(optimizers) or not models:
            got = f"{len(models)} models and {len(optimizers)} optimizers"
            raise ValueError(f"LocalWorkers: got {got}, expected one of each worker")
        pairs = [Worker(*pair, "LocalWorkers") for pair in zip(models, optimizers)]
        if any(worker.shards is not None for worker in pairs):
            raise ValueError("LocalWorkers: got sharded parameters, expected whole ones: use LocalSteps in a job")
        compressor = NoCompression() if compressor is None else compressor
        self._group = LocalGroup(compressor, len(models))
        super().__init__(pairs, Schedule(**schedule, what="LocalWorkers"), outer, compressor)
        self._begin()

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that each worker has sent so far."""
        return self._group.bytes_sent

    def _average(self, fragment: int, differences: list[dict[str, Tensor]], stays: bool) -> Callable[[], Exchanged]:
        exchanged = Exchanged(not self._equal, False, [], stays)
        if exchanged.changed:
            exchanged.averages = self._group.step(differences, fragment)[0]
            exchanged.skipped = self._group.compressors[0].last_step_skipped
            exchanged.diverged = [not ops.all_finite(list(of_worker.values())) for of_worker in differences]
        return lambda: exchanged

    def _step(self, averages: dict[str, Tensor], skipped: bool) -> None:
        if not skipped:
            self._group.tell_optimizers(self._global.tensors)
            self._global.step(averages)
