"""What every engine does: run a collective over a group, and the rounds of several routines to their end."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from ..collectives import Collective, Routine, ToHost, Traffic
from ..fusion import Round


class Pending(Protocol):
    """A collective in progress."""

    def send_overflow(self) -> bool:
        """Wait for the first transfer; start a second one for what did not fit.

        Returns whether a second transfer was needed (the same on all ranks).
        """

    def result(self) -> Any:
        """Wait for the collective, and return what its routine is sent. Call `send_overflow` first."""


class PendingCopy:
    """A ToHost in progress: `result` waits for the device."""

    def __init__(self, collective: ToHost) -> None:
        self._tensor = collective.tensor

    def send_overflow(self) -> bool:
        return False

    def result(self) -> Tensor:
        return self._tensor.cpu()  # the host waits for the current stream, on which the tensor was computed


class Engine(ABC):
    """Runs collectives over a group of ranks, and counts the bytes that this rank sends.

    All ranks must start the same collectives, with the same slots, in the same order.
    """

    rank: int  # this rank's number in the group
    size: int  # the world size
    traffic: Traffic

    # Whether operations are matched by their order alone, in place of their slots.
    in_order = False

    # How the front end joins collectives, for the cost model: those of gradients of so many bytes, in order; and those
    # that wait at the same time, up to so many bytes.
    bucket_nbytes: float | None = None
    fusion_nbytes: float | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """The group's ranks, as numbered in the whole job."""
        return tuple(range(self.size))

    @abstractmethod
    def launch(self, collective: Collective, slot: str) -> Pending:
        """Start a collective. slot: its name, the same on all ranks and in every step."""

    @abstractmethod
    def allgather_bytes(self, data: bytes, slot: str) -> list[bytes]:
        """Every rank's bytes, in rank order. Blocks until all ranks have called it."""

    def max_over_ranks(self, values: Sequence[float], slot: str) -> list[float]:
        """The largest of each number over the ranks, the same on all. Blocks until all ranks have called it."""
        lines = self.allgather_bytes(json.dumps(list(values)).encode() + b"\n", slot)
        return [max(column) for column in zip(*map(json.loads, lines), strict=True)]

    def run(self, collective: Collective, slot: str) -> Any:
        """Start a collective, wait for it, and return its result."""
        pending = self.launch(collective, slot)
        pending.send_overflow()
        return pending.result()

    def finish(self, routines: Mapping[Any, Routine], current: Round, slot: str) -> dict[Any, Any]:
        """Run routines to their ends, each round as one collective per kind.

        Args:
            routines: by key. All ranks must have the same ones.
            current: the first round, not started yet.
            slot: prefix of the collectives' slots.

        Returns what the routines returned, by key.
        """
        returned: dict[Any, Any] = {}
        number = 1
        while collectives := current.collectives():
            number += 1
            pending = [self.launch(c, f"{slot}.{number}.{i}") for i, c in enumerate(collectives)]
            for p in pending:
                p.send_overflow()
            results = current.split([p.result() for p in pending])
            current = Round()
            returned |= current.advance(routines, results)
        return returned
