"""Scenarios that tests/test_ddp_contract.py runs under a real torchrun, with every registered method:
`ddp_contract_worker.py FOLDER [NAME ...]`. Each returns what is left in gradients, parameters or states, by method."""

import contextlib
import copy
import gc
import io
import os
import sys
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradzip
from contract import AMP_STEPS, OVERFLOWS, SHAPES, SPECS, STEPS, gradient

SHAPES = {**SHAPES, "u": (40, 60)}
SECOND = {"w": (50, 60), "v": SHAPES["v"]}  # of another model, with equal names
CAP = 5000  # elements: DDP rebuilds its buckets after the first step, one becomes two, of which one holds two matrices
SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = lambda rank: {spec: function(spec, rank) for spec in SPECS}
    return function


class Model(torch.nn.Module):
    """Parameters whose gradients are what `forward` is given."""

    def __init__(self, shapes=SHAPES, dtype=torch.float32):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients):
        return sum((p * gradients[name]).sum() for name, p in self.named_parameters())


def network():
    """A real one: a convolution and two dense layers, one of them too small to be compressed."""
    torch.manual_seed(0)
    layers = OrderedDict(
        v=torch.nn.Conv2d(8, 32, 3, padding=1), relu=torch.nn.ReLU(), flatten=torch.nn.Flatten(),
        w=torch.nn.Linear(512, 24), gelu=torch.nn.GELU(), u=torch.nn.Linear(24, 10),
    )  # fmt: skip
    return torch.nn.Sequential(layers)


class Job:
    """A model under DDP, its optimizer, and which parameters shared a bucket in each step."""

    def __init__(self, compressor, model=None, state=None):
        self.compressor = compressor
        self.model = Model() if model is None else model
        self.named = dict(self.model.named_parameters())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        cap_mb = CAP * next(self.model.parameters()).element_size() / 2**20
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=cap_mb)
        self.buckets = buckets = []
        names = {p: name for name, p in self.named.items()}
        self.state = state or gradzip.ddp.HookState(compressor, named_parameters=self.named.items())

        def noting(state, bucket):  # knows nothing of `self`: a model that its own hook holds would never go
            if bucket.index() == 0:
                buckets.append([])
            buckets[-1].append([names[p] for p in bucket.parameters()])
            return gradzip.ddp.hook(state, bucket)

        self.ddp.register_comm_hook(self.state, noting)

    def loss(self, rank, step, spoilt=()):
        gradients = {}
        for name, p in self.named.items():
            gradients[name] = gradient(name, rank, step, p.shape).to(p.dtype)
            if name in spoilt:
                gradients[name][-1] = float("inf")
        return self.ddp(gradients)

    def step(self, rank, step):
        """The averages of one step."""
        self.optimizer.zero_grad()
        self.loss(rank, step).backward()
        return self.averages()

    def averages(self):
        return {name: p.grad.clone() for name, p in self.named.items()}

    def parameters(self):
        return {name: p.detach().clone() for name, p in self.named.items()}


def through_a_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@scenario
def checkpointed(spec, rank):
    """Ten steps, and as many with a checkpoint after five: a file of each rank's, and one of all ranks'."""
    runs = []
    for how in ("none", "of_each_rank", "merged"):
        job, averages, buckets = Job(gradzip.parse(spec)), [], []
        for step in range(10):
            if step == 5 and how != "none":
                saved = job.compressor.state_dict()
                if how == "merged":
                    everyones = [None] * dist.get_world_size()
                    dist.all_gather_object(everyones, saved)
                    merged = through_a_file(gradzip.checkpoint.merge(everyones))
                    saved = gradzip.checkpoint.shard(merged, rank, dist.get_world_size())
                job = Job(gradzip.parse(spec))
                job.compressor.load_state_dict(through_a_file(saved))
            averages.append(job.step(rank, step))
            buckets.append(job.buckets[-1])
        runs.append((averages, buckets))
    return runs


@scenario
def in_half_precision(spec, rank):
    """Parameters, and with them buckets, of 16 bits."""
    results = []
    for dtype in (torch.bfloat16, torch.float16):
        job = Job(gradzip.parse(spec), Model(dtype=dtype))
        results.append(([job.step(rank, step) for step in range(STEPS)], job.buckets))
    return results


@scenario
def accumulated(spec, rank):
    """Two backward passes for every step, the first without DDP."""
    job, averages = Job(gradzip.parse(spec)), []
    for step in range(STEPS):
        job.optimizer.zero_grad()
        with job.ddp.no_sync():
            job.loss(rank, 2 * step).backward()
        job.loss(rank, 2 * step + 1).backward()
        averages.append(job.averages())
    return averages, job.buckets


@scenario
def clipped(spec, rank):
    """The norm of all averages, and the parameters after a step of the norm 1."""
    job = Job(gradzip.parse(spec))
    averages = job.step(rank, 0)
    norm = torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
    job.optimizer.step()
    return [averages], job.buckets, norm, job.parameters()


@scenario
def two_models(spec, rank):
    """A GAN's: one compressor, equal names, one of equal shape, in turns."""
    compressor = gradzip.parse(spec)
    jobs = [Job(compressor), Job(compressor, Model(SECOND))]
    averages = [[job.step(rank, 100 * i + step) for i, job in enumerate(jobs)] for step in range(STEPS)]
    return [(list(of_job), job.buckets) for of_job, job in zip(zip(*averages), jobs)]


@scenario
def wrapped_anew(spec, rank):
    """In another DDP model after two steps and a backward pass that fails: with a new HookState, and with the same."""
    results = []
    for keep in (False, True):
        compressor, model = gradzip.parse(spec), Model()
        job, averages, buckets = Job(compressor, model), [], []
        for step in range(4):
            if step == 2:
                failing = model.b.register_hook(fail)
                with contextlib.suppress(ZeroDivisionError):
                    job.step(rank, step)
                failing.remove()
                assert len(job.buckets.pop()) == 1  # has begun to travel
                state = job.state if keep else None
                del job  # and with it the hooks of a DDP model that still waits for its gradients
                gc.collect()
                job = Job(compressor, model, state)
            averages.append(job.step(rank, step))
            buckets.append(job.buckets[-1])
        results.append((averages, buckets))
    return results


def fail(gradient):
    raise ZeroDivisionError


@scenario
def backward_within_autocast(spec, rank):
    job, averages = Job(gradzip.parse(spec)), []
    for step in range(STEPS):
        job.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            job.loss(rank, step).backward()
        averages.append(job.averages())
    return averages, job.buckets


def scaled_steps(job, rank, backward):
    """What there is to see of steps with a GradScaler: scales; averages, unscaled; parameters and states after them."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    job.compressor.follow(scaler)
    scales, averages, parameters, states = [], [], [], []
    for step in range(AMP_STEPS):
        scales.append(scaler.get_scale())
        job.optimizer.zero_grad()
        backward(scaler, step, spoilt=step == OVERFLOWS and rank == dist.get_world_size() - 1)
        scaler.unscale_(job.optimizer)
        averages.append(job.averages())
        scaler.step(job.optimizer)
        scaler.update()
        parameters.append(job.parameters())
        states.append(copy.deepcopy(job.compressor.state_dict()))
    return scales, averages, job.buckets, parameters, states


@scenario
def loss_scaled(spec, rank):
    """Given gradients, one of them infinite on one rank in one step; in buckets of float32, and of bfloat16."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        job = Job(gradzip.parse(spec), Model(dtype=dtype))

        def backward(scaler, step, spoilt, job=job):
            scaler.scale(job.loss(rank, step, ["v"] if spoilt else [])).backward()

        results.append(scaled_steps(job, rank, backward))
    return results


@scenario
def autocast(spec, rank):
    """A network under autocast, with a GradScaler; where it is to overflow, inputs are large. First, this rank's own
    gradients, unscaled."""
    results = []
    for dtype in (torch.float16, torch.bfloat16):
        job, own = Job(gradzip.parse(spec), network()), []
        for name, p in job.named.items():
            p.register_hook(lambda grad, own=own, name=name: own[-1].__setitem__(name, grad.clone()))

        def backward(scaler, step, spoilt, job=job, own=own, dtype=dtype):
            own.append({})
            x = gradient("x", rank, step, (16, 8, 4, 4)) * (1e30 if spoilt else 1.0)
            with torch.autocast("cpu", dtype):
                loss = job.ddp(x).float().square().mean()
            scaler.scale(loss).backward()
            own[-1] = {name: grad / scaler.get_scale() for name, grad in own[-1].items()}

        results.append((own, scaled_steps(job, rank, backward)))
    return results


def main():
    folder, *names = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    results = {name: SCENARIOS[name](rank) for name in names or SCENARIOS}
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # at once: a thread of torch's that lets go of a Python object too late would abort the process


if __name__ == "__main__":
    main()
