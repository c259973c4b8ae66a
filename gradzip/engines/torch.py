"""Collectives over a torch process group."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..collectives import AllToAll, Broadcast, Collective, Gather, Mean, RingSum, Traffic
from .ring import Ring

_PREFIX = 16  # bytes before a part: its length, and the longest that its sender sends to anyone (int64)


# As torch 2.13 calls it, where it warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending(Protocol):
    """A collective on its way."""

    def extend(self) -> bool:
        """Waits for what was started. Where that was not all, starts the rest, and says so: on all ranks alike."""

    def answer(self) -> Any:
        """What the routine is to be sent; `extend` was called before."""


class TorchEngine:
    """Runs collectives over a process group, and counts the bytes this rank sends, padding included.

    Operations of a process group are matched by their order: all ranks must call `launch` and `extend` in the same one.

    Payloads differ in length from rank to rank and from step to step, and torch wants equal ones. A size exchange
    before every gather would cost a round. So every part is given the room that is known to have been enough the last
    time (capacity), begins with its length, and what did not fit follows in a second operation. All ranks see the
    lengths of the longest parts, so all have the same idea of the capacity.
    """

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic) -> None:
        self.group = group
        self.traffic = traffic
        self.rank = group.rank()
        self.size = group.size()
        self._capacities: dict[Hashable, int] = {}

    @cached_property
    def ring(self) -> Ring:
        """For sums around a ring: on a group of its own, where nothing else comes between."""
        ranks = dist.get_process_group_ranks(self.group)
        return Ring(dist.new_group(ranks, use_local_synchronization=True), traffic=self.traffic)

    def launch(self, collective: Collective, slot: Hashable) -> Pending:
        """Starts a collective. slot: names what is alike in length from step to step; the same on all ranks."""
        if isinstance(collective, RingSum):
            return _Rotation(self, collective)
        if self.size == 1:
            return _Alone(self, collective)
        if isinstance(collective, (Gather, AllToAll)):
            return _Exchange(self, collective, slot)
        return _Reduction(self, collective)

    def share(self, line: bytes, device: torch.device) -> list[bytes]:
        """Every rank's line of text, in rank order. Waits for all ranks."""
        pending = self.launch(Gather(torch.frombuffer(bytearray(line), dtype=torch.uint8).to(device)), "line")
        pending.extend()
        return [bytes(received.tolist()) for received in pending.answer()]


class _Rotation:
    """A sum around the ring, which runs while it is waited for: all its work is done by whoever waits."""

    def __init__(self, engine: TorchEngine, ring: RingSum) -> None:
        self._engine = engine
        self._ring = ring

    def extend(self) -> bool:
        self._engine.ring.run(self._ring)
        return False

    def answer(self) -> None:
        return None


class _Alone:
    """Any other collective of a group of one."""

    def __init__(self, engine: TorchEngine, collective: Mean | Gather | AllToAll | Broadcast) -> None:
        self._collective = collective
        engine.traffic.bytes_sent += nbytes_of(collective.tensor)

    def extend(self) -> bool:
        return False

    def answer(self) -> Any:
        tensor = self._collective.tensor
        return [tensor] if isinstance(self._collective, (Gather, AllToAll)) else tensor


class _Reduction:
    """Mean, as a sum that is divided (gloo has no average; ranks end with the same bits), and Broadcast. A mean may be
    one of sparse tensors."""

    def __init__(self, engine: TorchEngine, collective: Mean | Broadcast) -> None:
        tensor = collective.tensor
        self._tensor = tensor if tensor.is_sparse else tensor.contiguous()
        self._divisor = engine.size if isinstance(collective, Mean) else None
        engine.traffic.bytes_sent += nbytes_of(tensor)
        if self._divisor:
            self._work = dist.all_reduce(self._tensor, group=engine.group, async_op=True)
        else:
            root = dist.get_global_rank(engine.group, 0)
            self._work = dist.broadcast(self._tensor, root, group=engine.group, async_op=True)

    def extend(self) -> bool:
        self._work.wait()
        return False

    def answer(self) -> Tensor:
        return self._tensor.div_(self._divisor) if self._divisor else self._tensor


class _Exchange:
    """Gather, where all ranks get the one part that this rank has, and AllToAll, where each gets one of its own."""

    def __init__(self, engine: TorchEngine, collective: Gather | AllToAll, slot: Hashable) -> None:
        self._engine = engine
        self._slot = slot
        self._parts = collective.parts if isinstance(collective, AllToAll) else [collective.tensor]
        self._exchange = dist.all_to_all_single if isinstance(collective, AllToAll) else _all_gather
        self._capacity = engine._capacities.get(slot, 0)
        longest = max(part.numel() for part in self._parts)
        prefixes = torch.tensor([[part.numel(), longest] for part in self._parts], device="cpu").view(torch.uint8)
        heads = self._message(_PREFIX + self._capacity)
        heads[:, :_PREFIX].copy_(prefixes, non_blocking=True)
        for row, part in zip(heads[:, _PREFIX:], self._parts):
            _fill(row, part[: self._capacity])
        self._heads, self._work = self._start(heads)
        self._rest: Tensor | None = None

    def _message(self, nbytes: int) -> Tensor:
        return torch.empty((len(self._parts), nbytes), dtype=torch.uint8, device=self._parts[0].device)

    def _start(self, message: Tensor) -> tuple[Tensor, Any]:
        engine = self._engine
        received = message.new_empty((engine.size, message.shape[1]))
        engine.traffic.bytes_sent += message.numel()
        return received, self._exchange(received.view(-1), message.view(-1), group=engine.group, async_op=True)

    def extend(self) -> bool:
        engine, capacity = self._engine, self._capacity
        self._work.wait()
        prefixes = self._heads[:, :_PREFIX].contiguous().cpu().view(torch.int64).tolist()
        for rank, (nbytes, longest) in enumerate(prefixes):
            if not 0 <= nbytes <= longest:
                raise ops.PayloadError(
                    f"from rank {rank} of {engine.size}: corrupt message: got {nbytes} bytes of at most {longest}"
                )
        self._nbytes = [nbytes for nbytes, _ in prefixes]
        needed = max(longest for _, longest in prefixes)
        engine._capacities[self._slot] = _next_capacity(capacity, needed)
        if needed <= capacity:
            return False
        message = self._message(needed - capacity)
        for row, part in zip(message, self._parts):
            _fill(row, part[capacity:])
        self._rest, self._work = self._start(message)
        return True

    def answer(self) -> list[Tensor]:
        received = list(self._heads[:, _PREFIX:])
        if self._rest is not None:
            self._work.wait()
            received = [torch.cat(halves) for halves in zip(received, self._rest)]
        return [part[:nbytes] for part, nbytes in zip(received, self._nbytes)]


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor, which may be a sparse one."""
    parts = [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]
    return sum(part.nbytes for part in parts)


def _fill(row: Tensor, content: Tensor) -> None:
    row[: content.numel()] = content
    row[content.numel() :].zero_()


def _next_capacity(capacity: int, needed: int) -> int:
    """The room for the next step's parts: what was enough, and where lengths vary, a little more for a while."""
    if needed > capacity:
        spare = min(needed - capacity, needed // 16) if capacity else 0
    else:
        spare = (capacity - needed) * 7 // 8
    return -(-(needed + spare) // ops.PAYLOAD_ALIGN) * ops.PAYLOAD_ALIGN
