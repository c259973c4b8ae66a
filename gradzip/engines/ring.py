"""`RingSum` around a torch process group: one segment is compressed while others are on the wire."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import secrets
import socket
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..collectives import RingSum, Traffic
from ..compressor import GatherCompressor, Key, Workspace


class RingError(RuntimeError):
    """A neighbour in the ring died, or was not heard of in time. The process group is of no more use."""


class Ring:
    """Runs `RingSum`s over a group: Yu et al., GradiVeQ, NeurIPS 2018, Algorithm 1.

    group: a torch.distributed.ProcessGroup, gloo for tensors on the CPU and NCCL for those on a device; or what
    `group_from_horovod` made. All ranks run the same sums in the same order: nothing is matched by name. Ranks that run
    sums of different segments wait for each other until the timeout.
    timeout: seconds to wait for one segment before `RingError`; by default half an hour, as process groups have it, for
    a rank may save a checkpoint first. On a device the host waits for nothing, and the group's own timeout counts.
    lockstep: whether a receive begins only with a send, the two as one operation. NCCL needs that, and it is the
    default on a device. Otherwise all receives are announced at the beginning: no sender has to ask first, behind
    other data on a slow wire.

    Segment i starts at rank i mod n and is added up once, in the order of the ring; that sum is forwarded, so all ranks
    decode the same bits. A rank sends, and receives, 2 (n - 1) / n of the segments' bytes.
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
        self._wreck: _Wire | None = None

    def run(self, ring: RingSum) -> None:
        """Carries out the sum; returns when all segments are decoded here and sent on. RingError."""
        if self._wreck is not None:
            raise RingError("this ring has failed before: make a new process group, or restart the job")
        ring = _filled_up(ring, self.size)
        lockstep = ring.device.type != "cpu" if self.lockstep is None else self.lockstep
        wire = (_LockstepWire if lockstep else _Wire)(self, ring)
        try:
            self._run(ring, wire)
            wire.finish()
        except BaseException:
            self._wreck = wire  # whose memory may still be sent from and received into
            raise

    def _run(self, ring: RingSum, wire: _Wire) -> None:
        n = self.size
        own: dict[int, Tensor] = {}  # compressed while what it is added to is on the wire
        # At step k a rank deals with the segments whose trips began k ranks before it. They come as partial sums up to
        # step n - 1, where this rank's is the last to be added, and complete from then on.
        for step in range(2 * n - 1):
            for first in range(0, len(ring.numels), n):
                leaving, arriving = first + (self.rank - step) % n, first + (self.rank - step - 1) % n
                if step == 0:
                    data = _checked(ring, leaving, ring.encode(leaving))
                else:
                    data = wire.receive(step - 1, leaving)
                    if step < n:
                        data = _checked(ring, leaving, ring.add(leaving, data, own.pop(leaving, None)))
                if step < 2 * n - 2:
                    wire.exchange(step, leaving, data, arriving)
                # While others are on the wire:
                if step >= n - 1:
                    ring.decode(leaving, data)
                elif ring.merge is None:
                    own[arriving] = _checked(ring, arriving, ring.encode(arriving))


def _filled_up(ring: RingSum, size: int) -> RingSum:
    """The same sum, with empty segments up to a multiple of `size`: equally many for each rank."""
    count = len(ring.numels)
    missing = -count % size
    if not missing:
        return ring
    empty = torch.empty(0, dtype=ring.dtype, device=ring.device)
    merge = ring.merge
    return replace(
        ring,
        numels=ring.numels + (0,) * missing,
        encode=lambda i: ring.encode(i) if i < count else empty,
        decode=lambda i, total: ring.decode(i, total) if i < count else None,
        merge=merge and (lambda i, partial: merge(i, partial) if i < count else partial),
    )


def _checked(ring: RingSum, segment: int, data: Tensor) -> Tensor:
    """A segment as it is sent: flat."""
    numel = ring.numels[segment]
    if data.numel() != numel or data.dtype != ring.dtype or not data.is_contiguous():
        raise ValueError(
            f"RingSum: got {data.numel()} elements of {data.dtype}{'' if data.is_contiguous() else ', not contiguous,'}"
            f" for segment {segment}, expected {numel} of {ring.dtype}, contiguous"
        )
    return data.view(-1)


class _Wire:
    """What one sum sends to the successor and receives from the predecessor. A message is a (step, segment)."""

    def __init__(self, ring: Ring, what: RingSum) -> None:
        self.ring = ring
        self.what = what
        # Messages of different sums never match: gloo would take a shorter one, and abort the process for a longer one.
        self.first_tag = zlib.crc32(f"{what.numels}{what.dtype}".encode())
        n, count = ring.size, len(what.numels)
        coming = [
            (step, first + (ring.rank - step - 1) % n) for step in range(2 * n - 2) for first in range(0, count, n)
        ]
        numels = [what.numels[segment] for _, segment in coming]
        memory = ring.workspace.empty(f"received {what.dtype}", (sum(numels),), what.dtype, what.device)
        self.buffers = dict(zip(coming, memory.split(numels)))
        self.sent: list[Tensor] = []  # kept until the end
        self.receives: dict[tuple[int, int], list[Any]] = {}  # what has to be waited for, by message
        self.sends: dict[tuple[int, int], list[Any]] = {}
        self.start()

    def start(self) -> None:
        """Announces all receives."""
        group, peer = self.ring.group, self.ring.predecessor
        for message, buffer in self.buffers.items():
            if buffer.numel():
                with self.watched("receive", message):
                    self.receives[message] = [group.recv([buffer], peer, self.tag(message))]

    def exchange(self, step: int, leaving: int, data: Tensor, arriving: int) -> None:
        """Sends `data` of the segment `leaving`; in the same step `arriving` is on its way here."""
        self.sent.append(data)
        self.ring.traffic.bytes_sent += data.numel() * data.element_size()
        self.launch((step, leaving), data, (step, arriving))

    def launch(self, leaving: tuple[int, int], data: Tensor, arriving: tuple[int, int]) -> None:
        if data.numel():
            with self.watched("send", leaving):
                self.sends[leaving] = [self.ring.group.send([data], self.ring.successor, self.tag(leaving))]

    def receive(self, step: int, segment: int) -> Tensor:
        """The segment that was on its way here in that step."""
        message = step, segment
        self.wait("receive", message, self.receives.pop(message, []))
        return self.buffers[message]

    def finish(self) -> None:
        """Waits until everything is sent."""
        for message, works in self.sends.items():
            self.wait("send", message, works)

    def tag(self, message: tuple[int, int]) -> int:
        step, segment = message
        return (self.first_tag + step * len(self.what.numels) + segment) % (1 << 31)

    def wait(self, action: str, message: tuple[int, int], works: list[Any]) -> None:
        with self.watched(action, message):
            for work in works:
                if self.what.device.type == "cpu":
                    work.wait(datetime.timedelta(seconds=self.ring.timeout))
                else:
                    work.wait()  # only the current stream does: with a timeout the host would

    @contextlib.contextmanager
    def watched(self, action: str, message: tuple[int, int]) -> Iterator[None]:
        """Says of an error in communication who was waited for, with what and how long."""
        begin = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            ring, seconds = self.ring, time.monotonic() - begin
            peer = f"from rank {ring.predecessor}" if action == "receive" else f"to rank {ring.successor}"
            # Of "[/path/of/torch/file.cc:line] reason. Advice.", the reason.
            reason = re.sub(r"^\[\S*\] ", "", " ".join(str(error).split())).partition(". ")[0]
            raise RingError(
                f"ring of {ring.size} ranks, rank {ring.rank}: could not {action} segment {message[1]} of "
                f"{len(self.what.numels)} {peer}, waited {seconds:.1f} s of {ring.timeout:g} ({reason}); see what "
                "became of that rank, and whether it ran the same sum, and restart the job"
            ) from error


class _LockstepWire(_Wire):
    """A receive begins with a send. Two neighbours of which each sends first would wait for each other, with NCCL."""

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
                works = dist.batch_isend_irecv(operations)
                (self.receives if buffer.numel() else self.sends)[arriving if buffer.numel() else leaving] = works


def codec_ring(codec: GatherCompressor, x: Tensor, segments: Sequence[slice], key: Key) -> RingSum:
    """The RingSum of a codec whose payloads cannot be added: decode, add and encode at every hop.

    x: float32, contiguous; its elements, flat, are replaced by the sums over the ranks. segments: `ring_segments` of
    them. The codec's payloads must have one length, which the number of elements decides (`QSGD(coding="packed")`), as
    peers have to know it. Each of the n encodings of an element adds its error. key: the draws of a rank at a segment
    are those of `name[segment]`. An inf or a NaN makes the segment NaN on all ranks.
    """
    flat = x.view(-1)
    lengths = {s.stop - s.start for s in segments}
    nbytes = {numel: codec.encode(flat.new_zeros(numel), key).numel() for numel in lengths}

    def packed(i: int, values: Tensor) -> Tensor:
        payload = codec.encode(values, key._replace(name=f"{key.name}[{i}]"))
        missing = nbytes[values.numel()] - payload.numel()
        if missing < 0:
            raise ValueError(
                f"codec_ring: got a payload of {payload.numel()} bytes for {values.numel()} elements, expected "
                f"{nbytes[values.numel()]} as for zeros; take a codec of one length, such as QSGD(coding='packed')"
            )
        return torch.nn.functional.pad(payload, (0, missing)) if missing else payload

    def unpacked(i: int, payload: Tensor) -> Tensor:
        return codec.decode([ops.first_payload(payload)], segments[i].stop - segments[i].start)

    def decode(i: int, total: Tensor) -> None:
        flat[segments[i]] = unpacked(i, total)

    return RingSum(
        numels=tuple(nbytes[s.stop - s.start] for s in segments),
        encode=lambda i: packed(i, flat[segments[i]]),
        decode=decode,
        merge=lambda i, partial: packed(i, unpacked(i, partial).add_(flat[segments[i]])),
        dtype=torch.uint8,
        device=x.device,
    )


def group_from_horovod(process_set: Any = None, timeout: float = 60.0) -> Any:
    """A gloo process group of a Horovod process set's ranks (default: all), beside Horovod and torch.distributed.

    Collective: all its ranks call it. Rank 0 listens on a free port and tells its addresses; the first that all ranks
    reach is taken, and each rank is reached where it reached rank 0 from. On rank 0 the environment says which come
    first: those of the interfaces in GLOO_SOCKET_IFNAME, or else of HOROVOD_GLOO_IFACE, which is what `horovodrun
    --network-interface` sets; then the loopback. timeout: seconds for the group to form, and for operations that are
    given none.
    """
    import horovod.torch as hvd
    import psutil  # Horovod depends on it

    members = hvd.global_process_set if process_set is None else process_set
    rank, size, name = members.rank(), members.size(), "gradzip.ring"
    patience = datetime.timedelta(seconds=timeout)
    token = secrets.token_hex(16)
    store: Any = None
    told: Any = None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience)
        store.set("token", token)
        wanted = (os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("HOROVOD_GLOO_IFACE", "")).split(",")
        everywhere = [
            (interface not in wanted, not a.address.startswith("127."), a.address)
            for interface, of_one in psutil.net_if_addrs().items()
            for a in of_one
            if a.family == socket.AF_INET
        ]
        told = token, store.port, [address for *_, address in sorted(everywhere)]
    root = members.ranks[0]
    token, port, addresses = hvd.broadcast_object(told, root, name=f"{name}.addresses", process_set=members)
    mine: tuple[str, Any] | None = None
    reached = []
    for address in addresses:
        mine = (address, store) if rank == 0 else _reach(address, port, token, patience)
        if mine is not None:
            reached.append(address)
        ok = torch.tensor([float(mine is not None)], device="cpu")
        if hvd.allreduce(ok, name=f"{name}.reached", op=hvd.Min, process_set=members).item():
            break
    else:
        raise RingError(
            f"group_from_horovod: got no address of rank 0 that all {size} ranks reach among {addresses} (rank {rank} "
            f"reaches {reached}); open TCP between the hosts"
        )
    assert mine is not None
    here, store = mine
    gloo: Any = dist.ProcessGroupGloo  # of which torch's type stubs know little
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=here)]
    options._timeout = patience
    return gloo(dist.PrefixStore(name, store), rank, size, options)


def _reach(address: str, port: int, token: str, patience: datetime.timedelta) -> tuple[str, Any] | None:
    """This host's address as seen from `address`, and the store with that token, if it is there; else None."""
    try:
        with socket.create_connection((address, port), timeout=3) as connection:
            here = connection.getsockname()[0]
        # Something is there, and soon tells what; but torch may wait seconds for the names of hosts, which it logs.
        # Another host has a 127.0.0.1 of its own, where something else may listen.
        store = dist.TCPStore(address, port, is_master=False, timeout=patience)
        return (here, store) if store.get("token").decode() == token else None
    except (OSError, RuntimeError):
        return None
