"""One rank of a job of benchmarks/sharded/steps.py.

Usage: `step_rank.py JOB FILE`, with the fields of a `Job` as JSON. Rank 0 writes one line of JSON to the file:
{"seconds": {variant: of each step}, "wire": {variant: bytes of a rank in a step, None if others use the network, too},
"parameters": elements, "modules": that are sharded, "link", "codecs": {method: its cost on all gradients}}.
"""

from __future__ import annotations

import collections
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import data
import gradzip
from benchmarks.common.jobs import has_own_net
from benchmarks.sharded.rank import RANK, RANKS, shard
from benchmarks.sharded.steps import BFLOAT16, FLOOR, VARIANTS, Job
from benchmarks.training.rank import Batch, codec, gradients, train_step, wire_bytes
from gradzip.advice.advice import FOUR_BITS
from gradzip.advice.measure import measure_link
from gradzip.cli.sharded import DELTA, EIGHT_BITS, KEEP
from gradzip.engines.torch import TorchEngine
from models import MODELS

OPTIONS: dict[str | None, dict[str, Any]] = {None: {}, KEEP: {"keep": True}, DELTA: {"reference": "delta"}}


class Collective:
    """In place of one of FSDP's own: how it allocates memory."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class Silent(Collective):
    """Send nothing: each rank has its own shard in place of all others, and reduces nothing."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *_: Any, **options: Any) -> None:
        if output_tensor.numel() > input_tensor.numel():
            output_tensor.view(RANKS, -1).copy_(input_tensor.clone())
        else:
            output_tensor.copy_(input_tensor.view(RANKS, -1)[RANK])


class Halved(Collective):
    """Gather weights as bfloat16."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        gathered = output_tensor.new_empty(output_tensor.shape, dtype=torch.bfloat16)
        dist.all_gather_into_tensor(gathered, input_tensor.bfloat16(), group)
        output_tensor.copy_(gathered)


class Training:
    """A sharded network, and its optimizer."""

    def __init__(self, job: Job, dataset: data.Images | data.Text, variant: str) -> None:
        recipe = MODELS[job.network]
        torch.manual_seed(0)
        self.model: nn.Module = recipe.build(*dataset.dimensions)
        shard(self.model, torch.bfloat16 if variant == BFLOAT16 else None)
        self.modules: list[Any] = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        if arguments := VARIANTS[variant]:
            gather, reduce, how = arguments
            rounded = gradzip.parse(gather + ("" if "nearest" in gather else ":rounding=nearest")) if gather else None
            gradzip.fsdp.quantize(self.model, rounded, gradzip.parse(reduce), **OPTIONS[how])
        for module in self.modules:
            if variant in (FLOOR, BFLOAT16):
                module.set_custom_all_gather(Silent() if variant == FLOOR else Halved())
            if variant == FLOOR:
                module.set_custom_reduce_scatter(Silent())
        # A low learning rate, because it is not increased slowly.
        self.optimizer = recipe.make_optimizer(self.model, recipe.lr / 10)

    def step(self, batch: Batch) -> float:
        """Train one step. Returns seconds."""
        elapsed, loss = train_step(self.model, self.optimizer, batch)
        if not torch.isfinite(loss):
            raise RuntimeError("a loss is not finite")
        return elapsed


def timed(job: Job, trained: dict[str, Training], batches: Iterator[Batch]) -> dict[str, Any]:
    """The steps of all variants in turns, which begin with another one each."""
    seconds: dict[str, list[float]] = {name: [] for name in trained}
    wire = dict.fromkeys(trained, 0.0)
    names = list(trained)
    for turn in range(-job.warmup, job.steps):
        batch, first = next(batches), turn % len(names)
        for name in names[first:] + names[:first]:
            before = wire_bytes(hosts=1)
            dist.barrier()  # no rank takes a step before the bytes are read
            elapsed = trained[name].step(batch)
            dist.barrier()
            if turn >= 0:
                seconds[name].append(elapsed)
                wire[name] += (wire_bytes(hosts=1) - before) / job.steps
    return {"seconds": seconds, "wire": wire if has_own_net() else dict.fromkeys(wire)}


def codecs(job: Job, dataset: data.Images | data.Text, batch: Batch) -> dict[str, Any]:
    """The cost of both methods on all gradients of the network, as one of all ranks."""
    of_network = gradients(job.network, dataset, batch)
    found: dict[str, Any] = {}
    for spec in (EIGHT_BITS, FOUR_BITS):
        dist.barrier()  # all ranks measure at the same time: they may share cores
        layers, rounds = codec(spec, of_network), collections.Counter[str]()
        for kind, nbytes in itertools.chain(*(layer["rounds"] for layer in layers)):
            rounds[kind] += nbytes
        seconds = {part: sum(layer[part] for layer in layers) for part in ("encode", "decode")}
        found[spec] = {"rounds": list(rounds.items()), **seconds}
    return {"codecs": found, "parameters": sum(map(Tensor.numel, of_network.values()))}


def main() -> None:
    text, path = sys.argv[1:]
    job = Job(**json.loads(text))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dataset = MODELS[job.network].data(job.data)
    batches = data.batches(dataset, batch_size=job.batch_size, rank=RANK, size=RANKS, seed=0)
    link = measure_link(TorchEngine(dist.distributed_c10d._get_default_group(), gradzip.Traffic(), torch.device("cpu")))
    trained = {name: Training(job, dataset, name) for name in VARIANTS}
    found = timed(job, trained, batches) | codecs(job, dataset, next(batches))
    modules = len(next(iter(trained.values())).modules)
    if RANK == 0:
        with Path(path).open("a") as file:
            file.write(json.dumps({**found, "modules": modules, "link": asdict(link)}) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
