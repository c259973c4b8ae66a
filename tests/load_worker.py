"""Many steps of many small parameters: `load_worker.py horovod|ddp METHOD STEPS FOLDER`.

Writes FOLDER/RANK.json: what the process holds after a quarter of the steps, and after all of them.
"""

import gc
import json
import os
import resource
import sys
import time
from pathlib import Path

import torch

import gradzip

PARAMETERS = 200
SHAPE = (32, 32)


class Model(torch.nn.Module):
    """A model of PARAMETERS weights: half are matrices, half are vectors that are not compressed."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = [SHAPE if i % 2 else SHAPE[:1] for i in range(PARAMETERS)]
        self.weights = torch.nn.ParameterList(0.1 * torch.randn(shape, generator=generator) for shape in shapes)

    def forward(self, x):
        for weight in self.weights:
            x = x @ weight / 4 + x if weight.dim() > 1 else torch.tanh(x + weight)
        return x.square().mean()


def horovod(compressor, model, sgd):
    """Return the rank, the optimizer, the module to call, and a function that counts pending operations."""
    import horovod.torch as hvd
    from horovod.torch import mpi_ops

    hvd.init()
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters(), compression=compressor)
    return hvd.rank(), optimizer, model, lambda: len(mpi_ops._handle_map)  # looked up late: init() replaces _handle_map


def ddp(compressor, model, sgd):
    """Do the same as `horovod`, with DistributedDataParallel and its hook."""
    import torch.distributed as dist

    import gradzip.ddp

    dist.init_process_group("gloo")
    parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    parallel.register_comm_hook(gradzip.ddp.HookState(compressor), gradzip.ddp.hook)
    return dist.get_rank(), sgd, parallel, lambda: 0


def resources_in_use(pending):
    """Return how much memory and how many objects, files and threads this process has."""
    # Gloo's threads release the tensors of a finished operation a little later, above all on a busy machine.
    tensors = []
    for _ in range(10):
        gc.collect()
        tensors.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
        time.sleep(0.05)
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "bytes": pages * resource.getpagesize(),
        "blocks": sys.getallocatedblocks(),  # of Python's allocator for small objects
        "tensors": min(tensors),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "under way": pending(),
    }


def main():
    engine, method, steps, folder = sys.argv[1:]
    steps = int(steps)
    torch.set_num_threads(1)
    compressor, model = gradzip.parse(method), Model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    rank, optimizer, module, pending = {"horovod": horovod, "ddp": ddp}[engine](compressor, model, sgd)
    generator = torch.Generator().manual_seed(rank)
    measured = []
    for step in range(steps):
        optimizer.zero_grad()
        module(torch.randn(4, SHAPE[0], generator=generator)).backward()
        optimizer.step()
        if step + 1 in (steps // 4, steps):
            measured.append(resources_in_use(pending))
    checksum = sum(p.double().sum().item() for p in model.parameters())
    states = {state.step for state in compressor.states.values() if state.residual is not None}
    Path(folder, f"{rank}.json").write_text(json.dumps([measured, checksum, len(compressor.states), sorted(states)]))


if __name__ == "__main__":
    main()
