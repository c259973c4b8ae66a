"""Scenarios for tests/methods/test_phases.py, on two ranks. The models are those of auto_worker.py."""

import copy

import torch

import gradzip
from auto_worker import SHAPES, equal, residuals, training
from contract import gradient
from harness import UNDER_HOROVOD, gather, main, message, scenario

# Methods that compress parameters, and such that compress whole buckets.
CHANGING = "phases:0=topk(theta=0.9),4=acpsgd,8=fft-range(theta=0.5,error_feedback=True),12=none"
WARMED_UP = "phases:0=none,3=acpsgd,6=none"
STEPS = 16
SCALED_STEPS = 14
SKIPPED = (1, 5, 9)


@scenario
def switched():
    """Return averages, residuals and the number of bytes sent, of each step."""
    compressor = gradzip.parse(CHANGING)
    job, steps = training(compressor), []
    for step in range(STEPS):
        before = compressor.traffic.bytes_sent
        averages = job.step(step)
        steps.append((averages, residuals(compressor), compressor.traffic.bytes_sent - before))
    return steps


@scenario
def resumed(rank):
    """Continue from a checkpoint of all ranks, in the middle of each phase. Return the averages of all runs."""
    averages = []
    for last in (None, 2, 4, 7):
        compressor = gradzip.parse(WARMED_UP)
        job, run = training(compressor), []
        for step in range(8):
            if step == last:
                merged = gradzip.checkpoint.merge(gather(compressor.state_dict()))
                compressor = gradzip.parse(WARMED_UP)
                compressor.load_state_dict(gradzip.checkpoint.shard(merged, rank, 2))
                job = training(compressor)
            run.append(job.step(step))
        averages.append(run)
    return averages


def after(steps):
    """A compressor after some steps of one rank."""
    group = gradzip.LocalGroup(gradzip.parse(WARMED_UP), 1)
    for step in range(steps):
        for name, shape in SHAPES.items():
            group.average([gradient(name, 0, step, shape)], name)
    return group.compressors[0]


@scenario
def different_steps(rank):
    """Rank 1 alone has loaded a checkpoint. Return the errors: in the same phase, and in another one."""
    errors = []
    for steps in (2, 4):
        compressor = gradzip.parse(WARMED_UP)
        if rank == 1:
            compressor.load_state_dict(after(steps).state_dict())
        errors.append(message(training(compressor).step, 0))
    return errors


@scenario
def loss_scaled(rank):
    """Overflow on rank 1 in some steps. Return those that have changed anything, step numbers, and the parameters."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    compressor = gradzip.parse(WARMED_UP).follow(scaler)
    job, changes, numbers = training(compressor), [], []
    for step in range(SCALED_STEPS):
        before = copy.deepcopy(compressor.state_dict()), job.parameters()
        job.step(step, scaler, "v" if step in SKIPPED and rank == 1 else None)
        if step in SKIPPED and not equal([compressor.state_dict(), job.parameters()], list(before)):
            changes.append(step)
        numbers.append(compressor.step_of("w", torch.Size(SHAPES["w"])))
    return changes, numbers, job.parameters()


@scenario
def synced(rank):
    """Horovod's elastic state: a new worker (rank 1) gets the step numbers, and a commit keeps them. Not with DDP."""
    if not UNDER_HOROVOD:
        return None
    compressor = after(4) if rank == 0 else gradzip.parse(WARMED_UP)
    job, numbers = training(compressor), []
    state = gradzip.horovod.elastic_state(model=job.module, optimizer=job.optimizer)
    state.sync()
    numbers.append(compressor.step_of("w", torch.Size(SHAPES["w"])))
    job.step(0)
    state.save()
    job.step(1)  # begins the last phase
    state.restore()
    state.sync()
    numbers.append(compressor.step_of("w", torch.Size(SHAPES["w"])))
    job.step(2)
    job.step(3)
    return numbers, compressor.method_for("w", torch.Size(SHAPES["w"])) is compressor.parts[2], job.parameters()


if __name__ == "__main__":
    main()
