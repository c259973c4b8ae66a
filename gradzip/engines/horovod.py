"""Collectives on stock Horovod."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch
import torch.distributed as dist
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops
from torch import Tensor

from ..collectives import AllToAll, Broadcast, Collective, Gather, RingSum, Traffic
from .ring import Ring, RingError, group_from_horovod

# What Horovod's all-reduce takes of the floating-point types.
_ALLREDUCE_DTYPES = (torch.float16, torch.float32, torch.float64)


class Pending(NamedTuple):
    """A collective on its way."""

    collective: Collective
    handle: int | None  # None: it runs while it is waited for


class HorovodEngine:
    """Runs collectives over a Horovod process set, and counts the bytes this rank sends.

    Collectives are matched by their names; a RingSum, which runs around a group of its own while it is waited for, by
    its order among them. Where torch has no gloo, and on a device, it is one all-reduce.
    """

    def __init__(self, process_set: Any, traffic: Traffic) -> None:
        self.process_set = process_set
        self.traffic = traffic
        self._handles = mpi_ops._handle_map

    @property
    def is_over(self) -> bool:
        """Whether Horovod was started anew since, maybe with other ranks: it has a new map of handles then."""
        return mpi_ops._handle_map is not self._handles

    @property
    def size(self) -> int:
        return self.process_set.size()

    @property
    def rank(self) -> int:
        return self.process_set.rank()

    @cached_property
    def ring(self) -> Ring:
        """For sums around a ring. Made when the first one is waited for, by all ranks."""
        return Ring(group_from_horovod(self.process_set), traffic=self.traffic)

    def share(self, line: bytes, name: str) -> list[bytes]:
        """Every rank's line of text, in rank order. Waits for all ranks."""
        tensor = torch.frombuffer(bytearray(line), dtype=torch.uint8)
        gathered = hvd.allgather(tensor, name=name, process_set=self.process_set)
        return bytes(gathered.tolist()).splitlines()

    def wire(self, tensor: Tensor) -> Tensor:
        """The tensor as Horovod takes it: contiguous, of a type it can add up (bfloat16 travels as float32)."""
        if tensor.is_floating_point() and tensor.dtype not in _ALLREDUCE_DTYPES:
            tensor = tensor.float()
        tensor = tensor.contiguous()
        self.traffic.bytes_sent += tensor.numel() * tensor.element_size()
        return tensor

    def launch(self, collective: Collective, name: str) -> Pending:
        """Starts a collective; every rank must give it the same name."""
        if isinstance(collective, RingSum):
            if collective.device.type == "cpu" and dist.is_available() and dist.is_gloo_available():
                return Pending(collective, None)
            return self.launch_as_one(collective, name)
        tensor = self.wire(collective.tensor)
        if isinstance(collective, Gather):
            return Pending(collective, hvd.allgather_async(tensor, name=name, process_set=self.process_set))
        if isinstance(collective, AllToAll):
            splits = torch.tensor(collective.nbytes, dtype=torch.int32, device="cpu")
            return Pending(collective, hvd.alltoall_async(tensor, splits, name=name, process_set=self.process_set))
        if isinstance(collective, Broadcast):
            root = self.process_set.ranks[0]
            return Pending(collective, hvd.broadcast_async(tensor, root, name=name, process_set=self.process_set))
        handle = hvd.allreduce_async_(tensor, name=name, op=hvd.Average, process_set=self.process_set)
        return Pending(collective, handle)

    def launch_as_one(self, ring: RingSum, name: str) -> Pending:
        """The same sum as one all-reduce: stock Horovod sends nothing from one rank to another."""
        if ring.merge is not None:
            raise ValueError(
                f"{name}: got a RingSum that merges at every hop, expected one that Horovod can add up; such rings "
                "need tensors on the CPU, and a torch with gloo"
            )
        encoded = [ring.encode(i).reshape(-1) for i in range(len(ring.numels))]
        tensor = self.wire(torch.cat(encoded) if encoded else torch.empty(0, dtype=ring.dtype, device=ring.device))
        handle = hvd.allreduce_async_(tensor, name=name, op=hvd.Sum, process_set=self.process_set)
        return Pending(ring, handle)

    def _rotate(self, collective: Any) -> None:
        ring = self.ring
        try:
            ring.run(collective)
        except RingError as error:
            # As when a collective of Horovod's own fails: elastic training goes on from there.
            raise HorovodInternalError(str(error)) from error

    def wait(self, pending: Pending) -> Any:
        """The answer of a started collective."""
        if pending.handle is None:
            return self._rotate(pending.collective)
        result = hvd.synchronize(pending.handle)
        if isinstance(pending.collective, Gather):
            return pending.collective.of_ranks(result, self.size)
        if isinstance(pending.collective, AllToAll):
            received, nbytes = result
            return list(received.split(nbytes.tolist()))
        if isinstance(pending.collective, RingSum):
            ring = pending.collective
            for i, total in enumerate(result.to(ring.dtype).split(list(ring.numels))):
                ring.decode(i, total)
            return None
        return result.to(pending.collective.tensor.dtype)
