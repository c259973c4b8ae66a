"""`RingSum` on a torch process group: a segment is compressed while others are on the wire."""

from __future__ import annotations

import contextlib
import datetime
import re
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import RingSum
from ..collectives.traffic import Traffic, sent_nbytes
from ..memory.state import Workspace


class RingError(RuntimeError):
    """A neighbour in the ring failed or timed out. The process group cannot be used any more."""


class Ring:
    """Runs `RingSum`s on a process group. All ranks must run the same sums in the same order.

    Segment i starts at rank i mod n and is added up once, in the order of the ring. The sum is forwarded, so all ranks
    decode the same bits. A rank sends, and receives, 2 (n - 1) / n of the segments' bytes.

    Args:
        group: a torch.distributed.ProcessGroup (gloo for tensors on the CPU, NCCL for those on a device), or the
            result of `group_from_horovod`.
        timeout: seconds to wait for one segment before `RingError`. Half an hour by default, as process groups have
            it: a rank may save a checkpoint first. On a device the group's own timeout counts, because the host does
            not wait.
        traffic: counts what this rank hands to sums and sends.
        lockstep: whether each receive is posted together with a send, as one operation. NCCL needs that, and it is
            the default on a device. Otherwise all receives are posted at the beginning, so that no send has to wait
            for a request behind other data on a slow link.

    Source: Yu et al., GradiVeQ, NeurIPS 2018, Algorithm 1.
    """

    def __init__(
        self, group: Any, timeout: float = 1800.0, traffic: Traffic | None = None, lockstep: bool | None = None
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"Ring: got timeout = {timeout!r}, expected seconds > 0")
        self.group = group
        self.timeout = timeout
        self.traffic = Traffic() if traffic is None else traffic
        self.lockstep = lockstep
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.successor = (self.rank + 1) % self.size
        self.predecessor = (self.rank - 1) % self.size
        self.workspace = Workspace()
        self._failed: _Wire | None = None

    def run(self, ring: RingSum) -> None:
        """Run a sum; return when all segments are decoded and forwarded. Raises RingError."""
        if self._failed is not None:
            raise RingError("this ring has failed before: make a new process group, or restart the job")
        ring = _pad(ring, self.size)
        lockstep = ring.device.type != "cpu" if self.lockstep is None else self.lockstep
        wire = (_LockstepWire if lockstep else _Wire)(self, ring)
        try:
            self.traffic.bytes_sent += sent_nbytes(ring)
            self._run(ring, wire)
            wire.finish()
        except BaseException:
            self._failed = wire  # keeps its buffers, which transfers may still use
            raise

    def _run(self, ring: RingSum, wire: _Wire) -> None:
        n = self.size
        own: dict[int, Tensor] = {}  # compressed while what it is added to is on the wire
        # In step k a rank handles the segments that started k ranks before it: partial sums up to step n - 1, in which
        # this rank adds the last part, and complete sums from then on.
        for step in range(2 * n - 1):
            for first in range(0, len(ring.numels), n):
                leaving, arriving = first + (self.rank - step) % n, first + (self.rank - step - 1) % n
                if step == 0:
                    data = _checked(ring, leaving, ring.encode(leaving))
                else:
                    data = wire.receive(step - 1, leaving)
                    if step < n:
                        data.add_(own.pop(leaving))
                if step < 2 * n - 2:
                    wire.exchange(step, leaving, data, arriving)
                # While others are on the wire:
                if step >= n - 1:
                    ring.decode(leaving, data)
                else:
                    own[arriving] = _checked(ring, arriving, ring.encode(arriving))


def _pad(ring: RingSum, size: int) -> RingSum:
    """The same sum with empty segments appended, up to a multiple of `size`: equally many for each rank."""
    count = len(ring.numels)
    missing = -count % size
    if not missing:
        return ring
    empty = torch.empty(0, dtype=ring.dtype, device=ring.device)
    return replace(
        ring,
        numels=ring.numels + (0,) * missing,
        encode=lambda i: ring.encode(i) if i < count else empty,
        decode=lambda i, total: ring.decode(i, total) if i < count else None,
    )


def _checked(ring: RingSum, segment: int, data: Tensor) -> Tensor:
    """A segment, flat, after a check of its size and type."""
    numel = ring.numels[segment]
    if data.numel() != numel or data.dtype != ring.dtype or not data.is_contiguous():
        raise ValueError(
            f"RingSum: got {data.numel()} elements of {data.dtype}{'' if data.is_contiguous() else ', not contiguous,'}"
            f" for segment {segment}, expected {numel} of {ring.dtype}, contiguous"
        )
    return data.view(-1)


class _Wire:
    """The transfers of one sum, from the predecessor and to the successor. A message is a (step, segment)."""

    def __init__(self, ring: Ring, collective: RingSum) -> None:
        self.ring = ring
        self.collective = collective
        # Different sums must not match: gloo accepts a shorter message, and aborts the process for a longer one.
        self.first_tag = zlib.crc32(f"{collective.numels}{collective.dtype}".encode())
        n, count = ring.size, len(collective.numels)
        coming = [
            (step, first + (ring.rank - step - 1) % n) for step in range(2 * n - 2) for first in range(0, count, n)
        ]
        numels = [collective.numels[segment] for _, segment in coming]
        memory = ring.workspace.empty(  # the former sum's readers are queued on the same stream
            f"received {collective.dtype}", (sum(numels),), collective.dtype, collective.device
        )
        self.buffers = dict(zip(coming, memory.split_with_sizes(numels)))
        self.sent: list[Tensor] = []  # kept until all transfers have ended
        self.receives: dict[tuple[int, int], list[Any]] = {}  # operations to wait for, by message
        self.sends: dict[tuple[int, int], list[Any]] = {}
        self.start()

    def start(self) -> None:
        """Post all receives."""
        group, peer = self.ring.group, self.ring.predecessor
        for message, buffer in self.buffers.items():
            if buffer.numel():
                with self.watched("receive", message):
                    self.receives[message] = [group.recv([buffer], peer, self.tag(message))]

    def exchange(self, step: int, leaving: int, data: Tensor, arriving: int) -> None:
        """Send `data`, which is segment `leaving`; segment `arriving` is received in the same step."""
        self.sent.append(data)
        self.ring.traffic.bytes_wire += data.nbytes
        self.launch((step, leaving), data, (step, arriving))

    def launch(self, leaving: tuple[int, int], data: Tensor, arriving: tuple[int, int]) -> None:
        if data.numel():
            with self.watched("send", leaving):
                self.sends[leaving] = [self.ring.group.send([data], self.ring.successor, self.tag(leaving))]

    def receive(self, step: int, segment: int) -> Tensor:
        """Wait for the segment that was received in that step."""
        message = step, segment
        self.wait("receive", message, self.receives.pop(message, []))
        return self.buffers[message]

    def finish(self) -> None:
        """Wait until everything is sent."""
        for message, works in self.sends.items():
            self.wait("send", message, works)

    def tag(self, message: tuple[int, int]) -> int:
        step, segment = message
        return (self.first_tag + step * len(self.collective.numels) + segment) % (1 << 31)

    def wait(self, action: str, message: tuple[int, int], works: list[Any]) -> None:
        with self.watched(action, message):
            for work in works:
                if self.collective.device.type == "cpu":
                    work.wait(datetime.timedelta(seconds=self.ring.timeout))
                else:
                    work.wait()  # blocks the current stream only; with a timeout it would block the host

    @contextlib.contextmanager
    def watched(self, action: str, message: tuple[int, int]) -> Iterator[None]:
        """Add the peer, the segment and the time waited to the text of a communication error."""
        begin = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            ring, seconds = self.ring, time.monotonic() - begin
            peer = f"from rank {ring.predecessor}" if action == "receive" else f"to rank {ring.successor}"
            # The reason in "[/path/of/torch/file.cc:line] reason. Advice."
            reason = re.sub(r"^\[\S*\] ", "", " ".join(str(error).split())).partition(". ")[0]
            raise RingError(
                f"ring of {ring.size} ranks, rank {ring.rank}: could not {action} segment {message[1]} of "
                f"{len(self.collective.numels)} {peer}, waited {seconds:.1f} s of {ring.timeout:g} ({reason}); see "
                "what became of that rank, and whether it ran the same sum, and restart the job"
            ) from error


class _LockstepWire(_Wire):
    """Posts each receive together with a send: with NCCL, two neighbours that both send first would deadlock."""

    def start(self) -> None:
        pass

    def launch(self, leaving: tuple[int, int], data: Tensor, arriving: tuple[int, int]) -> None:
        ring, buffer = self.ring, self.buffers[arriving]
        with self.watched("receive", arriving):
            operations = [
                dist.P2POp(operation, tensor, dist.get_global_rank(ring.group, peer), ring.group, self.tag(message))
                for operation, tensor, peer, message in (
                    (dist.isend, data, ring.successor, leaving),
                    (dist.irecv, buffer, ring.predecessor, arriving),
                )
                if tensor.numel()
            ]
            if operations:
                # The group's stream starts after what is queued on the current one: the buffer's last readers are done.
                # With NCCL, one work stands for both: who waits for what arrives waits for what leaves.
                works = dist.batch_isend_irecv(operations)
                (self.receives if buffer.numel() else self.sends)[arriving if buffer.numel() else leaving] = works
