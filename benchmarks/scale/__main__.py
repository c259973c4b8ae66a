"""Measure averages of a bucket on 2 to 16 ranks of this machine, and project them to clusters by gradzip.advice.cost.

Measured, for each method: the CPU time and the bytes of a rank in an average of four square matrices of random numbers.
The ranks are gloo processes with one thread each, and share two cores: wall time would say nothing. Methods that gather
run with each `exchange`. The same jobs measure what gradzip.advice.cost needs to predict both.

Projected, for 64 and 1024 ranks and known models: bytes and communication time, with codecs that take no time. Codecs
are measured on one core of this CPU; how fast those of a device are is not known here.

Results are kept after each measurement. The same command continues an interrupted run; more ranks, rounds and models
are added. `python -m benchmarks.scale.report --write` then writes docs/scale.md's tables and picture.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import gradzip
from benchmarks.common import jobs
from benchmarks.common.arguments import Parser, at_least, method, output_file
from benchmarks.common.progress import Progress
from benchmarks.common.results import ResultsError, check_same, provenance, stored, write_json
from benchmarks.scale.predictions import Sizes, project
from benchmarks.scale.rank import CORES, Job
from benchmarks.scale.report import measured_tables
from benchmarks.scale.variants import AUTO, GATHER, PROJECTED, SCATTER, VARIANTS, with_exchange
from benchmarks.scale.variants import MODELS as SHOWN
from gradzip.advice.cost import Layer
from gradzip.advice.measure import measure_layers
from gradzip.cli.models import MODELS

EXAMPLES = """\
examples:
  python -m benchmarks.scale --json benchmarks/results/scale_cpu.json       all of it: a quarter of an hour on two cores
  python -m benchmarks.scale --ranks 2 --ranks 4 --rounds 1 --variant none --variant qsgd:exchange=auto
  python -m benchmarks.scale --side 64 --ranks 2 --rounds 1 --model resnet18    small matrices, another projection
"""
PARAMETERS = 4
LATENCY_US = 10.0


class Benchmark:
    """What is measured, and what is missing. The content of the file is a dict of JSON types.

    provenance; links: by ranks; codecs: by variant and ranks; rows: by ranks, variant and round; projection.
    """

    def __init__(self, about: dict[str, Any], path: Path | None, timeout: float) -> None:
        self.path, self.timeout = path, timeout
        self.results: dict[str, Any] = {
            "provenance": about, "links": {}, "codecs": {}, "rows": [], "projection": [],
        }  # fmt: skip

    def resume(self) -> None:
        """Continue the results of the file, if there is one. Raises ResultsError."""
        if self.path is None or not self.path.exists():
            return
        about = self.results["provenance"]
        with stored(self.path) as known:
            kept = {key: known[key] for key in self.results}
            check_same(self.path, "results", kept["provenance"], {k: about[k] for k in ("side", "steps", "latency_us")})
        for key in ("commands", "commits"):
            known_ones = kept["provenance"][key]
            known_ones += [one for one in about[key] if one not in known_ones]
        self.results = kept

    def save(self) -> None:
        if self.path is not None:
            write_json(self.path, self.results)

    def missing(self, ranks: int, number: int, variants: list[str]) -> list[str]:
        known = {row["variant"] for row in self.results["rows"] if (row["ranks"], row["round"]) == (ranks, number)}
        return [variant for variant in variants if variant not in known]

    def run_job(self, ranks: int, number: int, variants: list[str]) -> Iterator[str]:
        """Measure variants in one job. Yields what was measured. Raises JobError."""
        about, codecs = self.results["provenance"], self.results["codecs"]
        of_codecs = dict.fromkeys(
            name
            for v in variants
            for name in ([with_exchange(v, e) for e in (GATHER, SCATTER)] if v.endswith(AUTO) else [v])
        )
        job = Job(
            about["side"], PARAMETERS, about["steps"], link=str(ranks) not in self.results["links"],
            codecs=tuple(v for v in of_codecs if str(ranks) not in codecs.get(v, {})), variants=tuple(variants),
        )  # fmt: skip
        own_net = jobs.network("none", ranks)
        command = [*own_net, *jobs.launcher("ddp", ranks), "benchmarks.scale.rank", json.dumps(asdict(job))]
        for line in jobs.run(command, threads=1, timeout=self.timeout):
            if "link" in line:
                self.results["links"][str(ranks)] = line["link"]
            elif "codec" in line:
                codecs.setdefault(line["codec"], {})[str(ranks)] = line["result"]
            else:
                variant, result = line["variant"], line["result"]
                if not result.pop("identical"):
                    raise jobs.JobError(f"{variant}: the averages of {ranks} ranks differ")
                if not own_net:
                    result["wire_bytes"] = None  # other processes use the same loopback
                self.results["rows"].append({"ranks": ranks, "variant": variant, "round": number, **result})
                yield f"{variant}: {1e3 * max(result['cpu_seconds']):.1f} ms of CPU time"
            self.save()


def sizes_of(models: list[str]) -> Sizes:
    """What each projected variant sends of gradients of the models' shapes."""
    shapes = dict.fromkeys(p.shape for model in models for p in MODELS[model]())
    layers = [Layer(str(shape), shape, 0.0) for shape in shapes]
    costs = {v: measure_layers(gradzip.parse(v), layers, torch.device("cpu")) for v in PROJECTED}
    return {v: {s: c.rounds for s, c in zip(shapes, of_shapes)} for v, of_shapes in costs.items()}


def main() -> None:
    parser = Parser("scale", __doc__, EXAMPLES)
    parser.add_argument("--ranks", action="append", type=at_least(2), help="world size; repeat (default: 2, 4, 8, 16)")
    parser.add_argument("--variant", action="append", type=method, metavar="SPEC", help="repeat (default: thirteen)")
    parser.add_argument("--side", type=at_least(32), default=1024, help="of the matrices (default: %(default)s)")
    parser.add_argument("--steps", type=at_least(2), default=8, help="timed ones in a round, even (default: 8)")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="jobs for each world size (default: 3)")
    parser.add_argument("--model", action="append", choices=MODELS, metavar="NAME",
                        help=f"to project; repeat (default: {', '.join(SHOWN)})")  # fmt: skip
    parser.add_argument("--latency-us", type=float, default=LATENCY_US, help="of a projected message (default: 10)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds without a result (default: 300)")
    parser.add_argument("--json", metavar="PATH", type=output_file, help="keep results here, and continue them")
    args = parser.parse_args()
    if args.steps % 2:
        parser.error(f"got --steps {args.steps}, expected an even number: steps of ACP-SGD differ")
    variants, models = args.variant or list(VARIANTS), args.model or list(SHOWN)
    sizes = sorted({*(args.ranks or (2, 4, 8, 16))})
    about = {
        **provenance(), "cores": min(CORES, os.cpu_count() or 1), "threads": 1, "side": args.side,
        "parameters": PARAMETERS, "steps": args.steps, "latency_us": args.latency_us, "commands": [parser.command],
    }  # fmt: skip
    about["commits"] = [about.pop("commit")]
    benchmark = Benchmark(about, args.json, args.timeout)
    try:
        benchmark.resume()
    except ResultsError as error:
        parser.fail(str(error))
    torch.set_num_threads(1)
    turns = [(ranks, number, benchmark.missing(ranks, number, variants))
             for number in range(args.rounds) for ranks in sizes]  # fmt: skip
    with Progress(sum(len(missing) for *_, missing in turns)) as progress:
        for ranks, number, missing in turns:
            progress.now(f"{ranks} ranks, round {number + 1}")
            try:
                for what in benchmark.run_job(ranks, number, missing) if missing else ():
                    progress.done(f"{ranks} ranks, round {number + 1}, {what}")
            except jobs.JobError as error:
                parser.fail(f"{ranks} ranks: {error}; what was measured is kept, and the same command continues")
    benchmark.results["projection"] = project(sizes_of(models), models, args.latency_us / 1e6)
    benchmark.save()
    print(measured_tables(benchmark.results))


if __name__ == "__main__":
    main()
