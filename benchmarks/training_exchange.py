"""How the variants of benchmarks/training.py average gradients: groups of ranks, and exchanges over them."""

from __future__ import annotations

import collections
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import gradzip
from gradzip.engines.base import Engine

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from models import BasicBlock, DecoderBlock

BLOCKS = (BasicBlock, DecoderBlock)  # what FSDP2 gathers and reduces as one


class Group(ABC):
    """All ranks of a job, for as long as the job runs."""

    @abstractmethod
    def gather(self, row: Tensor) -> Tensor:
        """Gather the rows (n) of all ranks: (ranks, n). Blocks until all ranks have called it."""

    @abstractmethod
    def engine(self) -> Engine:
        """An engine over the group, to measure its link."""

    @abstractmethod
    def end(self) -> None:
        """Leave the group. Called last."""


class HorovodGroup(Group):
    def __init__(self) -> None:
        import horovod.torch as hvd

        hvd.init()
        self.hvd = hvd

    def gather(self, row: Tensor) -> Tensor:
        return self.hvd.allgather(row[None], name="benchmark")

    def engine(self) -> Engine:
        from gradzip.engines.horovod import HorovodEngine

        return HorovodEngine(self.hvd.global_process_set, gradzip.Traffic())

    def end(self) -> None:
        self.hvd.shutdown()


class TorchGroup(Group):
    def __init__(self) -> None:
        dist.init_process_group("gloo")

    def gather(self, row: Tensor) -> Tensor:
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        return torch.stack(rows)

    def engine(self) -> Engine:
        from gradzip.engines.torch import TorchEngine

        return TorchEngine(dist.group.WORLD, gradzip.Traffic(), torch.device("cpu"))

    def end(self) -> None:
        dist.destroy_process_group()


GROUPS: dict[str, Callable[[], Group]] = {"horovod": HorovodGroup, "ddp": TorchGroup}


class Exchange(ABC):
    """How gradients are averaged: by a front end, with or without compression.

    Args:
        compressor: of gradzip; None for the front end's own exchange.
        itemsize: bytes for each element in the front end's own exchange.
    """

    def __init__(self, compressor: gradzip.Compressor | None = None, itemsize: float = 4) -> None:
        self.compressor = compressor
        self.itemsize = itemsize

    @abstractmethod
    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Make the model and the optimizer average gradients. Returns what to train in place of them."""

    def parameters(self, network: nn.Module) -> list[Tensor]:
        """The network's parameters, whole, the same number on all ranks. All ranks must call it."""
        return [p.detach() for p in network.parameters()]

    def sent(self) -> int | None:
        """Payload bytes that this rank has sent so far; None if nothing counts them."""
        return self.compressor.traffic.bytes_sent if self.compressor else None

    def seconds(self) -> float:
        """Seconds of compression so far; 0 where nothing counts them."""
        return self.compressor.traffic.seconds if self.compressor else 0.0

    def settled(self) -> bool:
        """Whether the method is chosen. The same on all ranks."""
        return not isinstance(self.compressor, gradzip.Auto) or self.compressor.decided

    def choice(self) -> dict[str, int] | None:
        """The methods that Auto has chosen, with the number of parameters of each."""
        if not isinstance(self.compressor, gradzip.Auto):
            return None
        return dict(collections.Counter(self.compressor.choice.values()))


class Horovod(Exchange):
    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        import horovod.torch as hvd

        own = hvd.Compression.fp16 if self.itemsize == 2 else hvd.Compression.none
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        names = model.named_parameters()
        return model, hvd.DistributedOptimizer(optimizer, names, compression=self.compressor or own)


class DDP(Exchange):
    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        model = nn.parallel.DistributedDataParallel(model)
        self.hook(model)
        return model, optimizer

    def hook(self, model: nn.parallel.DistributedDataParallel) -> None:
        if self.compressor:
            from gradzip import ddp

            state = ddp.HookState(self.compressor, named_parameters=model.module.named_parameters())
            model.register_comm_hook(state, ddp.hook)
        elif self.itemsize == 2:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            model.register_comm_hook(None, fp16_compress_hook)


class PowerSGDHook(DDP):
    """PyTorch's powerSGD_hook at rank 4, from step 2, the first that it allows (default: 1000)."""

    def hook(self, model: nn.parallel.DistributedDataParallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        self.state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(self.state, powerSGD_hook.powerSGD_hook)

    def sent(self) -> int | None:
        return 4 * self.state.compression_stats()[2]


class FSDP(Exchange):
    """FSDP2 with shards within a host, and replicas on the others. On one host, each half of the ranks is a replica.

    Without a method, FSDP2 averages over the replicas itself.
    """

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        ranks, local = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
        shards = local if local < ranks else max(1, ranks // 2)
        mesh = init_device_mesh("cpu", (ranks // shards, shards), mesh_dim_names=("replicate", "shard"))
        names = {parameter: name for name, parameter in model.named_parameters()}
        for module in [m for m in model.modules() if isinstance(m, BLOCKS)]:
            fully_shard(module, mesh=mesh["shard"] if self.compressor else mesh)
        fully_shard(model, mesh=mesh["shard"] if self.compressor else mesh)
        for group in optimizer.param_groups:
            group["params"] = [model.get_parameter(names[parameter]) for parameter in group["params"]]
        self.itemsize = 4 / shards  # of whole parameters, for FSDP2's own averages
        if self.compressor:
            gradzip.fsdp.compress(model, self.compressor, mesh["replicate"].get_group())
        return model, optimizer

    def parameters(self, network: nn.Module) -> list[Tensor]:
        return [p.detach().full_tensor() for p in network.parameters()]


class NoExchange(Exchange):
    """No exchange of gradients."""

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        return model, optimizer


_STOCK: dict[str, Callable[[], Exchange]] = {
    "compute": lambda: NoExchange(itemsize=0),
    "horovod": Horovod,
    "horovod-fp16": lambda: Horovod(itemsize=2),
    "ddp": DDP,
    "ddp-fp16": lambda: DDP(itemsize=2),
    "ddp-powersgd": PowerSGDHook,
    "fsdp": FSDP,
}


def exchange(variant: str) -> Exchange:
    """The exchange of a variant: a stock one, horovod:SPEC, ddp:SPEC or fsdp:SPEC."""
    if variant in _STOCK:
        return _STOCK[variant]()
    front, _, spec = variant.partition(":")
    return {"horovod": Horovod, "ddp": DDP, "fsdp": FSDP}[front](gradzip.parse(spec))
