"""`gradzip advise`: does compression pay for this model on this network, and which method?"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradzip
from gradzip.methods.base.registry import registered

from ..advice.advice import Advice
from ..advice.cost import JOINED, Compressed, Link, Step
from ..advice.decision import FP16, FP32
from ..advice.layer_costs import LayerCost, measure_layers
from ..advice.measure import measure_link
from ..advice.studies import OPTIMIZERS
from ..collectives.engine import Engine
from ..collectives.traffic import Traffic
from ..engines import horovod_engine, torch_engine
from ..inspection import script
from ..methods.base.composite import Composite
from ..methods.base.compressor import Compressor
from .command import CommandError, table
from .conditions import conditions
from .models import MODELS, Parameter, step_of

EXAMPLES = f"""\
models: {", ".join(MODELS)}

examples:
  gradzip advise --model resnet50 --optimizer sgd --bandwidth 10gbit --ranks 16 --step-ms 180
  gradzip advise --model train.py:build --bandwidth 1gbit --ranks 4 --step-ms 250 --methods acpsgd qsgd:bits=2
  gradzip advise --model bert-large --optimizer adamw --bandwidth 25gbit --ranks 1024 --step-ms 400
  horovodrun -np 4 gradzip advise --measure --model train.py:build --step-ms 250
  torchrun --nproc-per-node 4 --no-python gradzip advise --measure --model resnet50 --step-ms 180
"""

LATENCY_US = 50.0  # of a message, by default

# Methods that are not compared by default, beside those made of methods. ATOMO takes long to measure: it decomposes
# each layer. GradiVeQ compresses after hundreds of steps. The first two, and Momentum, are compared anyway.
LEFT_OUT = (FP32, FP16, "atomo", "gradiveq", "momentum")

# Momentum with the method of its study.
MOMENTUM = "momentum:inner=signsgd(majority=False)"

FRONT_ENDS = {"horovod": "Horovod", "ddp": "DDP"}

# Methods whose cost no single step shows: they change during training, or have two kinds of links.
CHANGING = ("auto", "phases", "hierarchical")


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
    parser.add_argument("--model", required=True, help="a name, or file.py:build")
    parser.add_argument(
        "--optimizer", choices=list(OPTIMIZERS), help="of the training: it decides what compression costs in accuracy"
    )
    parser.add_argument("--bandwidth", metavar="RATE", help="of one rank's link: a number and kbit, mbit or gbit")
    parser.add_argument("--ranks", type=int, help="world size")
    parser.add_argument(
        "--step-ms", type=float, metavar="MS", help="a training step on one rank, without communication"
    )
    parser.add_argument(
        "--latency-us", type=float, metavar="US", default=LATENCY_US, help="of one message (default: %(default)g)"
    )
    parser.add_argument(
        "--methods", nargs="+", metavar="SPEC", help="compare these, and advise one whatever it costs in accuracy"
    )
    parser.add_argument("--front-end", choices=sorted(JOINED), help="default: ddp")
    parser.add_argument("--device", default="cpu", help="where to measure the methods: cpu (the default) or cuda")
    parser.add_argument(
        "--measure", action="store_true", help="measure the link of the job that horovodrun or torchrun started"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    _check(options)
    methods, device = _methods(options.methods), _device(options.device)
    step = step_of(parameters_of(options.model), options.step_ms / 1e3)
    choices = methods, bool(options.methods), options.optimizer
    if not options.measure:
        link = Link(options.ranks, bandwidth_of(options.bandwidth), options.latency_us / 1e6)
        _report(Advice(step, link, options.front_end or "ddp", _costs(methods, step, device), *choices), options)
        return 0
    with _job() as (engine, front_end):
        link, costs = measure_link(engine), _slowest(_costs(methods, step, device), engine)
        advice = Advice(step, link, front_end, costs, *choices)
        try:
            if engine.rank == 0:
                _report(advice, options)
        finally:  # the others wait, so that no rank ends the job before the report is written
            engine.allgather_bytes(b"done\n", "gradzip.advise.end")
    return 0


# --- options


def _check(options: argparse.Namespace) -> None:
    """Raise CommandError for options that are missing, out of range, or do not go together."""
    found = ("bandwidth", "ranks", "front_end")  # by --measure
    for name in ("step_ms", *(() if options.measure else found[:2])):
        if getattr(options, name) is None:
            raise CommandError(
                f"got no --{name.replace('_', '-')}, expected for example --bandwidth 10gbit --ranks 16 --step-ms 180, "
                "or --measure --step-ms 180 in a job"
            )
    for name in found if options.measure else ():
        if getattr(options, name) is not None:
            raise CommandError(f"got --{name.replace('_', '-')} with --measure, expected one of both")
    if options.measure and options.device != "cpu":
        raise CommandError(f"got --device {options.device} with --measure, which measures on the CPU; expected cpu")
    for name, least in (("ranks", 1), ("step_ms", 1e-6), ("latency_us", 0)):
        value = getattr(options, name)
        if value is not None and not least <= value < math.inf:
            raise CommandError(f"got --{name.replace('_', '-')} {value}, expected a number >= {least}")


def _methods(specs: Sequence[str] | None) -> dict[str, Compressor]:
    """The methods to compare, by spec; fp32 and fp16 are among them."""
    if specs is None:
        known = registered()
        specs = [name for name in known if name not in LEFT_OUT and not issubclass(known[name], Composite)]
        specs.append(MOMENTUM)
    for name in (spec.partition(":")[0].strip() for spec in specs):
        if name in CHANGING:
            raise CommandError(f"got --methods {name}, whose steps differ; expected the methods that it is made of")
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


def bandwidth_of(text: str) -> float:
    """Bytes per second of a rate such as 10gbit. Raises CommandError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    if match is None or float(match[1]) <= 0:
        raise CommandError(f"got --bandwidth {text!r}, expected a number > 0 and kbit, mbit or gbit, such as 10gbit")
    return float(match[1]) * units[match[2]] / 8


def parameters_of(text: str) -> list[Parameter]:
    """The parameters of the workload that `--model` names, in the order of the forward pass. Raises CommandError."""
    if text in MODELS:
        return list(MODELS[text]())
    path, _, function = text.partition(":")
    if path.endswith(".py"):
        return _of_module(Path(path), function or "build")
    raise CommandError(f"got --model {text!r}, expected file.py:build, or one of: {', '.join(MODELS)}")


def _of_module(path: Path, function: str) -> list[Parameter]:
    """The parameters of the module that a function returns. Their work is estimated by their number of elements."""
    expected = f"expected a file with a function {function}() that returns a torch.nn.Module"
    try:
        built = script.call(path, function)
    except ValueError as error:
        raise CommandError(f"{error}; {expected}") from None
    if not isinstance(built, nn.Module):
        raise CommandError(f"{path}:{function}: got {type(built).__name__}, {expected}")
    named = [(name, p) for name, p in built.named_parameters() if p.requires_grad and p.numel()]
    if not named:
        raise CommandError(f"{path}:{function}: got a module without parameters that need a gradient, expected some")
    return [Parameter(name, tuple(p.shape), float(p.numel())) for name, p in named]


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


def _slowest(costs: Mapping[str, Sequence[LayerCost]], engine: Engine) -> dict[str, Sequence[LayerCost]]:
    """The costs with the slowest rank's times."""
    found: dict[str, Sequence[LayerCost]] = {}
    for method, layers in costs.items():
        times = [t for c in layers for t in (c.compressed.encode, c.compressed.decode, c.decode_rank)]
        slowest = zip(*[iter(engine.max_over_ranks(times, f"gradzip.advise.{method}"))] * 3)
        found[method] = [
            LayerCost(Compressed(c.compressed.rounds, encode, decode), decode_rank)
            for c, (encode, decode, decode_rank) in zip(layers, slowest)
        ]
    return found


def _costs(methods: dict[str, Compressor], step: Step, device: torch.device) -> dict[str, Sequence[LayerCost]]:
    costs: dict[str, Sequence[LayerCost]] = {}
    for spec, compressor in methods.items():
        if isinstance(compressor, gradzip.Momentum):
            compressor = replace(compressor, warmup_steps=0)  # the steps after the warm-up count
        costs[spec] = measure_layers(compressor, step.layers, device)
    return costs


def _report(advice: Advice, options: argparse.Namespace) -> None:
    rows = advice.rows()
    measured, warnings = conditions(torch.device(options.device))
    said, notes = list(advice.sentences(rows)), [*warnings, *advice.notes()]
    if options.json:
        content = {"model": options.model, **advice.json(rows), "conditions": measured, "advice": said, "notes": notes}
        print(json.dumps(content, indent=2))
        return
    link, step = advice.link, advice.step
    elements = sum(layer.numel for layer in step.layers)
    bandwidth = f"{8e-9 * link.bandwidth:.3g} Gb/s" if link.bandwidth < 1e15 else "no network"
    print(f"{options.model}: {elements / 1e6:.1f} M elements in {len(step.layers)} parameters")
    print(
        f"{link.ranks} ranks with {FRONT_ENDS[advice.front_end]}, {bandwidth}, {1e6 * link.latency:.0f} us a message; "
        f"{1e3 * step.seconds:.1f} ms a step without communication"
    )
    print(measured, "", *table(advice.table(rows)), "", *said, *notes, sep="\n")
