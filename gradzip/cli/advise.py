"""`gradzip advise`: does compression pay for this model on this network, and which method?

Predict a training step with each method, and say which one to use, or not to compress. Only methods are advised that
cost no accuracy to speak of in studies with your optimizer. What the methods take is measured on this machine in some
seconds; docs/advise.md explains the model.

examples:
  gradzip advise --model resnet50 --optimizer sgd --bandwidth 10gbit --ranks 16 --step-ms 180
  gradzip advise --model train.py:build --bandwidth 1gbit --ranks 4 --step-ms 250 --methods acpsgd qsgd:bits=2
  gradzip advise --model bert-large --optimizer adamw --bandwidth 25gbit --ranks 1024 --step-ms 400
  horovodrun -np 4 gradzip advise --measure --model train.py:build --step-ms 250
  torchrun --nproc-per-node 4 --no-python gradzip advise --measure --model resnet50 --step-ms 180
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import gradzip
from gradzip.methods.base.registry import registered

from ..advice.advice import FP16, FP32, Advice
from ..advice.cost import JOINED, Link, Step
from ..advice.measure import LayerCost, measure_layers, measure_link
from ..advice.studies import OPTIMIZERS
from ..collectives.engine import Engine
from ..inspection import script
from ..methods.base.composite import Composite
from ..methods.base.compressor import Compressor
from ..watch.replicas import engine_of_all
from .command import CommandError, check_least, table
from .conditions import conditions
from .models import MODELS, Parameter, step_of

LATENCY_US = 50.0  # of a message, by default

# Methods that are not compared by default, beside those made of methods. ATOMO takes long to measure: it decomposes
# each layer. GradiVeQ compresses after hundreds of steps. The first two, and Momentum, are compared anyway.
LEFT_OUT = (FP32, FP16, "atomo", "gradiveq", "momentum")

# Momentum with the method of its study.
MOMENTUM = "momentum:inner=signsgd(majority=False)"

FRONT_ENDS = {"horovod": "Horovod", "ddp": "DDP"}

# Methods whose cost no single step shows: they change during training, or have two kinds of links.
CHANGING = (gradzip.Auto, gradzip.Phases, gradzip.Hierarchical)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, help=f"file.py:build, or a name: {', '.join(MODELS)}")
    add("--optimizer", choices=list(OPTIMIZERS), help="of the training: what compression costs depends on it")
    add("--bandwidth", metavar="RATE", help="of one rank's link: a number and kbit, mbit or gbit")
    add("--ranks", type=int, help="world size")
    add("--step-ms", type=float, metavar="MS", help="a training step on one rank, without communication")
    add("--latency-us", type=float, metavar="US", default=LATENCY_US, help="of one message (default: %(default)g)")
    add("--methods", nargs="+", metavar="SPEC", help="compare these, and advise one whatever it costs in accuracy")
    add("--front-end", choices=sorted(JOINED), help="default: ddp")
    add("--device", default="cpu", help="where to measure the methods: cpu (the default) or cuda")
    add("--measure", action="store_true", help="measure the link of the job that horovodrun or torchrun started")


def run(options: argparse.Namespace) -> None:
    _check(options)
    methods, device = _methods(options.methods), _device(options.device)
    step = step_of(parameters_of(options.model), options.step_ms / 1e3)

    def report(link: Link, front_end: str, costs: Mapping[str, Sequence[LayerCost]]) -> None:
        among = {method: [layer.among(link.ranks) for layer in layers] for method, layers in costs.items()}
        _report(Advice(step, link, front_end, among, methods, bool(options.methods), options.optimizer), options)

    if not options.measure:
        link = Link(options.ranks, bandwidth_of(options.bandwidth), options.latency_us / 1e6)
        report(link, options.front_end or "ddp", _costs(methods, step, device))
        return
    with _job() as (engine, front_end):
        link, costs = measure_link(engine), _slowest(_costs(methods, step, device), engine)
        try:
            if engine.rank == 0:
                report(link, front_end, costs)
        finally:  # the others wait, so that no rank ends the job before the report is written
            engine.allgather_bytes(b"done\n", "gradzip.advise.end")


# --- options


def _check(options: argparse.Namespace) -> None:
    """Raise CommandError for options that are missing, out of range, or do not go together."""
    given = [name for name in ("bandwidth", "ranks", "front_end") if getattr(options, name) is not None]
    if options.measure and given:
        raise CommandError(f"got --{given[0].replace('_', '-')} with --measure, expected one of both")
    for name in ("step_ms",) if options.measure else ("step_ms", "bandwidth", "ranks"):
        if getattr(options, name) is None:
            raise CommandError(
                f"got no --{name.replace('_', '-')}, expected for example --bandwidth 10gbit --ranks 16 --step-ms 180, "
                "or --measure --step-ms 180 in a job"
            )
    if options.measure and options.device != "cpu":
        raise CommandError(f"got --device {options.device} with --measure, which measures on the CPU; expected cpu")
    check_least(options, ranks=1, step_ms=1e-6, latency_us=0)


def _methods(specs: Sequence[str] | None) -> dict[str, Compressor]:
    """The methods to compare, by spec; fp32 and fp16 are among them."""
    if specs is None:
        plain = [name for name, method in registered().items() if not issubclass(method, Composite)]
        specs = [name for name in plain if name not in LEFT_OUT] + [MOMENTUM]
    try:
        methods = {spec: gradzip.parse(spec) for spec in (FP32, FP16, *specs)}
    except (TypeError, ValueError) as error:
        raise CommandError(f"--methods: {error}") from None
    for spec, method in methods.items():
        if isinstance(method, CHANGING):
            raise CommandError(f"got --methods {spec}, whose steps differ; expected the methods that it is made of")
        if any(getattr(part, "exchange", "gather") == "auto" for part in method.parts):
            raise CommandError(
                f"got --methods {spec}, whose rounds change during training; expected exchange=gather or scatter_reduce"
            )
    return methods


def _device(name: str) -> torch.device:
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise CommandError(f"got --device {name!r}, expected cpu or a device that torch can use ({reason})") from None


def bandwidth_of(text: str) -> float:
    """Bytes per second of a rate such as 10gbit. Raises CommandError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", text)
    if match is None or float(match[1]) <= 0:
        raise CommandError(f"got --bandwidth {text!r}, expected a number > 0 and kbit, mbit or gbit, such as 10gbit")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]] / 8


def parameters_of(text: str) -> list[Parameter]:
    """The parameters of the workload that `--model` names, in the order of the forward pass. Raises CommandError.

    The work of those of a module that a function returns is estimated by their number of elements.
    """
    if text in MODELS:
        return list(MODELS[text]())
    path, _, function = text.partition(":")
    function = function or "build"
    if not path.endswith(".py"):
        raise CommandError(f"got --model {text!r}, expected file.py:build, or one of: {', '.join(MODELS)}")
    expected = f"expected a file with a function {function}() that returns a torch.nn.Module"
    try:
        built = script.call(Path(path), function)
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
        front_end, leave = "horovod", hvd.shutdown
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        front_end, leave = "ddp", dist.destroy_process_group
    else:
        raise CommandError(
            "got --measure outside of a job, expected horovodrun -np 2 gradzip advise --measure ..., or "
            "torchrun --nproc-per-node 2 --no-python gradzip advise --measure ..."
        )
    try:
        yield engine_of_all(), front_end
    finally:
        leave()


def _costs(methods: Mapping[str, Compressor], step: Step, device: torch.device) -> dict[str, list[LayerCost]]:
    """The costs of each layer. Of momenta, the steps after the warm-up count."""
    costs = {}
    for spec, method in methods.items():
        measured = replace(method, warmup_steps=0) if isinstance(method, gradzip.Momentum) else method
        costs[spec] = measure_layers(measured, step.layers, device)
    return costs


def _slowest(costs: Mapping[str, Sequence[LayerCost]], engine: Engine) -> dict[str, list[LayerCost]]:
    """The costs with the slowest rank's times."""
    found = {}
    for method, layers in costs.items():
        times = [time for layer in layers for time in (layer.encode, layer.decode, layer.decode_rank)]
        slowest = iter(engine.max_over_ranks(times, f"gradzip.advise.{method}"))
        found[method] = [LayerCost(c.rounds, *of_layer) for c, of_layer in zip(layers, zip(slowest, slowest, slowest))]
    return found


def _report(advice: Advice, options: argparse.Namespace) -> None:
    measured, warnings = conditions(torch.device(options.device))
    said, notes = list(advice.sentences()), [*warnings, *advice.notes()]
    if options.json:
        content = {"model": options.model, **advice.json(), "conditions": measured, "advice": said, "notes": notes}
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
    print(measured, "", *table(advice.table()), "", *said, *notes, sep="\n")
