"""Count what one training step with each method queues on a device, and how often the host waits. Needs no GPU.

A stand-in for the device counts operations, syncs and bytes (stand_in.py) while one rank runs its part of a step. All
other ranks send what it sends. Front ends:

  horovod  gradzip's hook, beside Horovod's own all-reduces, which are not counted. Buckets have 25 MiB.
  ddp      gradzip's hook of DistributedDataParallel, which a loop calls with buckets of 25 MiB.
  fsdp     gradzip.fsdp.compress between replicas of two shards each. torch's own FSDP2 shards each block of layers,
           runs forward and backward passes, and calls the hooks. What these do is counted, and the end of the step.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import Parameter

import gradzip
import gradzip.ddp
import gradzip.fsdp
import gradzip.horovod
from benchmarks.common.arguments import Parser, at_least, method, output_file
from benchmarks.common.results import RESULTS, ROOT, Blocks, provenance, replace_blocks, write_json
from benchmarks.common.tables import markdown
from benchmarks.device_ops.stand_in import SMALL, Counts, StandIn, stand_in, zeros
from gradzip.advice import cost
from gradzip.cli import models
from gradzip.collectives import AllToAll, Collective, Gather, RingSum, ToHost
from gradzip.collectives.engine import Engine, Pending, PendingCopy
from gradzip.collectives.traffic import Traffic
from gradzip.memory.verdict import read_all
from gradzip.methods.base.registry import registered

STORED = RESULTS / "device_ops.json"
PAGE = ROOT / "docs" / "gpu.md"
START = "<!-- table: python -m benchmarks.device_ops --write -->\n\n"

SMALLEST = "three"  # two matrices and a bias
MODELS = ("resnet50", "bert-large", "charlm")
FRONT_ENDS = ("horovod", "ddp", "fsdp")
SIZES = (2, 8)
SHARDS = 2  # of FSDP's: ranks of a replica
BUCKET = 25 << 20  # bytes, as DDP's default

EXAMPLES = """\
examples:
  python -m benchmarks.device_ops --model charlm topk fft-range        two methods on a small network
  python -m benchmarks.device_ops --json benchmarks/results/device_ops.json
  python -m benchmarks.device_ops --write                              the table of docs/gpu.md, from that file
"""


@dataclass(frozen=True)
class Cell:
    """One step of one method."""

    method: str
    model: str
    ranks: int
    front_end: str
    parameters: int
    compressed: int  # of the parameters
    ops: int
    syncs: int
    in_hook: int  # of the syncs, those in backward hooks
    read: int  # bytes
    written: int  # bytes
    sent: int  # bytes
    waits: dict[str, float]  # syncs by operation


Shapes = dict[str, torch.Size]
Step = Callable[[dict[str, Tensor], Counts], None]  # averages gradients by name


def stored() -> list[Cell]:
    return [Cell(**row) for row in json.loads(STORED.read_text())["cells"]]


def default_specs() -> list[str]:
    """What is stored, and the first example of each other method whose operations do not depend on the gradients."""
    specs = dict.fromkeys(cell.method for cell in stored())
    known = {type(gradzip.parse(spec)) for spec in specs}
    new = [gradzip.parse(method.examples[0]) for method in registered().values() if method not in known]
    return [*specs, *(type(c).examples[0] for c in new if c.parts == [c] and not c.adapts)]


def shapes_of(model: str) -> Shapes:
    """The shapes of a network's parameters, by name, in the order of the forward pass."""
    if model == SMALLEST:
        return {"a.weight": torch.Size((40, 300)), "b.weight": torch.Size((64, 20, 3, 3)), "b.bias": torch.Size((64,))}
    if model == "charlm":
        from models import charlm

        with torch.device("meta"):
            return {name: p.shape for name, p in charlm(65, 128).named_parameters()}
    return {p.name: torch.Size(p.shape) for p in models.MODELS[model]()}


def buckets_of(shapes: Shapes) -> list[Shapes]:
    """DDP's buckets: the parameters in the order in which their gradients are computed."""
    names = list(reversed(shapes))
    numbers = cost.cut([4 * shapes[name].numel() for name in names], BUCKET, large_alone=False)
    return [{names[i]: shapes[names[i]] for i in bucket} for bucket in numbers]


def compresses(compressor: gradzip.Compressor, shape: torch.Size) -> bool:
    return not compressor.bypasses(torch.empty(shape, device="meta"))


def noise(numel: int, step: int) -> Tensor:
    """Normal numbers on the CPU, repeated."""
    some = torch.randn(1 << 16, generator=torch.Generator().manual_seed(step), dtype=torch.float32)
    return some.repeat(-(-numel // some.numel()))[:numel]


# --- Horovod


class Loopback(Engine):
    """A group whose ranks all send the same, as seen by one of them. Its transfers are not counted."""

    is_stale = False

    def __init__(self, size: int, traffic: Traffic, uncounted: Callable[[], Any]) -> None:
        self.rank, self.size, self.traffic, self.uncounted = 0, size, traffic, uncounted

    def accepted(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous()

    def wire(self, tensor: Tensor) -> Tensor:
        self.traffic.bytes_sent += tensor.nbytes
        return tensor.contiguous()

    def launch(self, collective: Collective, slot: str) -> Pending:
        return PendingCopy(collective) if isinstance(collective, ToHost) else _Looped(self, collective)

    def allgather_bytes(self, data: bytes, slot: str) -> list[bytes]:
        return [data] * self.size


class _Looped(Pending):
    def __init__(self, engine: Loopback, collective: Collective) -> None:
        self._engine, self._collective = engine, collective

    def result(self) -> Any:
        engine, collective = self._engine, self._collective
        assert not isinstance(collective, RingSum)
        tensor = engine.wire(collective.tensor)
        if isinstance(collective, AllToAll):
            return [collective.parts[engine.rank]] * engine.size
        if not isinstance(collective, Gather):
            return tensor  # Horovod writes the average to the same memory
        with engine.uncounted():
            received = torch.cat([tensor] * engine.size)
        return collective.split_by_rank(received, engine.size)


class HorovodOptimizer:
    """What Horovod's optimizer gives gradzip's front end, and does with a gradient."""

    op: Any = None
    process_set = SimpleNamespace(process_set_id=0)

    def __init__(self, named: Mapping[str, Tensor], compression: gradzip.Compressor) -> None:
        self.param_groups = [{"params": list(named.values())}]
        self._parameter_names = {parameter: name for name, parameter in named.items()}
        self._requires_update = set(named.values())
        self._handles: dict[Any, Any] = {}
        self._compression = compression

    def start(self, p: Any) -> tuple[Tensor, Any]:
        return self._compression.compress(p.grad)


def horovod_steps(
    compressor: gradzip.Compressor, shapes: Shapes, size: int, device: StandIn, dtype: torch.dtype = torch.float32
) -> Step:
    import horovod.torch as hvd

    engine = Loopback(size, compressor.traffic, device.uncounted)
    named = {name: device.tensor(torch.empty(shape, dtype=dtype)).requires_grad_() for name, shape in shapes.items()}
    optimizer = HorovodOptimizer(named, compressor)
    optimizer.op = hvd.Average

    def run(gradients: dict[str, Tensor], counts: Counts) -> None:
        with counts.hook(), mock.patch("gradzip.engines.horovod.HorovodEngine", lambda *_: engine):
            sent = []
            for name, gradient in reversed(gradients.items()):
                named[name].grad = gradient
                accumulated(named[name])
                sent.append(optimizer.start(named[name]))
        for tensor, of_compress in sent:
            compressor.decompress(tensor, of_compress)

    return run


def accumulated(parameter: Parameter) -> None:
    """Call the hooks that autograd calls when it has computed a gradient."""
    for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)


# --- DDP


def grad_bucket(index: int, parameters: list[Parameter], buffer: Tensor, is_last: bool) -> Any:
    """What DDP gives its hook."""
    pieces = buffer.split([p.numel() for p in parameters])
    return SimpleNamespace(
        index=lambda: index, parameters=lambda: parameters, buffer=lambda: buffer, is_last=lambda: is_last,
        gradients=lambda: [piece.view(p.shape) for piece, p in zip(pieces, parameters)],
    )  # fmt: skip


def future(**_: Any) -> Any:
    """In place of a torch.futures.Future, which looks into the memory of its result."""
    return SimpleNamespace(set_result=lambda result: None)


@contextlib.contextmanager
def fake_group(size: int) -> Iterator[None]:
    """A process group in which rank 0 is alone, and receives from all ranks what it sends."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def ddp_steps(
    compressor: gradzip.Compressor, shapes: Shapes, size: int, device: StandIn, dtype: torch.dtype = torch.float32,
    finds_unused: bool = False,
) -> Step:  # fmt: skip
    """finds_unused: `find_unused_parameters` of the hook's state. All parameters are used."""
    named = {name: Parameter(torch.empty(shape, dtype=dtype, device="meta")) for name, shape in shapes.items()}
    buckets = [{name: named[name] for name in bucket} for bucket in buckets_of(shapes)]
    state = gradzip.ddp.HookState(compressor, dist.group.WORLD, named.items(), finds_unused)

    def run(gradients: dict[str, Tensor], counts: Counts) -> None:
        # The hook of the last bucket ends the step, and may wait for the device there.
        with counts.hook(), mock.patch.object(state, "_finish", lambda: None):
            for i, bucket in enumerate(buckets):
                for parameter in bucket.values():
                    accumulated(parameter)
                with device.uncounted():
                    buffer = torch.cat([gradients[name].view(-1) for name in bucket])
                gradzip.ddp.hook(state, grad_bucket(i, list(bucket.values()), buffer, i == len(buckets) - 1))
        state._finish()

    return run


# --- FSDP2


def blocks_of(shapes: Shapes) -> list[Shapes]:
    """The parameters that are in no numbered block of layers; then, those of each block."""
    found: dict[str, Shapes] = {"": {}}
    for name, shape in shapes.items():
        block = re.match(r"(\w+\.)*?\d+\.", name)
        found.setdefault(block[0] if block else "", {})[name] = shape
    return list(found.values())


class Block(nn.Module):
    """Parameters whose gradients are arguments of the forward pass."""

    def __init__(self, shapes: Shapes, device: StandIn, dtype: torch.dtype) -> None:
        super().__init__()
        self.names = list(shapes)
        for name, shape in shapes.items():
            self.register_parameter(name.replace(".", "_"), Parameter(device.tensor(zeros(shape, dtype))))

    def forward(self, x: Tensor, gradients: dict[str, Tensor]) -> Tensor:
        for name, parameter in zip(self.names, self.parameters(recurse=False)):
            x = x + (parameter * gradients[name]).sum()
        return x


class Sharded(Block):
    """A model whose blocks are modules of FSDP2. named: this rank's shards, by the names of the shapes.

    options: of `fully_shard`.
    """

    def __init__(
        self, shapes: Shapes, mesh: DeviceMesh, device: StandIn, dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        own, *others = blocks_of(shapes)
        super().__init__(own, device, dtype)
        self.blocks = nn.ModuleList(Block(of_block, device, dtype) for of_block in others)
        self.start = device.tensor(torch.zeros((), dtype=dtype))
        for module in (*self.blocks, self):
            fully_shard(module, mesh=mesh, reshard_after_forward=False, **options)
        self.set_reshard_after_backward(False)  # values of parameters do not matter: they are gathered once
        of_blocks = [zip(block.names, block.parameters(recurse=False)) for block in (self, *self.blocks)]
        self.named: dict[str, Parameter] = dict(itertools.chain(*of_blocks))

    def forward(self, x: Tensor, gradients: dict[str, Tensor]) -> Tensor:
        x = super().forward(x, gradients)
        for block in self.blocks:
            x = block(x, gradients)
        return x

    def reduce_with(self, reduce_scatter: Any) -> None:
        """Have FSDP2 reduce gradients with an object as of `gradzip.fsdp.reduce_scatter`."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(reduce_scatter)

    def backward(self, gradients: dict[str, Tensor], adds: bool = False) -> None:
        """Run a forward and a backward pass with these gradients. adds: to those of earlier passes."""
        for parameter in self.named.values() if not adds else ():
            parameter.grad = None
        with torch.enable_grad():
            self(self.start, gradients).backward()

    def averages(self) -> dict[str, Tensor]:
        """The averages of this rank's shards."""
        return {name: parameter.grad.to_local() for name, parameter in self.named.items()}


def fsdp_steps(
    compressor: gradzip.Compressor, shapes: Shapes, size: int, device: StandIn, dtype: torch.dtype = torch.float32
) -> Step:
    """As the others, in a process group of `size * SHARDS` ranks. Averages take the places of gradients."""
    mesh = init_device_mesh("cuda", (size, SHARDS), mesh_dim_names=("replicate", "shard"))
    model = Sharded(shapes, mesh["shard"], device, dtype)

    class Counted(gradzip.fsdp.ReplicaAverages):
        counts: Counts

        def _average(self, index: int, reduced: Tensor) -> None:
            with device.counting(self.counts), self.counts.hook():
                super()._average(index, reduced)

        def _finish(self) -> None:
            with device.counting(self.counts):
                super()._finish()

    return _steps(model, Counted(model, compressor, mesh["replicate"].get_group()), device)


def reduce_scatter_steps(
    compressor: gradzip.Compressor, shapes: Shapes, size: int, device: StandIn, dtype: torch.dtype = torch.float32
) -> Step:
    """Steps with `gradzip.fsdp.reduce_scatter` between `size` shards, whose calls are counted."""
    model = Sharded(shapes, init_device_mesh("cuda", (size,)), device, dtype)

    class Counted(gradzip.fsdp.ReduceScatter):
        counts: Counts

        def __call__(self, *arguments: Any, **options: Any) -> None:
            with device.counting(self.counts), self.counts.hook():
                super().__call__(*arguments, **options)

    quantized = Counted(compressor)
    model.reduce_with(quantized)
    return _steps(model, quantized, device)


def _steps(model: Sharded, counted: Any, device: StandIn) -> Step:
    """Steps of a model. counted: counts its own part of them."""

    def run(gradients: dict[str, Tensor], counts: Counts) -> None:
        counted.counts = counts
        with device.uncounted():
            model.backward(gradients)
        gradients |= model.averages()

    return run


# --- counting

STEPS = {
    "horovod": horovod_steps,
    "ddp": ddp_steps,
    "ddp that finds unused parameters": functools.partial(ddp_steps, finds_unused=True),
    "fsdp": fsdp_steps,
    "reduce-scatter": reduce_scatter_steps,
}


def world_size(front_end: str, size: int) -> int:
    """The ranks of a job that averages over `size` ranks."""
    return size * SHARDS if front_end == "fsdp" else size


WARM_UP, COUNTED = 2, 2  # steps: ACPSGD does other work in even and odd ones, for the first time in the first two


def count(
    compressor: gradzip.Compressor, shapes: Shapes, size: int, front_end: str, compute: bool = True, small: int = SMALL
) -> Counts:
    """Count two steps, with residuals, of the first of `size` ranks. compute, small: of `stand_in`.

    front_end: of `STEPS`.
    """
    total = Counts()
    with (
        fake_group(world_size(front_end, size)),
        mock.patch("gradzip.ddp.Future", future),
        stand_in(compute, small) as device,
    ):
        run = STEPS[front_end](compressor, shapes, size, device)
        for step in range(WARM_UP + COUNTED):
            if step == WARM_UP:
                compressor.traffic.bytes_sent = 0
            gradients = {name: device.tensor(gradient(shape, step, compute)) for name, shape in shapes.items()}
            with device.counting() as counts:
                run(gradients, counts)
            if step >= WARM_UP:
                total.add(counts)
        read_all()  # while the device is there
    return total


def gradient(shape: torch.Size, step: int, compute: bool) -> Tensor:
    return noise(shape.numel(), step).view(shape) if compute else zeros(shape)


def cell(spec: str, model: str, size: int, front_end: str) -> Cell:
    """Count one step of a method: the mean of two."""
    shapes = shapes_of(model)
    compressor = gradzip.parse(spec)
    # Where values decide how much is queued, they are computed for all networks, which takes hours for the largest one.
    compute = model in (SMALLEST, "charlm") or not getattr(compressor, "fixed_nbytes", True)
    counts = count(compressor, shapes, size, front_end, compute)
    numbers = [counts.ops, counts.syncs, counts.in_hook, counts.read, counts.written, compressor.traffic.bytes_sent]
    return Cell(
        spec, model, size, front_end, len(shapes), sum(compresses(compressor, s) for s in shapes.values()),
        *(-(-number // COUNTED) for number in numbers),
        waits={name: n / COUNTED for name, n in sorted(counts.waits.items())},
    )  # fmt: skip


# --- what is printed


def table(cells: list[Cell], size: int) -> Iterator[str]:
    """Markdown: a row for each method, columns for the networks of the goals and the front ends."""
    found = {(c.method, c.model, c.front_end): f"{c.ops} / {c.syncs}" for c in cells if c.ranks == size}
    counted = {(c.model, c.front_end) for c in cells if c.ranks == size}
    columns = [column for column in itertools.product(MODELS[:2], FRONT_ENDS) if column in counted]
    methods = sorted({c.method for c in cells})
    rows = ([f"`{method}`", *(found.get((method, *column), "") for column in columns)] for method in methods)
    return markdown(["method", *(f"{model}, {front_end}" for model, front_end in columns)], rows)


def blocks() -> Blocks:
    """The block of docs/gpu.md, from the stored counts."""
    return {(PAGE, START): "".join(f"{line}\n" for line in table(stored(), max(SIZES)))}


def main() -> None:
    parser = Parser("device_ops", __doc__, EXAMPLES)
    parser.add_argument(
        "methods", metavar="SPEC", nargs="*", type=method, help="methods (default: those in results/, and new ones)"
    )
    parser.add_argument(
        "--model", action="append", choices=(SMALLEST, *MODELS), help="repeat for several (default: all)"
    )
    parser.add_argument("--ranks", action="append", type=at_least(1), help="repeat for several (default: 2 and 8)")
    parser.add_argument("--front-end", action="append", choices=FRONT_ENDS, help="repeat for several (default: all)")
    parser.add_argument("--waits", action="store_true", help="show which operations wait for the device")
    parser.add_argument(
        "--json", metavar="PATH", type=output_file, help="add the counts to this file, with their provenance"
    )
    parser.add_argument("--write", action="store_true", help="write the table of docs/gpu.md, and count nothing")
    args = parser.parse_args()
    if args.write:
        replace_blocks(blocks())
        return
    document: dict[str, Any] = {"cells": []}
    if args.json and args.json.exists():
        document = json.loads(args.json.read_text())
    cells = {tuple(row[key] for key in ("model", "method", "front_end", "ranks")): row for row in document["cells"]}
    for model in args.model or (SMALLEST, *MODELS):
        for spec in args.methods or default_specs():
            for front_end in args.front_end or FRONT_ENDS:
                for size in args.ranks or SIZES:
                    c = cell(spec, model, size, front_end)
                    cells[model, spec, front_end, size] = asdict(c)
                    print(
                        f"{model:10} {spec:30} {front_end:8} {size:2} ranks {c.ops:6} ops {c.syncs:5} syncs "
                        f"({c.in_hook} in hooks) {c.read / 1e6:9.1f} MB read {c.written / 1e6:9.1f} MB written "
                        f"{c.sent / 1e6:7.2f} MB sent" + (f"  {c.waits}" if args.waits else ""),
                        flush=True,
                    )
            if args.json:
                document = {"provenance": provenance(), "cells": list(cells.values())}
                write_json(args.json, document)


if __name__ == "__main__":
    main()
