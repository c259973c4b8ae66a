"""A training step: its layers, their cost with a method, and the predicted time."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """One parameter. ready: seconds from the start of the step until its gradient is computed."""

    name: str
    shape: tuple[int, ...]
    ready: float

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Step:
    """A training step without communication.

    layers: in the order in which the backward pass produces their gradients.
    seconds: of the whole step: forward and backward pass, optimizer.
    """

    layers: tuple[Layer, ...]
    seconds: float


# An all-reduce is an all-to-all and an all-gather of partitions.
_HALF_ALL_REDUCES = ("all_to_all", "all_gather_partitions")


@dataclass(frozen=True)
class Compressed:
    """The cost of a method on one layer.

    rounds: (kind, bytes) of the consecutive collectives: arguments of `Link.seconds`.
    encode: seconds before the first round.
    decode: seconds between rounds, and after the last one for the payloads of all ranks.
    """

    rounds: tuple[tuple[str, float], ...]
    encode: float = 0.0
    decode: float = 0.0

    @property
    def nbytes(self) -> float:
        """Bytes of all rounds, comparable with those of an all-reduce."""
        return sum(nbytes / 2 if kind in _HALF_ALL_REDUCES else nbytes for kind, nbytes in self.rounds)


@dataclass(frozen=True)
class Prediction:
    """The time of a training step with communication: seconds = compute + compression + exposed.

    exposed: time that communication adds, by waiting and by the core time of collectives.
    nbytes: bytes that one rank sends.
    """

    seconds: float
    compute: float
    compression: float
    exposed: float
    nbytes: float
