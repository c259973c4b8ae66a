"""A worker of tests/front_ends/test_elastic_outer.py, run by an elastic horovodrun: `SCRIPT PLAN FOLDER`.

Trains several models with local steps. Gradients depend on the host and the batch alone. The plan says after which
batch hosts change or a worker is killed. Every worker records its state after each batch.
"""

import faulthandler
import os
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

import gradzip
from contract import gradient
from elastic_jobs import HOSTS, change_hosts, die, digest, write
from gradzip.engines.horovod import HorovodEngine
from gradzip.memory.checkpoint import split

FOLDER = Path(sys.argv[-1])
HOST = os.environ.get("HOROVOD_HOSTNAME")
SHAPES = {"matrix": (64, 48), "wide": (32, 96), "bias": (48,)}
LR = 0.1
COMMIT_EVERY, EVERY = 4, 6  # commits are between exchanges, and after some


@dataclass
class Plan:
    """A job, and what happens in each generation of workers. A generation starts when the world changes.

    models: (spec of the method, class of the optimizer, options of LocalSteps) for each model.
    sizes: the world size of each generation.
    hosts: by (generation, batch), the hosts listed besides rank 0's after that batch. All workers wait for the change.
    killed: by generation, the worker that is killed: (rank, batch, where). Rank 0 is killed last.
    fails: by generation, a worker on which a commit fails that the others complete: (rank, batch).
    """

    models: list[tuple[str, type[torch.optim.Optimizer], dict]]
    sizes: list[int]
    hosts: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    killed: dict[int, tuple[int, int, str]] = field(default_factory=dict)
    fails: dict[int, tuple[int, int]] = field(default_factory=dict)
    batches: int = 0


PLANS = {
    # The mean of the workers' parameters, DiLoCo with residuals, and shared factors. A third worker joins between two
    # exchanges. One is killed between two exchanges and replaced at once, others during an exchange.
    "rounds": Plan(
        models=[
            ("none", torch.optim.SGD, {"outer": None}),
            ("topk:theta=0.9", torch.optim.AdamW, {}),
            ("acpsgd:rank=2", torch.optim.AdamW, {}),
        ],
        sizes=[2, 3, 3, 2, 1],
        hosts={(0, 8): HOSTS},
        killed={
            1: (1, 14, "between exchanges"),
            2: (1, 24, "after an exchange has begun"),
            3: (0, 30, "between the collectives of an exchange"),
        },
        batches=33,
    ),
    # Exchanges in the background. A worker joins and another is killed during one.
    "streamed": Plan(
        models=[("topk:theta=0.9", torch.optim.AdamW, {"fragments": 2, "delay": 2, "blend": 0.5, "offload": True})],
        sizes=[2, 3, 2],
        hosts={(0, 4): HOSTS[:3]},
        killed={1: (1, 9, "after an exchange has begun")},
        batches=20,
    ),
    # A host is no longer listed. Horovod does not synchronize the state then.
    "removed": Plan(
        models=[("topk:theta=0.9", torch.optim.AdamW, {})],
        sizes=[2, 1],
        hosts={(0, 8): []},
        batches=14,
    ),
    # A commit fails on one worker, which returns to the one before, while rank 0 has completed an exchange since.
    "behind": Plan(
        models=[("topk:theta=0.9", torch.optim.AdamW, {"offload": True})],
        sizes=[2, 2],
        fails={0: (1, 8)},
        batches=14,
    ),
}


class Model(torch.nn.Module):
    """Parameters and a buffer that differ between workers."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(gradient(name, HOST, -1, shape)))
        self.register_buffer("mean", gradient("mean", HOST, -1, (5,)))


def local_steps(state):
    return [getattr(state, f"local{i}") for i in range(state.models)]


def parts(outer):
    (worker,) = outer._workers
    return worker.model, worker.optimizer


def write_record(state, generation, event, restarts=0):
    """Append a record of this worker's state to its file."""
    record = {
        "event": event, "generation": generation, "batch": state.batch, "rank": hvd.rank(), "size": hvd.size(),
        "restarts": restarts, "models": [],
    }  # fmt: skip
    for outer in local_steps(state):
        model, optimizer = parts(outer)
        saved = outer.state_dict()
        common, own = split(saved["compressor"])
        for values in common["states"].values():
            del values["rank"], values["size"]
        copies = saved["global"]["parameters"]
        record["models"].append({
            "exchanges": saved["exchanges"],
            "steps": saved["steps"],
            "common": digest([saved["global"], common, saved["next"]]),
            "global": digest(copies),
            "local": digest(dict(model.named_parameters())),
            "buffers": digest(dict(model.named_buffers())),
            "inner": digest(optimizer.state_dict()["state"]),
            "own": {n: digest(s["residual"]) for n, s in own["states"].items() if "residual" in s},
        })  # fmt: skip
    write(FOLDER, HOST, record)


def save_global(state, name):
    if hvd.rank() == 0:
        torch.save([outer.state_dict()["global"]["parameters"] for outer in local_steps(state)], FOLDER / name)


def die_in_an_exchange(number):
    """Die in place of the first collective of the `number`-th bucket from now."""
    launch, launched = HorovodEngine.launch, []

    def launch_or_die(engine, collective, name):
        launched.append(name)
        if len(launched) > number:
            die()
        return launch(engine, collective, name)

    HorovodEngine.launch = launch_or_die


def fail_to_save(outer_state):
    """Have the next commit of this worker fail, when the others can complete theirs."""
    handler = outer_state._handlers["local0"]
    save = handler.save

    def fail():
        handler.save = save
        raise HorovodInternalError("this commit fails")

    handler.save = fail


@hvd.elastic.run
def train(state, plan, caught):
    generation = hvd.broadcast_object(state.generation + 1, name="generation")
    state.generation = generation
    state.save()
    write_record(state, generation, "begin", sum("restarts from the global" in str(w.message) for w in caught))
    if generation == 0:
        save_global(state, "begin.pt")
    while state.batch < plan.batches:
        batch = state.batch + 1
        rank, last, where = plan.killed.get(generation, (None, None, ""))
        dies = (rank, last) == (hvd.rank(), batch)
        if dies and "exchange has begun" in where:
            die_in_an_exchange(0)
        if dies and where.startswith("between the collectives"):
            die_in_an_exchange(1)
        for outer in local_steps(state):
            model, optimizer = parts(outer)
            for name, parameter in model.named_parameters():
                parameter.grad = gradient(name, HOST, batch, parameter.shape)
            optimizer.step()
        if dies:
            die()
        state.batch = batch
        committing = batch % COMMIT_EVERY == 0
        if committing or not outer.schedule.delay:  # state_dict waits for an exchange in progress
            write_record(state, generation, "commit" if committing else "step")
        if plan.fails.get(generation) == (hvd.rank(), batch):
            fail_to_save(state)
        if committing:
            state.commit()
        if (generation, batch) in plan.hosts:
            change_hosts(state, FOLDER, HOST, hvd.rank(), plan.hosts[generation, batch])
    for outer in local_steps(state):
        outer.synchronize()
    write_record(state, generation, "end")
    save_global(state, "end.pt")


def main():
    plan = PLANS[sys.argv[1]]
    faulthandler.dump_traceback_later(120)  # a job that hangs is found with the stacks of its workers
    hvd.init()
    torch.set_num_threads(1)
    values = {"models": len(plan.models)}
    for i, (spec, kind, options) in enumerate(plan.models):
        model = Model()
        optimizer = kind(model.parameters(), lr=LR)
        method = gradzip.parse(spec)
        outer = gradzip.outer.LocalSteps(model, optimizer, method, every=EVERY, group="horovod", **options)
        values[f"local{i}"] = outer
    state = gradzip.horovod.elastic_state(**values, batch=0, generation=-1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(state, plan, caught)


if __name__ == "__main__":
    main()
