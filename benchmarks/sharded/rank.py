"""One rank of a run of benchmarks/sharded or benchmarks/peers.

Usage: `rank.py JOB FILE`, with the fields of a `Job` as JSON. After each epoch, rank 0 appends a line of JSON to the
file: {"score", "loss": of a test; "losses": its own, means over 50 steps; "sent": bytes so far to other ranks, of
methods by what they do; "wire": those that the loopback carried in steps; "seconds", "steps": of training so far}.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import data
import gradzip
from benchmarks.common.hooks import TRAINED
from benchmarks.convergence.recipes import Run, load_data, steps_per_epoch
from benchmarks.convergence.training import WINDOW, Alone
from benchmarks.training.averagers import BLOCKS
from benchmarks.training.rank import wire_bytes
from models import MODELS, make_optimizer
from train import cross_entropy, evaluate, learning_rate

BUCKET_CAP_MB = 1024  # more than any gradient
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


@dataclass(frozen=True)
class Job:
    """A run.

    Args:
        run: the fields of a `Run`, with as many workers as there are ranks.
        front_end: "fsdp" or "ddp".
        options: of `gradzip.fsdp.quantize`, with methods as specs, or the "hook" or "method" of DDP; none for their own
            collectives.
        data: a file or folder; None for the default.
        steps: of a run that is cut short; None for all.
    """

    run: dict[str, Any]
    front_end: str
    options: dict[str, Any]
    data: str | None
    steps: int | None


class WholeOptimizer:
    """An optimizer of whole parameters, for one that does not take shards: each rank takes the same steps.

    It gathers gradients, uncompressed and uncounted: the study is about what FSDP sends.
    """

    def __init__(self, model: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer], network: nn.Module):
        self._sharded: dict[str, Any] = dict(model.named_parameters())
        self._whole = dict(network.named_parameters())
        self._optimizer = make(network)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def zero_grad(self) -> None:
        for parameter in self._sharded.values():
            parameter.grad = None

    def step(self) -> None:
        for name, parameter in self._sharded.items():
            self._whole[name].grad = whole(parameter.grad)
        self._optimizer.step()
        with torch.no_grad():
            for name, parameter in self._sharded.items():
                shards = self._whole[name].chunk(RANKS)
                if len(shards) > RANK:
                    parameter.to_local().copy_(shards[RANK])


def whole(sharded: Any) -> Tensor:
    gathered: Tensor = sharded.full_tensor()
    return gathered


def shard(network: nn.Module, reduce_dtype: torch.dtype | None = None) -> None:
    """Shard a network over all ranks, each block on its own.

    reduce_dtype: of gradients as they are reduced; None for that of the parameters.
    """
    mesh, policy = init_device_mesh("cpu", (RANKS,)), MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for block in [module for module in network.modules() if isinstance(module, BLOCKS)]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(network, mesh=mesh, mp_policy=policy)


class Training(ABC):
    """This rank's model and optimizer, and the methods by what they do."""

    def __init__(self, run: Run, dataset: data.Images | data.Text, options: dict[str, Any]) -> None:
        self.run, self.dimensions = run, dataset.dimensions
        specs = {name: value for name, value in options.items() if name in ("gather", "reduce", "method")}
        self.methods = {name: gradzip.parse(spec) for name, spec in specs.items()}
        self.network = self.built()
        self.model: nn.Module = self.connected(options | self.methods)
        self.optimizer: Any = self.made_optimizer()

    def built(self) -> nn.Module:
        torch.manual_seed(self.run.seed)
        network: nn.Module = MODELS[self.run.network].build(*self.dimensions)
        return network

    @abstractmethod
    def connected(self, options: dict[str, Any]) -> nn.Module:
        """A model whose backward pass averages gradients."""

    def made_optimizer(self) -> Any:
        return self.make(self.model)

    def make(self, network: nn.Module) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = make_optimizer(self.run.optimizer, network, self.run.lr)
        return made

    def step(self, lr: float, inputs: Tensor, targets: Tensor) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return float(loss)

    @abstractmethod
    def tested(self) -> nn.Module:
        """A whole network."""


class Replicated(Training):
    """With DDP. There is one bucket: with several, ranks with torch's PowerSGD hook abort on gloo."""

    def connected(self, options: dict[str, Any]) -> nn.Module:
        model = DistributedDataParallel(self.network, bucket_cap_mb=BUCKET_CAP_MB)
        if "hook" in options:
            TRAINED[options["hook"]](model)
        elif options:
            gradzip.ddp.register(model, options["method"])
        return model

    def tested(self) -> nn.Module:
        """The network. Raises RuntimeError if it is another one than that of rank 0."""
        mine = nn.utils.parameters_to_vector(self.network.parameters()).detach()
        first = mine.clone()
        dist.broadcast(first, 0)
        if not torch.equal(mine, first):
            raise RuntimeError(f"rank {RANK} has other parameters than rank 0")
        return self.network


class Sharded(Training):
    """With FSDP2."""

    def connected(self, options: dict[str, Any]) -> nn.Module:
        model = self.built()
        shard(model)
        if options:
            gradzip.fsdp.quantize(model, **options)
        return model

    def made_optimizer(self) -> Any:
        whole = self.run.optimizer == "muon"
        return WholeOptimizer(self.model, self.make, self.built()) if whole else self.make(self.model)

    def tested(self) -> nn.Module:
        """The network of the sharded parameters, which are not rounded. It has this rank's statistics of BatchNorm."""
        state = self.model.state_dict()
        self.network.load_state_dict({name: whole(x) if isinstance(x, DTensor) else x for name, x in state.items()})
        return self.network


FRONT_ENDS: dict[str, type[Training]] = {"ddp": Replicated, "fsdp": Sharded}


def train(job: Job, path: Path) -> None:
    """Train, and append what rank 0 finds out to a file."""
    run = Run(**job.run)
    dataset = load_data(run, job.data)
    per_epoch = steps_per_epoch(run, dataset)
    steps = min(job.steps or math.inf, run.epochs * per_epoch)
    training = FRONT_ENDS[job.front_end](run, dataset, job.options)
    shard = data.batches(dataset, batch_size=run.batch_size, rank=RANK, size=RANKS, seed=run.seed)
    seconds, wire, losses = 0.0, 0.0, []
    dist.barrier()  # all that the set-up sends is sent
    before = wire_bytes(hosts=1)
    dist.barrier()  # no rank takes a step before the bytes are read
    for number, (inputs, targets) in enumerate(itertools.islice(shard, int(steps)), 1):
        begin = time.perf_counter()
        losses.append(training.step(learning_rate(run.lr, number - 1, int(steps)), inputs, targets))
        seconds += time.perf_counter() - begin
        if number % per_epoch and number != steps:
            continue
        dist.barrier()  # all that the steps send is sent
        wire += wire_bytes(hosts=1) - before
        network = training.tested()
        if RANK == 0:
            accuracy, loss = evaluate(network, dataset, Alone)
            means = [statistics.fmean(losses[i : i + WINDOW]) for i in range(0, len(losses), WINDOW)]
            sent = {name: method.traffic.bytes_wire for name, method in training.methods.items()}
            line = {
                "score": dataset.measure.value(accuracy, loss), "loss": loss, "losses": means, "sent": sent,
                "wire": wire, "seconds": seconds, "steps": number,
            }  # fmt: skip
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        losses = []
        before = wire_bytes(hosts=1)
        dist.barrier()  # no rank trains while one tests


def main() -> None:
    text, path = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # Returns without DDP's model. If that outlived the group, it would free the group while it holds Python's lock, and
    # wait for a thread of gloo that may want the lock to free a tensor.
    train(Job(**json.loads(text)), Path(path))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
