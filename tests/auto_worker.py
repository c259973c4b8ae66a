"""Scenarios for tests/test_auto.py, on two ranks: `auto_worker.py FRONT_END FOLDER NAME ...`.

FRONT_END is horovod or ddp. Each scenario trains small models whose gradients are given.
"""

import copy
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch

import gradzip
from contract import assert_equal_states, gradient
from gradzip.auto.plans import Plan

SHAPES = {"w": (64, 48), "v": (32, 8, 3, 3), "b": (48,), "u": (40, 60)}
LARGE = {"w": (300, 400), "b": (48,)}
TOPK = "topk(theta=0.9,exchange=scatter_reduce)"
SEARCHING = "auto:steps=3,every=10,allow=[fp16,acpsgd]"
GIVEN = f"auto:every=0,allow=[fp16,acpsgd,{TOPK}]"  # for plans that do not depend on times
CHANGES = ["none", "topk:exchange=scatter_reduce,theta=0.9", "acpsgd", "mixed", "none", "mixed"]
CHANGE_EVERY = 4
SKIPPED = (2, 5, 12, 20)
FRONT_END = next(iter(sys.argv[1:]), "")  # pytest imports this file, too, for doctests
SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


class Model(torch.nn.Module):
    """A model whose gradients are the argument of `forward`."""

    def __init__(self, shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, gradients):
        return sum((p * gradients[name]).sum() for name, p in self.named_parameters())


class Job:
    """A model under Horovod or DDP, and its optimizer."""

    def __init__(self, compressor, shapes=SHAPES):
        self.compressor = compressor
        self.model = model = Model(shapes)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if FRONT_END == "horovod":
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer, named_parameters=model.named_parameters(), compression=compressor
            )
        else:
            # Two buckets.
            self.model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)
            state = gradzip.ddp.HookState(compressor, named_parameters=model.named_parameters())
            self.model.register_comm_hook(state, gradzip.ddp.hook)
        self.named = dict(model.named_parameters())

    def step(self, rank, step, scaler=None, non_finite=False):
        """Return the averages."""
        self.optimizer.zero_grad()
        gradients = {name: gradient(name, rank, step, p.shape) for name, p in self.named.items()}
        if non_finite:
            gradients["v"][0, 0] = float("inf")
        loss = self.model(gradients)
        if scaler is None:
            loss.backward()
            self.optimizer.step()
            return {name: p.grad.clone() for name, p in self.named.items()}
        scaler.scale(loss).backward()
        if FRONT_END == "horovod":
            self.optimizer.synchronize()
            scaler.unscale_(self.optimizer)
            with self.optimizer.skip_synchronize():
                scaler.step(self.optimizer)
        else:
            scaler.step(self.optimizer)
        scaler.update()
        return None

    def parameters(self):
        return {name: p.detach().clone() for name, p in self.named.items()}


class Lines(logging.Handler):
    """Collects what Auto logs."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@scenario
def searched(rank):
    """Train until it has chosen and looked again. Return what it did in each step, its log, and the results."""
    lines = Lines()
    logger = logging.getLogger("gradzip.auto")
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    auto = gradzip.parse(SEARCHING)
    job, history = Job(auto), []
    decisions = 0
    while decisions < 2:
        history.append([auto.decided, auto.plan.title])
        reports = auto.report
        job.step(rank, len(history))
        decisions += auto.report is not reports
    logger.removeHandler(lines)
    return history, lines.lines, auto.choice, auto.report, auto.state_dict()["auto"], job.parameters()


@scenario
def nothing_allowed(rank):
    auto = gradzip.parse(f"{SEARCHING},max_error=1e-9")
    job, step = Job(auto), 0
    while not auto.decided:
        job.step(rank, step := step + 1)
    return auto.decided, auto.choice, auto.report["ms"], job.parameters()


@scenario
def changed(rank):
    """Put other plans in charge while training goes on.

    Returns the averages of all steps, the names of the states of each part after each plan, and residuals.
    """
    auto = gradzip.parse(GIVEN)
    job, averages, owners = Job(auto), [], []
    plans = {title: everywhere(i) for i, title in enumerate(auto.titles)}
    plans["mixed"] = Plan("mixed", dict(zip(keys(), [3, 2, 3, 3])))
    for i, title in enumerate(CHANGES):
        settle(auto, plans[title], rank)
        for step in range(CHANGE_EVERY):
            averages.append(job.step(rank, CHANGE_EVERY * i + step))
        owners.append([sorted({n for s in part.states.values() for n in s.state_dicts()}) for part in auto.parts])
    residuals = {}
    for part in auto.parts:
        part.memory.split_all_buckets()
        residuals |= {name: state.take_residual() for name, state in part.states.items()}
    return averages, owners, residuals


def keys():
    return [(name, torch.Size(shape)) for name, shape in SHAPES.items()]


def everywhere(index):
    return Plan("", dict.fromkeys(keys(), index), 0.01)


def settle(auto, plan, rank):
    auto.settle(plan, [everywhere(0), plan], None, rank, 2)


@scenario
def resumed(rank):
    """Continue with a choice from a checkpoint. Return whether it is in charge at once, and both jobs' results."""
    auto = gradzip.parse(GIVEN)
    job = Job(auto)
    settle(auto, everywhere(2), rank)
    for step in range(5):
        job.step(rank, step)
    saved = gather(auto.state_dict())
    state = gradzip.checkpoint.shard(gradzip.checkpoint.merge(saved), rank, 2)
    again = gradzip.parse(GIVEN)
    again.load_state_dict(state)
    second = Job(again)
    decided, choice = again.decided, again.choice
    averages = [[j.step(rank, step) for step in range(5, 8)] for j in (job, second)]
    return decided, choice, averages, [a.state_dict()["auto"]["steps"] for a in (auto, again)]


def gather(value):
    if FRONT_END == "horovod":
        return hvd.allgather_object(value, name="states")
    values = [None] * 2
    dist.all_gather_object(values, value)
    return values


@scenario
def synced(rank):
    """Horovod's elastic state: a new worker (rank 1) gets the choice, and a commit keeps it. Not with DDP."""
    if FRONT_END == "ddp":
        return None
    auto = gradzip.parse(GIVEN)
    job = Job(auto)
    if rank == 0:
        settle(auto, everywhere(2), rank)
    state = gradzip.horovod.elastic_state(model=job.model, optimizer=job.optimizer)
    state.sync()
    choices, counts = [auto.choice], [auto.steps_since]
    for step in range(3):
        job.step(rank, step)
    state.save()
    job.step(rank, 3)
    settle(auto, everywhere(0), rank)  # a decision after the commit
    state.restore()
    state.sync()
    job.step(rank, 4)
    return [*choices, auto.choice], [*counts, auto.steps_since], job.parameters()


@scenario
def different_choices(rank):
    """Rank 1 alone has loaded a choice. Return the error."""
    auto = gradzip.parse(GIVEN)
    if rank == 1:
        settle(auto, Plan("", {("v", (32, 8, 3, 3)): 2}), rank)
    job = Job(auto)
    try:
        job.step(rank, 0)
    except RuntimeError as error:
        return str(error)
    return None


@scenario
def loss_scaled(rank):
    """Overflow in some steps on rank 1: while it measures, and around changes of the plan.

    Returns the steps in which an overflow has changed anything, and the parameters of both jobs.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10)
    changes, parameters = [], []
    for spec, steps in ((SEARCHING, 12), (GIVEN, 24)):
        auto = gradzip.parse(spec).follow(scaler)
        job = Job(auto)
        for step in range(steps):
            if spec == GIVEN and step in (0, 10, 20):
                settle(auto, everywhere(0 if step == 20 else 2), rank)
            skipped = step in SKIPPED
            before = copy.deepcopy(auto.state_dict()), job.parameters()
            job.step(rank, step, scaler, non_finite=skipped and rank == 1)
            if skipped and not equal([auto.state_dict(), job.parameters()], list(before)):
                changes.append([spec, step])
        parameters.append(job.parameters())
    return changes, parameters


def equal(a, b):
    try:
        assert_equal_states(a, b)
    except AssertionError:
        return False
    return True


@scenario
def two_models(rank):
    """Share an Auto between two models in turns, as in a GAN. Names are equal, and one shape."""
    auto = gradzip.parse(SEARCHING)
    jobs, step = [Job(auto), Job(auto, {"w": (50, 60), "v": SHAPES["v"]})], 0
    while not auto.decided:
        for i, job in enumerate(jobs):
            job.step(rank, 1000 * i + step)
        step += 1
    for i, job in enumerate(jobs):
        job.step(rank, 1000 * i + step)
    return step, auto.choice, [job.parameters() for job in jobs]


@scenario
def slow_network(rank):
    """Train on a network where sending takes long. Return the choice, the report, and the parameters."""
    auto = gradzip.parse(SEARCHING)
    job, history = Job(auto, LARGE), []
    while not auto.steps_since:
        history.append(auto.plan.title)
        job.step(rank, len(history))
    return auto.decided, auto.choice, auto.report, history, job.parameters()


def main():
    global dist, hvd
    folder, *names = sys.argv[2:]
    torch.set_num_threads(1)
    if FRONT_END == "horovod":
        import horovod.torch as hvd

        hvd.init()
        rank = hvd.rank()
    else:
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(seconds=100))
        rank = dist.get_rank()
    results = {name: SCENARIOS[name](rank) for name in names}
    torch.save(results, Path(folder) / f"{rank}.pt")
    if FRONT_END == "ddp":
        dist.barrier()
        dist.destroy_process_group()
        os._exit(0)  # as in ddp_contract_worker.py


if __name__ == "__main__":
    main()
