"""What a method asks of its peers. A method yields a collective and is sent its result; engines carry it out."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import ops


@dataclass(frozen=True)
class Mean:
    """Average over the ranks of a floating-point tensor of the same shape and dtype on each.

    Answered with the average. The engine may overwrite the tensor, and answer with it.
    """

    tensor: Tensor


@dataclass(frozen=True)
class Gather:
    """Every rank's payload (uint8, begun by a payload header; lengths may differ), or several, one behind the other.

    Answered with the list of what each rank sent, in rank order.
    """

    tensor: Tensor
    count: int = 1  # of payloads, the same on all ranks

    def of_ranks(self, gathered: Tensor, size: int) -> list[Tensor]:
        """The answer, from what `size` ranks sent, one behind the other: payloads tell their own lengths."""
        lengths = [payload.numel() for payload in ops.split_payloads(gathered, size * self.count)]
        return list(gathered.split([sum(lengths[i : i + self.count]) for i in range(0, len(lengths), self.count)]))


@dataclass(frozen=True)
class AllToAll:
    """A payload for each rank, one behind the other in rank order, of so many bytes.

    Answered with the list of the payloads meant for this rank, in the order of the ranks that sent them.
    """

    tensor: Tensor
    nbytes: tuple[int, ...]

    @property
    def parts(self) -> list[Tensor]:
        return list(self.tensor.split(list(self.nbytes)))


@dataclass(frozen=True)
class Broadcast:
    """Rank 0's tensor, for all ranks; each hands over one of the same shape and dtype.

    Answered with rank 0's, the same bits on all ranks. The engine may overwrite the tensor, and answer with it.
    """

    tensor: Tensor


Collective = Mean | Gather | AllToAll | Broadcast

# A method at work: yields collectives, is sent their results, returns the average.
Routine = Generator[Collective, Any, Any]

# Several methods at work: yields the collectives of a round, which may run side by side, and is sent their results.
Joint = Generator[list[Collective], list[Any], list[Tensor]]


@dataclass
class Traffic:
    """What one rank has put on the wire, in bytes, and what the same gradients hold uncompressed."""

    bytes_sent: int = 0
    bytes_dense: int = 0

    @property
    def ratio(self) -> float:
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else 1.0


def fused(routines: Iterable[Routine]) -> Joint:
    """Tensor fusion: runs routines side by side, and joins what they yield into one collective per round and kind.

    Members may need different numbers of rounds. All ranks must fuse the same routines in the same order. Returns
    their results, in order.
    """
    members = list(routines)
    results: dict[int, Tensor] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(members)))
    while True:
        wanted: dict[Any, dict[int, Any]] = {}
        for i, answer in answers.items():
            try:
                collective = members[i].send(answer)
            except StopIteration as done:
                results[i] = done.value
            else:
                key = (type(collective), collective.tensor.dtype, collective.tensor.device)
                wanted.setdefault(key, {})[i] = collective
        if not wanted:
            return [results[i] for i in range(len(members))]
        joined = yield [_join(list(group.values())) for group in wanted.values()]
        answers = {}
        for group, answer in zip(wanted.values(), joined):
            answers |= zip(group, _take_apart(answer, list(group.values())))


def _join(group: list[Any]) -> Collective:
    """One collective for several of one kind."""
    if len(group) == 1:
        return group[0]
    if isinstance(group[0], (Mean, Broadcast)):
        return type(group[0])(torch.cat([c.tensor.reshape(-1) for c in group]))
    if isinstance(group[0], Gather):
        return Gather(torch.cat([c.tensor for c in group]), sum(c.count for c in group))
    to_ranks = list(zip(*[c.parts for c in group]))
    nbytes = tuple(sum(part.numel() for part in parts) for parts in to_ranks)
    return AllToAll(torch.cat([part for parts in to_ranks for part in parts]), nbytes)


def _take_apart(answer: Any, group: list[Any]) -> list[Any]:
    """The answers of each, from that of the joined collective."""
    if len(group) == 1:
        return [answer]
    if isinstance(group[0], (Mean, Broadcast)):
        parts = answer.split([c.tensor.numel() for c in group])
        return [part.view(c.tensor.shape) for part, c in zip(parts, group)]
    from_ranks = [ops.split_payloads(buffer, len(group)) for buffer in answer]
    return [list(payloads) for payloads in zip(*from_ranks)]
