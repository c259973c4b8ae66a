"""How the variants of benchmarks/training average gradients over the ranks."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

import gradzip
from benchmarks.common.local_steps import LocalSteps, local_steps
from gradzip.collectives.engine import Engine
from gradzip.engines.torch import TorchEngine
from models import BasicBlock, DecoderBlock

BLOCKS = (BasicBlock, DecoderBlock)  # what FSDP2 gathers and reduces as one


class Group(NamedTuple):
    """All ranks of a job, for as long as the job runs.

    Args:
        gather: gathers the rows (n) of all ranks: (ranks, n). Blocks until all ranks have called it.
        engine: over the group, to measure its link.
        end: leaves the group. Called last.
    """

    gather: Callable[[Tensor], Tensor]
    engine: Engine
    end: Callable[[], None]


def join_group(front: str) -> Group:
    """The group of a launcher's ranks: "horovod" or "ddp"."""
    if front == "horovod":
        import horovod.torch as hvd

        from gradzip.engines.horovod import HorovodEngine

        hvd.init()
        engine = HorovodEngine(hvd.global_process_set, gradzip.Traffic())
        return Group(lambda row: hvd.allgather(row[None], name="benchmark"), engine, hvd.shutdown)
    dist.init_process_group("gloo")

    def gather(row: Tensor) -> Tensor:
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        return torch.stack(rows)

    engine = TorchEngine(dist.group.WORLD, gradzip.Traffic(), torch.device("cpu"))
    return Group(gather, engine, dist.destroy_process_group)


class Averager:
    """A front end that averages the gradients of a model, with or without compression. This one does not average.

    Args:
        compressor: of gradzip; None for the front end's own averages.
        itemsize: bytes for each element of the front end's own averages.
    """

    every = 1  # steps between two exchanges
    prefix = ""  # of the parameters' names under Horovod, which knows operations by them: others in a process differ

    def __init__(self, compressor: gradzip.Compressor | None = None, itemsize: float = 4) -> None:
        self.compressor = compressor
        self.itemsize = itemsize

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Make the model and the optimizer average gradients. Returns what to train in place of them."""
        return model, optimizer

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


class Horovod(Averager):
    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        import horovod.torch as hvd

        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        names = [(self.prefix + name, parameter) for name, parameter in model.named_parameters()]
        return model, hvd.DistributedOptimizer(optimizer, names, compression=self.compressor or self.own())

    def own(self) -> Any:
        """Horovod's own compression."""
        import horovod.torch as hvd

        return hvd.Compression.fp16 if self.itemsize == 2 else hvd.Compression.none


class HorovodFloor(Horovod):
    """All that Horovod does for gradients, with one element of each: no method can avoid it."""

    def own(self) -> Any:
        return OneElement


class OneElement:
    """For Horovod's `compression`: leaves gradients as they are, and has it average a zero in place of each."""

    @staticmethod
    def compress(gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient.new_zeros(1), gradient

    @staticmethod
    def decompress(_: Tensor, gradient: Tensor) -> Tensor:
        return gradient


class DDP(Averager):
    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        model = nn.parallel.DistributedDataParallel(model)
        self.hook(model)
        return model, optimizer

    def hook(self, model: nn.parallel.DistributedDataParallel) -> None:
        if self.compressor:
            from gradzip import ddp

            state = ddp.HookState(self.compressor, None, model.module.named_parameters(), find_unused_parameters=False)
            model.register_comm_hook(state, ddp.hook)
        elif self.itemsize == 2:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            model.register_comm_hook(None, fp16_compress_hook)


class DDPFloor(DDP):
    """All that DDP does for gradients, with a hook that does nothing."""

    def hook(self, model: nn.parallel.DistributedDataParallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

        model.register_comm_hook(None, noop_hook)


class PowerSGDHook(DDP):
    """PyTorch's powerSGD_hook at rank 4, from step 2, the first that it allows (default: 1000)."""

    def hook(self, model: nn.parallel.DistributedDataParallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        self.state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(self.state, powerSGD_hook.powerSGD_hook)

    def sent(self) -> int | None:
        return 4 * self.state.compression_stats()[2]


class Local(Averager):
    """Local steps: differences of parameters are averaged after every N of them.

    Args:
        local: every how many steps, and the outer optimizer.
    """

    def __init__(self, compressor: gradzip.Compressor, local: LocalSteps) -> None:
        super().__init__(compressor)
        self.every = local.every
        self.options = local.options

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        self.outer = gradzip.outer.LocalSteps(model, optimizer, self.compressor, **self.options)
        return model, optimizer

    def parameters(self, network: nn.Module) -> list[Tensor]:
        self.outer.synchronize()
        return super().parameters(network)


class FSDP(Averager):
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
            fully_shard(module, mesh=self.own(mesh))
        fully_shard(model, mesh=self.own(mesh))
        for group in optimizer.param_groups:
            group["params"] = [model.get_parameter(names[parameter]) for parameter in group["params"]]
        self.itemsize /= shards  # of whole parameters, for FSDP2's own averages
        if self.compressor:
            gradzip.fsdp.compress(model, self.compressor, mesh["replicate"].get_group())
        return model, optimizer

    def own(self, mesh: DeviceMesh) -> DeviceMesh:
        """The ranks over which FSDP2 itself averages."""
        return mesh["shard"] if self.compressor else mesh

    def parameters(self, network: nn.Module) -> list[Tensor]:
        return [p.detach().full_tensor() for p in network.parameters()]


class FSDPFloor(FSDP):
    """All that FSDP2 does for shards, without averages over the replicas."""

    def own(self, mesh: DeviceMesh) -> DeviceMesh:
        return mesh["shard"]


_STOCK: dict[str, Callable[[], Averager]] = {
    "compute": lambda: Averager(itemsize=0),
    "horovod": Horovod,
    "horovod-fp16": lambda: Horovod(itemsize=2),
    "ddp": DDP,
    "ddp-fp16": lambda: DDP(itemsize=2),
    "ddp-powersgd": PowerSGDHook,
    "horovod-noop": lambda: HorovodFloor(itemsize=0),
    "ddp-noop": lambda: DDPFloor(itemsize=0),
    "fsdp-noop": lambda: FSDPFloor(itemsize=0),
    "fsdp": FSDP,
}


def averager(variant: str) -> Averager:
    """The averager of a variant: a stock one, horovod:SPEC, ddp:SPEC, fsdp:SPEC or local(every=30):SPEC."""
    if variant in _STOCK:
        return _STOCK[variant]()
    local, spec = local_steps(variant)
    if local:
        return Local(gradzip.parse(spec), local)
    front, _, spec = variant.partition(":")
    return {"horovod": Horovod, "ddp": DDP, "fsdp": FSDP}[front](gradzip.parse(spec))
