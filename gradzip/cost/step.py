"""A training step: its layers, what a method does to them, and how long it takes."""

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


_HALVES = ("all_to_all", "all_gather_shards")  # of an all-reduce


@dataclass(frozen=True)
class Compressed:
    """What a method does to one layer.

    rounds: (collective, bytes), one after the other, as for `Link.seconds`.
    encode: seconds before the first round.
    decode: seconds after that: between rounds, and for all ranks' payloads at the end.
    """

    rounds: tuple[tuple[str, float], ...]
    encode: float = 0.0
    decode: float = 0.0

    @property
    def nbytes(self) -> float:
        """Bytes that compare with an all-reduce's, of which an all-to-all and an all-gather of shards are halves."""
        return sum(nbytes / 2 if kind in _HALVES else nbytes for kind, nbytes in self.rounds)


def uncompressed(layer: Layer, itemsize: int = 4) -> Compressed:
    """A layer that is averaged as it is, with `itemsize` bytes for each element."""
    return Compressed((("all_reduce_half" if itemsize == 2 else "all_reduce", float(itemsize * layer.numel)),))


@dataclass(frozen=True)
class Prediction:
    """A training step with communication: seconds = compute + compression + exposed.

    exposed: what communication adds: waiting, and the core time of collectives.
    nbytes: bytes that one rank sends.
    """

    seconds: float
    compute: float
    compression: float
    exposed: float
    nbytes: float
