"""`gradzip advise`: does compression pay for this model on this network, and which method?"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import gradzip
from gradzip.methods.base.registry import registered

from ..auto.studies import OPTIMIZERS
from ..collectives.engine import Engine
from ..collectives.traffic import Traffic
from ..cost import JOINED, Compressed, Link, Step
from ..engines import horovod_engine, torch_engine
from ..measure import measure_link
from ..methods.base.composite import Composite
from ..methods.base.compressor import Compressor
from .advice import Advice
from .advice_report import method_table, plot, print_table, projection_table
from .command import CommandError, check_picture, progress
from .conditions import conditions
from .decision import FP16, FP32
from .layer_costs import LayerCost, measure_layers
from .models import MODELS, step_of
from .recommendation import notes, recommendation
from .workload import Workload, load

EXAMPLES = f"""\
models: {", ".join(MODELS)}

examples:
  gradzip advise --model resnet50 --optimizer sgd --bandwidth 10gbit --ranks 16 --step-ms 180
  gradzip advise --model train.py:build --bandwidth 1gbit --ranks 4 --step-ms 250 --methods acpsgd qsgd:bits=2
  gradzip advise --model bert-large --optimizer adamw --bandwidth 25gbit --ranks 32 --step-ms 400 --project 1024
  horovodrun -np 4 gradzip advise --measure --model train.py:build
                   measures the link, the methods and, if build() returns (module, inputs), the training step
  torchrun --nproc-per-node 4 --no-python gradzip advise --measure --model resnet50 --step-ms 180
"""

LATENCY_US = 50.0  # of a message, if it is not given

# Methods that are not compared by default, beside those made of methods. ATOMO takes long to measure: it decomposes
# each layer. GradiVeQ compresses after hundreds of steps. The first two, and Momentum, are compared anyway.
LEFT_OUT = (FP32, FP16, "atomo", "gradiveq", "momentum")

# Momentum with the method of its study.
MOMENTUM = "momentum:inner=signsgd(majority=False)"

FRONT_ENDS = {"horovod": "Horovod", "ddp": "DDP"}

# Methods whose cost no single step shows.
CHANGING = {
    "auto": "chooses during training; expected the methods to choose from",
    "phases": "changes during training; expected the methods of its phases",
    "hierarchical": "has two kinds of links; expected its inner method, with --ranks the number of nodes",
}


def add(commands: Any) -> None:
    """Add `gradzip advise`."""
    parser = commands.add_parser(
        "advise",
        help="does compression pay for this model on this network, and which method?",
        description="Predict a training step with each method, and say which one to use, or not to compress. Only "
        "methods are advised that cost no accuracy to speak of in studies with your optimizer. What the methods take "
        "is measured on this machine in some seconds; docs/advise.md explains the model.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="a name, file.py:build or shapes.json")
    parser.add_argument(
        "--optimizer", choices=list(OPTIMIZERS), help="of the training: it decides what compression costs in accuracy"
    )
    parser.add_argument("--bandwidth", metavar="RATE", help="of one rank's link: a number and kbit, mbit or gbit")
    parser.add_argument("--ranks", type=int, help="world size")
    parser.add_argument(
        "--step-ms", type=float, metavar="MS", help="a training step on one rank, without communication"
    )
    parser.add_argument("--latency-us", type=float, metavar="US", help="of one message (default: 50)")
    parser.add_argument(
        "--methods", nargs="+", metavar="SPEC", help="compare these, and advise one whatever it costs in accuracy"
    )
    parser.add_argument("--front-end", choices=sorted(JOINED), help="default: ddp")
    parser.add_argument("--device", default="cpu", help="where to measure the methods: cpu (the default) or cuda")
    parser.add_argument("--measure", action="store_true", help="measure in the job that horovodrun or torchrun started")
    parser.add_argument("--project", type=int, metavar="RANKS", help="predict for 2, 4, 8, ... ranks, too")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the least ratio that pays, and the projection")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.measure:
        _refuse(options)
    methods = _methods(options.methods)
    device = _device(options.device)
    if options.project is not None and options.project < 2:
        raise CommandError(f"got --project {options.project}, expected a number of ranks >= 2")
    if options.step_ms is not None and not 0 < options.step_ms < math.inf:
        raise CommandError(f"got --step-ms {options.step_ms}, expected milliseconds > 0")
    if options.png:
        check_picture(options.png)
    workload = load(options.model)
    if options.measure:
        with _job() as (engine, front_end):
            advice = _measured(workload, methods, device, engine, front_end, options)
            try:
                if engine.rank == 0:
                    _report(advice, options)
            finally:  # the others wait, so that no rank ends the job before the report is written
                engine.allgather_bytes(b"done\n", "gradzip.advise.end")
        return 0
    link = _link(options)
    step = step_of(workload.parameters, _given_seconds(options))
    costs = _costs(methods, step, device)
    front_end = options.front_end or "ddp"
    _report(Advice(step, link, front_end, costs, methods, bool(options.methods), options.optimizer), options)
    return 0


# --- options


def _methods(specs: Sequence[str] | None) -> dict[str, Compressor]:
    """The methods to compare, by spec; fp32 and fp16 are among them."""
    if specs is None:
        known = registered()
        specs = [name for name in known if name not in LEFT_OUT and not issubclass(known[name], Composite)]
        specs.append(MOMENTUM)
    for name in (spec.partition(":")[0].strip() for spec in specs):
        if name in CHANGING:
            raise CommandError(f"got --methods {name}, which {CHANGING[name]}")
    try:
        methods = {spec: gradzip.parse(spec) for spec in (FP32, FP16, *specs)}
    except (TypeError, ValueError) as error:
        raise CommandError(f"--methods: {error}") from None
    for spec, compressor in methods.items():
        if any(getattr(part, "exchange", "gather") == "auto" for part in compressor.parts):
            raise CommandError(
                f"got --methods {spec}, whose rounds change during training; expected exchange=gather or scatter_reduce"
            )
    return methods


def _device(name: str) -> torch.device:
    try:
        torch.empty(1, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise CommandError(f"got --device {name!r}, expected cpu or a device that torch can use ({reason})") from None


def _given_seconds(options: argparse.Namespace) -> float:
    if options.step_ms is None:
        raise CommandError(
            "got no --step-ms, expected the milliseconds of a training step on one rank without communication; "
            "--measure measures it for a file whose build() returns (module, inputs)"
        )
    return options.step_ms / 1e3


def _link(options: argparse.Namespace) -> Link:
    if options.bandwidth is None or options.ranks is None:
        missing = "--bandwidth" if options.bandwidth is None else "--ranks"
        raise CommandError(
            f"got no {missing}, expected for example --bandwidth 10gbit --ranks 16, or --measure in a job"
        )
    if options.ranks < 1:
        raise CommandError(f"got --ranks {options.ranks}, expected a number >= 1")
    latency = LATENCY_US if options.latency_us is None else options.latency_us
    if not 0 <= latency < math.inf:
        raise CommandError(f"got --latency-us {latency}, expected microseconds >= 0")
    return Link(options.ranks, bandwidth_of(options.bandwidth), latency / 1e6)


def bandwidth_of(text: str) -> float:
    """Bytes per second of a rate such as 10gbit. Raises CommandError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    if match is None or float(match[1]) <= 0:
        raise CommandError(f"got --bandwidth {text!r}, expected a number > 0 and kbit, mbit or gbit, such as 10gbit")
    return float(match[1]) * units[match[2]] / 8


def _refuse(options: argparse.Namespace) -> None:
    """Raise CommandError for options that do not go with --measure."""
    if options.device != "cpu":
        raise CommandError(
            f"got --device {options.device} with --measure, which measures on the CPU; expected --bandwidth, --ranks "
            "and --step-ms in place of --measure"
        )
    for name in ("bandwidth", "ranks", "latency-us", "front-end"):
        if getattr(options, name.replace("-", "_")) is not None:
            raise CommandError(f"got --{name} with --measure, expected one of both: --measure finds it out")


# --- measuring and reporting


@contextlib.contextmanager
def _job() -> Iterator[tuple[Engine, str]]:
    """Join the job that this process is a rank of. Yields its engine, and its front end: "horovod" or "ddp".

    Raises:
        CommandError: the process is a rank of no job.
    """
    if "HOROVOD_RANK" in os.environ:
        import horovod.torch as hvd

        hvd.init()
        try:
            yield horovod_engine(hvd.global_process_set, Traffic()), "horovod"
        finally:
            hvd.shutdown()
        return
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise CommandError(
            "got --measure outside of a job, expected horovodrun -np 2 gradzip advise --measure ..., or "
            "torchrun --nproc-per-node 2 --no-python gradzip advise --measure ..."
        )
    import torch.distributed as dist

    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    try:
        yield torch_engine(dist.group.WORLD, Traffic(), torch.device("cpu")), "ddp"
    finally:
        dist.destroy_process_group()


def _measured(
    workload: Workload, methods: dict[str, Compressor], device: torch.device, engine: Engine, front_end: str,
    options: argparse.Namespace,
) -> Advice:  # fmt: skip
    """Advice for this job, from the slowest rank's measurements. All ranks measure at the same time."""
    if workload.inputs is not None and options.step_ms is None:
        step = workload.measured_step()
    else:
        step = step_of(workload.parameters, _given_seconds(options))
    step = _stretched(step, engine.max_over_ranks([step.seconds], "gradzip.advise.step")[0])
    link = measure_link(engine)
    costs = _costs(methods, step, device, quiet=engine.rank > 0)
    for method, of_layers in costs.items():
        times = [t for c in of_layers for t in (c.compressed.encode, c.compressed.decode, c.decode_rank, c.slowest)]
        slowest = engine.max_over_ranks(times, f"gradzip.advise.{method}")
        costs[method] = [
            LayerCost(Compressed(c.compressed.rounds, encode, decode), decode_rank, of_step)
            for c, (encode, decode, decode_rank, of_step) in zip(of_layers, zip(*[iter(slowest)] * 4))
        ]
    return Advice(step, link, front_end, costs, methods, bool(options.methods), options.optimizer)


def _stretched(step: Step, seconds: float) -> Step:
    """The step with all times scaled to a total of `seconds`."""
    # Rounding must not make a gradient ready after the step.
    ready = [min(seconds, layer.ready * seconds / step.seconds) for layer in step.layers]
    return Step(tuple(replace(layer, ready=at) for layer, at in zip(step.layers, ready)), seconds)


def _costs(
    methods: dict[str, Compressor], step: Step, device: torch.device, quiet: bool = False
) -> dict[str, Sequence[LayerCost]]:
    costs: dict[str, Sequence[LayerCost]] = {}
    with progress(len(methods), "measuring the methods", quiet) as advance:
        for spec, compressor in methods.items():
            if isinstance(compressor, gradzip.Momentum):
                compressor = replace(compressor, warmup_steps=0)  # the steps after the warm-up count
            costs[spec] = measure_layers(compressor, step.layers, device)
            advance()
    return costs


def _report(advice: Advice, options: argparse.Namespace) -> None:
    rows = advice.rows()
    projection = advice.projection(options.project, rows) if options.project else []
    if options.png:
        plot(advice, rows, projection, options.png)
    found = conditions(torch.device(options.device))
    said = list(recommendation(advice, rows))
    warnings = list(found.warnings())
    remarks = list(notes(advice, os.environ.get("HOROVOD_CYCLE_TIME"), found.cores))
    if options.json:
        content = {"model": options.model, **advice.json(rows, projection), "conditions": asdict(found)}
        print(json.dumps(content | {"advice": said, "notes": [*warnings, *remarks]}, indent=2))
        return
    link = advice.link
    layers = advice.step.layers
    elements = sum(layer.numel for layer in layers)
    bandwidth = f"{8e-9 * link.bandwidth:.3g} Gb/s" if link.bandwidth < 1e15 else "no network"
    print(f"{options.model}: {elements / 1e6:.1f} M elements in {len(layers)} parameters")
    print(
        f"{link.ranks} ranks with {FRONT_ENDS[advice.front_end]}, {bandwidth}, {1e6 * link.latency:.0f} us a message; "
        f"{1e3 * advice.step.seconds:.1f} ms a step without communication"
    )
    for line in (found.line, *warnings, ""):
        print(line)
    print_table(*method_table(advice, rows))
    print()
    for line in (*said, *remarks):
        print(line)
    if projection:
        print("\nms/step, and share of the ideal, with the same work for each rank:\n")
        print_table(*projection_table(projection))
