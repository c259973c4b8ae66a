"""Jobs for tests/test_hierarchical_jobs.py, on 2 nodes of 2 ranks: `hierarchical_worker.py FOLDER ddp|horovod`."""

import copy
import os
import sys
import zlib
from pathlib import Path

import torch

import gradzip

NODES, PLACES = 2, 2
SHAPES = {"b": (48,), "v": (33, 8, 3, 3), "w": (64, 48)}
STEPS = 3
SPECS = [
    "hierarchical:inner=acpsgd,local_size=2",
    "hierarchical:inner=powersgd",
    "hierarchical:inner=topk(theta=0.9)",
    "hierarchical:inner=topk(theta=0.9,exchange=scatter_reduce)",
]


def gradient(name, rank, step, shape):
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{rank}/{step}".encode()))
    return torch.randn(shape, generator=generator)


def gradients(name, step, size, shape=None):
    """The gradients of all ranks."""
    return [gradient(name, rank, step, shape or SHAPES[name]) for rank in range(size)]


class Model(torch.nn.Module):
    """A model whose gradients are the argument of `forward`."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, grads):
        return sum((p * grads[name]).sum() for name, p in self.named_parameters())


class Ddp:
    def __init__(self):
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # As torchrun sets them on two nodes.
        os.environ |= {"LOCAL_RANK": str(self.rank % PLACES), "LOCAL_WORLD_SIZE": str(PLACES)}

    def job(self, compressor):
        """A model and its optimizer, which average gradients."""
        model = Model()
        wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
        state = gradzip.ddp.HookState(compressor, named_parameters=model.named_parameters())
        wrapped.register_comm_hook(state, gradzip.ddp.hook)
        return wrapped, model, torch.optim.SGD(model.parameters(), lr=0.5)

    def synchronize(self, optimizer):
        pass

    def gather(self, value):
        import torch.distributed as dist

        gathered = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def end(self):
        pass


class Horovod:
    def __init__(self):
        import horovod.torch as hvd

        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()

    def job(self, compressor):
        import horovod.torch as hvd

        model = Model()
        named, sgd = model.named_parameters(), torch.optim.SGD(model.parameters(), lr=0.5)
        compressor = gradzip.horovod.bucketed(compressor, bucket_cap_mb=0.01)
        return model, model, hvd.DistributedOptimizer(sgd, named_parameters=named, compression=compressor)

    def synchronize(self, optimizer):
        optimizer.synchronize()

    def gather(self, value):
        import horovod.torch as hvd

        return hvd.allgather_object(value)

    def end(self):
        import horovod.torch as hvd

        hvd.shutdown()  # all ranks together: one that leaves earlier aborts the others


class Job:
    def __init__(self, launcher, compressor):
        self.launcher = launcher
        self.run, self.model, self.optimizer = launcher.job(compressor)

    def average(self, step, scale=1.0, infinite=False):
        """The averages of one step, by name."""
        rank = self.launcher.rank
        self.optimizer.zero_grad()
        grads = {name: scale * gradient(name, rank, step, shape) for name, shape in SHAPES.items()}
        if infinite:
            grads["w"][-1] = float("inf")
        self.run(grads).backward()
        self.launcher.synchronize(self.optimizer)
        return {name: p.grad.clone() for name, p in self.model.named_parameters()}


def train(launcher, spec):
    compressor = gradzip.parse(spec)
    job = Job(launcher, compressor)
    averages = [job.average(step) for step in range(STEPS)]
    traffic = copy.copy(compressor.traffic)
    merged = gradzip.checkpoint.merge(launcher.gather(compressor.state_dict()))
    resumed = gradzip.parse(spec)
    resumed.load_state_dict(gradzip.checkpoint.shard(merged, launcher.rank, launcher.size))
    straight, after = ([j.average(s) for s in range(STEPS, STEPS + 2)] for j in (job, Job(launcher, resumed)))
    return {
        "averages": averages,
        "bytes_sent": traffic.bytes_sent,
        "bytes_in_node": traffic.bytes_in_node,
        "bytes_dense": traffic.bytes_dense,
        # Of what is compressed: Horovod adds all ranks' vectors in an order that depends on what it joins them with.
        "same_after_checkpoint": all(torch.equal(a[n], b[n]) for a, b in zip(straight, after) for n in ("w", "v")),
        "skipped": skipped_steps(launcher, spec),
    }


def skipped_steps(launcher, spec):
    """Which of three steps GradScaler skips, and leaves states as they were, if one rank overflows in the second."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    compressor = gradzip.parse(spec).follow(scaler)
    job, skipped = Job(launcher, compressor), []
    for step in range(3):
        before = copy.deepcopy(compressor.inner.state_dict()["states"])
        averages = job.average(step, scaler.get_scale(), infinite=step == 1 and launcher.rank == launcher.size - 1)
        now = compressor.inner.state_dict()["states"]
        same = before.keys() == now.keys() and all(
            torch.equal(value, now[name][field]) if isinstance(value, torch.Tensor) else value == now[name][field]
            for name, fields in before.items()
            for field, value in fields.items()
        )
        skipped.append(same and not averages["w"].isfinite().any().item())
        if step == 1:
            scaler.update(512.0)
    return skipped


def error_of(launcher, spec):
    """The error of the first step."""
    try:
        Job(launcher, gradzip.parse(spec)).average(0)
    except ValueError as error:
        return str(error)
    return None


def main():
    folder, kind, *names = sys.argv[1:]
    torch.set_num_threads(1)
    launcher = {"ddp": Ddp, "horovod": Horovod}[kind]()
    if names == ["error"]:
        results = {"error": error_of(launcher, SPECS[1])}
    else:
        results = {spec: train(launcher, spec) for spec in names or SPECS}
    torch.save(results, Path(folder) / f"{launcher.rank}.pt")
    launcher.gather(0)
    launcher.end()
    os._exit(0)


if __name__ == "__main__":
    main()
