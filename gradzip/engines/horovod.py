"""Collectives on stock Horovod."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import horovod.torch as hvd
import torch
import torch.distributed as dist
from horovod.common import process_sets
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops
from torch import Tensor

from ..collectives import AllToAll, Broadcast, Collective, Gather, Mean, RingSum, Scope, ToHost, split_equally
from ..collectives.cost import JOINED
from ..collectives.engine import Engine, Pending, PendingCopy
from ..collectives.traffic import Traffic
from ..memory.streams import use_on_current_stream
from .horovod_group import group_from_horovod
from .ring import Ring, RingError

# Types that Horovod's collectives support: of numbers, and of bytes.
_DTYPES = (torch.float16, torch.float32, torch.float64, torch.uint8)

_MOST_COUNT = 2**31 - 1  # Horovod counts in 32 bits, and wraps around if there are more

_SECONDS_TO_POLL = 2e-5
_SECONDS_TO_CHECK = 1.0  # whether Horovod has shut down


class HorovodEngine(Engine):
    """Runs collectives over a Horovod process set.

    On a device, Horovod starts a transfer after an event that it records on the current stream. It keeps the tensors
    until `hvd.synchronize`, where the host waits for the end of the transfer.

    Horovod matches collectives by their slots. A RingSum runs on a process group of its own, which matches operations
    by their order. On a device, and if torch has no gloo, it is one all-reduce.
    """

    bucket_nbytes = JOINED["horovod"]["bucket_nbytes"]  # until the front end has agreed on another
    fusion_nbytes = JOINED["horovod"]["fusion_nbytes"]  # unless HOROVOD_FUSION_THRESHOLD says otherwise

    def __init__(self, process_set: Any, traffic: Traffic) -> None:
        self.process_set = process_set
        self.rank, self.size = process_set.rank(), process_set.size()
        self.traffic = traffic
        self._handles = mpi_ops._handle_map

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(self.process_set.ranks or range(self.size))

    @property
    def is_stale(self) -> bool:
        """Whether Horovod was initialized again, maybe with other ranks. Its map of handles is new then."""
        return mpi_ops._handle_map is not self._handles

    @cached_property
    def ring(self) -> Ring:
        """The ring for RingSums. All ranks create it when they wait for the first one."""
        return Ring(group_from_horovod(self.process_set), traffic=self.traffic)

    def allgather_bytes(self, data: bytes, slot: str) -> list[bytes]:
        """data: a line, with its line feed."""
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        handle = hvd.allgather_async(tensor, name=slot, process_set=self.process_set)
        _wait(handle)
        return bytes(hvd.synchronize(handle).tolist()).splitlines()

    def accepted(self, tensor: Tensor) -> Tensor:
        """Convert a tensor to what Horovod accepts: contiguous, and bfloat16 to float32."""
        if tensor.is_floating_point() and tensor.dtype not in _DTYPES:
            tensor = tensor.float()
        return tensor.contiguous()

    def place(self) -> tuple[int, int]:
        return hvd.local_rank(), hvd.local_size()

    def split(self, groups: Mapping[Scope, Sequence[Sequence[int]]]) -> Mapping[Scope, Engine]:
        members, engines = self.members, {}
        ranks = {scope: [[members[i] for i in group] for group in groups[scope]] for scope in groups}
        sets = _process_sets([group for of_scope in ranks.values() for group in of_scope], self.size == hvd.size())
        for scope, of_scope in ranks.items():
            own = next(s for s in sets if s.included() and s.ranks in of_scope)
            engines[scope] = HorovodEngine(own, self.traffic)
            engines[scope].scope = scope
        return engines

    def launch(self, collective: Collective, slot: str) -> Pending:
        """`Engine.launch`.

        Raises:
            ValueError: elements, or bytes of payloads, are more than Horovod can count. No rank has started it, unless
                payloads of different lengths are close to that.
        """
        if collective.scope != "all":
            return self.launch_scoped(collective, slot)
        if isinstance(collective, ToHost):
            return PendingCopy(collective)
        if isinstance(collective, RingSum):
            if collective.device.type == "cpu" and dist.is_available() and dist.is_gloo_available():
                return _Pending(self, collective, None)
            # Stock Horovod has no point-to-point messages: one all-reduce.
            encoded = [collective.encode(i).reshape(-1) for i in range(len(collective.numels))]
            none = torch.empty(0, dtype=collective.dtype, device=collective.device)
            sent = torch.cat([*encoded, none])
        elif isinstance(collective, Mean):
            sent = collective.addend(self.size)
        else:
            sent = collective.tensor
        tensor = sent if sent.dtype in _DTYPES and sent.is_contiguous() else self.accepted(sent)
        most = tensor.numel() * self.size  # that Horovod might count
        if most > _MOST_COUNT and (count := _counted(collective, tensor, self.size)) > _MOST_COUNT:
            unit = "bytes" if isinstance(collective, (Gather, AllToAll)) else "elements"
            raise ValueError(
                f"HorovodEngine: got {count} {unit} in one {type(collective).__name__} of {self.size} ranks, expected "
                f"at most {_MOST_COUNT}, which is as far as Horovod counts: make buckets smaller "
                "(gradzip.horovod.bucketed), compress more, or use DDP, which has no such limit"
            )
        self.traffic.count(tensor.nbytes, self.wire_shares[type(collective)], self.scope)
        if isinstance(collective, Gather):
            handle = hvd.allgather_async(tensor, name=slot, process_set=self.process_set)
        elif isinstance(collective, AllToAll):
            splits = torch.tensor(collective.nbytes, dtype=torch.int32, device="cpu")
            handle = hvd.alltoall_async(tensor, splits, name=slot, process_set=self.process_set)
        elif isinstance(collective, Broadcast):
            root = self.process_set.ranks[0]
            handle = hvd.broadcast_async(tensor, root, name=slot, process_set=self.process_set)
        else:
            sums = isinstance(collective, RingSum) or sent.dtype == torch.float16  # `addend` has divided float16
            op = hvd.Sum if sums else hvd.Average
            handle = hvd.allreduce_async_(tensor, name=slot, op=op, process_set=self.process_set)
        return _Pending(self, collective, handle)


def _process_sets(groups: list[list[int]], add: bool) -> list[Any]:
    """The process sets of these groups of ranks.

    Args:
        add: whether to add those that do not exist, which all ranks of the job must do at the same time.

    Raises:
        ValueError: some do not exist, and cannot be added.
    """
    sets = [hvd.ProcessSet(ranks) for ranks in groups]
    known = {tuple(ranks): i for i, ranks in process_sets._basics._get_process_set_ids_and_ranks().items()}
    for one in sets:
        one.process_set_id = known.get(tuple(one.ranks))
    missing = [one for one in sets if one.process_set_id is None]
    what = f"HorovodEngine: there are no process sets of the ranks {', '.join(str(one.ranks) for one in missing)}"
    if missing and not add:
        raise ValueError(
            f"{what}, which only all ranks of the job together can add; pass them to hvd.init(process_sets=...), or "
            "call hvd.add_process_set for each of them on all ranks before the first step"
        )
    try:
        for one in missing:
            hvd.add_process_set(one)
    except ValueError as error:
        raise ValueError(
            f"{what} ({error}); set HOROVOD_DYNAMIC_PROCESS_SETS=1 on all ranks, or pass them to "
            "hvd.init(process_sets=...)"
        ) from None
    return sets


def _counted(collective: Collective, tensor: Tensor, size: int) -> int:
    """What Horovod counts of a collective of so many ranks that sends this tensor.

    Bytes of all ranks in a gather, of one if NCCL gathers equal lengths; bytes of a part in an all-to-all; elements in
    a reduction on a CPU.
    """
    if isinstance(collective, Gather):
        return tensor.numel() * (1 if tensor.is_cuda and collective.same_length else size)
    if isinstance(collective, AllToAll):
        return max(collective.nbytes)
    return 0 if tensor.is_cuda else tensor.numel()


def _wait(handle: int) -> None:
    """Wait for the end of an operation, which `hvd.synchronize` returns.

    Horovod's enqueueing functions look whether it has shut down before they take the lock of its queue. When it shuts
    down in between, because another rank has died, nobody will run the operation or report its failure, and
    `hvd.synchronize` waits for ever.

    Raises:
        HorovodInternalError: Horovod has shut down, and has lost the operation.
    """
    next_check = time.monotonic() + _SECONDS_TO_CHECK
    while not hvd.poll(handle):
        time.sleep(_SECONDS_TO_POLL)  # leaves the core to the threads that communicate
        if time.monotonic() > next_check:
            if has_shut_down() and not hvd.poll(handle):
                raise HorovodInternalError("Horovod has shut down: another rank has failed")
            next_check += _SECONDS_TO_CHECK


def has_shut_down() -> bool:
    """Whether Horovod has shut down. It fails what is queued first, and then closes its process sets."""
    try:
        process_sets._basics._get_process_set_ids_and_ranks()
    except ValueError:
        return True
    except RuntimeError:  # a thread of Horovod's is changing them
        pass
    return False


class _Pending(Pending):
    """A collective that Horovod runs. handle: None for a ring, which runs in `result`."""

    def __init__(self, engine: HorovodEngine, collective: Any, handle: int | None) -> None:
        self._engine = engine
        self._collective = collective
        self._handle = handle

    def result(self) -> Any:
        collective = self._collective
        if self._handle is None:
            try:
                return self._engine.ring.run(collective)
            except RingError as error:
                # As when one of Horovod's own collectives fails: elastic training resumes from there.
                raise HorovodInternalError(str(error)) from error
        if not hvd.poll(self._handle):
            _wait(self._handle)
        received = hvd.synchronize(self._handle)
        # What is gathered is in memory that a thread of Horovod's has allocated, on the device's default stream.
        if isinstance(collective, Gather):
            return collective.split_by_rank(use_on_current_stream(received), self._engine.size)
        if isinstance(collective, AllToAll):
            tensor, nbytes = received
            use_on_current_stream(tensor)
            if collective.same_length:
                return split_equally(tensor, collective.nbytes[0], self._engine.size)
            return list(tensor.split(nbytes.tolist()))
        if isinstance(collective, RingSum):
            for i, total in enumerate(received.to(collective.dtype).split_with_sizes(list(collective.numels))):
                collective.decode(i, total)
            return None
        return received.to(collective.tensor.dtype)
