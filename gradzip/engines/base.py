"""What every engine does: run a collective over a group, and the rounds of several routines to their end."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from ..collectives import Collective, Scope, ToHost, among
from ..fusion import Round
from ..routines import Routine
from ..traffic import Traffic


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
    scope: Scope = "all"  # of this engine's group in the group that it was split from
    scopes: Mapping[str, Engine] = {}  # the engines of other scopes, after `set_nodes`

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

    def count(self, nbytes: int) -> None:
        """Count bytes that this rank sends."""
        self.traffic.count(nbytes, self.scope)

    @abstractmethod
    def allgather_bytes(self, data: bytes, slot: str) -> list[bytes]:
        """Every rank's bytes, in rank order. Blocks until all ranks have called it."""

    # --- scopes

    def place(self) -> tuple[int, int]:
        """This rank's number among the ranks of its node, and how many these are, as the launcher says."""
        raise NotImplementedError(f"{type(self).__name__} knows no nodes")

    def split(self, groups: Sequence[Sequence[int]], scope: Scope) -> Engine:
        """The engine of that group of these that this rank is in. All ranks must call it, with the same groups."""
        raise NotImplementedError(f"{type(self).__name__} has no scopes")

    def node_size(self, what: str) -> int:
        """The number of ranks on each node, as the launcher says. All ranks must call it.

        Raises:
            ValueError: nodes have different numbers of ranks, or ranks are not numbered node by node; the same on all
                ranks. what: who asks.
        """
        lines = self.allgather_bytes(json.dumps(self.place()).encode() + b"\n", "gradzip.places")
        places = [tuple(json.loads(line)) for line in lines]
        size = places[0][1]
        for rank, place in enumerate(places):
            if place != (rank % size, size):
                raise ValueError(
                    f"{what}: rank {rank} is number {place[0]} of {place[1]} on its node, expected number "
                    f"{rank % size} of {size}: start as many ranks on each node, numbered node by node"
                )
        return size

    def set_nodes(self, node_size: int) -> None:
        """Make the groups for the scopes "node" and "peers". All ranks must call it.

        Args:
            node_size: ranks of a node, which are consecutive; a divisor of the world size.
        """
        nodes = [list(range(first, first + node_size)) for first in range(0, self.size, node_size)]
        peers = [list(range(place, self.size, node_size)) for place in range(node_size)]
        self.scopes = {"node": self.split(nodes, "node"), "peers": self.split(peers, "peers")}

    def launch_scoped(self, collective: Collective, slot: str) -> Pending:
        """Start a collective of another scope than all ranks."""
        return self.scopes[collective.scope].launch(among("all", collective), slot)

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
