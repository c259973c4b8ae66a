"""A worker of tests/test_elastic.py: `elastic_worker.py [plain] FOLDER`, under an elastic horovodrun.

Trains two models, through a method whose residuals stay each rank's own and through one that besides has factors in
common. What happens when is scripted by the step; every worker writes down what it has after each one.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

import gradzip
from gradzip.checkpoint import split

FOLDER = Path(sys.argv[-1])
HOST = os.environ.get("HOROVOD_HOSTNAME")
HOSTS = ["localhost", "127.0.0.1", "127.1", "LOCALHOST"]  # Horovod never uses a name again after a failure there
COMMIT_EVERY = 3
LAST_STEP = 24
SPECS = ("topk:theta=0.9,exchange=scatter_reduce", "acpsgd:rank=2")

# Generations, what ends each, and how large its world is: 0 is two workers, until a third comes; 1 is three, until one
# is killed, whose place is taken at once by one that was listed too; 2 is three, until one is killed; 3 is two.
JOINS = (0, 6)  # a generation, and after which step of it
KILLED = {1: (10, 0), 2: (17, 1)}  # generation: in which step, in the backward pass of which model


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
    compressors = [optimizer._compression for optimizer in (state.optimizer, state.optimizer1)]
    halves = [split(c.state_dict()) for c in compressors]
    for common, _ in halves:
        for values in common["states"].values():
            del values["rank"], values["size"]
    record = {
        "event": event,
        "generation": generation,
        "step": state.step,
        "rank": hvd.rank(),
        "size": hvd.size(),
        "model": digest([state.model.state_dict(), state.model1.state_dict()]),
        "momentum": digest([o.state_dict()["state"] for o in (state.optimizer, state.optimizer1)]),
        "common": digest([common for common, _ in halves]),
        "steps": [{name: s["step"] for name, s in common["states"].items()} for common, _ in halves],
        # Of those residuals only that go with the worker wherever it goes, not with a shard.
        "own": [{n: digest(s["residual"]) for n, s in own["states"].items() if "residual" in s} for _, own in halves],
    }
    with open(FOLDER / f"{HOST}.jsonl", "a") as file:
        file.write(json.dumps(record) + "\n")


def save(state, name):
    if hvd.rank() == 0:
        parts = [state.model, state.optimizer, state.model1, state.optimizer1]
        torch.save([part.state_dict() for part in parts], FOLDER / name)


def list_hosts(*names):
    """What the discovery script says from now on."""
    new = FOLDER / f"hosts.{HOST}"
    new.write_text("".join(f"{name}:1\n" for name in names))
    new.rename(FOLDER / "hosts")


def loss(model, step, rank, dies=False):
    """Of another batch in every step and on every rank. dies: half-way through the backward pass."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    hidden = model[0](torch.randn(8, 48, generator=generator)).tanh()
    if dies:
        # When the second layer's gradients are on their way, and the first one's are not there yet.
        hidden.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    return model[1](hidden).square().mean()


def networks():
    """(network, its optimizer) for each of SPECS; tests/test_elastic.py makes the same."""
    for _ in SPECS:
        model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.Linear(64, 48))
        yield model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


@hvd.elastic.run
def train(state):
    generation = hvd.broadcast_object(state.generation + 1, name="generation")
    state.generation = generation
    state.save()
    write(state, generation, "begin")
    if generation == 0:
        save(state, "begin.pt")
    while state.step < LAST_STEP:
        pairs = [(state.model, state.optimizer), (state.model1, state.optimizer1)]
        for i, (model, optimizer) in enumerate(pairs):
            dies = hvd.rank() == 1 and KILLED.get(generation) == (state.step, i)
            optimizer.zero_grad()
            loss(model, state.step, hvd.rank(), dies).backward()
            optimizer.step()
        state.step += 1
        commits = state.step % COMMIT_EVERY == 0
        write(state, generation, "commit" if commits else "step")
        if commits:
            state.commit()
        if (generation, state.step) == JOINS:
            list_hosts(*HOSTS)
            while True:  # raises what takes all workers out of here
                time.sleep(0.1)
                state.check_host_updates()
    write(state, generation, "end")
    save(state, "end.pt")


def main():
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank() + os.getpid())  # nothing but the shared state makes models equal
    values = {}
    for spec, suffix, (model, sgd) in zip(SPECS, ("", "1"), networks()):
        named = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(sgd, named_parameters=named, compression=gradzip.parse(spec))
        values |= {f"model{suffix}": model, f"optimizer{suffix}": optimizer}
    make = hvd.elastic.TorchState if "plain" in sys.argv else gradzip.horovod.elastic_state
    train(make(**values, step=0, generation=-1))


if __name__ == "__main__":
    main()
