"""Engines for `train.py`: stock Horovod, or PyTorch's DistributedDataParallel (DDP) or FSDP2.

An engine has this process's `rank`, the world `size`, the `local_size` on this machine, and a `group` of all ranks for
local steps. It wraps a network and its optimizer, and averages and gathers tensors. Horovod is imported only if it is
used.
"""

import atexit
import copy
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import gradzip
from gradzip.collectives.cost import sent_share


def launcher():
    """The engine of the launcher: "ddp" under torchrun, "horovod" under horovodrun, None without a launcher."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "ddp"
    return "horovod" if "HOROVOD_RANK" in os.environ else None


def local_rank():
    """This process's rank on its machine. Works before an engine is initialized."""
    return int(os.environ.get("HOROVOD_LOCAL_RANK") or os.environ.get("LOCAL_RANK", 0))


class Horovod:
    """Stock Horovod, which passes each gradient to the compressor during the backward pass."""

    start = "horovodrun -np 2"
    group = "horovod"  # of all ranks, for gradzip.outer

    def __init__(self):
        import horovod
        import horovod.torch as hvd

        hvd.init()
        self.hvd = hvd
        self.rank, self.size, self.local_size = hvd.rank(), hvd.size(), hvd.local_size()
        self.ranks = self.size  # whose gradients are averaged
        self.versions = {"horovod": horovod.__version__}

    def wrap(self, model, optimizer, compressor):
        """Make a network and its optimizer average gradients. All ranks start from rank 0's weights.

        Returns the network to train, its optimizer, and a gradzip.Traffic that counts bytes.
        """
        self.hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = self.hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compressor
        )
        return model, optimizer, compressor.traffic

    def whole(self, model):
        """The trained network, with all of its parameters on this rank."""
        return model

    def step(self, optimizer, scaler):
        """Step the optimizer, unless `scaler` finds an average that is not finite, which it does on all ranks."""
        optimizer.synchronize()  # before the scaler checks gradients: it must see the averages
        with optimizer.skip_synchronize():
            scaler.step(optimizer)

    def end(self):
        """End the process. Called last."""

    def average(self, tensor, name):
        return self.hvd.allreduce(tensor, op=self.hvd.Average, name=name)

    def gather(self, tensor, name):
        """Gather all ranks' tensors: (size, ...), in rank order."""
        return self.hvd.allgather(tensor[None], name=name)


class DDP:
    """PyTorch's DDP over gloo, which passes gradients to gradzip's hook in buckets."""

    start = "torchrun --nproc-per-node 2"
    group = None  # the default group of torch

    def __init__(self):
        # Without torchrun, this process is a group of one.
        alone = {} if launcher() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("gloo", **alone)
        atexit.register(dist.destroy_process_group)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.ranks = self.size
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.versions = {}

    def wrap(self, model, optimizer, compressor):
        """See `Horovod.wrap`."""
        if self.size == 1:  # nothing to average; Horovod does the same
            return model, optimizer, gradzip.Traffic()
        names = model.named_parameters()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about a name that is new in torch 2.13 and missing in 2.12
            model = DistributedDataParallel(model, broadcast_buffers=False)
        if isinstance(compressor, gradzip.NoCompression):
            traffic = gradzip.Traffic()
            model.register_comm_hook(traffic, all_reduce)
        else:
            state = gradzip.ddp.HookState(compressor, named_parameters=names, find_unused_parameters=False)
            model.register_comm_hook(state, gradzip.ddp.hook)
            traffic = state.traffic
        return model, optimizer, traffic

    def whole(self, model):
        """See `Horovod.whole`."""
        return model

    def step(self, optimizer, scaler):
        """See `Horovod.step`."""
        scaler.step(optimizer)

    def end(self):
        """See `Horovod.end`.

        Skips the interpreter's shutdown: a torch 2.13 thread that frees a Python object during it aborts the process,
        which happens now and then after short runs.
        """
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)

    def average(self, tensor, name):
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor / self.size

    def gather(self, tensor, name):
        """Gather all ranks' tensors: (size, ...), in rank order."""
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor)
        return torch.stack(gathered)


class FSDP(DDP):
    """PyTorch's FSDP2 over gloo: shards within a machine, and gradzip's averages of them between machines.

    On one machine, each half of the ranks stands for a machine.
    """

    def wrap(self, model, optimizer, compressor):
        """See `Horovod.wrap`. All ranks have the same weights, because they have the same seed."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if self.size == 1:
            return super().wrap(model, optimizer, compressor)
        shards = self.local_size if self.local_size < self.size else max(1, self.size // 2)
        self.ranks = self.size // shards
        mesh = init_device_mesh("cpu", (self.ranks, shards), mesh_dim_names=("replicate", "shard"))
        self.plain = copy.deepcopy(model)  # for `whole`
        names = {parameter: name for name, parameter in model.named_parameters()}
        for block in getattr(model, "blocks", ()):
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        for group in optimizer.param_groups:
            group["params"] = [model.get_parameter(names[parameter]) for parameter in group["params"]]
        state = gradzip.fsdp.compress(model, compressor, mesh["replicate"].get_group())
        return model, optimizer, state.traffic

    def whole(self, model):
        """See `Horovod.whole`."""
        if self.size == 1:
            return model
        tensors = {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in model.state_dict().items()}
        self.plain.load_state_dict(tensors)
        return self.plain


class LocalSteps:
    """The ranks of another engine, which train alone, and average what has changed after every `every` steps.

    options: of gradzip.outer.LocalSteps.
    """

    def __init__(self, engine, **options):
        self.engine, self.options = engine, options

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def wrap(self, model, optimizer, compressor):
        """See `Horovod.wrap`."""
        self.steps = gradzip.outer.LocalSteps(model, optimizer, compressor, group=self.engine.group, **self.options)
        return model, optimizer, self.steps.traffic

    @property
    def exchange_seconds(self):
        """Seconds that the exchanges of the last model took, in all and while training waited."""
        return {"total": self.steps.seconds.total, "exposed": self.steps.seconds.exposed}

    def step(self, optimizer, scaler):
        """Step the optimizer, unless `scaler` finds a gradient of this rank that is not finite."""
        scaler.step(optimizer)

    def whole(self, model):
        """See `Horovod.whole`. The ranks exchange what has changed since the last exchange."""
        self.steps.synchronize()
        return model


def all_reduce(traffic, bucket):
    """DDP's default all-reduce as a hook that counts bytes, as a ring sends them."""
    traffic.count(bucket.buffer().nbytes, sent_share("all_reduce", dist.get_world_size()))
    traffic.bytes_dense += bucket.buffer().nbytes
    return allreduce_hook(None, bucket)


ENGINES = {"horovod": Horovod, "ddp": DDP, "fsdp": FSDP}
