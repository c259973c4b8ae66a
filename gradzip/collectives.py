"""What a method asks of its peers. A method yields a collective and is sent its result; engines carry it out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True)
class RingSum:
    """Sum over the ranks of segments that are compressed, and decompressed, while others are on the wire.

    Yu et al., GradiVeQ, NeurIPS 2018, Algorithm 1. Answered with None, once every segment was decoded.

    numels: elements of each segment as it travels, the same on all ranks. There may be any number of segments; with as
    many for each rank as `ring_segments` makes, a rank compresses one while others travel.
    encode(i): this rank's segment i, contiguous, numels[i] elements of `dtype` on `device`. It is left as it is, and
    has to stay so until the sum is done. Called once for every segment, in an order of the engine's own, and before
    decode(i).
    decode(i, total): takes the sum of segment i over the ranks, the same bits on all. The next RingSum may use its
    memory again. Called once for every segment, in such an order.
    merge(i, partial): for what cannot be summed as it travels: what came of segment i with this rank's added to it, as
    it travels on. It may not change `partial`. Only the rank where a segment's trip begins is then asked to encode it.
    None: partial + encode(i), and encode(i) runs while `partial` is downloaded.
    """

    numels: tuple[int, ...]
    encode: Callable[[int], Tensor]
    decode: Callable[[int, Tensor], None]
    merge: Callable[[int, Tensor], Tensor] | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def add(self, i: int, partial: Tensor, own: Tensor | None = None) -> Tensor:
        """`partial` with this rank's segment i in it; it may be overwritten unless there is a `merge`.

        own: encode(i), where that was called already.
        """
        if self.merge is not None:
            return self.merge(i, partial)
        return partial.add_(self.encode(i) if own is None else own)


Collective = Mean | Gather | AllToAll | Broadcast | RingSum

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


def sent_nbytes(collective: Collective) -> int:
    """Bytes that one rank puts on the wire, an all-reduce counted as if each had one peer."""
    if isinstance(collective, RingSum):
        return sum(collective.numels) * collective.dtype.itemsize
    return collective.tensor.numel() * collective.tensor.element_size()


# A segment of a ring weighs so much on the wire that what a message costs is little beside it. From so many for each
# rank on they grow instead: a rank hides all but one of them at either end.
SEGMENT_NBYTES = 1 << 18
SEGMENTS_PER_RANK = 32


def ring_segments(rows: int, size: int, row_nbytes: float) -> list[slice]:
    """Cuts rows that are compressed independently into segments for a ring of `size` ranks: equally many for each.

    row_nbytes: what a row weighs on the wire. Segments differ by at most one row, and none is empty: of fewer rows than
    ranks, there is one for each row.

    >>> ring_segments(7, 2, 4.0)
    [slice(0, 4, None), slice(4, 7, None)]
    >>> len(ring_segments(1 << 18, 3, 4.0)), len(ring_segments(1 << 30, 3, 4.0))  # 1 MiB, 4 GiB
    (6, 96)
    """
    if size < 1:
        raise ValueError(f"ring_segments: got size = {size}, expected at least 1")
    per_rank = math.ceil(rows * row_nbytes / (size * SEGMENT_NBYTES))
    count = min(rows, size * min(max(1, per_rank), SEGMENTS_PER_RANK))
    edges = [-(-rows * i // count) for i in range(count + 1)] if count else []
    return [slice(begin, end) for begin, end in itertools.pairwise(edges)]


def fused(routines: Iterable[Routine]) -> Joint:
    """Tensor fusion: runs routines side by side, and joins what they yield into one collective per round and kind.

    Members may need different numbers of rounds. All ranks must fuse the same routines in the same order. Returns
    their results, in order.
    """
    members = dict(enumerate(routines))
    turn = Round()
    results = turn.resume(members, dict.fromkeys(members))
    while collectives := turn.collectives():
        answers = turn.split((yield collectives))
        turn = Round()
        results |= turn.resume(members, answers)
    return [results[i] for i in members]


class Round:
    """What routines that run side by side ask for at one time. They may have any keys."""

    def __init__(self) -> None:
        self._groups: dict[Any, dict[Any, Any]] = {}

    def resume(self, routines: Mapping[Any, Routine], answers: Mapping[Any, Any]) -> dict[Any, Tensor]:
        """Sends routines their answers, takes up what they ask for next, and returns the results of those that end."""
        results = {}
        for key, answer in answers.items():
            try:
                collective = routines[key].send(answer)
            except StopIteration as done:
                results[key] = done.value
            else:
                kind: tuple
                if isinstance(collective, RingSum):
                    kind = (RingSum, collective.dtype, collective.device, collective.merge is None)
                else:
                    kind = (type(collective), collective.tensor.dtype, collective.tensor.device)
                self._groups.setdefault(kind, {})[key] = collective
        return results

    def collectives(self) -> list[Collective]:
        """All that was asked for, joined into one collective per kind; they may run side by side."""
        return [_join(list(group.values())) for group in self._groups.values()]

    def split(self, answers: Iterable[Any]) -> dict[Any, Any]:
        """The answer for each routine, from those of the joined collectives."""
        parts: dict[Any, Any] = {}
        for group, answer in zip(self._groups.values(), answers):
            parts |= zip(group, _take_apart(answer, list(group.values())))
        return parts


def _join(group: list[Any]) -> Collective:
    """One collective for several of one kind."""
    if len(group) == 1:
        return group[0]
    if isinstance(group[0], (Mean, Broadcast)):
        tensors = [c.tensor for c in group]
        joined = adjacent(tensors)
        return type(group[0])(torch.cat([t.reshape(-1) for t in tensors]) if joined is None else joined)
    if isinstance(group[0], Gather):
        return Gather(torch.cat([c.tensor for c in group]), sum(c.count for c in group))
    if isinstance(group[0], RingSum):
        return _join_rings(group)
    to_ranks = list(zip(*[c.parts for c in group]))
    nbytes = tuple(sum(part.numel() for part in parts) for parts in to_ranks)
    return AllToAll(torch.cat([part for parts in to_ranks for part in parts]), nbytes)


def adjacent(tensors: list[Tensor]) -> Tensor | None:
    """One flat view of tensors that lie one behind the other in memory, as the gradients in a bucket do."""
    first, end = tensors[0], tensors[0].storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and tensor.is_contiguous() and tensor.storage_offset() == end):
            return None
        end += tensor.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


def _join_rings(group: list[RingSum]) -> RingSum:
    owners = [(ring, i) for ring in group for i in range(len(ring.numels))]

    def encode(i: int) -> Tensor:
        ring, own = owners[i]
        return ring.encode(own)

    def decode(i: int, total: Tensor) -> None:
        ring, own = owners[i]
        ring.decode(own, total)

    def merge(i: int, partial: Tensor) -> Tensor:
        ring, own = owners[i]
        return ring.add(own, partial)

    return replace(
        group[0],
        numels=tuple(numel for ring in group for numel in ring.numels),
        encode=encode,
        decode=decode,
        merge=None if group[0].merge is None else merge,
    )


def _take_apart(answer: Any, group: list[Any]) -> list[Any]:
    """The answers of each, from that of the joined collective."""
    if len(group) == 1:
        return [answer]
    if isinstance(group[0], (Mean, Broadcast)):
        parts = answer.split([c.tensor.numel() for c in group])
        return [part.view(c.tensor.shape) for part, c in zip(parts, group)]
    if isinstance(group[0], RingSum):
        return [None] * len(group)
    from_ranks = [ops.split_payloads(buffer, len(group)) for buffer in answer]
    return [list(payloads) for payloads in zip(*from_ranks)]
