"""One rank of a job of benchmarks/training: train some steps with each variant, and write results as they come.

Usage: `rank.py JOB FILE`, with the fields of a `Job` as JSON. Rank 0 appends lines of JSON to the file: {"start": what}
before each piece of work, and its result after it. Profiles of models, links and codecs are what a cost model needs,
with the fields of the classes of gradzip.advice.cost.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.jobs import pin

RANK = int(os.environ.get("HOROVOD_RANK", os.environ.get("RANK", 0)))
RANKS = int(os.environ.get("HOROVOD_SIZE", os.environ.get("WORLD_SIZE", 1)))

if __name__ == "__main__":
    pin(RANK, RANKS)  # before threads start, which inherit it

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import data  # noqa: E402
import gradzip  # noqa: E402
from benchmarks.training.averagers import Averager, Group, averager, join_group  # noqa: E402
from benchmarks.training.jobs import Job  # noqa: E402
from benchmarks.training.profile import measure_step  # noqa: E402
from benchmarks.training.variants import COMPUTE, MOST_WARMUP, front_end, least_warmup  # noqa: E402
from gradzip.advice.measure import measure_gradients, measure_link  # noqa: E402
from models import MODELS  # noqa: E402

LEAST_STEPS = 3

Batch = tuple[Tensor, Tensor]  # inputs and labels


class Batches:
    """This rank's batches, the same for all variants. They are loaded before they are timed."""

    def __init__(self, job: Job) -> None:
        self.dataset = MODELS[job.model].data(job.data)
        self._shard = data.batches(
            self.dataset, batch_size=job.batch_size, rank=RANK, size=RANKS, seed=job.seed
        )  # fmt: skip
        self._loaded: list[Batch] = []

    def load(self, begin: int, end: int) -> list[Batch]:
        self._loaded += itertools.islice(self._shard, max(0, end - len(self._loaded)))
        return self._loaded[begin:end]


class Training:
    """A fresh model and optimizer, whose gradients are averaged."""

    def __init__(self, job: Job, batches: Batches, averaging: Averager) -> None:
        recipe = MODELS[job.model]
        torch.manual_seed(job.seed)
        self.network = recipe.build(*batches.dataset.dimensions)
        torch.manual_seed(job.seed + RANK)  # for dropout masks
        # A low learning rate, because it is not increased slowly.
        optimizer = recipe.make_optimizer(self.network, recipe.lr / 10, averaging.compressor, momentum=0.9)
        self.model, self.optimizer = averaging.wrap(self.network, optimizer)
        self.losses: list[float] = []

    def step(self, batch: Batch) -> float:
        """Train one step. Returns seconds."""
        elapsed, loss = train_step(self.model, self.optimizer, batch)
        self.losses.append(loss.item())
        return elapsed


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> tuple[float, Tensor]:
    """Train one step. Returns seconds, and the loss."""
    inputs, labels = batch
    start = time.perf_counter()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
    loss.backward()
    optimizer.step()
    return time.perf_counter() - start, loss


def wire_bytes(hosts: int) -> float:
    """Bytes of one rank on the wire so far: of the loopback, or of this host's link to the other."""
    interface = "lo:" if hosts == 1 else "inter:"
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith(interface))
    return int(line.split(":")[1].split()[8]) / (RANKS // hosts)


def num_steps(job: Job, seconds: float, alternates: bool, group: Group) -> int:
    """How many steps to time, the same on all ranks.

    Args:
        seconds: that one step takes here.
        alternates: whether to take an even number: methods such as ACPSGD send other factors in every other step.
    """
    slowest = float(group.gather(torch.tensor([seconds], dtype=torch.float64)).max())
    count = min(job.steps, max(LEAST_STEPS, int(job.seconds / slowest)))
    if alternates:
        count += count % 2 if count < job.steps else -(count % 2)
    return count


class Measurement:
    """One variant: a model that has done its untimed steps, and what its timed ones have taken on this rank.

    With local steps, all steps up to an exchange are timed as one, of which they are the mean.
    """

    def __init__(self, job: Job, variant: str, batches: Batches, group: Group) -> None:
        self.job, self.variant, self.batches, self.group = job, variant, batches, group
        self.averaging = averager(variant)
        self.averaging.prefix = f"{variant}." if job.interleaved else ""
        self.training = Training(job, batches, self.averaging)
        self.warmup = max(job.warmup, least_warmup(variant))
        self.every = self.averaging.every
        seconds = [self.training.step(batch) for batch in batches.load(0, self.warmup)]
        self.last = sum(seconds[-self.every :])
        while not self.averaging.settled() and self.warmup < MOST_WARMUP:
            self.last = self.training.step(*batches.load(self.warmup, self.warmup + 1))
            self.warmup += 1
        self.times: list[float] = []
        self.compression: list[float] = []

    def begin(self, count: int) -> None:
        """Load the batches of `count` steps, and read the counters."""
        self.timed = self.batches.load(self.warmup, self.warmup + count * self.every)
        self.before = self.counters()

    def counters(self) -> tuple[float, int | None]:
        self.group.gather(torch.zeros(1))  # a barrier
        return wire_bytes(self.job.hosts), self.averaging.sent()

    def step(self) -> None:
        """Time the next step."""
        before, done = self.averaging.seconds(), len(self.times) * self.every
        of_steps = [self.training.step(batch) for batch in self.timed[done : done + self.every]]
        self.times.append(statistics.fmean(of_steps))
        self.compression.append((self.averaging.seconds() - before) / self.every)

    def result(self) -> dict[str, Any]:
        """The results of one round, for this rank."""
        job, group, averaging, steps = self.job, self.group, self.averaging, len(self.timed)
        (wire, payload), (wire_after, payload_after) = self.before, self.counters()
        parameters = averaging.parameters(self.training.network)
        digest = hashlib.sha256(b"".join(p.numpy().tobytes() for p in parameters)).digest()
        digests = group.gather(torch.tensor(list(digest), dtype=torch.uint8))
        finite = group.gather(torch.tensor([math.isfinite(sum(self.training.losses))], dtype=torch.uint8))
        if payload is None or payload_after is None:
            sent = float(averaging.itemsize * sum(p.numel() for p in parameters))
        else:
            sent = (payload_after - payload) / steps
        result: dict[str, Any] = {
            "ms": [1000 * step for step in self.times],
            "compression_ms": 1000 * statistics.median(self.compression),
            "wire_bytes": None if job.interleaved else (wire_after - wire) / steps,
            "payload_bytes": sent,
            "identical": bool((digests == digests[0]).all()),
            "finite": bool(finite.all()),
            "parameters": sum(p.numel() for p in parameters),
            "choice": averaging.choice(),
        }
        if self.variant == COMPUTE and job.profile:
            group.gather(torch.zeros(1))  # all ranks profile at the same time: they may share cores
            again = itertools.cycle(self.timed)
            network, training = self.training.network, self.training
            result["profile"] = asdict(measure_step(network, lambda: training.step(next(again))))
        return result


def measure(job: Job, batches: Batches, group: Group, write: Callable[[dict[str, Any]], None]) -> None:
    """Measure the variants, one after the other."""
    for variant in job.variants:
        write({"start": variant})
        one = Measurement(job, variant, batches, group)
        count = num_steps(job, one.last, one.averaging.compressor is not None, group) if one.every == 1 else 1
        one.begin(count)
        for _ in range(count):
            one.step()
        write({"variant": variant, "result": one.result()})
        del one
        gc.collect()  # the model and its optimizer, which refer to each other


def measure_interleaved(job: Job, batches: Batches, group: Group, write: Callable[[dict[str, Any]], None]) -> None:
    """Measure the variants together: in each turn, each takes a step. Ranks begin a step at the same time.

    Turns begin with another variant each, so that none always follows the same one.
    """
    together = []
    for variant in job.variants:
        write({"start": variant})
        together.append(Measurement(job, variant, batches, group))
    count = num_steps(job, statistics.fmean(one.last for one in together), True, group)
    for one in together:
        one.begin(count)
    for turn in range(count):
        write({"start": f"turn {turn + 1} of {count}"})
        first = turn % len(together)
        for one in together[first:] + together[:first]:
            group.gather(torch.zeros(1))  # a barrier
            one.step()
    for one in together:
        write({"variant": one.variant, "result": one.result()})


def gradients(model: str, dataset: data.Images | data.Text, batch: Batch, seed: int = 0) -> dict[str, Tensor]:
    """Gradients of a fresh model on a batch, by parameter name."""
    torch.manual_seed(seed)
    network: nn.Module = MODELS[model].build(*dataset.dimensions)
    inputs, labels = batch
    F.cross_entropy(network(inputs).flatten(0, -2), labels.flatten()).backward()
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


def codec(spec: str, gradients: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """What a method does to each layer: the fields of a gradzip.advice.measure.Measurement."""
    steps = max(4, least_warmup(f"ddp:{spec}") + 2)
    measured = measure_gradients(gradzip.parse(spec), gradients, RANKS, repeats=steps)
    return [{"name": name, **asdict(found)} for name, found in measured.items()]


def work(job: Job, group: Group, path: Path) -> None:
    """Do all the work of a job."""

    def write(line: dict[str, Any]) -> None:
        if RANK == 0:
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    batches = Batches(job)
    if job.link:
        write({"start": "link"})
        write({"link": asdict(measure_link(group.engine))})
    (measure_interleaved if job.interleaved else measure)(job, batches, group, write)
    for spec in job.codecs:
        write({"start": f"codec {spec}"})
        group.gather(torch.zeros(1))  # all ranks measure at the same time: they may share cores
        write(
            {
                "compression": spec,
                "layers": codec(spec, gradients(job.model, batches.dataset, batches.load(0, 1)[0], job.seed)),
            }
        )
        group.gather(torch.zeros(1))
    write({"start": "end"})


def main() -> None:
    text, path = sys.argv[1:]
    job = Job(**json.loads(text))
    front = front_end(job.variants[0])
    torch.set_num_threads(job.threads)
    group = join_group(front)
    work(job, group, Path(path))
    group.gather(torch.zeros(1))  # no rank leaves while others communicate
    group.end()
    if front == "ddp":
        os._exit(0)  # now: a torch thread that frees a Python object during shutdown aborts the process


if __name__ == "__main__":
    main()
