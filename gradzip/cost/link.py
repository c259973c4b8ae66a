"""The connection of a rank, and what exchanges take on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

# (messages one after the other, multiples of this rank's bytes that it sends) among p ranks. Numbers of messages:
# Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, IJHPCA 2005. An all-to-all
# exchanges its messages in pairs. An all-gather of shards counts the bytes of all ranks, an all-gather those of one.
_EXCHANGES: dict[str, Callable[[int], tuple[int, float]]] = {
    "all_reduce": lambda p: (2 * math.ceil(math.log2(p)), 2 * (p - 1) / p),
    "all_reduce_half": lambda p: (2 * math.ceil(math.log2(p)), 2 * (p - 1) / p),
    "all_gather": lambda p: (math.ceil(math.log2(p)), p - 1),
    "all_gather_shards": lambda p: (math.ceil(math.log2(p)), (p - 1) / p),
    "all_to_all": lambda p: (p - 1, (p - 1) / p),
}


@dataclass(frozen=True)
class Link:
    """One rank's connection, as measured or as given.

    Args:
        ranks: the world size.
        bandwidth: bytes per second that one rank can send while it receives as much.
        latency: seconds for one message.
        operation: seconds that the training thread loses for each collective, for example to start it.
        nbyte: seconds of this rank's own core for each byte that it sends, for copies and additions; 0 if other cores
            do that. A time per byte, unlike `nbytes` elsewhere, which is a number of bytes.
        background: share of the core that the engine takes all the time, as Horovod's cycles do. In [0, 1).
        half: extra seconds per byte sent in a 16-bit all-reduce ("all_reduce_half"): some engines add such numbers
            slowly on a CPU.
        spread: how much slower the slowest rank is than the fastest: 0.2 is 20 %. The model does not use it.

    Raises:
        ValueError: a number is out of its range.
    """

    ranks: int
    bandwidth: float
    latency: float
    operation: float = 0.0
    nbyte: float = 0.0
    background: float = 0.0
    half: float = 0.0
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not (isinstance(self.ranks, int) and self.ranks >= 1):
            raise ValueError(f"Link: got ranks = {self.ranks!r}, expected an integer >= 1")
        if not self.bandwidth > 0:
            raise ValueError(f"Link: got bandwidth = {self.bandwidth!r}, expected bytes per second > 0")
        for name in ("latency", "operation", "nbyte", "half", "spread"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"Link: got {name} = {getattr(self, name)!r}, expected a finite number >= 0")
        if not 0 <= self.background < 1:
            raise ValueError(f"Link: got background = {self.background!r}, expected a share in [0, 1)")

    def all_reduce(self, nbytes: float) -> float:
        """Seconds of an all-reduce of `nbytes`: 2 (p - 1) / p of them are sent, as by a ring."""
        return self.seconds("all_reduce", nbytes)

    def all_gather(self, nbytes: float) -> float:
        """Seconds of an all-gather of `nbytes` of each rank."""
        return self.seconds("all_gather", nbytes)

    def all_to_all(self, nbytes: float) -> float:
        """Seconds of an all-to-all of `nbytes` of each rank, one part for each rank."""
        return self.seconds("all_to_all", nbytes)

    def seconds(self, kind: str, nbytes: float) -> float:
        """Seconds of a collective of `nbytes` of this rank.

        kind: "all_reduce", "all_reduce_half" (of float16 or bfloat16), "all_gather", "all_gather_shards" (`nbytes` of
            all ranks together) or "all_to_all".
        """
        sent = self.sent_nbytes(kind, nbytes)
        return self.messages(kind) * self.latency + sent / self.bandwidth + self._half(kind) * sent

    def core_seconds(self, kind: str, nbytes: float) -> float:
        """Seconds of this rank's core that a collective takes while it runs."""
        return (self.nbyte + (self._half(kind) if self.nbyte else 0.0)) * self.sent_nbytes(kind, nbytes)

    def _half(self, kind: str) -> float:
        return self.half if kind == "all_reduce_half" else 0.0

    def messages(self, kind: str) -> int:
        """Number of messages of a collective that follow one another."""
        return _EXCHANGES[kind](self.ranks)[0] if self.ranks > 1 else 0

    def sent_nbytes(self, kind: str, nbytes: float) -> float:
        """Bytes that one rank sends in a collective of `nbytes` of its own (ICDCS 2023, Table II)."""
        return _EXCHANGES[kind](self.ranks)[1] * nbytes if self.ranks > 1 else 0.0
