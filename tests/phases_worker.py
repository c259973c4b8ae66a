"""Scenarios for tests/test_phases.py, on two ranks: `phases_worker.py FRONT_END FOLDER NAME ...`.

The models, whose gradients are given, and the main function are those of auto_worker.py.
"""

import copy

import torch

import auto_worker
import gradzip
from auto_worker import FRONT_END, SHAPES, Job, equal, gather, scenario
from contract import gradient

# Methods that compress parameters, and such that compress whole buckets.
CHANGING = "phases:0=topk(theta=0.9),4=acpsgd,8=fft-range(theta=0.5,error_feedback=True),12=none"
WARMED_UP = "phases:0=none,3=acpsgd,6=none"
STEPS = 16
SCALED_STEPS = 14
SKIPPED = (1, 5, 9)


@scenario
def switched(rank):
    """Return averages, residuals and the number of bytes sent, of each step."""
    compressor = gradzip.parse(CHANGING)
    job, steps = Job(compressor), []
    for step in range(STEPS):
        before = compressor.traffic.bytes_sent
        averages = job.step(rank, step)
        steps.append((averages, residuals(compressor), compressor.traffic.bytes_sent - before))
    return steps


def residuals(compressor):
    """Copies of this rank's residuals, by parameter name."""
    states = [item for part in compressor.state_dict()["parts"] for item in part["states"].items()]
    return {name: fields["residual"].clone() for name, fields in states if "residual" in fields}


@scenario
def resumed(rank):
    """Continue from a checkpoint of all ranks, in the middle of each phase. Return the averages of all runs."""
    averages = []
    for last in (None, 2, 4, 7):
        compressor = gradzip.parse(WARMED_UP)
        job, run = Job(compressor), []
        for step in range(8):
            if step == last:
                merged = gradzip.checkpoint.merge(gather(compressor.state_dict()))
                compressor = gradzip.parse(WARMED_UP)
                compressor.load_state_dict(gradzip.checkpoint.shard(merged, rank, 2))
                job = Job(compressor)
            run.append(job.step(rank, step))
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
        try:
            Job(compressor).step(rank, 0)
        except RuntimeError as error:
            errors.append(str(error))
    return errors


@scenario
def loss_scaled(rank):
    """Overflow on rank 1 in some steps. Return those that have changed anything, step numbers, and the parameters."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    compressor = gradzip.parse(WARMED_UP).follow(scaler)
    job, changes, numbers = Job(compressor), [], []
    for step in range(SCALED_STEPS):
        before = copy.deepcopy(compressor.state_dict()), job.parameters()
        job.step(rank, step, scaler, non_finite=step in SKIPPED and rank == 1)
        if step in SKIPPED and not equal([compressor.state_dict(), job.parameters()], list(before)):
            changes.append(step)
        numbers.append(compressor.step_of("w", torch.Size(SHAPES["w"])))
    return changes, numbers, job.parameters()


@scenario
def synced(rank):
    """Horovod's elastic state: a new worker (rank 1) gets the step numbers, and a commit keeps them. Not with DDP."""
    if FRONT_END == "ddp":
        return None
    compressor = after(4) if rank == 0 else gradzip.parse(WARMED_UP)
    job, numbers = Job(compressor), []
    state = gradzip.horovod.elastic_state(model=job.model, optimizer=job.optimizer)
    state.sync()
    numbers.append(compressor.step_of("w", torch.Size(SHAPES["w"])))
    job.step(rank, 0)
    state.save()
    job.step(rank, 1)  # begins the last phase
    state.restore()
    state.sync()
    numbers.append(compressor.step_of("w", torch.Size(SHAPES["w"])))
    job.step(rank, 2)
    job.step(rank, 3)
    return numbers, compressor.method_for("w", torch.Size(SHAPES["w"])) is compressor.parts[2], job.parameters()


if __name__ == "__main__":
    auto_worker.main()
