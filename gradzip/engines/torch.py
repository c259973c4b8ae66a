"""Collectives on a torch process group."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import AllToAll, Broadcast, Collective, Gather, Mean, RingSum, Scope, ToHost
from ..collectives.cost import JOINED
from ..collectives.engine import Engine, Pending, PendingCopy
from ..collectives.traffic import Traffic, nbytes_of
from ..ops import tensors as ops
from .ring import Ring

_PREFIX = 16  # bytes before a part: its length, and the length of its sender's longest part (int64)

# Process groups that no engine uses, by the group that they are beside, and by name. They are kept and not destroyed:
# torch may give the next group the name of another one, or that of a destroyed one, whose addresses are in the store.
_free: WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = WeakKeyDictionary()

_next_number = 0  # of the next process group's name


class TorchEngine(Engine):
    """Runs collectives over a process group. Bytes sent include padding.

    A process group matches operations by their order: all ranks must call `launch` and `send_overflow` in the same
    order.

    Payload lengths differ between ranks and steps, but torch needs equal lengths, and an exchange of lengths before
    every gather would cost a round. Instead, each part is sent with the capacity that was sufficient in the last step,
    and starts with its length. What did not fit is sent in a second operation. All ranks see the lengths of the longest
    parts, so all compute the same capacity.

    On a device, a transfer starts after the work queued on the current stream, and runs on the group's own stream.
    `send_overflow` and `result` make the current stream wait for it, not the host. Until then, a pending transfer keeps
    what it sends and receives, and nothing may write to that.

    Args:
        device: of the tensors that `allgather_bytes` makes, one that the group's backend supports.
        shards: the process group of the ranks that hold the shards of a model; None: each rank has all of it.
    """

    in_order = True
    bucket_nbytes = JOINED["ddp"]["bucket_nbytes"]  # unless DDP is given another bucket_cap_mb

    def __init__(
        self, group: dist.ProcessGroup, traffic: Traffic, device: torch.device, shards: dist.ProcessGroup | None = None
    ) -> None:
        self.group = group
        self.shards = shards
        self.traffic = traffic
        self.device = device
        self.rank = group.rank()
        self.size = group.size()
        self._borrowed: list[tuple[dist.ProcessGroup, dist.ProcessGroup]] = []  # groups, and those beside them
        self.capacities: dict[tuple[str, type], int] = {}  # by slot and kind of collective

    @property
    def members(self) -> tuple[int, ...]:
        try:
            return tuple(dist.get_process_group_ranks(self.group))
        except KeyError:  # torch.distributed has not made the group, and does not number its ranks
            return super().members

    @cached_property
    def ring(self) -> Ring:
        """The ring for RingSums, on a process group of its own, where no other operation can come between."""
        return Ring(_new_group(self, [range(self.size)]), traffic=self.traffic)

    def separate(self) -> None:
        self.group = self._borrow(self.group)
        if self.shards is not None:
            self.shards = self._borrow(self.shards)

    def _borrow(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """A process group of the same ranks: one that is free on all of them, or a new one."""
        engine, free = TorchEngine(group, Traffic(), self.device), _free.setdefault(group, {})
        names = engine.allgather_bytes(json.dumps(list(free)).encode(), "free")
        common = set.intersection(*(set(json.loads(of_rank)) for of_rank in names))
        borrowed = free.pop(min(common)) if common else _new_group(engine, [range(engine.size)])
        self._borrowed.append((group, borrowed))
        return borrowed

    def close(self) -> None:
        for group, borrowed in self._borrowed:
            _free.setdefault(group, {})[borrowed.group_name] = borrowed
        self._borrowed = []

    def forget_lengths(self) -> None:
        self.capacities.clear()

    def place(self) -> tuple[int, int]:
        names = "LOCAL_RANK", "LOCAL_WORLD_SIZE"  # set by torchrun
        try:
            rank, size = (int(os.environ[name]) for name in names)
        except (KeyError, ValueError):
            raise ValueError(
                f"TorchEngine: got {', '.join(f'{name}={os.environ.get(name)}' for name in names)}, expected the "
                "numbers that torchrun sets; set them, or pass local_size"
            ) from None
        return rank, size

    def split(self, groups: Mapping[Scope, Sequence[Sequence[int]]]) -> Mapping[Scope, Engine]:
        engines: dict[Scope, Engine] = {}
        for scope, of_scope in groups.items():
            engines[scope] = TorchEngine(_new_group(self, of_scope), self.traffic, self.device)
            engines[scope].scope = scope
        return engines

    def launch(self, collective: Collective, slot: str) -> Pending:
        if collective.scope != "all":
            return self.launch_scoped(collective, slot)
        if isinstance(collective, RingSum):
            return _PendingRing(self, collective)
        if isinstance(collective, ToHost):
            return PendingCopy(collective)
        if self.size == 1:
            return _PendingSingle(self, collective)
        if isinstance(collective, (Gather, AllToAll)):
            if collective.same_length:
                return _PendingEqual(self, collective)
            return _PendingParts(self, collective, slot)
        return _PendingReduction(self, collective)

    def allgather_bytes(self, data: bytes, slot: str) -> list[bytes]:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        return [bytes(received.tolist()) for received in self.run(Gather(tensor), slot)]

    def sum_over_shards(self, values: Sequence[float]) -> list[float]:
        if self.shards is None:
            return list(values)
        own = torch.tensor(values, dtype=torch.float64).to(self.device)
        gathered = [torch.empty_like(own) for _ in range(self.shards.size())]
        dist.all_gather(gathered, own, self.shards)
        return [math.fsum(column) for column in zip(*(numbers.tolist() for numbers in gathered))]


def _new_group(engine: TorchEngine, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """The group that has this rank, of disjoint process groups of an engine's ranks, with the backend of its group.

    All ranks of the engine must call it, and no others need to.

    Args:
        groups: the engine's numbers of the ranks.
    """
    other = engine.group
    try:
        backend, members = dist.get_backend(other), dist.get_process_group_ranks(other)
    except ValueError:
        raise ValueError(
            "TorchEngine: got a process group that torch.distributed has not made, expected one of new_group: the "
            "method needs more groups; choose another one than Hierarchical or GradiVeQ"
        ) from None
    device = getattr(dist.group.WORLD, "bound_device_id", None)  # as of init_process_group(device_id=...)
    if device is not None and backend != dist.Backend.GLOO and other._get_backend(device).supports_splitting:
        # new_group would split the default group, for which all of its ranks must call it (ncclCommSplit).
        return cast(dist.ProcessGroup, dist.split_group(other, list(map(list, groups))))
    ranks = [members[i] for group in groups if other.rank() in group for i in group]
    # torch names the group after its ranks and the number of groups that this rank has. With another number on another
    # rank, as after a change of a mesh, they would wait for each other. No number is used twice.
    global _next_number
    known: dict[Any, Any] = cast(Any, dist.distributed_c10d)._world.pg_names
    own = str(max(len(known), _next_number)).encode()
    number = max(map(int, TorchEngine(other, Traffic(), engine.device).allgather_bytes(own, "groups")))
    _next_number = number + 1
    missing = {object(): "" for _ in range(number - len(known))}
    known.update(missing)
    try:
        return cast(dist.ProcessGroup, dist.new_group(ranks, backend=backend, use_local_synchronization=True))
    finally:
        for key in missing:
            del known[key]


class _PendingRing(Pending):
    """A RingSum. It runs in `send_overflow`: the waiting thread does all the work."""

    def __init__(self, engine: TorchEngine, ring: RingSum) -> None:
        self._engine = engine
        self._ring = ring

    def send_overflow(self) -> bool:
        self._engine.ring.run(self._ring)
        return False

    def result(self) -> None:
        return None


class _PendingSingle(Pending):
    """Any other collective in a group of one rank."""

    def __init__(self, engine: TorchEngine, collective: Mean | Gather | AllToAll | Broadcast) -> None:
        self._collective = collective
        engine.traffic.count(nbytes_of(collective.tensor), 0.0, engine.scope)

    def result(self) -> Any:
        tensor = self._collective.tensor
        return [tensor] if isinstance(self._collective, (Gather, AllToAll)) else tensor


class _PendingReduction(Pending):
    """Mean, as a sum and a division (gloo has no average; all ranks get the same bits), and Broadcast.

    The tensor of a Mean may be sparse.
    """

    def __init__(self, engine: TorchEngine, collective: Mean | Broadcast) -> None:
        self._collective = collective
        self._size = engine.size
        tensor = collective.addend(engine.size) if isinstance(collective, Mean) else collective.tensor
        self._tensor = tensor if tensor.is_sparse else tensor.contiguous()
        if tensor.is_sparse:  # indices and values are gathered
            engine.traffic.count(nbytes_of(tensor), engine.wire_shares[Gather], engine.scope)
        else:
            engine.traffic.count(tensor.nbytes, engine.wire_shares[type(collective)], engine.scope)
        if isinstance(collective, Mean):
            self._work = engine.group.allreduce([self._tensor])
        else:
            self._work = engine.group.broadcast(self._tensor, 0)

    def send_overflow(self) -> bool:
        self._work.wait()
        return False

    def result(self) -> Tensor:
        collective = self._collective
        return collective.average(self._tensor, self._size) if isinstance(collective, Mean) else self._tensor


class _PendingEqual(Pending):
    """A Gather or AllToAll in which all parts have equally many bytes: no lengths are exchanged."""

    def __init__(self, engine: TorchEngine, collective: Gather | AllToAll) -> None:
        self._sent = collective.tensor.contiguous()  # kept until the transfer ends: a joined payload has no other owner
        scatters = isinstance(collective, AllToAll)
        each = self._sent.numel() // engine.size if scatters else self._sent.numel()
        self._received = self._sent.new_empty((engine.size, each))
        engine.traffic.count(self._sent.numel(), engine.wire_shares[type(collective)], engine.scope)
        self._work = _exchange(engine.group, self._received, self._sent, scatters)

    def send_overflow(self) -> bool:
        self._work.wait()
        return False

    def result(self) -> list[Tensor]:
        return list(self._received.unbind(0))


class _PendingParts(Pending):
    """A Gather (one part, sent to all ranks) or an AllToAll (a part for each rank), of parts of different lengths."""

    def __init__(self, engine: TorchEngine, collective: Gather | AllToAll, slot: str) -> None:
        self._engine = engine
        self._key = slot, type(collective)  # a method may change its exchange
        self._limit = collective.limit
        self._count = collective.count if isinstance(collective, Gather) else 1
        self._parts = collective.parts if isinstance(collective, AllToAll) else [collective.tensor]
        self._scatters = isinstance(collective, AllToAll)
        self._capacity = engine.capacities.get(self._key, 0)
        longest = max(part.numel() for part in self._parts)
        first = self._message(_PREFIX + self._capacity)
        prefixes = first[:, :_PREFIX].view(torch.int64)
        if len(self._parts) == 1:
            prefixes.fill_(longest)  # no copy from host memory, which waits for the device
        else:
            # The host waits, so the lengths may be dropped.
            prefixes.copy_(torch.tensor([[part.numel(), longest] for part in self._parts], device="cpu"))
        for row, part in zip(first[:, _PREFIX:], self._parts):
            _fill(row, part[: self._capacity])
        self._received, self._work = self._start(first)
        self._overflow: Tensor | None = None

    def _message(self, nbytes: int) -> Tensor:
        return torch.empty((len(self._parts), nbytes), dtype=torch.uint8, device=self._parts[0].device)

    def _start(self, message: Tensor) -> tuple[Tensor, Any]:
        engine = self._engine
        received = message.new_empty((engine.size, message.shape[1]))
        self._sent = message  # kept until the transfer ends: it has no other owner
        engine.traffic.count(message.numel(), engine.wire_shares[self._key[1]], engine.scope)
        return received, _exchange(engine.group, received, message, self._scatters)

    def send_overflow(self) -> bool:
        engine, capacity = self._engine, self._capacity
        self._work.wait()
        prefixes = self._received[:, :_PREFIX].contiguous().cpu().view(torch.int64).tolist()
        for rank, (nbytes, longest) in enumerate(prefixes):
            if not 0 <= nbytes <= longest <= self._limit:  # before memory is taken for it
                got = f"got {nbytes} bytes of at most {longest}, expected at most {self._limit}"
                raise ops.PayloadError(f"from rank {rank} of {engine.size}: corrupt message: {got}")
        self._nbytes = [nbytes for nbytes, _ in prefixes]
        needed = max(longest for _, longest in prefixes)
        engine.capacities[self._key] = next_capacity(capacity, needed)
        if needed <= capacity:
            return False
        message = self._message(needed - capacity)
        for row, part in zip(message, self._parts):
            _fill(row, part[capacity:])
        self._overflow, self._work = self._start(message)
        return True

    def result(self) -> list[Tensor]:
        received = list(self._received[:, _PREFIX:])
        if self._overflow is not None:
            self._work.wait()
            received = [torch.cat(halves) for halves in zip(received, self._overflow)]
        buffers = [part[:nbytes] for part, nbytes in zip(received, self._nbytes)]
        if self._count > 1:
            ops.split_all_payloads(buffers, self._count)
        return buffers


def _exchange(group: dist.ProcessGroup, received: Tensor, sent: Tensor, scatters: bool) -> Any:
    """Start an all-to-all of equal parts, or an all-gather. The functions of torch.distributed call these, slowly."""
    if scatters:
        return group.alltoall_base(received.view(-1), sent.view(-1), [], [])
    return group._allgather_base(received.view(-1), sent.view(-1))


def _fill(row: Tensor, content: Tensor) -> None:
    row[: content.numel()] = content
    row[content.numel() :].zero_()


def next_capacity(capacity: int, needed: int) -> int:
    """The capacity for the next step: the bytes needed in this one, plus a decaying margin if lengths vary."""
    if needed > capacity:
        margin = min(needed - capacity, needed // 16) if capacity else 0
    else:
        margin = (capacity - needed) * 7 // 8
    return -(-(needed + margin) // ops.PAYLOAD_ALIGN) * ops.PAYLOAD_ALIGN
