"""Whether replicas still are replicas, looked at every so many steps."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import agreement
from .collectives import Traffic


class ReplicaMonitor:
    """Compares all ranks' parameters every `check_every` steps; hands out rank 0's every `broadcast_every` steps, as
    Wang et al. (HPDC 2020, section 4) do every 10 iterations. 0: never.

        monitor = gradzip.ReplicaMonitor(model.named_parameters(), check_every=100)
        ...
        optimizer.step()
        monitor.step()

    Averages of compressed gradients are the same on all ranks, to the bit; parameters that differ anyway were treated
    differently: random numbers, a step that one rank skipped, an optimizer that is not deterministic, broken memory.

    named_parameters: (name, tensor) of what is compared: dense tensors of any type, to the bit, so that a NaN equals
    the same NaN. What differs in an optimizer's state shows in the parameters one step later. Buffers, as BatchNorm's,
    are of what each rank has seen; where they should be the same, give `model.state_dict().items()`. Tensors are kept:
    load and move models in place.
    process_group: of torch.distributed, where that averages gradients; otherwise all ranks of Horovod's or torch's.

    All ranks compare in the same step: a worker that joins an elastic job takes over `steps` from the others.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        *,
        check_every: int = 100,
        broadcast_every: int = 0,
        process_group: Any = None,
    ) -> None:
        for name, every in (("check_every", check_every), ("broadcast_every", broadcast_every)):
            if not (isinstance(every, int) and every >= 0):
                raise ValueError(f"ReplicaMonitor: got {name} = {every!r}, expected an integer >= 0")
        self.parameters = agreement.by_name(named_parameters, "ReplicaMonitor")
        for name, parameter in self.parameters.items():
            if parameter.layout != torch.strided:
                raise ValueError(f"ReplicaMonitor: got {name!r} of {parameter.layout}, expected dense tensors")
        self.check_every = check_every
        self.broadcast_every = broadcast_every
        self.process_group = process_group
        self.steps = 0

    def step(self) -> None:
        """After each step of the optimizer, on all ranks. RuntimeError, on all ranks, if replicas differ."""
        self.steps += 1
        if self.broadcast_every and self.steps % self.broadcast_every == 0:
            self.broadcast()
        if self.check_every and self.steps % self.check_every == 0:
            self.check()

    def check(self) -> None:
        """Compares a digest of each parameter. RuntimeError that names the first that differs, and whose it is."""
        mine = {name: _digest(parameter) for name, parameter in self.parameters.items()}
        first, *others = map(json.loads, _Peers(self.process_group).share(json.dumps(mine).encode() + b"\n"))
        for rank, theirs in enumerate(others, start=1):
            different = [name for name in first if theirs.get(name) != first[name]]
            if different or len(theirs) != len(first):
                raise RuntimeError(
                    f"step {self.steps}: rank {rank} and rank 0 differ in {len(different)} of {len(first)} parameters"
                    f"{f', the first is {different[0]!r}' if different else ''}; look for what the ranks do "
                    "differently, or hand out rank 0's with ReplicaMonitor(broadcast_every=...)"
                )

    @torch.no_grad()
    def broadcast(self) -> None:
        """Overwrites all ranks' parameters with rank 0's."""
        peers = _Peers(self.process_group)
        for parameter in self.parameters.values():
            if parameter.numel():
                data = _bytes(parameter)
                peers.broadcast(data)
                parameter.copy_(data.view(parameter.dtype).view(parameter.shape))


class _Peers:
    """All ranks, by whichever library connects them."""

    def __init__(self, process_group: Any) -> None:
        hvd = sys.modules.get("horovod.torch")
        self.hvd = hvd if process_group is None and hvd is not None and hvd.is_initialized() else None
        if self.hvd is None:
            if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
                raise RuntimeError(
                    "ReplicaMonitor: got neither Horovod nor torch.distributed initialized; call hvd.init() or "
                    "torch.distributed.init_process_group() first"
                )
            self.group: Any = process_group or torch.distributed.group.WORLD

    def share(self, line: bytes) -> list[bytes]:
        """Every rank's line of text, in rank order."""
        if self.hvd is not None:
            from .engines.horovod import HorovodEngine

            return HorovodEngine(self.hvd.global_process_set, Traffic()).share(line, "gradzip.replicas")
        from .engines.torch import TorchEngine

        device = "cuda" if torch.distributed.get_backend(self.group) == "nccl" else "cpu"
        return TorchEngine(self.group, Traffic()).share(line, torch.device(device))

    def broadcast(self, data: Tensor) -> None:
        """Overwrites it with rank 0's."""
        if self.hvd is not None:
            self.hvd.broadcast_(data, 0, name="gradzip.parameter")
        else:
            root = torch.distributed.get_global_rank(self.group, 0)
            torch.distributed.broadcast(data, root, group=self.group)


def _bytes(parameter: Tensor) -> Tensor:
    """Its memory, of whatever type: what libraries cannot add up they can still copy."""
    return parameter.detach().contiguous().view(-1).view(torch.uint8)


def _digest(parameter: Tensor) -> str:
    data = _bytes(parameter).cpu().numpy().data if parameter.numel() else b""
    return hashlib.blake2b(data, digest_size=8).hexdigest()
