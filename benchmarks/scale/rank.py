"""One rank of a job of benchmarks/scale: average a fixed bucket of gradients with each variant.

Usage: `rank.py JOB FILE`, with the fields of a `Job` as JSON. Rank 0 appends a line of JSON to the file for the link,
if it is to be measured, for each codec and for each variant.

All ranks share `CORES` cores. A step is timed in CPU time of the whole process, with the threads of the process group:
waiting for others takes none. Codecs are timed in all ranks at once, which share caches and memory as in a step.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CORES = 2  # for all ranks together


def share_cores() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])


if __name__ == "__main__":
    share_cores()  # before threads start, which inherit it

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import gradzip  # noqa: E402
from gradzip.advice.cost import Layer  # noqa: E402
from gradzip.advice.measure import measure_layers, measure_link  # noqa: E402
from gradzip.averaging.session import Session  # noqa: E402
from gradzip.engines import torch_engine  # noqa: E402

WARMUP = 4  # steps; exchange="auto" has chosen after the first one


@dataclass(frozen=True)
class Job:
    """What the ranks of a job do.

    Args:
        side, parameters: the bucket is of so many square matrices.
        steps: timed ones, an even number.
        link: measure the link.
        codecs: specs of methods to measure on one of the matrices, as `gradzip advise` does.
        variants: specs of methods to average with.
    """

    side: int
    parameters: int
    steps: int
    link: bool
    codecs: tuple[str, ...]
    variants: tuple[str, ...]


class Bucket:
    """A bucket of gradients, averaged over all ranks as the front ends do it."""

    def __init__(self, job: Job, spec: str) -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.original = torch.randn(job.parameters, job.side, job.side, generator=generator)
        self.memory = torch.empty_like(self.original)
        gradients = list(self.memory)
        names = [f"w{i}" for i in range(job.parameters)]
        self.compressor = gradzip.parse(spec)
        self.session = Session(self.compressor, "scale")
        engine = self.session.torch_engine(dist.group.WORLD, torch.device("cpu"))
        self.session.connect(engine, dict(zip(names, gradients)), "handshake")
        self.gradients = gradients
        self.plan = self.session.plan(gradients, names)

    def step(self) -> float:
        """Average the gradients. Returns seconds of CPU time."""
        self.memory.copy_(self.original)
        dist.barrier()
        start = time.process_time()
        with self.session.compressor.streams.on(self.memory):
            self.session.start(0, self.plan.groups, self.plan.parameters, self.gradients, "bucket")
        with self.session.compressor.streams.on_all(self.memory.device):
            self.session.finish("round")
            self.session.end(skipped := self.session.is_skipped())
            self.session.complete(skipped)
        return time.process_time() - start

    def scattered(self) -> bool | None:
        """Whether the method has scattered partitions in the last step; None if that is no choice of its."""
        states = self.compressor.states.values()
        return any(state.scattered for state in states) if hasattr(self.compressor, "exchange") else None


def wire_bytes() -> float:
    """Bytes of one rank on the loopback so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8]) / dist.get_world_size()


def of_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def measure(job: Job, spec: str) -> dict[str, Any]:
    """Average some steps. Returns what a step takes and sends, and whether the averages of all ranks are equal.

    CPU time is that of the fastest pair of steps, because others on the machine take caches from a rank, and because
    ACP-SGD's steps alternate. A codec's time in `codec` is the least of several, too.
    """
    bucket = Bucket(job, spec)
    for _ in range(WARMUP):
        bucket.step()
    dist.barrier()
    handed, wire = bucket.compressor.traffic.bytes_sent, wire_bytes()
    steps = [bucket.step() for _ in range(job.steps)]
    seconds = min(statistics.fmean(pair) for pair in zip(steps[0::2], steps[1::2]))
    dist.barrier()
    sent = (wire_bytes() - wire) / job.steps
    handed = (bucket.compressor.traffic.bytes_sent - handed) / job.steps
    digest = float(bucket.memory.double().sum()), float(bucket.memory.double().square().sum())
    return {
        "cpu_seconds": of_all_ranks(seconds), "handed_bytes": handed, "wire_bytes": sent,
        "scattered": bucket.scattered(), "identical": len(set(of_all_ranks(digest))) == 1,
    }  # fmt: skip


def codec(job: Job, spec: str) -> dict[str, Any]:
    """The cost of a matrix: the fields of a gradzip.advice.measure.LayerCost."""
    dist.barrier()
    layers = [Layer("w", (job.side, job.side), 0.0)]
    (cost,) = measure_layers(gradzip.parse(spec), layers, torch.device("cpu"), lambda _: time.process_time())
    return asdict(cost)


def main() -> None:
    text, path = sys.argv[1:]
    job = Job(**json.loads(text))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def write(line: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            with open(path, "a") as file:
                file.write(json.dumps(line) + "\n")

    if job.link:
        engine = torch_engine(dist.group.WORLD, gradzip.Traffic(), torch.device("cpu"))
        # Of the bucket's size alone: on cores that are shared, times of smaller transfers are those of messages.
        write({"link": asdict(measure_link(engine, sizes=[4 * job.parameters * job.side**2]))})
    for spec in job.codecs:
        write({"codec": spec, "result": codec(job, spec)})
    for spec in job.variants:
        write({"variant": spec, "result": measure(job, spec)})
    dist.barrier()  # no rank leaves while others communicate
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
