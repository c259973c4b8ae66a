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


Collective = Mean | Gather

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
        for (kind, *_), group in wanted.items():
            joined = torch.cat([c.tensor.reshape(-1) for _, c in group]) if len(group) > 1 else group[0][1].tensor
            answer = yield kind(joined)
            if len(group) == 1:
                parts = [answer]
            elif kind is Gather:
                split = [ops.split_payloads(buffer, len(group)) for buffer in answer]
                parts = [[payloads[j] for payloads in split] for j in range(len(group))]
            else:
                flat = answer.split([c.tensor.numel() for _, c in group])
                parts = [part.view(c.tensor.shape) for part, (_, c) in zip(flat, group)]
            answers |= {i: part for (i, _), part in zip(group, parts)}
    return [results[i] for i in range(len(members))]
