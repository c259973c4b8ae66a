"""Elastic Horovod: what methods keep survives when workers come and go.

Horovod's state objects save, restore and broadcast whatever they have a handler for. Here is one for compressors.
"""

from __future__ import annotations

import copy
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.elastic import TorchState
from horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry

from .checkpoint import join, split
from .compressor import Compressor


def elastic_state(**values: Any) -> TorchState:
    """A `hvd.elastic.TorchState` of these values, and of the compressors of those that are a DistributedOptimizer.

        state = gradzip.horovod.elastic_state(model=model, optimizer=optimizer, batch=0)

    What all ranks have in common (factors, bases, step counts) comes from rank 0, a worker that was there before; what
    a worker had not sent yet stays its own, and is lost with it. Work in flight is dropped when a worker is lost, back
    to the last commit. Make it before the first step, and with the same names on all workers.
    """
    registry = get_handler_registry()
    if (Compressor, CompressorHandler) not in registry:
        set_handler_registry([*registry, (Compressor, CompressorHandler)])
    compressors: dict[int, Compressor] = {}
    for value in values.values():
        compressor = getattr(value, "_compression", None)
        if isinstance(compressor, Compressor):
            compressors[id(compressor)] = compressor
            # In this order on all workers, whichever optimizer steps first when one joins.
            compressor.front_end.prefix(value)
    return ElasticState(**values, **{f"compressor{i}": c for i, c in enumerate(compressors.values())})


class ElasticState(TorchState):
    """Horovod's, but models are shared after their optimizers: to make the state of a new worker's optimizer, Horovod
    has it step, and with weight decay that changes the model."""

    _handlers: dict[str, StateHandler]

    def sync(self) -> None:
        self._handlers = dict(
            sorted(self._handlers.items(), key=lambda item: isinstance(item[1].value, torch.nn.Module))
        )
        super().sync()


class CompressorHandler(StateHandler):
    """Saves, restores and synchronizes the states of a compressor."""

    def __init__(self, compressor: Compressor) -> None:
        super().__init__(compressor)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)
        self.value.front_end.drop_in_flight()

    def sync(self) -> None:
        rank, size = hvd.rank(), hvd.size()
        self.value.move(rank, size)
        common, own = split(self.value.state_dict())
        common = hvd.broadcast_object(common, root_rank=0, name="gradzip.elastic")
        self.value.load_state_dict(join(common, own, rank, size))
        self.value.front_end.drop_in_flight()
        self.save()
