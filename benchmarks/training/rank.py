"""One rank of a job of benchmarks/training: train some steps with each variant, and write results as they come.

Usage: `rank.py JOB FILE`, with the fields of a `Job` as JSON. Rank 0 appends lines of JSON to the file: {"start": what}
before each piece of work, and its result after it. Profiles of models, links and codecs are what a cost model needs,
with the fields of the classes of gradzip.cost.
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
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

RANK = int(os.environ.get("HOROVOD_RANK", os.environ.get("RANK", 0)))
RANKS = int(os.environ.get("HOROVOD_SIZE", os.environ.get("WORLD_SIZE", 1)))


def pin() -> None:
    """Give each rank its own cores. If there are fewer cores than ranks, ranks share one."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        share = len(cores) // RANKS
        mine = cores[RANK * share : (RANK + 1) * share] if share else [cores[RANK % len(cores)]]
        os.sched_setaffinity(0, mine)


if __name__ == "__main__":
    pin()  # before threads start, which inherit it

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import data  # noqa: E402
import gradzip  # noqa: E402
from benchmarks.training.averagers import Averager, Group, averager, join_group  # noqa: E402
from benchmarks.training.jobs import Job  # noqa: E402
from benchmarks.training.variants import COMPUTE, MOST_WARMUP, front_end, least_warmup  # noqa: E402
from gradzip.measure import measure_gradients, measure_link, measure_step  # noqa: E402
from models import MODELS  # noqa: E402

LEAST_STEPS = 3


class Batches:
    """This rank's batches, the same for all variants. They are loaded before they are timed."""

    def __init__(self, job: Job) -> None:
        self.dataset = MODELS[job.model].data(job.data)
        self._shard = data.batches(
            self.dataset, batch_size=job.batch_size, rank=RANK, size=RANKS, seed=job.seed
        )  # fmt: skip
        self._loaded: list[tuple[Tensor, Tensor]] = []

    def load(self, begin: int, end: int) -> list[tuple[Tensor, Tensor]]:
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

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        """Train one step. Returns seconds."""
        inputs, labels = batch
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(inputs).flatten(0, -2), labels.flatten())
        loss.backward()
        self.optimizer.step()
        elapsed = time.perf_counter() - start
        self.losses.append(loss.item())
        return elapsed


def wire_bytes(hosts: int) -> float:
    """Bytes of one rank on the wire so far: of the loopback, or of this host's link to the other."""
    interface = "lo:" if hosts == 1 else "inter:"
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith(interface))
    return int(line.split(":")[1].split()[8]) / (RANKS // hosts)


def num_steps(job: Job, seconds: float, averaging: Averager, group: Group) -> int:
    """How many steps to time, the same on all ranks. seconds: that one step takes here."""
    slowest = float(group.gather(torch.tensor([seconds], dtype=torch.float64)).max())
    count = min(job.steps, max(LEAST_STEPS, int(job.seconds / slowest)))
    if averaging.compressor:  # methods such as ACPSGD send different factors in even and in odd steps
        count += count % 2 if count < job.steps else -(count % 2)
    return count


def measure(job: Job, variant: str, batches: Batches, group: Group) -> dict[str, Any]:
    """Measure one variant: the results of one round, for this rank."""
    averaging = averager(variant)
    training = Training(job, batches, averaging)

    def counters() -> tuple[float, int | None]:
        group.gather(torch.zeros(1))  # a barrier
        return wire_bytes(job.hosts), averaging.sent()

    warmup = max(job.warmup, least_warmup(variant))
    last = [training.step(batch) for batch in batches.load(0, warmup)][-1]
    while not averaging.settled() and warmup < MOST_WARMUP:
        last = training.step(*batches.load(warmup, warmup + 1))
        warmup += 1
    timed = batches.load(warmup, warmup + num_steps(job, last, averaging, group))
    times, compression = [], []
    wire, payload = counters()
    for batch in timed:
        before = averaging.seconds()
        times.append(training.step(batch))
        compression.append(averaging.seconds() - before)
    wire_after, payload_after = counters()

    parameters = averaging.parameters(training.network)
    digest = hashlib.sha256(b"".join(p.numpy().tobytes() for p in parameters)).digest()
    digests = group.gather(torch.tensor(list(digest), dtype=torch.uint8))
    finite = group.gather(torch.tensor([math.isfinite(sum(training.losses))], dtype=torch.uint8))
    if payload is None or payload_after is None:
        sent = float(averaging.itemsize * sum(p.numel() for p in parameters))
    else:
        sent = (payload_after - payload) / len(times)
    result: dict[str, Any] = {
        "ms": [1000 * step for step in times],
        "compression_ms": 1000 * statistics.median(compression),
        "wire_bytes": (wire_after - wire) / len(times),
        "payload_bytes": sent,
        "identical": bool((digests == digests[0]).all()),
        "finite": bool(finite.all()),
        "parameters": sum(p.numel() for p in parameters),
        "choice": averaging.choice(),
    }
    if variant == COMPUTE and job.profile:
        group.gather(torch.zeros(1))  # all ranks profile at the same time: they may share cores
        again = itertools.cycle(timed)
        result["profile"] = asdict(measure_step(training.network, lambda: training.step(next(again))))
    return result


def gradients(job: Job, batches: Batches) -> dict[str, Tensor]:
    """Gradients of this rank's first batch, by parameter name."""
    recipe = MODELS[job.model]
    torch.manual_seed(job.seed)
    network: nn.Module = recipe.build(*batches.dataset.dimensions)
    inputs, labels = batches.load(0, 1)[0]
    F.cross_entropy(network(inputs).flatten(0, -2), labels.flatten()).backward()
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


def codec(spec: str, gradients: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """What a method does to each layer: the fields of a gradzip.cost.Compressed, and the error."""
    steps = max(4, least_warmup(f"ddp:{spec}") + 2)
    measured = measure_gradients(gradzip.parse(spec), gradients, RANKS, repeats=steps)
    return [{"name": name, **asdict(found.compressed), "error": found.error} for name, found in measured.items()]


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
    for variant in job.variants:
        write({"start": variant})
        write({"variant": variant, "result": measure(job, variant, batches, group)})
        gc.collect()  # the model and its optimizer, which refer to each other
    for spec in job.codecs:
        write({"start": f"codec {spec}"})
        group.gather(torch.zeros(1))  # all ranks measure at the same time: they may share cores
        write({"compression": spec, "layers": codec(spec, gradients(job, batches))})
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
