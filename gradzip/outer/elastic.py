"""Workers that come and go: local steps in elastic Horovod.

Horovod's state objects save, restore and synchronize values by handlers. Its own handlers give all workers the model
and the optimizer of rank 0. With local steps, workers differ in these between two exchanges. If all took those of rank
0, the steps of the others would be lost, and its own would be averaged as often as there are workers. This handler lets
each worker keep its own, and gives a new worker what the others have in common.

When a worker is lost during an exchange, some of the others may have the averages, and the rest an error. Those whose
last commit is not that of rank 0 join as a new worker does.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.elastic.state import StateHandler
from torch import nn

from ..horovod.elastic import broadcast, sync_compressor


class LocalStepsHandler(StateHandler):
    """Saves, restores and synchronizes a LocalSteps with its model and its optimizer."""

    def __init__(self, outer: Any) -> None:
        super().__init__(outer)
        self.save()

    @property
    def parts(self) -> tuple[Any, ...]:
        """What this handler handles beside the LocalSteps: its model and its optimizer."""
        (worker,) = self.value._workers
        return worker.model, worker.optimizer

    def has(self, value: Any) -> bool:
        """Whether a value is the model, the optimizer, or a model that shares parameters with this one."""
        model, optimizer = self.parts
        own = set(map(id, model.parameters()))
        return value is optimizer or (isinstance(value, nn.Module) and not own.isdisjoint(map(id, value.parameters())))

    def wait(self) -> None:
        """Wait for the exchange in progress, if there is one."""
        self.value._receive()

    def save(self) -> None:
        self._saved = copy.deepcopy([part.state_dict() for part in (*self.parts, self.value)])

    def restore(self) -> None:
        with contextlib.suppress(HorovodInternalError):
            self.value._forget()
        for part, state in zip((*self.parts, self.value), self._saved):
            part.load_state_dict(state)

    def sync(self) -> None:
        outer, (model, _) = self.value, self.parts
        rank, size = hvd.rank(), hvd.size()
        positions = hvd.allgather_object(self._position(), name="gradzip.outer.positions")
        first = positions[0]
        joins = [position is None or position != first for position in positions]
        sync_compressor(outer.compressor)
        if any(joins):
            sent = {"shared": outer._shared_state(), "model": model.state_dict()} if rank == 0 else None
            received = broadcast(sent, "gradzip.outer.state")
        if joins[rank]:
            if positions[rank] is not None:
                got = f"exchange {positions[rank][0]} on rank {rank} and {first and first[0]} on rank 0"
                warnings.warn(
                    f"LocalSteps: got {got}, expected the same: a worker was lost during it; this rank restarts from "
                    "the global parameters of rank 0, without its residuals and its steps since the last exchange",
                    stacklevel=2,
                )
            model.load_state_dict(received["model"])
            outer._adopt(received["shared"], None, rank, size)
        outer.is_started = True
        self.save()

    def _position(self) -> tuple[int, int, bool] | None:
        """Where this rank is in the sequence of exchanges. Ranks with the same one have the same global parameters.

        None for a new worker. Since the last `sync`, which has made all equal, each exchange had the same ranks.
        """
        outer = self.value
        return (outer.exchanges, outer._next, outer._pending is not None) if outer.is_started else None
