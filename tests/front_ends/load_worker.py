"""A scenario for test_load.py: many steps of many small parameters."""

import gc
import os
import resource
import sys
import time

import torch

import gradzip
from harness import UNDER_HOROVOD, data_parallel, main, scenario

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


def resources_in_use():
    """Return how much memory and how many objects, files and threads this process has."""
    if UNDER_HOROVOD:
        from horovod.torch import mpi_ops
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
        "under way": len(mpi_ops._handle_map) if UNDER_HOROVOD else 0,
    }


@scenario
def trained(rank):
    """Return what the process holds after a quarter of the steps and after all, the result, and what states count."""
    steps = int(os.environ["STEPS"])
    compressor, model = gradzip.parse(os.environ["METHOD"]), Model()
    module, optimizer = data_parallel(model, torch.optim.SGD(model.parameters(), lr=0.01), compressor, bucket_cap_mb=1)
    generator = torch.Generator().manual_seed(rank)
    measured = []
    for step in range(steps):
        optimizer.zero_grad()
        module(torch.randn(4, SHAPE[0], generator=generator)).backward()
        optimizer.step()
        if step + 1 in (steps // 4, steps):
            measured.append(resources_in_use())
    checksum = sum(p.double().sum().item() for p in model.parameters())
    counts = [fields["step"] for fields in compressor.state_dict()["states"].values() if "residual" in fields]
    return measured, checksum, len(counts), sorted(set(counts))


if __name__ == "__main__":
    main()
