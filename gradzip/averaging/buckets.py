"""Buckets: which parameters a front end averages together, and the averages in progress."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..collectives import AllToAll, Mean, RingSum, cost
from ..collectives.engine import Engine
from ..collectives.fusion import Round, adjacent, pieces
from ..collectives.routines import Routine
from ..memory.state import BucketState
from ..methods.base.compressor import INDEXED_NUMEL, Compressor, set_parts, write_parts
from .routine import UNCOMPRESSED, Averaging

# Buckets of a model on a device, at most. Each takes the host as long to queue, whatever its size. The more there are,
# the less is left to send after the backward pass.
MOST_BUCKETS = 8


def bucket_nbytes(
    cap_mb: float | None, parameters: Iterable[Tensor], default: float = cost.JOINED["horovod"]["bucket_nbytes"]
) -> float:
    """The size of the buckets of a model, in bytes: `cap_mb` MiB, which the user has set, or by default `default`.

    On a device, it is at least an eighth of the parameters by default.
    """
    if cap_mb is not None:
        return cap_mb * 2**20
    return max(default, sum(p.nbytes for p in parameters if ops.on_device(p)) / MOST_BUCKETS)


def cut(parameters: Iterable[Tensor], nbytes: float) -> list[list[Tensor]]:
    """Split parameters into Horovod's buckets of at least `nbytes`, each of one dtype and on one device.

    parameters: in the order of the forward pass, so that the gradients of the first bucket of each dtype and device
    come last. nbytes: as in `cost.cut`. The result depends on the order, dtypes, devices and shapes alone.

    A large gradient does not wait for those of earlier layers, which would fill its bucket with it.
    """
    by_kind: dict[Any, list[tuple[int, Tensor]]] = {}
    for number, parameter in enumerate(parameters):
        by_kind.setdefault(_kind(parameter), []).append((number, parameter))
    buckets = [
        [members[i] for i in bucket]
        for members in by_kind.values()
        for bucket in cost.cut([p.nbytes for _, p in members], nbytes, large_alone=True)
    ]
    return [[parameter for _, parameter in bucket] for bucket in sorted(buckets, key=lambda bucket: bucket[0][0])]


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    """What tensors that are concatenated have in common."""
    return tensor.dtype, tensor.device


class Unit:
    """Parameters that are averaged as one: a single one, or those of a bucket that a method joins or leaves as is."""

    def __init__(self, averaging: Averaging, indices: list[int], shapes: dict[str, torch.Size]) -> None:
        self.averaging = averaging
        self.indices = indices  # within the bucket
        self.shapes = shapes  # by name
        first, *others = shapes
        self.name = f"{first} and {len(others)} more" if others else first
        averaging.name = self.name
        averaging.shapes = shapes if averaging.joined_shape == UNCOMPRESSED else {self.name: shapes[first]}
        # For the concatenated gradients, if they are not adjacent: memory, and its parts.
        self._memory: tuple[Tensor, list[Tensor]] | None = None

    def average(self, gradients: list[Tensor], rank: int, size: int) -> Routine:
        """Coroutine that replaces the unit's gradients, in the order of its parameters, by their averages."""
        self._find_states(gradients, rank, size)
        if len(gradients) == 1:
            return (yield from self.averaging.run(gradients[0], rank, size))
        joined_shape = self.averaging.joined_shape
        assert joined_shape is not None
        vector = adjacent(gradients)
        if vector is not None:
            return (yield from self.averaging.run(vector.view(joined_shape), rank, size))
        if joined_shape == UNCOMPRESSED:
            return (yield from self.averaging.run_uncompressed(gradients, rank, size))
        if self._memory is None:
            memory = gradients[0].new_empty(sum(g.numel() for g in gradients))
            self._memory = memory, pieces(memory, [g.shape for g in gradients])
        memory, parts = self._memory
        torch._foreach_copy_(parts, gradients)  # one operation on a device
        vector = memory.view(joined_shape)
        set_parts(vector, parts, gradients)
        average = yield from self.averaging.run(vector, rank, size)
        write_parts(vector, average)
        return average

    def _find_states(self, gradients: list[Tensor], rank: int, size: int) -> None:
        """Make one state of the parameters' states, unless there is one. They may be in former buckets' states."""
        method, joined_shape = self.averaging.method, self.averaging.joined_shape
        if joined_shape is None or joined_shape == UNCOMPRESSED:
            return
        state, memory = method.states.get(self.name), method.memory
        if len(gradients) == 1:
            if state is None:
                memory.split_buckets({self.name})
        elif not (isinstance(state, BucketState) and list(state.shapes.items()) == list(self.shapes.items())):
            memory.split_buckets(set(self.shapes))
            by_name = dict(zip(self.shapes, gradients))
            memory.concatenate(self.name, by_name, joined_shape, method.state_shapes, rank, size)


def _split(indices: list[int], parameters: list[Tensor]) -> Iterator[list[int]]:
    """Split parameters, by their numbers, where a vector of them would be longer than `INDEXED_NUMEL`."""
    run, length = [indices[0]], parameters[indices[0]].numel()
    for i in indices[1:]:
        length += parameters[i].numel()
        if length > INDEXED_NUMEL:
            yield run
            run, length = [], parameters[i].numel()
        run.append(i)
    yield run


@dataclass
class Plan:
    """The units of a bucket of these parameters."""

    parameters: list[Tensor]
    names: list[str]
    prefix: str  # of the names of their states
    averagings: list[Averaging]  # of the parameters; those of a unit have one
    units: list[Unit]
    choice_number: int  # of the compressor

    def __post_init__(self) -> None:
        self._kinds = list(map(_kind, self.parameters))

    @classmethod
    def of(
        cls,
        compressor: Compressor,
        parameters: list[Tensor],
        names: list[str],
        prefix: str,
        joins_uncompressed: bool = True,
    ) -> Plan:
        """Plan a bucket whose parameters have not been seen together before.

        Args:
            prefix: of the states' names.
            joins_uncompressed: whether gradients that are not compressed are averaged as one.
        """
        members: dict[Any, list[int]] = {}
        averagings = []
        for i, (name, parameter) in enumerate(zip(names, parameters)):
            if not parameter.is_floating_point():  # DDP gives complex gradients as twice as many real numbers
                raise ValueError(f"gradient of {name!r}: got {parameter.dtype}, expected a real floating-point type")
            averaging = Averaging(compressor, name, parameter, prefix=prefix)
            averagings.append(averaging)
            joined = averaging.joined_shape
            alone = joined is None or (joined == UNCOMPRESSED and not joins_uncompressed)
            key = i if alone else (id(averaging.method), _kind(parameter), joined)
            members.setdefault(key, []).append(i)
        units = []
        for indices in itertools.chain.from_iterable(_split(of_key, parameters) for of_key in members.values()):
            shapes = {prefix + names[i]: parameters[i].shape for i in indices}
            units.append(Unit(averagings[indices[0]], indices, shapes))
            for i in indices:
                averagings[i] = units[-1].averaging
        return cls(parameters, names, prefix, averagings, units, compressor.choice_number)

    def fits(self, compressor: Compressor, parameters: list[Tensor]) -> bool:
        """Whether these are the parameters of the plan, with the same methods in charge, and have not changed type."""
        if len(parameters) != len(self.parameters) or self.choice_number != compressor.choice_number:
            return False
        return all(
            p is known and _kind(p) == kind and compressor.method_for(name, p.shape, self.prefix) is averaging.method
            for p, known, kind, name, averaging in zip(
                parameters, self.parameters, self._kinds, self.names, self.averagings
            )
        )


class Bucket:
    """A bucket whose averages are in progress: its routines, and the first round of their collectives.

    Args:
        routines: by key.
        first: the round of their first collectives, which are started here. If the engine matches operations by their
            slots, rings wait for `results`: they are matched by their order, and buckets start in any order.
        slot: prefix of the collectives' slots.
    """

    def __init__(self, routines: dict[Any, Routine], first: Round, engine: Engine, slot: str) -> None:
        self.routines = routines
        self._engine = engine
        self._slot = slot
        self._rings = {} if engine.in_order else first.take_rings()
        self._launch(first)

    def _launch(self, current: Round) -> None:
        collectives = current.collectives()
        # Partitions of equal lengths: no transfer overflows, no length is waited for, and as many bytes are to follow.
        self._of_partitions = any(isinstance(c, AllToAll) for c in collectives) and all(
            isinstance(c, Mean) or (isinstance(c, AllToAll) and c.same_length) for c in collectives
        )
        self.on_device = any(ops.on_device(c.tensor) for c in collectives if not isinstance(c, RingSum))
        self._current = current
        self._pending = [self._engine.launch(c, f"{self._slot}.{i}") for i, c in enumerate(collectives)]

    def gather_partitions(self) -> None:
        """If ranks exchange partitions of equal lengths, wait for them, and start to gather what becomes of them."""
        if self._of_partitions:
            self.send_overflow()
            following = Round()
            following.advance(self.routines, self.results(following))
            self._launch(following)

    def send_overflow(self) -> bool:
        """Wait for the transfers; start others for what did not fit. Returns whether that was needed."""
        overflowed = [p.send_overflow() for p in self._pending]  # call all: each may have to start a transfer
        return any(overflowed)

    def results(self, following: Round) -> dict[Any, Any]:
        """The results of the round, by routine, to advance the routines with. Other work of it goes to `following`."""
        following.take_checks(self._current)
        for key, ring in self._rings.items():
            following.add(key, ring)
        return self._current.split([p.result() for p in self._pending])
