"""The jobs of benchmarks/training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common import jobs
from benchmarks.training.variants import front_end


@dataclass(frozen=True)
class Job:
    """What the ranks of one job do, one after the other.

    Args:
        variants: of one front end.
        hosts: over which the ranks are spread; with more than one, `rate` is that of the link between them.
        link: measure the link.
        profile: also profile the model in the variant without communication.
        codecs: specs of methods to measure.
        interleaved: the variants take turns in each step, with all their models in memory.
    """

    model: str
    rate: str
    ranks: int
    variants: tuple[str, ...]
    data: str | None
    batch_size: int
    seed: int
    warmup: int
    steps: int
    seconds: float
    threads: int
    hosts: int = 1
    link: bool = False
    profile: bool = False
    codecs: tuple[str, ...] = ()
    interleaved: bool = False


def run(job: Job, timeout: float) -> Iterator[dict[str, Any]]:
    """Run a job. Yields what rank 0 writes, as it comes.

    timeout: seconds without a new line until the job is ended.

    Raises:
        JobError: the job failed or took too long.
    """
    command = [
        *jobs.network(job.rate, job.ranks, job.hosts), *jobs.launcher(front_end(job.variants[0]), job.ranks, job.hosts),
        "benchmarks.training.rank", json.dumps(asdict(job)),
    ]  # fmt: skip
    return jobs.run(command, job.threads, timeout)
