"""A replica of tests/integrations/test_torchft.py: `torchft_worker.py PLAN FOLDER LIGHTHOUSE NUMBER GENERATION`.

Trains with local steps in the quorums of a torchft Manager, and writes what it does to FOLDER/NUMBER.GENERATION.jsonl.
One replica of the first generation kills itself, where the plan says. Its successor says when all end.
"""

import hashlib
import itertools
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo

import gradzip
from contract import gradient

REPLICAS = 3
KILLED = 1
LR = 0.1
SHAPES = {"matrix": (64, 48), "wide": (32, 96), "bias": (48,)}
SECONDS = 0.05  # of a step


@dataclass
class Plan:
    """A job.

    spec: of the method.
    place: where one replica dies: between two exchanges, before the collectives of the method, or before its vote.
    """

    place: str
    spec: str = "none"
    options: dict = field(default_factory=lambda: {"every": 4, "outer": None})


STREAMED = {"every": 8, "fragments": 2, "delay": 2, "blend": 0.5}
PLANS = {
    "collectives": Plan("collectives"),
    "vote": Plan("vote"),
    "residuals": Plan("collectives", "topk:theta=0.9", {"every": 4}),
    "factors": Plan("between", "acpsgd:rank=2", {"every": 4}),
    "streamed": Plan("collectives", "topk:theta=0.9", STREAMED),
}
DIES_AFTER, GOES_ON_FOR = 3, 4  # exchanges


class Model(torch.nn.Module):
    """Parameters of these shapes, others in each process."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(gradient(name, os.getpid(), -1, shape)))


def digest(tensors):
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()[:16]


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    plan, folder, lighthouse, number, generation = sys.argv[1:]
    plan, folder, number, generation = PLANS[plan], Path(folder), int(number), int(generation)

    def record(event, **values):
        with open(folder / f"{number}.{generation}.jsonl", "a") as file:
            file.write(json.dumps({"event": event, **values}) + "\n")

    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)), load_state_dict=None, state_dict=None, min_replica_size=1,
        use_async_quorum=False, rank=0, world_size=1, store_addr="localhost", store_port=store.port,
        lighthouse_addr=lighthouse, replica_id=f"replica{number}", hostname="localhost",
    )  # fmt: skip
    (folder / f"{number}.ready").touch()  # the lighthouse knows of it
    while len(list(folder.glob("*.ready"))) < REPLICAS:
        time.sleep(0.05)
    model = Model()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LR, momentum=0.9 if plan.options.get("outer", 0) is not None else 0
    )
    outer = gradzip.outer.LocalSteps(model, optimizer, gradzip.parse(plan.spec), group=manager, **plan.options)
    tensors = list(outer._global.tensors.values())
    torch.save([tensor.detach().clone() for tensor in tensors], folder / f"{number}.{generation}.pt")
    inner = sum("momentum_buffer" in state for state in optimizer.state.values())
    equal = digest(tensors) == digest(model.parameters())
    record("joined", exchanges=outer.exchanges, equal=equal, inner=inner)
    if generation:
        (folder / "last.new").write_text(str(outer.exchanges + GOES_ON_FOR))
        (folder / "last.new").rename(folder / "last")
    exchange, taken = outer._exchange, 0
    dies = number == KILLED and not generation

    def exchange_or_die(fragment, own, changed, stays):
        record("launched", size=outer._session.engine.size, steps=taken)
        if dies and outer.exchanges == DIES_AFTER and plan.place == "collectives":
            outer._session.start = die
        exchanged = exchange(fragment, own, changed, stays)
        if dies and outer.exchanges == DIES_AFTER and plan.place == "vote":
            die()
        return exchanged

    outer._exchange = exchange_or_die
    for step in itertools.count():
        if (folder / "last").exists() and outer.exchanges >= int((folder / "last").read_text()):
            break
        if dies and outer.exchanges == DIES_AFTER and plan.place == "between":
            die()
        time.sleep(SECONDS)
        before = outer.exchanges
        for name, parameter in model.named_parameters():
            parameter.grad = gradient(name, f"{number}.{generation}", step, parameter.shape)
        taken = step + 1
        optimizer.step()
        if outer.exchanges > before:
            momenta = [s["momentum_buffer"] for s in outer._global.optimizer.state.values() if "momentum_buffer" in s]
            record("applied", exchanges=outer.exchanges, common=digest([*tensors, *momenta]))
    outer.synchronize()
    torch.save([tensor.detach().clone() for tensor in tensors], folder / f"{number}.end.pt")
    record("end", exchanges=outer.exchanges, common=digest(tensors), parameters=digest(model.parameters()), steps=taken)
    os._exit(0)


if __name__ == "__main__":
    main()
