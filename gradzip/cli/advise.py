"""`gradzip advise`: does compression pay for this model on these machines, and which method?

Predict a training step with each method, and say which one to use, or not to compress. Only methods are advised that
cost no accuracy to speak of in studies with your optimizer. What methods take is known of some GPUs, and measured in
some seconds with --device here or cpu; docs/advise.md explains the model.

examples:
  gradzip advise --model resnet50 --optimizer sgd --bandwidth 10gbit --ranks 16 --step-ms 180
  gradzip advise --model gpt2 --device a40 --gpus-per-node 8 --within pcie-shm --step-ms 150
  gradzip advise --model gpt2-xl --nodes 2 --gpus-per-node 8 --between 25gbit --step-ms 600
  gradzip advise --model train.py --front-end fsdp --ranks 4 --bandwidth 100gbit --step-ms 900
  gradzip advise --model train.py:build --device here --bandwidth 1gbit --ranks 4 --step-ms 250
  gradzip advise --model gpt2 --methods topk qsgd:bits=2 --bandwidth 1gbit --ranks 4 --step-ms 250
  horovodrun -np 4 gradzip advise --measure --model train.py:build --step-ms 250
  torchrun --nproc-per-node 4 --no-python gradzip advise --measure --model resnet50 --step-ms 180
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import is_lazy

import gradzip

from ..advice.advice import BETWEEN, BF16, FOUR_BITS, FP16, FP32, SIGNS, Advice
from ..advice.cost import Compressed, Layer, Link, Step, between_nodes
from ..advice.measure import LayerCost, measure_layers, measure_link
from ..advice.studies import OPTIMIZERS
from ..collectives.engine import Engine
from ..collectives.node_chunks import NodeChunks
from ..inspection import script
from ..methods.base.compressor import Compressor
from ..methods.hierarchical import Hierarchical
from ..methods.spec import unparse
from ..watch.replicas import engine_of_all
from . import devices
from .command import CommandError, check_least, table
from .conditions import conditions
from .links import LINKS
from .models import MODELS, Parameter, step_of
from .sharded import EIGHT_BITS, ShardedAdvice

LATENCY_US = 50.0  # of a message, by default
WIDTH = 100  # of lines

# The methods that are compared by default, beside fp32 and fp16: those that README recommends, and others that ended as
# without compression in a study with some optimizer.
CANDIDATES = (
    "block-float", FOUR_BITS, SIGNS, "fft-range", "dct-range:theta=0.95", "qsgd", "powersgd", "acpsgd",
)  # fmt: skip
POWERSGD_HOOK = "PowerSGD hook"  # torch's, which is slower than `powersgd`; its times are known of a GPU
INTEGERS = (EIGHT_BITS, FOUR_BITS)  # where nodes have several ranks, also between nodes alone; for FSDP2, all methods

FRONT_ENDS = {"horovod": "Horovod", "ddp": "DDP", "fsdp": "FSDP2"}

# Methods whose cost no single step shows: they change during training.
CHANGING = (gradzip.Auto, gradzip.Phases)

Costs = dict[str, list[LayerCost]]
Device = devices.Device | torch.device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, help=f"file.py:build, or a name: {', '.join(MODELS)}")
    add("--optimizer", choices=list(OPTIMIZERS), help="of the training: what compression costs depends on it")
    add("--step-ms", type=float, metavar="MS", help="a training step on one rank, without communication")
    add("--device", metavar="DEVICE", help=f"what trains: {', '.join(devices.names())}; or measured: here, cpu, cuda:N")
    add("--nodes", type=int, help="machines, with --gpus-per-node (default: 1)")
    add("--gpus-per-node", type=int, metavar="N", help="ranks on each machine, which share its connection")
    add("--between", metavar="RATE", help="of one machine's connection: a number and kbit, mbit or gbit")
    add("--within", metavar="LINK", help=f"between GPUs of a machine: {', '.join(LINKS)}, or a rate (default: nvlink)")
    add("--ranks", type=int, help="world size, in place of --nodes: each rank on a machine of its own")
    add("--bandwidth", metavar="RATE", help="of one rank's link, in place of --between")
    add("--latency-us", type=float, metavar="US", default=LATENCY_US, help="of one message (default: %(default)g)")
    add("--methods", nargs="+", metavar="SPEC", help="compare these, and advise one whatever it costs in accuracy")
    add("--front-end", choices=sorted(FRONT_ENDS), help="default: ddp")
    add("--measure", action="store_true", help="measure the link of the job that horovodrun or torchrun started")


def run(options: argparse.Namespace) -> None:
    _check(options)
    device, assumed = _device(options)
    step = step_of(parameters_of(options.model), options.step_ms / 1e3)
    if options.measure:
        with _job() as (engine, front_end):
            methods = _methods(options.methods, None, front_end, None)
            link, costs = measure_link(engine), _slowest(_costs(methods, step.layers, device), engine)
            try:
                if engine.rank == 0:
                    _report(_advice(step, link, front_end, costs, methods, options, device), options, device, assumed)
            finally:  # the others wait, so that no rank ends the job before the report is written
                engine.allgather_bytes(b"done\n", "gradzip.advise.end")
        return
    link, front_end = _link(options), options.front_end or "ddp"
    if front_end == "fsdp":
        methods = {spec: gradzip.parse(spec) for spec in INTEGERS} | _between_nodes(link)
    else:
        methods = _methods(options.methods, device, front_end, link)
    costs = _costs(methods, step.layers, device, link.per_node)
    _report(_advice(step, link, front_end, costs, methods, options, device), options, device, assumed)


def _advice(
    step: Step,
    link: Link,
    front_end: str,
    costs: Costs,
    methods: Mapping[str, Compressor],
    options: argparse.Namespace,
    device: Device,
) -> Advice | ShardedAdvice:
    """What is advised. Chunks of methods between nodes are averaged by as many ranks as there are nodes."""
    among: dict[str, list[Compressed]] = {}
    for method, layers in costs.items():
        if method.startswith(BETWEEN):
            chunks = [layer.among(link.nodes) for layer in layers]
            among[method] = [
                between_nodes(chunk, layer.numel, link.per_node) for chunk, layer in zip(chunks, step.layers)
            ]
        else:
            among[method] = [layer.among(link.ranks) for layer in layers]
    if front_end == "fsdp":
        return ShardedAdvice(step, link, among, gloo=isinstance(device, torch.device) and device.type == "cpu")
    return Advice(step, link, front_end, among, methods, bool(options.methods), options.optimizer)


# --- options


def _check(options: argparse.Namespace) -> None:
    """Raise CommandError for options that are missing, out of range, or do not go together."""

    def given(*names: str) -> list[str]:
        return [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]

    flat, machines = given("ranks", "bandwidth"), given("nodes", "gpus_per_node", "between", "within")
    if options.measure and (wrong := given("front_end") + flat + machines):
        raise CommandError(f"got {wrong[0]} with --measure, which measures the job; expected one of both")
    if flat and machines:
        raise CommandError(f"got {flat[0]} with {machines[0]}, expected --ranks and --bandwidth, or --nodes and others")
    needed = ["step_ms"]
    if not options.measure:
        needed += ["gpus_per_node"] if machines else ["ranks", "bandwidth"]
        if machines and (options.nodes or 1) > 1:
            needed.append("between")
    for name in needed:
        if getattr(options, name) is None:
            raise CommandError(
                f"got no --{name.replace('_', '-')}, expected --step-ms 180 and --bandwidth 10gbit --ranks 16, or "
                "--nodes 2 --gpus-per-node 8 --between 25gbit, or --measure in a job"
            )
    if options.measure and options.device not in (None, "cpu"):
        raise CommandError(f"got --device {options.device} with --measure, which measures on the CPU; expected cpu")
    if options.front_end == "fsdp" and (options.methods or options.optimizer):
        raise CommandError(
            "got --methods or --optimizer with --front-end fsdp, which compares FSDP2 with gradzip.fsdp.quantize; "
            "leave them out"
        )
    check_least(options, ranks=1, nodes=1, gpus_per_node=1, step_ms=1e-6, latency_us=0)


def _link(options: argparse.Namespace) -> Link:
    """The link of the machines that the options describe."""
    latency = options.latency_us / 1e6
    if options.ranks is not None:
        return Link(options.ranks, bandwidth_of(options.bandwidth, "--bandwidth"), latency)
    name = options.within or "nvlink"
    kind = LINKS.get(name)
    if kind is None and not name[0].isdigit():
        raise CommandError(f"got --within {name!r}, expected {', '.join(LINKS)}, or a rate such as 200gbit")
    within = kind.bandwidth if kind else bandwidth_of(name, "--within")
    between = bandwidth_of(options.between, "--between") if options.between else math.inf
    ranks = (options.nodes or 1) * options.gpus_per_node
    tree = kind is not None and kind.tree
    return Link(ranks, between, latency, per_node=options.gpus_per_node, within=within, tree=tree)


def _methods(
    specs: Sequence[str] | None, device: Device | None, front_end: str, link: Link | None
) -> dict[str, Compressor]:
    """The methods to compare, by name; fp32 and fp16 are among them. link: None if a job is measured."""
    try:
        methods = {spec: gradzip.parse(spec) for spec in (FP32, FP16, *(specs or CANDIDATES))}
    except (TypeError, ValueError) as error:
        raise CommandError(f"--methods: {error}") from None
    for spec, method in methods.items():
        if isinstance(method, CHANGING) or (isinstance(method, Hierarchical) and not spec.startswith(BETWEEN)):
            raise CommandError(f"got --methods {spec}, whose steps differ; expected the methods that it is made of")
        if any(getattr(part, "exchange", "gather") == "auto" for part in method.parts):
            raise CommandError(
                f"got --methods {spec}, whose rounds change during training; expected exchange=gather or scatter_reduce"
            )
        if isinstance(method, Hierarchical):
            _check_nodes(spec, method, link)
        if isinstance(device, devices.Device) and device.costs(_plain(spec, method)[0]) is None:
            raise CommandError(
                f"got --methods {spec}, which was measured on no GPU; expected --device here, or one of: "
                f"{', '.join(CANDIDATES)}, topk"
            )
    if specs is not None:
        return methods
    if front_end == "ddp":
        methods[BF16] = gradzip.Cast(torch.bfloat16)
        if isinstance(device, devices.Device):
            methods[POWERSGD_HOOK] = gradzip.PowerSGD()
    return methods | (_between_nodes(link) if link else {})


def _between_nodes(link: Link) -> dict[str, Compressor]:
    """Integers between nodes alone, by name, where that differs from integers among all ranks."""
    if link.nodes == 1 or link.per_node == 1:
        return {}
    return {f"{BETWEEN}{spec}": Hierarchical(gradzip.parse(spec)) for spec in INTEGERS}


def _check_nodes(spec: str, method: Hierarchical, link: Link | None) -> None:
    """Raise CommandError if a method between nodes is not one of the link's."""
    if link is None:
        raise CommandError(f"got --methods {spec} with --measure, expected --nodes and --gpus-per-node")
    if link.nodes == 1 or link.per_node == 1:
        where = "on one node" if link.nodes == 1 else "with one rank on each node"
        raise CommandError(f"got --methods {spec} {where}, expected --nodes and --gpus-per-node of 2 or more")
    if method.local_size not in (None, link.per_node):
        raise CommandError(
            f"got --methods {spec} with --gpus-per-node {link.per_node}, expected the same local_size, or none"
        )


def _plain(spec: str, method: Compressor) -> tuple[str, Compressor]:
    """The method of a chunk, for one between nodes; else the method. By its name."""
    if not isinstance(method, Hierarchical):
        return spec, method
    return unparse(method.inner), method.inner


def _device(options: argparse.Namespace) -> tuple[Device, str]:
    """Where the methods run: a GPU that is known, or a device to measure them on; and what is assumed, in words."""
    name, cuda = options.device, torch.cuda.is_available()
    if name is None and options.measure:
        name = "cpu"
    if name is None and not cuda:
        assumed = f"assumed is --device {devices.ASSUMED}; --device cpu measures here"
        return devices.device(devices.ASSUMED), f"No --device, and no GPU here: {assumed}."
    if name in devices.names():
        return devices.device(name), ""
    known = f"here, cpu, or one of: {', '.join(devices.names())}"
    if name and (match := re.fullmatch(r"cuda(?::(\d+))?", name)):
        if int(match[1] or 0) >= (count := torch.cuda.device_count()):
            raise CommandError(f"got --device {name!r} with {count} GPUs here, expected {known}")
        return torch.device(name), ""
    if name not in (None, "here", "cpu"):
        raise CommandError(f"got --device {name!r}, expected {known}, or a GPU here: cuda, cuda:1")
    return torch.device("cuda" if cuda and name != "cpu" else "cpu"), ""


def bandwidth_of(text: str, option: str = "--bandwidth") -> float:
    """Bytes per second of a rate such as 10gbit. Raises CommandError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", text)
    if match is None or float(match[1]) <= 0:
        raise CommandError(f"got {option} {text!r}, expected a number > 0 and kbit, mbit or gbit, such as 10gbit")
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
    if lazy := [name for name, p in built.named_parameters() if is_lazy(p)]:
        raise CommandError(
            f"{path}:{function}: got the lazy parameter {lazy[0]}, expected a module whose shapes are known: call it "
            "with a batch, and then return it"
        )
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


def _costs(
    methods: Mapping[str, Compressor],
    layers: Sequence[Layer],
    device: Device,
    per_node: int = 1,
) -> Costs:
    """The costs of each layer; between nodes, of its chunk. Of momenta, the steps after the warm-up count."""
    costs = {}
    for name, method in methods.items():
        spec, plain = _plain(name, method)
        of = [_chunk(layer, plain, per_node) for layer in layers] if isinstance(method, Hierarchical) else layers
        if isinstance(plain, gradzip.Momentum):
            plain = replace(plain, warmup_steps=0)
        if isinstance(device, torch.device):
            costs[name] = measure_layers(plain, of, device)
            continue
        if isinstance(plain, gradzip.QSGD) and plain.coding == "elias":
            plain = replace(plain, coding="packed")  # as on a GPU
        costs[name] = device.layers(spec, of, measure_layers(plain, of, torch.device("cpu"), clock=None))
    return costs


def _chunk(layer: Layer, method: Compressor, per_node: int) -> Layer:
    """The chunk of a layer that a rank averages with its peers on other nodes."""
    shape = NodeChunks(0, 2, 0, per_node, method).shape(torch.Size(layer.shape))
    return Layer(layer.name, shape, layer.ready)


def _slowest(costs: Mapping[str, Sequence[LayerCost]], engine: Engine) -> Costs:
    """The costs with the slowest rank's times."""
    found = {}
    for method, layers in costs.items():
        times = [time for layer in layers for time in (layer.encode, layer.decode, layer.decode_rank)]
        slowest = iter(engine.max_over_ranks(times, f"gradzip.advise.{method}"))
        found[method] = [LayerCost(c.rounds, *of_layer) for c, of_layer in zip(layers, zip(slowest, slowest, slowest))]
    return found


def _report(advice: Advice | ShardedAdvice, options: argparse.Namespace, device: Device, assumed: str) -> None:
    measured, warnings = (device.words, []) if isinstance(device, devices.Device) else conditions(device)
    said, notes = list(advice.sentences()), [*warnings, *advice.notes()]
    if options.json:
        content = {
            "model": options.model, **advice.json(), "conditions": measured, "assumed": assumed, "advice": said,
            "notes": notes,
        }  # fmt: skip
        print(json.dumps(content, indent=2))
        return
    link, step = advice.link, advice.step
    answer, *more = said
    print(*_wrapped(answer, *([assumed] if assumed else []), *more), "", sep="\n")
    print(*table(advice.table()), "", sep="\n")
    elements = sum(layer.numel for layer in step.layers)
    front_end = FRONT_ENDS["fsdp" if isinstance(advice, ShardedAdvice) else advice.front_end]
    print(*_wrapped(
        f"{options.model}: {elements / 1e6:.1f} M elements in {len(step.layers)} parameters; "
        f"{1e3 * step.seconds:.1f} ms a step without communication",
        f"{_machines(link)} with {front_end}; {1e6 * link.latency:.0f} us a message",
        measured, *notes,
    ), sep="\n")  # fmt: skip


def _wrapped(*sentences: str) -> list[str]:
    """The sentences, as lines of at most `WIDTH` characters."""
    return [line for text in sentences for line in textwrap.wrap(text, WIDTH, break_on_hyphens=False)]


def _machines(link: Link) -> str:
    """The ranks and their links, in words."""

    def rate(bandwidth: float) -> str:
        return f"{8e-9 * bandwidth:.3g} Gb/s" if bandwidth < 1e15 else "no network"

    if link.per_node == 1:
        return f"{link.ranks} ranks, {rate(link.bandwidth)}"
    within = f"{1e-9 * link.within:.3g} GB/s within"
    if link.nodes == 1:
        return f"{link.ranks} ranks on one node, {within}"
    return f"{link.nodes} nodes of {link.per_node} ranks, {rate(link.bandwidth)} between, {within}"
