"""DDP's buckets: which parameters a method averages together, and the averages in progress."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..averaging import Averaging
from ..collectives import Routine
from ..compressor import Compressor
from ..engines.torch import TorchEngine
from ..fusion import Round, adjacent
from ..state import State

Future: TypeAlias = torch.futures.Future[torch.Tensor]


class Names:
    """The names of one model's parameters, as long as the parameters live."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.names: Any = WeakIdKeyDictionary()  # parameter -> name
        self._numbers = itertools.count()

    def matches(self, named: Mapping[Tensor, str]) -> bool:
        """Whether these parameters belong to this model: at least one is known, and no name is another parameter's."""
        owners = {name: parameter for parameter, name in self.names.items()}
        same = all(owners.get(name, parameter) is parameter for parameter, name in named.items())
        return same and any(parameter in self.names for parameter in named)

    def add_number(self, parameter: Tensor) -> str:
        """Name an unnamed parameter by the next number."""
        name = self.names[parameter] = str(next(self._numbers))
        return name


class Unit:
    """Parameters that a method averages as one: a single one, or all parameters of a bucket that it is in charge of."""

    def __init__(self, averaging: Averaging, indices: list[int], shapes: dict[str, torch.Size]) -> None:
        self.averaging = averaging
        self.indices = indices  # within the bucket
        self.shapes = shapes  # by name
        first, *others = shapes
        self.name = f"{first} and {len(others)} more" if others else first
        averaging.name = self.name
        self._memory: Tensor | None = None  # for the concatenated gradients, if they are not adjacent
        self._states: dict[str, State] | None = None

    def average(self, bucket_gradients: list[Tensor], rank: int, size: int) -> Routine:
        """Coroutine that replaces the unit's gradients by their averages."""
        gradients = [bucket_gradients[i] for i in self.indices]
        if len(gradients) == 1:
            return (yield from self.averaging.run(gradients[0], rank, size))
        self._concatenate_states(gradients, rank, size)
        vector = adjacent(gradients)
        if vector is not None:
            return (yield from self.averaging.run(vector.view(1, -1), rank, size))
        numels = [g.numel() for g in gradients]
        if self._memory is None:
            self._memory = gradients[0].new_empty(sum(numels))
        vector = torch.cat([g.reshape(-1) for g in gradients], out=self._memory)
        average = yield from self.averaging.run(vector.view(1, -1), rank, size)
        for gradient, piece in zip(gradients, average.view(-1).split(numels)):
            gradient.copy_(piece.view(gradient.shape))
        return average

    def _concatenate_states(self, gradients: list[Tensor], rank: int, size: int) -> None:
        """Make one state of the parameters' states, unless it was done and no state dict was loaded since."""
        method = self.averaging.method
        if self._states is not method.states:
            method.memory.concatenate(self.name, dict(zip(self.shapes, gradients)), method.state_shapes, rank, size)
            self._states = method.states


@dataclass
class Plan:
    """The units of a bucket of these parameters."""

    parameters: list[Tensor]
    names: list[str]
    prefix: str  # of the names of their states
    averagings: list[Averaging]  # of the parameters
    units: list[Unit]

    def __post_init__(self) -> None:
        self.slot = ",".join(self.names)  # of the bucket's collectives

    @classmethod
    def of(cls, compressor: Compressor, parameters: list[Tensor], names: list[str], prefix: str) -> Plan:
        """Plan a bucket whose parameters have not been seen together before. prefix: of the states' names."""
        members: dict[Any, list[int]] = {}
        averagings = []
        for i, (name, parameter) in enumerate(zip(names, parameters)):
            if not parameter.is_floating_point():  # DDP gives complex gradients as twice as many real numbers
                raise ValueError(f"gradient of {name!r}: got {parameter.dtype}, expected a real floating-point type")
            averaging = Averaging(compressor, name, parameter, prefix=prefix)
            averagings.append(averaging)
            members.setdefault(("bucket", id(averaging.method)) if averaging.per_bucket else i, []).append(i)
        units = []
        for indices in members.values():
            shapes = {prefix + names[i]: parameters[i].shape for i in indices}
            averaging = averagings[indices[0]]
            averaging.method.memory.split_buckets(set(shapes))  # of former buckets
            units.append(Unit(averaging, indices, shapes))
        return cls(parameters, names, prefix, averagings, units)

    def fits(self, compressor: Compressor, parameters: list[Tensor]) -> bool:
        """Whether these are the parameters of the plan, and the same methods are in charge of them."""
        return len(parameters) == len(self.parameters) and all(
            p is known and compressor.method_for(name, p.shape, self.prefix) is averaging.method
            for p, known, name, averaging in zip(parameters, self.parameters, self.names, self.averagings)
        )


class Bucket:
    """A bucket whose averages are in progress: its routines, and the first round of their collectives."""

    def __init__(self, buffer: Tensor, routines: dict[Any, Routine], engine: TorchEngine, slot: str) -> None:
        self.buffer = buffer
        self.routines = routines
        self.future = Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._first = Round()
        self._first.advance(routines, dict.fromkeys(routines))
        self._pending = [engine.launch(c, f"{slot}.{i}") for i, c in enumerate(self._first.collectives())]

    def advance_unless_overflow(self, following: Round) -> bool:
        """Wait for the first transfers. If none overflowed, advance the routines to `following`, and return True."""
        overflowed = [p.send_overflow() for p in self._pending]  # call all: each may have to start a transfer
        if any(overflowed):
            return False
        self.advance(following)
        return True

    def advance(self, following: Round) -> None:
        """Send the routines the results of the first round, and add their next collectives to `following`."""
        following.advance(self.routines, self._first.split([p.result() for p in self._pending]))
