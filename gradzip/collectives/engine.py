"""The abstract engine: runs collectives over a group of ranks."""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import methodcaller
from typing import Any

from torch import Tensor

from .fusion import Round
from .ranges import Range
from .requests import Collective, Scope, ToHost, among
from .routines import Routine
from .traffic import Traffic, wire_shares


class Pending:
    """A collective in progress."""

    def send_overflow(self) -> bool:
        """Wait for the first transfer; start a second one for what did not fit.

        Returns whether a second transfer was needed (the same on all ranks).
        """
        return False

    def result(self) -> Any:
        """Wait for the collective, and return its result. Call `send_overflow` first."""
        raise NotImplementedError


_SEND_OVERFLOW, _RESULT = methodcaller("send_overflow"), methodcaller("result")


def send_overflows(pending: Sequence[Pending]) -> bool:
    """`Pending.send_overflow` of all collectives, each of which may have to start a transfer."""
    return any(list(map(_SEND_OVERFLOW, pending)))


def results_of(pending: Sequence[Pending]) -> list[Any]:
    """Wait for collectives in progress."""
    with Range("gradzip::exchange"):
        return list(map(_RESULT, pending))


class PendingCopy(Pending):
    """A ToHost in progress."""

    def __init__(self, collective: ToHost) -> None:
        self._tensor = collective.tensor

    def result(self) -> Tensor:
        return self._tensor.cpu()  # the host waits for the current stream, on which the tensor was computed


class Engine(ABC):
    """Runs collectives over a group of ranks, and counts what this rank hands to them and sends.

    All ranks must start the same collectives, with the same slots, in the same order.
    """

    rank: int  # this rank's number in the group
    size: int  # the world size
    traffic: Traffic
    scope: Scope = "all"  # "node" or "peers" for an engine that `split` has made
    scopes: Mapping[Scope, Engine] = {}  # the engines of "node" and "peers", after `set_nodes`

    # The process group of the ranks that hold the shards of a model; None: each rank has all of it.
    shards: Any = None

    # Whether ranks match operations by their order alone, and not by their slots.
    in_order = False

    # Arguments of `cost.predict`, for methods that measure their job: the size of the front end's buckets, and up to
    # how many bytes the engine joins collectives that wait at the same time.
    bucket_nbytes: float | None = None
    fusion_nbytes: float | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """The group's ranks, as numbered in the whole job."""
        return tuple(range(self.size))

    @cached_property
    def wire_shares(self) -> Mapping[type[Collective], float]:
        """Bytes that this rank sends for each byte that it hands to a collective, by its kind."""
        return wire_shares(self.size)

    @abstractmethod
    def launch(self, collective: Collective, slot: str) -> Pending:
        """Start a collective. slot: name of the operation, the same on all ranks and in every step."""

    def forget_lengths(self) -> None:  # noqa: B027 (most engines remember none)
        """Forget the lengths of earlier payloads: buckets or methods have changed. All ranks must call it."""

    def separate(self) -> None:  # noqa: B027 (most engines match operations by their slots)
        """Run collectives from now on where no operation of others comes between. All ranks must call it."""

    def close(self) -> None:  # noqa: B027 (most engines have nothing to free)
        """Free what `separate` has taken. No collective follows."""

    @abstractmethod
    def allgather_bytes(self, data: bytes, slot: str) -> list[bytes]:
        """All-gather bytes, in rank order. Blocks until all ranks have called it."""

    # --- scopes

    def place(self) -> tuple[int, int]:
        """This rank's number within its node, and the number of ranks on the node, according to the launcher."""
        raise NotImplementedError(f"{type(self).__name__} knows no nodes")

    def split(self, groups: Mapping[Scope, Sequence[Sequence[int]]]) -> Mapping[Scope, Engine]:
        """Make an engine for the group of each scope that has this rank. All ranks must call it, with the same groups.

        Raises:
            ValueError: this engine cannot make the groups. The same error on all ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} has no scopes")

    def node_size(self, what: str) -> int:
        """The number of ranks on each node, according to the launcher. All ranks must call it.

        Args:
            what: the caller's name, for errors.

        Raises:
            ValueError: nodes have different numbers of ranks, or ranks are not numbered node by node, or the launcher
                has not told some. The same error on all ranks.
        """
        mine: tuple[int, int] | str
        try:
            mine = self.place()
        except ValueError as error:
            mine = str(error)  # the other ranks wait for this one
        lines = self.allgather_bytes(json.dumps(mine).encode() + b"\n", "gradzip.places")
        places = [json.loads(line) for line in lines]
        for rank, place in enumerate(places):
            if isinstance(place, str):
                raise ValueError(f"{what}: rank {rank}: {place}")
        size = places[0][1]
        for rank, place in enumerate(places):
            if place != [rank % size, size]:
                raise ValueError(
                    f"{what}: rank {rank} is number {place[0]} of {place[1]} on its node, expected number "
                    f"{rank % size} of {size}: start as many ranks on each node, numbered node by node"
                )
        return size

    def set_nodes(self, node_size: int) -> None:
        """Make the engines of the scopes "node" and "peers". All ranks must call it.

        Args:
            node_size: number of (consecutive) ranks on each node, a divisor of the world size.
        """
        nodes = [list(range(first, first + node_size)) for first in range(0, self.size, node_size)]
        peers = [list(range(place, self.size, node_size)) for place in range(node_size)]
        self.scopes = self.split({"node": nodes, "peers": peers})

    def launch_scoped(self, collective: Collective, slot: str) -> Pending:
        """Start a collective of the scope "node" or "peers"."""
        return self.scopes[collective.scope].launch(among("all", collective), slot)

    def max_over_ranks(self, values: Sequence[float], slot: str) -> list[float]:
        """The maximum of each number over the ranks. Blocks until all ranks have called it."""
        lines = self.allgather_bytes(json.dumps(list(values)).encode() + b"\n", slot)
        return [max(column) for column in zip(*map(json.loads, lines), strict=True)]

    def sum_over_shards(self, values: Sequence[float]) -> list[float]:
        """Sum numbers over the ranks that hold the other shards of the model, the same on all of them, to the bit.

        If the model is sharded, it blocks until all of them have called it. Otherwise, returns the numbers.
        """
        return list(values)

    def run(self, collective: Collective, slot: str) -> Any:
        """Start a collective, wait for it, and return its result."""
        pending = self.launch(collective, slot)
        pending.send_overflow()
        return pending.result()

    def finish(self, routines: Mapping[Any, Routine], current: Round, slot: str) -> None:
        """Run routines to their ends, with one collective per kind in each round.

        Args:
            routines: by key; the same on all ranks.
            current: the first round, not started yet.
            slot: prefix of the collectives' slots.
        """
        rounds = current.run(routines)
        results: Any = None
        for number in itertools.count(2):
            try:
                collectives = rounds.send(results)
            except StopIteration:
                return
            pending = []
            for i, collective in enumerate(collectives):
                pending.append(self.launch(collective, f"{slot}.{number}.{i}"))
            send_overflows(pending)
            results = results_of(pending)
