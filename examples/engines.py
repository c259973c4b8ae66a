"""What runs the ranks of `train.py`: stock Horovod, or PyTorch's DistributedDataParallel (DDP).

An engine has this process's `rank`, the `size` of the group and the `local_size` on this machine; it wraps a network
and its optimizer, and averages and gathers tensors. Only the engine that is used is started, and Horovod imported only
where it is.
"""

import atexit
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import gradzip


def launcher():
    """The engine whose launcher started this process: "ddp" for torchrun, "horovod" for horovodrun, None for none."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "ddp"
    return "horovod" if "HOROVOD_RANK" in os.environ else None


def local_rank():
    """This process's number on its machine, known before any engine runs."""
    return int(os.environ.get("HOROVOD_LOCAL_RANK") or os.environ.get("LOCAL_RANK", 0))


class Horovod:
    """Stock Horovod, which passes each gradient to the compressor as soon as it is there."""

    start = "horovodrun -np 2"

    def __init__(self):
        import horovod
        import horovod.torch as hvd

        hvd.init()
        self.hvd = hvd
        self.rank, self.size, self.local_size = hvd.rank(), hvd.size(), hvd.local_size()
        self.versions = {"horovod": horovod.__version__}

    def wrap(self, model, optimizer, compressor):
        """The network to train and its optimizer, which exchange gradients, and gradzip.Traffic, which counts them.

        All ranks start from rank 0's weights.
        """
        self.hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = self.hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compressor
        )
        return model, optimizer, compressor.traffic

    def step(self, optimizer, scaler):
        """A step of what `wrap` returned, unless `scaler` finds gradients that are not finite, as all ranks then do."""
        optimizer.synchronize()  # what the scaler looks at are the averages
        with optimizer.skip_synchronize():
            scaler.step(optimizer)

    def end(self):
        """Ends the process, when all is done."""

    def average(self, tensor, name):
        return self.hvd.allreduce(tensor, op=self.hvd.Average, name=name)

    def gather(self, tensor, name):
        """All ranks' tensors, (size, ...) in rank order."""
        return self.hvd.allgather(tensor[None], name=name)


class DDP:
    """PyTorch's DDP over gloo, which passes gradients to the compressor's hook in buckets."""

    start = "torchrun --nproc-per-node 2"

    def __init__(self):
        # Started by hand, without torchrun's variables, this process is a group of one.
        alone = {} if launcher() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("gloo", **alone)
        atexit.register(dist.destroy_process_group)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.versions = {}

    def wrap(self, model, optimizer, compressor):
        """The same as Horovod's."""
        if self.size == 1:  # Horovod, too, exchanges nothing then
            return model, optimizer, gradzip.Traffic()
        names = model.named_parameters()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another name for it, which 2.12 lacks
            model = DistributedDataParallel(model, broadcast_buffers=False)
        if isinstance(compressor, gradzip.NoCompression):
            traffic = gradzip.Traffic()
            model.register_comm_hook(traffic, all_reduce)
        else:
            state = gradzip.ddp.HookState(compressor, named_parameters=names)
            model.register_comm_hook(state, gradzip.ddp.hook)
            traffic = state.traffic
        return model, optimizer, traffic

    def step(self, optimizer, scaler):
        """The same as Horovod's."""
        scaler.step(optimizer)

    def end(self):
        """The same as Horovod's.

        At once: torch's threads let go of Python objects, and where the interpreter is half gone by then (a race, lost
        now and then with torch 2.13 after short runs), they abort the process.
        """
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)

    def average(self, tensor, name):
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor / self.size

    def gather(self, tensor, name):
        """All ranks' tensors, (size, ...) in rank order."""
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor)
        return torch.stack(gathered)


def all_reduce(traffic, bucket):
    """What DDP does by itself, counted: the reference for every other hook."""
    traffic.bytes_sent += bucket.buffer().nbytes
    traffic.bytes_dense += bucket.buffer().nbytes
    return allreduce_hook(None, bucket)


ENGINES = {"horovod": Horovod, "ddp": DDP}
