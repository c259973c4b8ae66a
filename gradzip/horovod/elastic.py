"""Elastic Horovod: the states of compressors survive when workers join and leave.

Horovod's state objects save, restore and broadcast values by handlers. This is the handler for compressors.
`gradzip.outer` has the one for local steps.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.elastic import TorchState
from horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry

from ..averaging.session import Session
from ..memory.checkpoint import join, split
from ..methods.base.compressor import Compressor
from .front_end import drop_in_flight, name_states


def elastic_state(**values: Any) -> TorchState:
    """A `hvd.elastic.TorchState` of these values, and of the compressors of every DistributedOptimizer among them.

        state = gradzip.horovod.elastic_state(model=model, optimizer=optimizer, batch=0)
        state = gradzip.horovod.elastic_state(local_steps=outer, batch=0)  # a gradzip.outer.LocalSteps

    Fields that are the same on all ranks (factors, bases, step counts) are broadcast from rank 0, a worker that was
    there before. A worker keeps its residuals, and they are lost with it. When a worker is lost, gradients in flight
    are dropped, and states return to the last commit. Create it before the first step, with the same names on all
    workers.

    A LocalSteps brings its model and its optimizer along: they differ between workers (docs/outer.md).

    Raises:
        ValueError: a model or an optimizer beside the LocalSteps that has it.
    """
    register_handler(Compressor, CompressorHandler)
    compressors: dict[int, Compressor] = {}
    for value in values.values():
        compressor = getattr(value, "_compression", None)
        if isinstance(compressor, Compressor):
            compressors[id(compressor)] = compressor
            # Assign prefixes in this order on all workers, whichever optimizer steps first when a worker joins.
            name_states(Session(compressor, "elastic_state"), value)
    return ElasticState(**values, **{f"compressor{i}": c for i, c in enumerate(compressors.values())})


def register_handler(kind: type, handler: type[StateHandler]) -> None:
    """Have Horovod's states handle values of a type by a handler."""
    registry = get_handler_registry()
    if (kind, handler) not in registry:
        set_handler_registry([*registry, (kind, handler)])


class ElasticState(TorchState):
    """Horovod's state, with four corrections.

    Models are broadcast after optimizers: Horovod lets a new worker's optimizer step to create its state, and with
    weight decay that changes the model. A restored optimizer has no gradients of its `groups` counted: Horovod keeps
    the count of a group whose launch failed, launches its gradients one by one from then on, and waits forever for the
    ranks that launch them as a group. Nothing is saved before all ranks have come so far: when a worker is lost, some
    of the others may have completed a collective that has failed on the rest, and must not save what came of it. What
    is saved stays as it was: torch's optimizers do not copy what they load, and step in the tensors of the commit.
    """

    _handlers: dict[str, StateHandler]

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        for owner, handler in self._handlers.items():
            for name, value in values.items():
                if hasattr(handler, "has") and handler.has(value):
                    got = f"got {name}, which is a part of {owner}"
                    raise ValueError(f"elastic_state: {got}, expected {owner} alone: it brings its model along")

    def commit(self) -> None:
        self._wait()
        hvd.barrier()
        super().commit()

    def check_host_updates(self) -> None:
        self._wait()  # after this, Horovod may shut down
        super().check_host_updates()

    def _wait(self) -> None:
        """Wait for what handlers have in progress in the background."""
        for handler in self._handlers.values():
            getattr(handler, "wait", lambda: None)()

    def restore(self) -> None:
        super().restore()
        for handler in self._handlers.values():
            counts = getattr(handler.value, "_group_counts", {})
            counts.update(dict.fromkeys(counts, 0))
            handler.save()  # makes copies

    def sync(self) -> None:
        handlers = sorted(self._handlers.items(), key=lambda item: isinstance(item[1].value, torch.nn.Module))
        self._handlers = dict(handlers)
        super().sync()


class CompressorHandler(StateHandler):
    """Saves, restores and broadcasts the states of a compressor."""

    def __init__(self, compressor: Compressor) -> None:
        super().__init__(compressor)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)
        drop_in_flight(self.value)

    def sync(self) -> None:
        sync_compressor(self.value)
        drop_in_flight(self.value)
        self.save()


def sync_compressor(compressor: Compressor) -> None:
    """Give the states of all ranks the fields of rank 0 that are the same on all ranks, and leave each its own."""
    rank, size = hvd.rank(), hvd.size()
    compressor.change_group(rank, size)
    common, own = split(compressor.state_dict())
    compressor.load_state_dict(join(broadcast(common, "gradzip.elastic"), own, rank, size))


def broadcast(value: Any, name: str) -> Any:
    """A value of rank 0, of what ``torch.load(weights_only=True)`` reads, on all ranks.

    Its tensors are on the CPU: ranks have other devices, and copy it to them.
    """
    file = io.BytesIO()
    if hvd.rank() == 0:
        torch.save(value, file)
    data = hvd.broadcast_object(file.getvalue(), root_rank=0, name=name)
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
