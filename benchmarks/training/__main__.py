"""Measure training steps on slow networks, with stock Horovod and DDP and with gradzip's methods.

For each model, bandwidth and number of ranks, variants take turns, because times on shared machines drift: in each
round, each variant trains a fresh model for some steps. One job per launcher runs them one after the other. Figures
compare variants within a round, and are medians over the rounds. A step is rank 0's zero_grad, forward, backward and
optimizer step. `compute` sends no gradients: the upper bound. A result counts only if all ranks end with the same
parameters, bit for bit, and with finite losses. With --interleave, the variants of a front end take turns in each step.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import Any

import data
from benchmarks.common.arguments import data_path
from benchmarks.common.jobs import JobError, network
from benchmarks.common.progress import Progress
from benchmarks.common.results import ResultsError, provenance
from benchmarks.training import chart, jobs
from benchmarks.training.arguments import BATCH_SIZES, checked, parser, version
from benchmarks.training.jobs import Job
from benchmarks.training.results import Cell, Results, Round, markdown
from benchmarks.training.variants import FRONT_ENDS, averages, compression, front_end


class Interrupted(BaseException):
    """A signal asked to end. Its argument is the exit status."""


class Benchmark:
    """All measurements that the command line asks for."""

    def __init__(self, args: argparse.Namespace, results: Results) -> None:
        self.args = args
        self.results = results
        self.cells: list[Cell] = list(itertools.product(args.model, args.rate, args.ranks))
        self.not_calibrated: set[tuple[object, ...]] = set()  # what failed, not to be tried again

    def missing(self, cell: Cell, number: int) -> list[str]:
        """The variants of a round that are not measured yet, in the round's order."""
        turn = number % len(self.args.variants)
        variants = [*self.args.variants[turn:], *self.args.variants[:turn]]
        return [name for name in variants if number not in self.results.row(cell, name).done]

    def run(self) -> None:
        rounds = list(itertools.product(self.cells, range(self.args.rounds)))
        total = sum(len(self.missing(*which)) for which in rounds)
        with Progress(total) as self.progress:
            for cell, number in rounds:
                missing = self.missing(cell, number)
                fronts = sorted(FRONT_ENDS, reverse=number % 2 == 0)
                for front in fronts:
                    pending = [name for name in missing if front_end(name) == front]
                    while pending:
                        chosen = pending[:1] if self.args.fresh else pending
                        done = self.run_job(cell, number, chosen)
                        pending = [name for name in pending if name not in done]

    def run_job(self, cell: Cell, number: int, variants: list[str]) -> set[str]:
        """Run variants in one job. Returns those that are measured or failed: one at least."""
        done: set[str] = set()
        current = None
        begin = time.monotonic()
        self.show(cell, number, "starting")

        def record(name: str, round_: Round) -> None:
            nonlocal begin
            done.add(name)
            self.results.row(cell, name).rounds.append(round_)
            self.results.save()
            outcome = f"aborts: {round_.error}" if round_.error else f"{round_.median:.1f} ms per step"
            self.progress.done(f"{self.title(cell, number)}, {name}: {outcome}, {time.monotonic() - begin:.0f} s")
            begin = time.monotonic()

        try:
            with contextlib.closing(jobs.run(self.job(cell, variants), self.args.timeout)) as lines:
                for line in lines:
                    if "start" in line:
                        current = line["start"]
                        self.show(cell, number, current)
                    elif "variant" in line:
                        record(line["variant"], self.measurement(cell, number, line["variant"], line["result"]))
                    else:
                        self.calibration(cell, variants, line)
            if left := [name for name in variants if name not in done]:
                raise JobError(f"ended without results of {', '.join(left)}")
        except JobError as error:
            if current is None or (self.args.interleave and current not in variants):  # no variant is to blame
                for name in [name for name in variants if name not in done]:
                    record(name, Round(number, error=str(error)))
            elif current in variants and current not in done:
                record(current, Round(number, error=str(error)))
            else:
                self.not_calibrated.add((*cell, current))
                self.progress.note(f"{self.title(cell, number)}, {current}: {error}")
        return done

    def job(self, cell: Cell, variants: list[str]) -> Job:
        """A job with what is still missing for a cost model."""
        model, rate, ranks = cell
        args, results = self.args, self.results
        at = {"model": model, "ranks": ranks}
        specs = dict.fromkeys(filter(None, map(compression, variants)))
        front = front_end(variants[0])
        calibrates = args.hosts == 1 and not args.interleave  # the cost model is that of one link
        return Job(
            model=model, rate=rate, ranks=ranks, variants=tuple(variants), data=args.data_of[model],
            batch_size=args.batch_size or BATCH_SIZES.get(model, 16), seed=args.seed, warmup=args.warmup,
            steps=args.steps, seconds=args.seconds, threads=args.threads, hosts=args.hosts,
            interleaved=args.interleave,
            link=calibrates
            and not known(results.links, rate=rate, ranks=ranks, front_end=front)
            and (*cell, "link") not in self.not_calibrated,
            profile=calibrates and not known(results.profiles, **at),
            codecs=tuple(
                spec
                for spec in specs
                if calibrates
                and not known(results.codecs, compression=spec, **at)
                and (*cell, f"codec {spec}") not in self.not_calibrated
            ),
        )  # fmt: skip

    def measurement(self, cell: Cell, number: int, name: str, result: dict[str, Any]) -> Round:
        """The round that a rank's result is, or why it does not count."""
        if not result["finite"]:
            return Round(number, error="a loss is not finite")
        if averages(name) and not result["identical"]:
            return Round(number, error="the replicas differ")
        model, rate, ranks = cell
        self.results.row(cell, name).parameters = result["parameters"]
        if "profile" in result:
            self.results.profiles.append({"model": model, "ranks": ranks, **result["profile"]})
        own_net = bool(network(rate, ranks, self.args.hosts))
        wire = result["wire_bytes"] if own_net else None
        return Round(number, result["ms"], result["compression_ms"], wire, result["payload_bytes"], result["choice"])

    def calibration(self, cell: Cell, variants: list[str], line: dict[str, Any]) -> None:
        """Keep a measured link or codec."""
        model, rate, ranks = cell
        if "link" in line:
            self.results.links.append({"rate": rate, "ranks": ranks, "front_end": front_end(variants[0]), **line})
        else:
            self.results.codecs.append({"model": model, "ranks": ranks, **line})
        self.results.save()

    def title(self, cell: Cell, number: int) -> str:
        model, rate, ranks = cell
        return f"{model}, {rate}, {ranks} ranks, round {number + 1}"

    def show(self, cell: Cell, number: int, what: str) -> None:
        self.progress.now(f"{self.title(cell, number)}, {what}")


def known(entries: list[dict[str, Any]], **about: object) -> bool:
    """Whether there is an entry with these values."""
    return any(all(entry[key] == value for key, value in about.items()) for entry in entries)


def conditions(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """The machine, the versions and the options that all results of a file must have in common."""
    folder, text = data_path(data.images, args.data), data_path(data.text, args.data)
    return {
        **provenance(), "horovod": version("horovod"), "python": platform.python_version(), "cores": os.cpu_count(),
        "data": {
            "images": "cifar10" if folder else "digits",
            "text": Path(text).name if text else data.torch_sources()[0],
        },
        "hosts": args.hosts, "threads": args.threads, "batch_size": args.batch_size, "warmup": args.warmup,
        "seconds": args.seconds, "steps": args.steps, "seed": args.seed, "fresh": args.fresh,
        "interleave": args.interleave,
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("HOROVOD_")},
        "commands": [command],
    }  # fmt: skip


def on_signal(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough: a running job is being ended
    raise Interrupted(128 + number)


def main() -> None:
    parse = parser(__doc__)
    args = checked(parse)
    results = Results(conditions(args, parse.command), args.json)
    try:
        resumed = results.resume()
        benchmark = Benchmark(args, results)
        results.plan(benchmark.cells, args.variants)
    except ResultsError as error:
        parse.error(str(error))
    print("  ".join(f"{key} {value}" for key, value in results.provenance.items()), file=sys.stderr)
    if resumed:
        print(f"continuing {args.json}", file=sys.stderr)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    status = 0
    try:
        benchmark.run()
    except Interrupted as interrupted:
        (status,) = interrupted.args
    reports = results.reports()
    tables = "\n".join(markdown(reports))
    print(tables)
    if args.markdown:
        args.markdown.write_text(tables.lstrip() + "\n")
    if args.png and reports:
        chart.draw(reports, args.png)
    if status:
        kept = f"; {args.json} has what was measured, and the same command continues" if args.json else ""
        parse.fail(f"interrupted{kept}", status)
    # A stock variant that aborts is a result; one of gradzip's methods that aborts is an error.
    failed = {
        row["variant"]: None for row in reports if ":" in row["variant"] and any("error" in r for r in row["rounds"])
    }
    if failed:
        parse.fail(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
