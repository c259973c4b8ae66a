"""Run the documentation's blocks of Python on two ranks: `code_blocks_worker.py FOLDER`, under horovodrun or torchrun.

Each block runs in a namespace of its own with the names that its page takes for granted: a model, an optimizer, a
gradient. A training step of that model follows. Rank 0 writes the blocks that ran to FOLDER/ran.json.
"""

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import gradzip
from code_blocks import python_blocks

UNDER_HOROVOD = "HOROVOD_SIZE" in os.environ
if UNDER_HOROVOD:
    import horovod.torch as hvd


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(48, 48) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


def mean_square(model, batch):
    return model(batch).square().mean()


def namespace(block):
    """Return what the block may use."""
    torch.manual_seed(0)
    model, batches = Model(), list(torch.randn(3, 8, 48))
    arrays = {"numpy_gradient": np.random.default_rng(0).standard_normal(5000, dtype=np.float32)}
    names = {
        "torch": torch, "gradzip": gradzip, "Mean": gradzip.Mean, "model": model, "batches": batches, "step": 500,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "compressor": gradzip.TopK(theta=0.99),
        "loss": mean_square(model, batches[0]), **{name: torch.randn(64, 64) for name in ("gradient", "gradient0",
        "gradient1", "gradient2")}, **arrays, "cupy_gradient": gpu_array() if torch.cuda.is_available() else
        arrays["numpy_gradient"],
    }  # fmt: skip
    if UNDER_HOROVOD:
        names["hvd"] = hvd
    else:
        names |= {
            "init_device_mesh": init_device_mesh, "fully_shard": fully_shard, "FSDPModule": FSDPModule,
            "machines": 2, "local_size": 1, "sites": 2, "ranks_of_a_site": 1,
        }  # fmt: skip
    if "SummaryWriter" in block.text:
        from torch.utils.tensorboard import SummaryWriter

        names["SummaryWriter"] = SummaryWriter
    if "loss(" in block.text:
        names["loss"] = mean_square
    if re.search("fsdp.compress|fsdp.quantize|FSDPModule", block.text) and "fully_shard(" not in block.text:
        shape = (2, 1) if "replicate" in block.text else (1, 2)  # in a job without replicas: two shards
        names["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=names["mesh"]["shard"])
    return names


def gpu_array():
    import cupy

    return cupy.ones(5000, dtype=cupy.float32)


def run(block):
    names = namespace(block)
    source = block.text if torch.cuda.is_available() else block.text.replace('"cuda"', '"cpu"')
    exec(compile("\n" * block.line + source, block.page, "exec"), names)
    model, optimizer = names["model"], names["optimizer"]
    optimizer.zero_grad()
    mean_square(model, names["batches"][0]).backward()
    optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def main():
    folder = Path(sys.argv[1])
    if UNDER_HOROVOD:
        hvd.init()
        rank = hvd.rank()
    else:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    own = folder / str(rank)  # what blocks write
    own.mkdir()
    ran = []
    os.chdir(own)
    for block in python_blocks(UNDER_HOROVOD):
        print(f"rank {rank}: {block}", file=sys.stderr, flush=True)
        run(block)
        ran.append(str(block))
    if rank == 0:
        (folder / "ran.json").write_text(json.dumps(ran))
    if not UNDER_HOROVOD:
        dist.barrier()  # a rank that leaves earlier ends the job
        sys.stderr.flush()
        os._exit(0)  # now: a torch thread that frees a Python object during shutdown aborts the process


if __name__ == "__main__":
    main()
