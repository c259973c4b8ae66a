"""Check every few steps that all ranks still have the same parameters."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..averaging.handshake import parameters_by_name
from ..collectives import Broadcast
from ..collectives.engine import Engine
from ..collectives.traffic import Traffic
from ..engines import horovod_engine, torch_engine


class ReplicaMonitor:
    """Compares the parameters of all ranks every few steps, or broadcasts those of rank 0.

        monitor = gradzip.ReplicaMonitor(model.named_parameters(), check_every=100)
        ...
        optimizer.step()
        monitor.step()

    Averages of compressed gradients are bit-identical on all ranks. If parameters differ anyway, something else
    differs between ranks: random numbers, a step that one rank skipped, a nondeterministic optimizer, faulty memory.

    All ranks must compare in the same step: a worker that joins an elastic job has to copy `steps` from the others.

    Args:
        named_parameters: (name, tensor) pairs to compare: dense tensors of any type. They are compared bit for bit, so
            a NaN equals the same NaN. A difference in an optimizer's state shows in the parameters one step later.
            Buffers, such as BatchNorm's, differ between ranks as a rule; if they should not, pass
            `model.state_dict().items()`. The tensors are kept: load and move models in place.
        check_every: steps between comparisons; 0: never.
        broadcast_every: steps between broadcasts of rank 0's parameters, which Wang et al. (HPDC 2020, section 4) do
            every 10 iterations; 0: never.
        process_group: the torch.distributed group that averages gradients. Default: all ranks of Horovod, or of torch.
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
        self.parameters = parameters_by_name(named_parameters, "ReplicaMonitor")
        for name, parameter in self.parameters.items():
            if parameter.layout != torch.strided:
                raise ValueError(f"ReplicaMonitor: got {name!r} of {parameter.layout}, expected dense tensors")
        self.check_every = check_every
        self.broadcast_every = broadcast_every
        self.process_group = process_group
        self.steps = 0

    def step(self) -> None:
        """Call after each optimizer step, on all ranks. Raises RuntimeError, on all ranks, if replicas differ."""
        self.steps += 1
        if self.broadcast_every and self.steps % self.broadcast_every == 0:
            self.broadcast()
        if self.check_every and self.steps % self.check_every == 0:
            self.check()

    def check(self) -> None:
        """Compare a digest of each parameter. Raises RuntimeError that names the first difference and its rank."""
        mine = {name: _digest(parameter) for name, parameter in self.parameters.items()}
        first, *others = map(
            json.loads,
            engine_of_all(self.process_group).allgather_bytes(json.dumps(mine).encode() + b"\n", "gradzip.replicas"),
        )
        for rank, theirs in enumerate(others, start=1):
            different = [name for name in first if theirs.get(name) != first[name]]
            if different or len(theirs) != len(first):
                raise RuntimeError(
                    f"step {self.steps}: rank {rank} and rank 0 differ in {len(different)} of {len(first)} parameters"
                    f"{f', the first is {different[0]!r}' if different else ''}; look for what the ranks do "
                    "differently, or broadcast rank 0's with ReplicaMonitor(broadcast_every=...)"
                )

    @torch.no_grad()
    def broadcast(self) -> None:
        """Overwrite the parameters of all ranks with rank 0's."""
        engine = engine_of_all(self.process_group)
        for parameter in self.parameters.values():
            if parameter.numel():
                data = engine.run(Broadcast(_bytes(parameter)), "gradzip.parameter")
                parameter.copy_(data.view(parameter.dtype).view(parameter.shape))


def engine_of_all(process_group: Any = None) -> Engine:
    """An engine for all ranks: on Horovod if it is initialized and no process group is given, else on torch."""
    hvd = sys.modules.get("horovod.torch")
    if process_group is None and hvd is not None and hvd.is_initialized():
        return horovod_engine(hvd.global_process_set, Traffic())
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "ReplicaMonitor: got neither Horovod nor torch.distributed initialized; call hvd.init() or "
            "torch.distributed.init_process_group() first"
        )
    group: Any = process_group or dist.group.WORLD
    return torch_engine(group, Traffic(), torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu"))


def _bytes(parameter: Tensor) -> Tensor:
    """The memory of a parameter of any type: libraries can copy bytes of types that they cannot add."""
    return parameter.detach().contiguous().view(-1).view(torch.uint8)


def _digest(parameter: Tensor) -> str:
    data = _bytes(parameter).cpu().numpy().data if parameter.numel() else b""
    return hashlib.blake2b(data, digest_size=8).hexdigest()
