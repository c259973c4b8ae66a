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
    """Every rank's payload (uint8, begun by a payload header; lengths may differ).

    Answered with the list of all payloads in rank order.
    """

    tensor: Tensor


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


Collective = Mean | Gather | AllToAll

# A method at work: yields collectives, is sent their results, returns the average.
Routine = Generator[Collective, Any, Tensor]


@dataclass
class Traffic:
    """What one rank has put on the wire, in bytes, and what the same gradients hold uncompressed."""

    bytes_sent: int = 0
    bytes_dense: int = 0

    @property
    def ratio(self) -> float:
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else 1.0


def fused(routines: Iterable[Routine]) -> Generator[Collective, Any, list[Tensor]]:
    """Tensor fusion: runs routines side by side, and joins what they yield into one collective per round and kind.

    Members may need different numbers of rounds. All ranks must fuse the same routines in the same order. Returns
    their results, in order.
    """
    members = list(routines)
    results: dict[int, Tensor] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(members)))
    while answers:
        wanted: dict[Any, list[tuple[int, Collective]]] = {}
        for i, answer in answers.items():
            try:
                collective = members[i].send(answer)
            except StopIteration as done:
                results[i] = done.value
            else:
                key = (type(collective), collective.tensor.dtype, collective.tensor.device)
                wanted.setdefault(key, []).append((i, collective))
        answers = {}
        for group in wanted.values():
            parts = yield from _joined([collective for _, collective in group])
            answers |= {i: part for (i, _), part in zip(group, parts)}
    return [results[i] for i in range(len(members))]


def _joined(group: list[Any]) -> Generator[Collective, Any, list[Any]]:
    """Yields one collective for several of one kind, and takes its answer apart into theirs."""
    if len(group) == 1:
        return [(yield group[0])]
    if isinstance(group[0], Mean):
        answer = yield Mean(torch.cat([c.tensor.reshape(-1) for c in group]))
        parts = answer.split([c.tensor.numel() for c in group])
        return [part.view(c.tensor.shape) for part, c in zip(parts, group)]
    if isinstance(group[0], Gather):
        answer = yield Gather(torch.cat([c.tensor for c in group]))
    else:
        to_ranks = list(zip(*[c.parts for c in group]))
        nbytes = tuple(sum(part.numel() for part in parts) for parts in to_ranks)
        answer = yield AllToAll(torch.cat([part for parts in to_ranks for part in parts]), nbytes)
    from_ranks = [ops.split_payloads(buffer, len(group)) for buffer in answer]
    return [list(payloads) for payloads in zip(*from_ranks)]
