"""A worker of tests/front_ends/test_elastic.py, run by an elastic horovodrun: `elastic_worker.py PLAN FOLDER`.

Trains several models, each with its own compression method. The plan says in which step hosts change or a worker is
killed. Every worker records its state after each step.
"""

import faulthandler
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import horovod.torch as hvd
import torch

import gradzip
from contract import kept_residual
from elastic_jobs import HOSTS, change_hosts, die, digest, write
from gradzip.engines.horovod import HorovodEngine
from gradzip.memory.checkpoint import split

FOLDER = Path(sys.argv[-1])
HOST = os.environ.get("HOROVOD_HOSTNAME")
COMMIT_EVERY = 3


@dataclass
class Plan:
    """A job, and what happens in each generation of workers. A generation starts when the world changes.

    models: (method, options of its optimizer) for each model.
    sizes: the world size of each generation.
    hosts: by (generation, step), the hosts listed besides rank 0's after that step. All workers wait for the change.
    killed: by generation, the worker that is killed: (rank, step, model, where).
    late: seconds that rank 0 waits in that step, so that it notices the death when it launches a collective.
    """

    models: list[tuple[str, dict]]
    sizes: list[int]
    hosts: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    killed: dict[int, tuple[int, int, int, str]] = field(default_factory=dict)
    late: float = 0.0
    last_step: int = 0
    plain: bool = False  # use hvd.elastic.TorchState


TOPK = "topk:theta=0.9,exchange=scatter_reduce"
PLANS = {
    # A method with residuals per rank, one that also has shared factors, one with phases, whose worker is killed
    # between two phases, and one with shared momenta. A third worker joins; another is killed and replaced at once by
    # one that was already listed.
    "joined": Plan(
        models=[
            (TOPK, {}),
            ("acpsgd:rank=2", {"backward_passes_per_step": 2}),
            ("gradiveq:warmup_steps=2,sample_steps=3,compress_steps=4,loss=0,stop=None", {}),
            ("momentum:inner=topk(theta=0.9),warmup_steps=4", {}),
        ],
        sizes=[2, 3, 3, 2, 1],
        hosts={(0, 6): HOSTS},
        killed={
            1: (1, 10, 0, "in the backward pass"),
            2: (1, 17, 1, "between backward passes"),
            3: (0, 19, 2, "between rounds"),
        },
        last_step=24,
    ),
    # No worker joins: with `groups`, a worker that creates its optimizer waits until all others create theirs.
    "grouped": Plan(
        models=[(TOPK, {"groups": 2}), ("powersgd:rank=2", {"groups": 1})],
        sizes=[3, 2, 1],
        killed={0: (1, 4, 0, "in the backward pass"), 1: (1, 7, 1, "between rounds")},
        late=1.0,
        last_step=12,
    ),
    # hvd.elastic.TorchState, and a worker that is replaced by another, so that the world size does not change.
    "plain": Plan(
        models=[(TOPK, {})],
        sizes=[2, 2],
        hosts={(0, 6): HOSTS[2:3]},
        last_step=12,
        plain=True,
    ),
}


def write_record(state, generation, event):
    """Append a record of this worker's state to its file."""
    models, optimizers = zip(*models_and_optimizers(state))
    state_dicts = [optimizer._compression.state_dict() for optimizer in optimizers]
    split_states = [split(state_dict) for state_dict in state_dicts]
    for shared, _ in split_states:
        for values in shared["states"].values():
            del values["rank"], values["size"]
            values.pop("learnt", None)  # rank 0 has learnt it, but not broadcast it yet
    record = {
        "event": event,
        "generation": generation,
        "step": state.step,
        "rank": hvd.rank(),
        "size": hvd.size(),
        "model": digest([model.state_dict() for model in models]),
        "momentum": digest([optimizer.state_dict()["state"] for optimizer in optimizers]),
        "common": digest([shared for shared, _ in split_states]),
        "steps": [{name: s["step"] for name, s in shared["states"].items()} for shared, _ in split_states],
        "own": [
            {n: digest(kept_residual(s)) for n, s in one["states"].items() if "residual" in s} for one in state_dicts
        ],
    }
    write(FOLDER, HOST, record)


def save_parts(state, name):
    if hvd.rank() == 0:
        torch.save([part.state_dict() for pair in models_and_optimizers(state) for part in pair], FOLDER / name)


def loss(network, seed, dies=False):
    """Return the loss of the batch with this seed. With `dies`, the backward pass kills the worker half-way through."""
    shape = (8, 48) if isinstance(network[0], torch.nn.Linear) else (8, 12, 5, 5)
    hidden = network[0](torch.randn(shape, generator=torch.Generator().manual_seed(seed))).tanh()
    if dies:
        # The second layer's gradients have been launched; the first layer's do not exist yet.
        hidden.register_hook(die)
    return network[1](hidden).square().mean()


def batch_seeds(step, rank, options):
    """Return the seeds of the batches of a rank in a step."""
    return [1000 * step + 100 * i + rank for i in range(options.get("backward_passes_per_step", 1))]


def networks_and_optimizers(plan):
    """Yield (network, optimizer) for each model. tests/front_ends/test_elastic.py creates the same ones."""
    for spec, _ in plan.models:
        if spec.startswith("gradiveq"):
            network = torch.nn.Sequential(*[torch.nn.Conv2d(*c, 3, padding=1) for c in ((12, 16), (16, 12))])
        else:
            network = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.Linear(64, 48))
        yield network, torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def models_and_optimizers(state):
    """Return (network, DistributedOptimizer) for each model."""
    return [(getattr(state, f"model{i}"), getattr(state, f"optimizer{i}")) for i in range(state.models)]


def die_between_rounds():
    launch = HorovodEngine.launch

    def launch_or_die(engine, collective, name):
        if ".gradzip.2" in name:
            die()
        return launch(engine, collective, name)

    HorovodEngine.launch = launch_or_die


@hvd.elastic.run
def train(state, plan):
    generation = hvd.broadcast_object(state.generation + 1, name="generation")
    state.generation = generation
    state.save()
    write_record(state, generation, "begin")
    if generation == 0:
        save_parts(state, "begin.pt")
    while state.step < plan.last_step:
        for i, (network, optimizer) in enumerate(models_and_optimizers(state)):
            death = ""
            if plan.killed.get(generation, ())[:3] == (hvd.rank(), state.step, i):
                death = plan.killed[generation][3]
            elif hvd.rank() == 0 and plan.killed.get(generation, ())[1:3] == (state.step, i):
                time.sleep(plan.late)
            optimizer.zero_grad()
            for seed in batch_seeds(state.step, hvd.rank(), plan.models[i][1]):
                loss(network, seed, death == "in the backward pass").backward()
                if death == "between backward passes":
                    die()
            if death == "between rounds":
                die_between_rounds()
            optimizer.step()
        state.step += 1
        committing = state.step % COMMIT_EVERY == 0
        write_record(state, generation, "commit" if committing else "step")
        if committing:
            state.commit()
        if (generation, state.step) in plan.hosts:
            change_hosts(state, FOLDER, HOST, hvd.rank(), plan.hosts[generation, state.step])
    write_record(state, generation, "end")
    save_parts(state, "end.pt")


def main():
    plan = PLANS[sys.argv[1]]
    faulthandler.dump_traceback_later(120)  # a job that hangs is found with the stacks of its workers
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank() + os.getpid())  # only the shared state makes the models equal
    values = {"models": len(plan.models)}
    for i, ((spec, options), (network, sgd)) in enumerate(zip(plan.models, networks_and_optimizers(plan))):
        named = network.named_parameters()
        compressor = gradzip.parse(spec)
        optimizer = hvd.DistributedOptimizer(sgd, named_parameters=named, compression=compressor, **options)
        values |= {f"model{i}": network, f"optimizer{i}": optimizer}
    make = hvd.elastic.TorchState if plan.plain else gradzip.horovod.elastic_state
    train(make(**values, step=0, generation=-1), plan)


if __name__ == "__main__":
    main()
