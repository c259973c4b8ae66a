"""A worker of tests/test_elastic.py: `elastic_worker.py PLAN FOLDER`, under an elastic horovodrun.

Trains some models, each through a method of its own. What happens when is scripted by the step; every worker writes
down what it has after each one.
"""

import hashlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import horovod.torch as hvd
import torch

import gradzip
from gradzip.checkpoint import split
from gradzip.engines.horovod import HorovodEngine

FOLDER = Path(sys.argv[-1])
HOST = os.environ.get("HOROVOD_HOSTNAME")
HOSTS = ["localhost", "127.0.0.1", "127.1", "LOCALHOST"]  # Horovod never uses a name again after a failure there
COMMIT_EVERY = 3


@dataclass
class Plan:
    """A job: (method, options of its optimizer) of each model, and what happens in which generation of workers.

    sizes: of the generations' worlds. hosts: by (generation, step), those listed beside rank 0's after that step; all
    wait for that. killed: by generation, (rank, step, model, where).
    """

    models: list[tuple[str, dict]]
    sizes: list[int]
    hosts: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    killed: dict[int, tuple[int, int, int, str]] = field(default_factory=dict)
    last_step: int = 0
    plain: bool = False  # Horovod's own state


TOPK = "topk:theta=0.9,exchange=scatter_reduce"
PLANS = {
    # Residuals that stay each rank's own; factors in common besides; a method of phases, killed as it goes from one to
    # the next. A third worker joins; one is killed, whose place is taken at once by one that was listed too.
    "joined": Plan(
        models=[
            (TOPK, {}),
            ("acpsgd:rank=2", {"backward_passes_per_step": 2}),
            ("gradiveq:warmup_steps=2,sample_steps=3,compress_steps=4,loss=0,stop=None", {}),
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
    # Nobody joins: with groups, Horovod has a worker that makes its optimizer wait for all others to make theirs.
    "grouped": Plan(
        models=[(TOPK, {"groups": 2}), ("powersgd:rank=2", {"groups": 1})],
        sizes=[3, 2, 1],
        killed={0: (1, 4, 0, "in the backward pass"), 1: (1, 7, 1, "between rounds")},
        last_step=12,
    ),
    # Horovod's own state, and a worker whose place is taken by another: the world is as large as before.
    "plain": Plan(
        models=[(TOPK, {})],
        sizes=[2, 2],
        hosts={(0, 6): HOSTS[2:3]},
        last_step=12,
        plain=True,
    ),
}


def digest(value):
    """Of tensors and numbers in dicts and lists, to the bit."""
    sha = hashlib.sha256()

    def add(x):
        if isinstance(x, dict):
            for key in sorted(x):
                sha.update(str(key).encode())
                add(x[key])
        elif isinstance(x, (list, tuple)):
            for item in x:
                add(item)
        elif isinstance(x, torch.Tensor):
            sha.update(x.detach().contiguous().numpy().tobytes())
        else:
            sha.update(repr(x).encode())

    add(value)
    return sha.hexdigest()[:16]


def write(state, generation, event):
    """Appends what this worker has to its file."""
    models, optimizers = zip(*trained(state))
    halves = [split(optimizer._compression.state_dict()) for optimizer in optimizers]
    for common, _ in halves:
        for values in common["states"].values():
            del values["rank"], values["size"]
            values.pop("learnt", None)  # by rank 0, and not yet handed out
    record = {
        "event": event,
        "generation": generation,
        "step": state.step,
        "rank": hvd.rank(),
        "size": hvd.size(),
        "model": digest([model.state_dict() for model in models]),
        "momentum": digest([optimizer.state_dict()["state"] for optimizer in optimizers]),
        "common": digest([common for common, _ in halves]),
        "steps": [{name: s["step"] for name, s in common["states"].items()} for common, _ in halves],
        # Of those residuals only that go with the worker wherever it goes, not with a shard.
        "own": [{n: digest(s["residual"]) for n, s in own["states"].items() if "residual" in s} for _, own in halves],
    }
    with open(FOLDER / f"{HOST}.jsonl", "a") as file:
        file.write(json.dumps(record) + "\n")


def save(state, name):
    if hvd.rank() == 0:
        torch.save([part.state_dict() for pair in trained(state) for part in pair], FOLDER / name)


def list_hosts(*names):
    """What the discovery script says from now on."""
    new = FOLDER / f"hosts.{HOST}"
    new.write_text("".join(f"{name}:1\n" for name in dict.fromkeys(names)))
    new.rename(FOLDER / "hosts")


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def loss(network, batch, dies=False):
    """Of another batch for each number. dies: half-way through the backward pass."""
    shape = (8, 48) if isinstance(network[0], torch.nn.Linear) else (8, 12, 5, 5)
    hidden = network[0](torch.randn(shape, generator=torch.Generator().manual_seed(batch))).tanh()
    if dies:
        # When the second layer's gradients are on their way, and the first one's are not there yet.
        hidden.register_hook(die)
    return network[1](hidden).square().mean()


def batches(step, rank, options):
    """The numbers of those that make up a step of a rank."""
    return [1000 * step + 100 * i + rank for i in range(options.get("backward_passes_per_step", 1))]


def networks(plan):
    """(network, its optimizer) for each model; tests/test_elastic.py makes the same."""
    for spec, _ in plan.models:
        if spec.startswith("gradiveq"):
            network = torch.nn.Sequential(*[torch.nn.Conv2d(*c, 3, padding=1) for c in ((12, 16), (16, 12))])
        else:
            network = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.Linear(64, 48))
        yield network, torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def trained(state):
    """(network, its DistributedOptimizer) for each model."""
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
    write(state, generation, "begin")
    if generation == 0:
        save(state, "begin.pt")
    while state.step < plan.last_step:
        for i, (network, optimizer) in enumerate(trained(state)):
            dies = ""
            if plan.killed.get(generation, ())[:3] == (hvd.rank(), state.step, i):
                dies = plan.killed[generation][3]
            optimizer.zero_grad()
            for batch in batches(state.step, hvd.rank(), plan.models[i][1]):
                loss(network, batch, dies == "in the backward pass").backward()
                if dies == "between backward passes":
                    die()
            if dies == "between rounds":
                die_between_rounds()
            optimizer.step()
        state.step += 1
        commits = state.step % COMMIT_EVERY == 0
        write(state, generation, "commit" if commits else "step")
        if commits:
            state.commit()
        if (generation, state.step) in plan.hosts:
            if hvd.rank() == 0:
                list_hosts(HOST, *plan.hosts[generation, state.step])
            while True:  # raises what takes all workers out of here
                time.sleep(0.1)
                state.check_host_updates()
    write(state, generation, "end")
    save(state, "end.pt")


def main():
    plan = PLANS[sys.argv[1]]
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank() + os.getpid())  # nothing but the shared state makes models equal
    values = {"models": len(plan.models)}
    for i, ((spec, options), (network, sgd)) in enumerate(zip(plan.models, networks(plan))):
        named = network.named_parameters()
        compressor = gradzip.parse(spec)
        optimizer = hvd.DistributedOptimizer(sgd, named_parameters=named, compression=compressor, **options)
        values |= {f"model{i}": network, f"optimizer{i}": optimizer}
    make = hvd.elastic.TorchState if plan.plain else gradzip.horovod.elastic_state
    train(make(**values, step=0, generation=-1), plan)


if __name__ == "__main__":
    main()
