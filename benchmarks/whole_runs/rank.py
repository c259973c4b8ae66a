"""One rank of a whole run of benchmarks/whole_runs.

Usage: `rank.py JOB FILE`, with the fields of a `Job` as JSON. After each epoch, rank 0 appends a line of JSON to the
file: {"seconds": of training so far, "score": of a test that takes no time}; at the end {"identical": whether replicas
are}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmarks.common.jobs import pin

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

if __name__ == "__main__":
    pin(RANK, RANKS)  # before threads start, which inherit it

import gc  # noqa: E402
import hashlib  # noqa: E402
import itertools  # noqa: E402
import time  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

import data  # noqa: E402
from benchmarks.convergence.recipes import Run, load_data, steps_per_epoch  # noqa: E402
from benchmarks.convergence.training import Alone  # noqa: E402
from benchmarks.training.averagers import Averager, averager, join_group  # noqa: E402
from models import MODELS, make_optimizer  # noqa: E402
from train import cross_entropy, evaluate, learning_rate  # noqa: E402


@dataclass(frozen=True)
class Job:
    """A whole run.

    Args:
        run: the fields of a `Run`, with as many workers as there are ranks.
        parts: variants of benchmarks/training that follow each other, each with its number of steps.
        data: a file or folder; None for the default.
    """

    run: dict[str, Any]
    parts: list[tuple[str, int]]
    data: str | None


class Training:
    """This rank's network and optimizer. `use` says how gradients are averaged."""

    def __init__(self, run: Run, dataset: data.Images | data.Text, variant: str) -> None:
        torch.manual_seed(run.seed)
        self.network = MODELS[run.network].build(*dataset.dimensions)
        averaging = averager(variant)
        options = dict(zip(("momentum", "beta2"), run.betas))
        self.optimizer = make_optimizer(run.optimizer, self.network, run.lr, averaging.compressor, **options)
        self._wrap(averaging)

    def use(self, variant: str) -> None:
        """Average in another way from here on."""
        self.model = self.network  # frees the DDP module, and with it its hooks
        gc.collect()
        self._wrap(averager(variant))

    def _wrap(self, averaging: Averager) -> None:
        self.averaging = averaging
        self.model, self.optimizer = averaging.wrap(self.network, self.optimizer)

    def step(self, lr: float, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        cross_entropy(self.model(inputs), targets).backward()
        self.optimizer.step()


def main() -> None:
    text, path = sys.argv[1:]
    job = Job(**json.loads(text))
    run = Run(**job.run)
    torch.set_num_threads(1)
    group = join_group("ddp")

    def write(line: dict[str, Any]) -> None:
        if RANK == 0:
            with Path(path).open("a") as file:
                file.write(json.dumps(line) + "\n")

    dataset = load_data(run, job.data)
    per_epoch = steps_per_epoch(run, dataset)
    steps = run.epochs * per_epoch
    (first, count), *others = job.parts
    starts = dict(zip(itertools.accumulate((n for _, n in others), initial=count), (variant for variant, _ in others)))
    training = Training(run, dataset, first)
    shard = data.batches(dataset, batch_size=run.batch_size, rank=RANK, size=RANKS, seed=run.seed)
    seconds = 0.0
    for number, (inputs, targets) in enumerate(itertools.islice(shard, steps)):
        if number in starts:
            training.use(starts[number])
        begin = time.perf_counter()
        training.step(learning_rate(run.lr, number, steps), inputs, targets)
        seconds += time.perf_counter() - begin
        if (number + 1) % per_epoch:
            continue
        begin = time.perf_counter()
        parameters = training.averaging.parameters(training.network)  # local steps exchange what has changed
        seconds += time.perf_counter() - begin
        if RANK == 0:
            accuracy, loss = evaluate(training.network, dataset, Alone)
            training.network.train()
            write({"seconds": seconds, "score": dataset.measure.value(accuracy, loss)})
        group.gather(torch.zeros(1))  # a barrier: no rank trains while one tests
    digest = hashlib.sha256(b"".join(p.numpy().tobytes() for p in parameters)).digest()
    digests = group.gather(torch.tensor(list(digest), dtype=torch.uint8))
    write({"identical": bool((digests == digests[0]).all())})
    group.gather(torch.zeros(1))  # no rank leaves while others communicate
    group.end()
    os._exit(0)  # now: a torch thread that frees a Python object during shutdown aborts the process


if __name__ == "__main__":
    main()
