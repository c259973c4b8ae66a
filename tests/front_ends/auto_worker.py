"""Scenarios for tests/front_ends/test_auto.py, on two ranks. Each trains small models whose gradients are given."""

import copy
import logging

import torch

import gradzip
from contract import assert_equal_states, kept_residual
from harness import UNDER_HOROVOD, Training, gather, main, message, scenario

SHAPES = {"w": (64, 48), "v": (32, 8, 3, 3), "b": (48,), "u": (40, 60)}
LARGE = {"w": (300, 400), "b": (48,)}
TOPK = "topk(theta=0.9,exchange=scatter_reduce)"
SEARCHING = "auto:steps=3,every=10,allow=[fp16,acpsgd]"
GIVEN = f"auto:every=0,allow=[fp16,acpsgd,{TOPK}]"  # for choices that do not depend on times
CHANGES = [0, 3, 2, 0, 3]
CHANGE_EVERY = 4
SKIPPED = (2, 6, 12, 20)


def training(compressor, shapes=SHAPES):
    return Training(compressor, shapes, bucket_cap_mb=25 if UNDER_HOROVOD else 0.02)  # DDP: two buckets


class Lines(logging.Handler):
    """Collects what Auto logs."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@scenario
def searched():
    """Train until it has chosen and looked again. Return what it did in each step, its log, and the results."""
    lines = Lines()
    logger = logging.getLogger("gradzip.auto")
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    auto = gradzip.parse(SEARCHING)
    job, history = training(auto), []
    decisions = 0
    while decisions < 2:
        history.append([auto.decided, auto.specs[auto.current]])
        reports = auto.report
        job.step(len(history))
        decisions += auto.report is not reports
    logger.removeHandler(lines)
    return history, lines.lines, auto.choice, auto.report, auto.state_dict()["auto"], job.parameters()


@scenario
def nothing_allowed():
    auto = gradzip.parse(f"{SEARCHING},max_error=1e-9")
    job, step = training(auto), 0
    while not auto.decided:
        job.step(step := step + 1)
    return auto.decided, auto.choice, auto.report["ms"], job.parameters()


@scenario
def changed(rank):
    """Choose other methods while training goes on.

    Returns the averages of all steps, the names of the states of each part after each choice, and residuals.
    """
    auto = gradzip.parse(GIVEN)
    job, averages, owners = training(auto), [], []
    for i, index in enumerate(CHANGES):
        settle(auto, index, rank)
        for step in range(CHANGE_EVERY):
            averages.append(job.step(CHANGE_EVERY * i + step))
        owners.append([sorted(part.memory.by_parameter()) for part in auto.parts])
    return averages, owners, residuals(auto)


def settle(auto, index, rank):
    auto.choose(index, {0: 0.01, index: 0.01}, 0.0, rank, 2)


@scenario
def resumed(rank):
    """Continue with a choice from a checkpoint. Return whether it is used at once, and both jobs' results."""
    auto = gradzip.parse(GIVEN)
    job = training(auto)
    settle(auto, 2, rank)
    for step in range(5):
        job.step(step)
    saved = gather(auto.state_dict())
    state = gradzip.checkpoint.shard(gradzip.checkpoint.merge(saved), rank, 2)
    again = gradzip.parse(GIVEN)
    again.load_state_dict(state)
    second = training(again)
    decided, choice = again.decided, again.choice
    averages = [[j.step(step) for step in range(5, 8)] for j in (job, second)]
    return decided, choice, averages, [a.state_dict()["auto"]["steps"] for a in (auto, again)]


@scenario
def synced(rank):
    """Horovod's elastic state: a new worker (rank 1) gets the choice, and a commit keeps it. Not with DDP."""
    if not UNDER_HOROVOD:
        return None
    auto = gradzip.parse(GIVEN)
    job = training(auto)
    if rank == 0:
        settle(auto, 2, rank)
    state = gradzip.horovod.elastic_state(model=job.module, optimizer=job.optimizer)
    state.sync()
    choices, counts = [auto.specs[auto.chosen]], [auto.steps_since]
    for step in range(3):
        job.step(step)
    state.save()
    job.step(3)
    settle(auto, 0, rank)  # a decision after the commit
    state.restore()
    state.sync()
    job.step(4)
    return [*choices, auto.specs[auto.chosen]], [*counts, auto.steps_since], job.parameters()


@scenario
def different_choices(rank):
    """Rank 1 alone has loaded a choice. Return the error."""
    auto = gradzip.parse(GIVEN)
    if rank == 1:
        saved = gradzip.parse(GIVEN)
        saved.register_parameter("w", torch.Size(SHAPES["w"]), "w")
        settle(saved, 2, rank)
        auto.load_state_dict(saved.state_dict())
    job = training(auto)
    return message(job.step, 0)


@scenario
def loss_scaled(rank):
    """Overflow in some steps on rank 1: while it measures, and around changes of the method.

    Returns the steps in which an overflow has changed anything, and the parameters of both jobs.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10)
    changes, parameters = [], []
    for spec, steps in ((SEARCHING, 12), (GIVEN, 24)):
        auto = gradzip.parse(spec).follow(scaler)
        job = training(auto)
        for step in range(steps):
            if spec == GIVEN and step in (0, 10, 20):
                settle(auto, 0 if step == 20 else 2, rank)
            skipped = step in SKIPPED
            states = residuals if step == 20 else gradzip.Auto.state_dict  # its first step moves residuals
            before = copy.deepcopy(states(auto)), job.parameters()
            job.step(step, scaler, "v" if skipped and rank == 1 else None)
            if skipped and not equal([states(auto), job.parameters()], list(before)):
                changes.append([spec, step])
        parameters.append(job.parameters())
    return changes, parameters


def residuals(compressor):
    """Copies of this rank's residuals, by parameter name, with what it keeps as the owner of a partition."""
    states = [item for part in compressor.state_dict()["parts"] for item in part["states"].items()]
    return {name: kept_residual(fields).clone() for name, fields in states if "residual" in fields}


def equal(a, b):
    try:
        assert_equal_states(a, b)
    except AssertionError:
        return False
    return True


@scenario
def two_models():
    """Share an Auto between two models in turns, as in a GAN. Names are equal, and one shape."""
    auto = gradzip.parse(SEARCHING)
    jobs, step = [training(auto), training(auto, {"w": (50, 60), "v": SHAPES["v"]})], 0
    while not auto.decided:
        for i, job in enumerate(jobs):
            job.step(1000 * i + step)
        step += 1
    for i, job in enumerate(jobs):
        job.step(1000 * i + step)
    return step, auto.choice, [job.parameters() for job in jobs]


@scenario
def slow_network():
    """Train on a network where sending takes long. Return the choice, the report, and the parameters."""
    auto = gradzip.parse(SEARCHING)
    job, history = training(auto, LARGE), []
    while not auto.steps_since:
        history.append(auto.specs[auto.current])
        job.step(len(history))
    return auto.decided, auto.choice, auto.report, history, job.parameters()


if __name__ == "__main__":
    main()
