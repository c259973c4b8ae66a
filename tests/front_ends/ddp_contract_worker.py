"""Contracts for tests/front_ends/test_ddp_contract.py, run by torchrun: `ddp_contract_worker.py FOLDER SPEC ...`.

The results of a method are those of all contracts, by name: averages, read from the gradients, parameters or states.
"""

import contextlib
import copy
import gc
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradzip
import harness
from contract import AMP_STEPS, OVERFLOWS, SHAPES, STEPS, gradient, through_file
from harness import Model

SHAPES = {**SHAPES, "u": (40, 60)}
SECOND_SHAPES = {"w": (50, 60), "v": SHAPES["v"]}  # of a second model with equal names
BUCKET_CAP = 5000  # elements. After the first step, DDP rebuilds its one bucket as two; one of them has two matrices.
CONTRACTS = {}


def contract(function):
    CONTRACTS[function.__name__] = function
    return function


def network():
    """Return a network with a convolution and two dense layers, one of them too small to be compressed."""
    torch.manual_seed(0)
    layers = OrderedDict(
        v=torch.nn.Conv2d(8, 32, 3, padding=1), relu=torch.nn.ReLU(), flatten=torch.nn.Flatten(),
        w=torch.nn.Linear(512, 24), gelu=torch.nn.GELU(), u=torch.nn.Linear(24, 10),
    )  # fmt: skip
    return torch.nn.Sequential(layers)


class Job:
    """A model under DDP and its optimizer. `buckets` has the parameter names of each bucket in each step."""

    def __init__(self, compressor, model=None, state=None):
        self.compressor = compressor
        self.model = Model(SHAPES) if model is None else model
        self.named = dict(self.model.named_parameters())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        cap_mb = BUCKET_CAP * next(self.model.parameters()).element_size() / 2**20
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=cap_mb)
        self.buckets = buckets = []
        names = {p: name for name, p in self.named.items()}
        self.state = state or gradzip.ddp.HookState(compressor, None, self.named.items(), find_unused_parameters=False)

        def recording_hook(state, bucket):  # no reference to `self`: a cycle would keep the DDP model alive
            if bucket.index() == 0:
                buckets.append([])
            buckets[-1].append([names[p] for p in bucket.parameters()])
            return gradzip.ddp.hook(state, bucket)

        self.ddp.register_comm_hook(self.state, recording_hook)

    def loss(self, rank, step, non_finite=()):
        gradients = {}
        for name, p in self.named.items():
            gradients[name] = gradient(name, rank, step, p.shape).to(p.dtype)
            if name in non_finite:
                gradients[name][-1] = float("inf")
        return self.ddp(gradients)

    def step(self, rank, step):
        """Return the averages of one step."""
        self.optimizer.zero_grad()
        self.loss(rank, step).backward()
        return self.averages()

    def averages(self):
        return {name: p.grad.clone() for name, p in self.named.items()}

    def parameters(self):
        return {name: p.detach().clone() for name, p in self.named.items()}


@contract
def checkpointed(spec, rank):
    """Take ten steps without a checkpoint, with one per rank after five steps, and with a merged one of all ranks."""
    runs = []
    for mode in ("none", "of_each_rank", "merged"):
        job, averages, buckets = Job(gradzip.parse(spec)), [], []
        for step in range(10):
            if step == 5 and mode != "none":
                saved = job.compressor.state_dict()
                if mode == "merged":
                    gathered = [None] * dist.get_world_size()
                    dist.all_gather_object(gathered, saved)
                    merged = through_file(gradzip.checkpoint.merge(gathered))
                    saved = gradzip.checkpoint.shard(merged, rank, dist.get_world_size())
                job = Job(gradzip.parse(spec))
                job.compressor.load_state_dict(through_file(saved))
            averages.append(job.step(rank, step))
            buckets.append(job.buckets[-1])
        runs.append((averages, buckets))
    return runs


@contract
def half_precision(spec, rank):
    """Use parameters, and therefore buckets, of 16 bits."""
    results = []
    for dtype in (torch.bfloat16, torch.float16):
        job = Job(gradzip.parse(spec), Model(SHAPES, dtype))
        results.append(([job.step(rank, step) for step in range(STEPS)], job.buckets))
    return results


@contract
def accumulated(spec, rank):
    """Take two backward passes per step, the first under no_sync()."""
    job, averages = Job(gradzip.parse(spec)), []
    for step in range(STEPS):
        job.optimizer.zero_grad()
        with job.ddp.no_sync():
            job.loss(rank, 2 * step).backward()
        job.loss(rank, 2 * step + 1).backward()
        averages.append(job.averages())
    return averages, job.buckets


@contract
def clipped(spec, rank):
    """Return the norm of all averages, and the parameters after a step clipped to a norm of 1."""
    job = Job(gradzip.parse(spec))
    averages = job.step(rank, 0)
    norm = torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
    job.optimizer.step()
    return [averages], job.buckets, norm, job.parameters()


@contract
def discarded(spec, rank):
    """Before each step, take a pass whose averages are announced to be thrown away."""
    job, averages, buckets = Job(gradzip.parse(spec)), [], []
    discarding = job.compressor.discarding()
    for step in range(STEPS):
        with discarding:
            job.step(rank, 100 + step)
        averages.append(job.step(rank, step))
        buckets.append(job.buckets[-1])
    return averages, buckets


@contract
def two_models(spec, rank):
    """Share a compressor between two models in turns, as in a GAN. Names are equal, and one shape."""
    compressor = gradzip.parse(spec)
    jobs = [Job(compressor), Job(compressor, Model(SECOND_SHAPES))]
    averages = [[job.step(rank, 100 * i + step) for i, job in enumerate(jobs)] for step in range(STEPS)]
    return [(list(of_job), job.buckets) for of_job, job in zip(zip(*averages), jobs)]


@contract
def rewrapped(spec, rank):
    """Wrap a model in DDP again after two steps and a failed backward pass, with a new HookState and with the same."""
    results = []
    for keep in (False, True):
        compressor, model = gradzip.parse(spec), Model(SHAPES)
        job, averages, buckets = Job(compressor, model), [], []
        for step in range(4):
            if step == 2:
                failing = model.b.register_hook(fail)
                with contextlib.suppress(ZeroDivisionError):
                    job.step(rank, step)
                failing.remove()
                assert len(job.buckets.pop()) == 1  # one bucket has been sent
                state = job.state if keep else None
                del job  # removes the hooks of the old DDP model, which still waits for gradients
                gc.collect()
                job = Job(compressor, model, state)
            averages.append(job.step(rank, step))
            buckets.append(job.buckets[-1])
        results.append((averages, buckets))
    return results


def fail(gradient):
    raise ZeroDivisionError


@contract
def backward_within_autocast(spec, rank):
    job, averages = Job(gradzip.parse(spec)), []
    for step in range(STEPS):
        job.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            job.loss(rank, step).backward()
        averages.append(job.averages())
    return averages, job.buckets


def scaled_steps(job, rank, backward):
    """Take steps with a GradScaler. Return scales, unscaled averages, buckets, parameters and states of each step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    job.compressor.follow(scaler)
    scales, averages, parameters, states = [], [], [], []
    for step in range(AMP_STEPS):
        scales.append(scaler.get_scale())
        job.optimizer.zero_grad()
        backward(scaler, step, non_finite=step == OVERFLOWS and rank == dist.get_world_size() - 1)
        scaler.unscale_(job.optimizer)
        averages.append(job.averages())
        scaler.step(job.optimizer)
        scaler.update()
        parameters.append(job.parameters())
        states.append(copy.deepcopy(job.compressor.state_dict()))
    return scales, averages, job.buckets, parameters, states


@contract
def loss_scaled(spec, rank):
    """Use given gradients, one of them infinite on one rank in one step, in float32 and in bfloat16."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        job = Job(gradzip.parse(spec), Model(SHAPES, dtype))

        def backward(scaler, step, non_finite, job=job):
            scaler.scale(job.loss(rank, step, ["v"] if non_finite else [])).backward()

        results.append(scaled_steps(job, rank, backward))
    return results


@contract
def autocast(spec, rank):
    """Train a network under autocast with a GradScaler. Large inputs make it overflow.

    Returns this rank's unscaled gradients, and the results of `scaled_steps`.
    """
    results = []
    for dtype in (torch.float16, torch.bfloat16):
        job, own_gradients = Job(gradzip.parse(spec), network()), []
        for name, p in job.named.items():
            p.register_hook(
                lambda grad, own_gradients=own_gradients, name=name: own_gradients[-1].__setitem__(name, grad.clone())
            )

        def backward(scaler, step, non_finite, job=job, own_gradients=own_gradients, dtype=dtype):
            own_gradients.append({})
            x = gradient("x", rank, step, (16, 8, 4, 4)) * (1e30 if non_finite else 1.0)
            with torch.autocast("cpu", dtype):
                loss = job.ddp(x).float().square().mean()
            scaler.scale(loss).backward()
            own_gradients[-1] = {name: grad / scaler.get_scale() for name, grad in own_gradients[-1].items()}

        results.append((own_gradients, scaled_steps(job, rank, backward)))
    return results


if __name__ == "__main__":
    harness.main(of_spec=lambda spec: {name: run(spec, harness.job.rank) for name, run in CONTRACTS.items()})
