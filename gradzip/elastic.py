"""Elastic Horovod: what methods keep survives when workers come and go.

Horovod's state objects save, restore and broadcast whatever they have a handler for. Here is one for compressors.
"""

from __future__ import annotations

import copy
from typing import Any

import horovod.torch as hvd
from horovod.torch.elastic import TorchState
from horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry

from .checkpoint import join, split
from .compressor import Compressor


def elastic_state(**values: Any) -> TorchState:
    """A `hvd.elastic.TorchState` of these values, and of the compressors of those that are a DistributedOptimizer.

        state = gradzip.horovod.elastic_state(model=model, optimizer=optimizer, batch=0)

    What all ranks have in common (factors, bases, step counts) comes from rank 0, a worker that was there before; what
    a worker had not sent yet stays its own. Work in flight is dropped when a worker is lost, back to the last commit.
    """
    registry = get_handler_registry()
    if (Compressor, CompressorHandler) not in registry:
        set_handler_registry([*registry, (Compressor, CompressorHandler)])
    found = [getattr(value, "_compression", None) for value in values.values()]
    compressors = {id(c): c for c in found if isinstance(c, Compressor)}
    return TorchState(**values, **{f"compressor{i}": c for i, c in enumerate(compressors.values())})


class CompressorHandler(StateHandler):
    """Saves, restores and synchronizes the states of a compressor."""

    def __init__(self, compressor: Compressor) -> None:
        super().__init__(compressor)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)
        self.value.drop_in_flight()

    def sync(self) -> None:
        state_dict = self.value.state_dict()
        common = hvd.broadcast_object(split(state_dict)[0], root_rank=0, name="gradzip.elastic")
        self.value.load_state_dict(join(common, split(state_dict)[1], hvd.rank(), hvd.size()))
        self.value.drop_in_flight()
        self.save()
