"""Tensor fusion: the collectives of several routines joined into one collective per round and kind.

A large `Mean` stays alone. To join it would copy it twice, for a message that is long enough as it is.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..ops import tensors as ops
from . import cost
from .ranges import Range
from .requests import AllToAll, Broadcast, Collective, Gather, Mean, RingSum, ToHost
from .routines import Local, Routine
from .traffic import Traffic

# Fused routines: yields the collectives of a round, which may run concurrently, and is sent the list of their results.
FusedRoutine = Generator[list[Collective], list[Any], list[Any]]


def fused(routines: Iterable[Routine], traffic: Traffic | None = None) -> FusedRoutine:
    """Run routines in lock-step, and join what they yield into one collective per round and kind, and per large Mean.

    Routines may need different numbers of rounds. All ranks must fuse the same routines in the same order. Returns
    their results, in order.
    """
    members = dict(enumerate(routines))
    first = Round(traffic or Traffic())
    returned = first.advance(members)
    returned |= yield from first.run(members)
    return [returned[i] for i in members]


class Round:
    """The collectives that several routines wait for at the same time. A key of any type identifies a routine.

    Args:
        traffic: counts the time that routines take.
    """

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self._groups: dict[Any, dict[Any, Any]] = {}  # kind -> key -> collective

    def advance(self, routines: Mapping[Any, Routine], results: Mapping[Any, Any] | None = None) -> dict[Any, Any]:
        """Send routines the results of their last collectives, and add their next ones to this round.

        Local work is done in between, in one call for all routines with the same function and device.

        Args:
            results: by key. None starts all routines.

        Returns the results of the routines that are done, by key.
        """
        begin = time.perf_counter()
        returned: dict[Any, Any] = {}
        waiting = dict.fromkeys(routines) if results is None else results
        # In the same order on all ranks, whatever local work they do.
        yielded: dict[Any, Any] = dict.fromkeys(waiting)
        try:
            with Range("gradzip::encode" if results is None else "gradzip::decode"):
                while waiting:
                    local: dict[Any, dict[Any, Local]] = {}  # by what can be done in one call
                    for key, result in waiting.items():
                        try:
                            item = routines[key].send(result)
                        except StopIteration as stop:
                            returned[key] = stop.value
                            del yielded[key]
                            continue
                        if isinstance(item, Local):
                            local.setdefault((item.function, item.device), {})[key] = item
                        else:
                            yielded[key] = item
                    waiting = {}
                    for (function, _), requests in local.items():
                        waiting |= zip(requests, function(list(map(_ARGUMENT, requests.values()))))
        finally:
            self.traffic.seconds += time.perf_counter() - begin
        self.add(yielded)
        return returned

    def add(self, requests: Mapping[Any, Collective]) -> None:
        """Add collectives of routines, by key."""
        for key, request in requests.items():
            kind: tuple[Any, ...]  # what collectives that are joined have in common
            if isinstance(request, RingSum):
                kind = (RingSum, request.scope, request.dtype, request.device)
            elif isinstance(request, ToHost):
                kind = (ToHost, request.tensor.device)
            else:
                tensor = request.tensor
                if isinstance(request, Mean):  # alike on all ranks, wherever tensors are in their memory
                    numel = sum(map(Tensor.numel, request.tensors)) or tensor.numel()
                    distinct = (key,) if numel * tensor.dtype.itemsize >= cost.ALONE_NBYTES else None
                else:
                    distinct = getattr(request, "same_length", None)  # of a Gather or AllToAll
                kind = (type(request), request.scope, tensor.dtype, tensor.device, distinct)
            self._groups.setdefault(kind, {})[key] = request

    def take_rings(self) -> dict[Any, RingSum]:
        """Remove the RingSums from this round, and return them by key."""
        rings: dict[Any, RingSum] = {}
        for kind in list(self._groups):
            if kind[0] is RingSum:
                rings |= self._groups.pop(kind)
        return rings

    def collectives(self) -> list[Collective]:
        """The collectives of this round, joined into one per kind and large Mean. They may run concurrently."""
        return list(map(_join, self._groups.values()))

    def split(self, results: Iterable[Any]) -> dict[Any, Any]:
        """Split the results of the joined collectives into each routine's result, by key."""
        parts: dict[Any, Any] = {}
        for group, result in zip(self._groups.values(), results):
            parts |= zip(group, _split(result, list(group.values())))
        return parts

    def run(self, routines: Mapping[Any, Routine]) -> Generator[list[Collective], list[Any], dict[Any, Any]]:
        """Run this round and all later ones: yields their collectives, and is sent the results.

        Returns the results of the routines, by key.
        """
        returned: dict[Any, Any] = {}
        current = self
        while current._groups:
            results = current.split((yield current.collectives()))
            current = Round(self.traffic)
            returned |= current.advance(routines, results)
        return returned


_ARGUMENT = attrgetter("argument")
_SHAPE = attrgetter("shape")


def _join(of_kind: Mapping[Any, Any]) -> Collective:
    """Join collectives of one kind, by key."""
    group = list(of_kind.values())
    if len(group) == 1 and not getattr(group[0], "tensors", ()):
        return group[0]
    if isinstance(group[0], Mean):
        tensors: list[Tensor] = []
        keep = False
        for mean in group:
            tensors += mean.tensors or (mean.tensor,)
            keep = keep or mean.keep
        joined = flattened(tensors)
        # A copy need not be kept.
        keep = keep and joined.data_ptr() == tensors[0].data_ptr()
        return Mean(joined, keep=keep, scope=group[0].scope)
    if isinstance(group[0], (Broadcast, ToHost)):
        tensors = [c.tensor for c in group]
        if isinstance(group[0], ToHost) and _mixed(group):
            tensors = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        joined = flattened(tensors)
        return ToHost(joined) if isinstance(group[0], ToHost) else Broadcast(joined, group[0].scope)
    if isinstance(group[0], Gather):
        joined, count = torch.cat([c.tensor for c in group]), sum([c.count for c in group])
        return Gather(joined, count, group[0].same_length, group[0].scope, sum([c.limit for c in group]))
    if isinstance(group[0], RingSum):
        return _join_rings(group)
    by_rank = list(zip(*[c.parts for c in group]))
    nbytes = tuple([sum([part.numel() for part in parts]) for parts in by_rank])
    joined = torch.cat([part for parts in by_rank for part in parts])
    return AllToAll(joined, nbytes, group[0].same_length, group[0].scope, sum([c.limit for c in group]))


def _split(result: Any, group: list[Any]) -> list[Any]:
    """Split the result of a joined collective."""
    if len(group) == 1 and not getattr(group[0], "tensors", ()):
        return [result]
    if isinstance(group[0], ToHost) and _mixed(group):
        parts = result.split_with_sizes([c.tensor.nbytes for c in group])
        return [part.clone().view(c.tensor.dtype).view(c.tensor.shape) for part, c in zip(parts, group)]
    if isinstance(group[0], Mean):
        return _split_means(result, group)
    if isinstance(group[0], (Broadcast, ToHost)):
        return pieces(result, [c.tensor.shape for c in group])
    if isinstance(group[0], RingSum):
        return [None] * len(group)
    if group[0].same_length:
        nbytes = [c.nbytes[0] if isinstance(c, AllToAll) else c.tensor.numel() for c in group]
        by_rank = [buffer.split_with_sizes(nbytes) for buffer in result]
    else:
        by_rank = [ops.split_payloads(buffer, len(group)) for buffer in result]
    return [list(payloads) for payloads in zip(*by_rank)]


def _split_means(total: Tensor, group: list[Mean]) -> list[Tensor]:
    """Split an average, and write the parts to the tensors that want them."""
    copied = total.untyped_storage().data_ptr() != group[0].tensor.untyped_storage().data_ptr()
    if len(group) == 1 and not copied:
        return [total.view(-1)]
    numels = [sum(map(Tensor.numel, c.tensors)) or c.tensor.numel() for c in group]
    results = list(total.view(-1).split_with_sizes(numels))
    written: list[Tensor] = []
    parts: list[Tensor] = []  # of these
    for i, c in enumerate(group):
        if c.tensors:
            if copied:
                written += c.tensors
                parts += pieces(results[i], list(map(_SHAPE, c.tensors)))
            continue
        results[i] = results[i].view(c.tensor.shape)
        if c.in_place and copied:
            written.append(c.tensor)
            parts.append(results[i])
            results[i] = c.tensor
    if written:
        torch._foreach_copy_(written, parts)  # one operation on a device
    return results


def _mixed(copies: list[ToHost]) -> bool:
    """Whether copies have several dtypes: they are joined as bytes."""
    return len({c.tensor.dtype for c in copies}) > 1


def _join_rings(group: list[RingSum]) -> RingSum:
    segments = [(ring, i) for ring in group for i in range(len(ring.numels))]

    def encode(i: int) -> Tensor:
        ring, own = segments[i]
        return ring.encode(own)

    def decode(i: int, total: Tensor) -> None:
        ring, own = segments[i]
        ring.decode(own, total)

    numels = tuple(numel for ring in group for numel in ring.numels)
    return replace(group[0], numels=numels, encode=encode, decode=decode)


def adjacent(tensors: list[Tensor]) -> Tensor | None:
    """One flat view of tensors that are adjacent in memory, such as the gradients of a bucket; None for others."""
    first, end = tensors[0], tensors[0].storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and tensor.is_contiguous() and tensor.storage_offset() == end):
            return None
        end += tensor.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


def flattened(tensors: list[Tensor]) -> Tensor:
    """One flat tensor of the elements of several ones: a view if they are adjacent in memory."""
    vector = adjacent(tensors)
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if vector is None else vector


def as_real(tensor: Tensor) -> Tensor:
    """A view of a complex tensor as twice as many real numbers, with a last dimension of 2; others as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def pieces(vector: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Views of consecutive parts of a contiguous tensor, of these shapes."""
    return list(map(Tensor.view, vector.view(-1).split_with_sizes(list(map(torch.Size.numel, shapes))), shapes))
