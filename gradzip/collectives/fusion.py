"""Tensor fusion: the collectives of several routines joined into one collective per round and kind."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..ops import tensors as ops
from .ranges import ranged
from .requests import AllFinite, AllToAll, Broadcast, Collective, Gather, Mean, RingSum, ToHost
from .routines import Local, Routine
from .traffic import Traffic

# Fused routines: yields the collectives of a round, which may run concurrently, and is sent the list of their results.
FusedRoutine = Generator[list[Collective], list[Any], list[Any]]


def fused(routines: Iterable[Routine], traffic: Traffic | None = None) -> FusedRoutine:
    """Run routines in lock-step, and join what they yield into one collective per round and kind.

    Routines may need different numbers of rounds. All ranks must fuse the same routines in the same order. Returns
    their results, in order. This is the simplest loop over `Round`, which the front ends use.
    """
    members = dict(enumerate(routines))
    current = Round(traffic)
    returned = current.advance(members, dict.fromkeys(members))
    while collectives := current.collectives():
        results = current.split((yield collectives))
        current, previous = Round(traffic), current
        returned |= current.advance(members, results)
        current.take_checks(previous)
    return [returned[i] for i in members]


class Round:
    """The collectives that several routines wait for at the same time. A key of any type identifies a routine.

    Args:
        traffic: counts the time that routines take.
    """

    def __init__(self, traffic: Traffic | None = None) -> None:
        self.traffic = traffic
        self._groups: dict[Any, dict[Any, Any]] = {}  # kind -> key -> collective
        self._checks: dict[Any, AllFinite] = {}  # by key

    @classmethod
    @ranged("encode")
    def first(cls, routines: Mapping[Any, Routine], traffic: Traffic | None = None) -> Round:
        """Start routines, and make the round of their first collectives."""
        first = cls(traffic)
        first._timed(routines, dict.fromkeys(routines))
        return first

    @ranged("decode")
    def advance(self, routines: Mapping[Any, Routine], results: Mapping[Any, Any]) -> dict[Any, Any]:
        """Send routines the results of their last collectives, and add their next ones to this round.

        Local work is done in between, in one call for all routines with the same function and device.

        Returns the results of the routines that are done, by key.
        """
        return self._timed(routines, results)

    def _timed(self, routines: Mapping[Any, Routine], results: Mapping[Any, Any]) -> dict[Any, Any]:
        begin = time.perf_counter()
        try:
            return self._advance(routines, results)
        finally:
            if self.traffic is not None:
                self.traffic.seconds += time.perf_counter() - begin

    def _advance(self, routines: Mapping[Any, Routine], results: Mapping[Any, Any]) -> dict[Any, Any]:
        returned: dict[Any, Any] = {}
        yielded: dict[Any, Collective | AllFinite] = {}
        waiting: Mapping[Any, Any] = results
        while waiting:
            local: dict[Any, dict[Any, Local]] = {}  # by what can be done in one call
            for key, result in waiting.items():
                try:
                    item = routines[key].send(result)
                except StopIteration as stop:
                    returned[key] = stop.value
                    continue
                if isinstance(item, Local):
                    local.setdefault((item.function, item.device), {})[key] = item
                else:
                    yielded[key] = item
            sent: dict[Any, Any] = {}
            for (function, _), requests in local.items():
                sent |= zip(requests, function([request.argument for request in requests.values()]))
            waiting = sent
        for key in results:  # in the same order on all ranks, whatever local work they did
            if key in yielded:
                self.add(key, yielded[key])
        return returned

    def add(self, key: Any, collective: Collective | AllFinite) -> None:
        """Add a collective of the routine `key`."""
        kind: tuple[Any, ...]  # what collectives that are joined have in common
        if isinstance(collective, AllFinite):
            self._checks[key] = collective
            return
        if isinstance(collective, RingSum):
            kind = (RingSum, collective.scope, collective.dtype, collective.device)
        elif isinstance(collective, ToHost):
            kind = (ToHost, collective.tensor.device)
        else:
            same_length = getattr(collective, "same_length", None)  # of a Gather or AllToAll
            tensor = collective.tensor
            kind = (type(collective), collective.scope, tensor.dtype, tensor.device, same_length)
        self._groups.setdefault(kind, {})[key] = collective

    def take_checks(self, previous: Round) -> None:
        """Take over the checks that the previous round has left to others."""
        self._checks = previous._checks | self._checks
        previous._checks = {}

    def take_rings(self) -> dict[Any, RingSum]:
        """Remove the RingSums from this round, and return them by key."""
        kinds = [kind for kind in self._groups if kind[0] is RingSum]
        return {key: ring for kind in kinds for key, ring in self._groups.pop(kind).items()}

    def collectives(self) -> list[Collective]:
        """The collectives of this round, joined into one per kind. They may run concurrently.

        Checks are made in a round in which the host waits anyway, or at the end.
        """
        if self._checks and (not self._groups or ToHost in [kind[0] for kind in self._groups]):
            checks, self._checks = self._checks, {}
            for device in dict.fromkeys([check.tensor.device for check in checks.values()]):
                of_device = {key: check.tensor for key, check in checks.items() if check.tensor.device == device}
                for key, number in zip(of_device, ops.finite_if_all(list(of_device.values()))):
                    self.add(key, ToHost(number))
        return list(map(_join, self._groups.values()))

    def split(self, results: Iterable[Any]) -> dict[Any, Any]:
        """Split the results of the joined collectives into each routine's result, by key."""
        parts: dict[Any, Any] = {}
        for group, result in zip(self._groups.values(), results):
            parts |= zip(group, _split(result, list(group.values())))
        return parts


def _join(of_kind: Mapping[Any, Any]) -> Collective:
    """Join collectives of one kind, by key."""
    group = list(of_kind.values())
    if len(group) == 1 and not getattr(group[0], "tensors", ()):
        return group[0]
    if isinstance(group[0], Mean):
        tensors = [tensor for c in group for tensor in c.tensors or (c.tensor,)]
        joined, scope = adjacent(tensors), group[0].scope
        if joined is None:
            return Mean(torch.cat([t.reshape(-1) for t in tensors]), scope=scope)
        return Mean(joined, keep=any([c.keep for c in group]), scope=scope)
    if isinstance(group[0], (Broadcast, ToHost)):
        tensors = [c.tensor for c in group]
        if isinstance(group[0], ToHost) and _mixed(group):
            tensors = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        joined = adjacent(tensors)
        joined = torch.cat([t.reshape(-1) for t in tensors]) if joined is None else joined
        return ToHost(joined) if isinstance(group[0], ToHost) else Broadcast(joined, group[0].scope)
    if isinstance(group[0], Gather):
        joined, count = torch.cat([c.tensor for c in group]), sum([c.count for c in group])
        return Gather(joined, count, group[0].same_length, group[0].scope)
    if isinstance(group[0], RingSum):
        return _join_rings(group)
    by_rank = list(zip(*[c.parts for c in group]))
    nbytes = tuple([sum([part.numel() for part in parts]) for parts in by_rank])
    joined = torch.cat([part for parts in by_rank for part in parts])
    return AllToAll(joined, nbytes, group[0].same_length, group[0].scope)


def _split(result: Any, group: list[Any]) -> list[Any]:
    """Split the result of a joined collective."""
    if len(group) == 1 and not getattr(group[0], "tensors", ()):
        return [result]
    if isinstance(group[0], ToHost) and _mixed(group):
        pieces = result.split_with_sizes([c.tensor.nbytes for c in group])
        return [piece.clone().view(c.tensor.dtype).view(c.tensor.shape) for piece, c in zip(pieces, group)]
    if isinstance(group[0], Mean):
        return _split_means(result, group)
    if isinstance(group[0], (Broadcast, ToHost)):
        parts = result.split_with_sizes([c.tensor.numel() for c in group])
        return [part.view(c.tensor.shape) for part, c in zip(parts, group)]
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
    written: list[Tensor] = []
    parts: list[Tensor] = []  # of these
    numels = [sum([tensor.numel() for tensor in c.tensors]) or c.tensor.numel() for c in group]
    results = list(total.view(-1).split_with_sizes(numels))
    copied = total.untyped_storage().data_ptr() != group[0].tensor.untyped_storage().data_ptr()
    for i, c in enumerate(group):
        if c.tensors:
            written += c.tensors
            parts += pieces(results[i], [t.shape for t in c.tensors])
            continue
        results[i] = results[i].view(c.tensor.shape)
        if c.in_place and copied:
            written.append(c.tensor)
            parts.append(results[i])
            results[i] = c.tensor
    if written and copied:
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


def pieces(vector: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Views of consecutive parts of a contiguous tensor, of these shapes."""
    parts = vector.view(-1).split_with_sizes([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes)]
