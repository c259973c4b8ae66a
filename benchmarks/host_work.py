"""Count the Python work of gradzip in a training step on a device. Needs no GPU.

A front end averages the gradients of a network, on one rank whose peers send what it sends. Tensors are in host memory,
and say that they are on a CUDA device while gradzip runs. The launchers of gradzip's CUDA kernels are compiled for the
host and queue nothing; the CPU's kernels compute the results.

What is counted in DDP's hook and at the end of the backward pass, or in Horovod's calls of `compress` and `decompress`:

  calls      calls of Python functions, and resumed generators: those of gradzip, and of torch and the standard library
             for it
  torch ops  operations and views that torch's dispatcher runs
  bytecodes  what these functions execute (--opcodes)

Not counted: kernels, stand-ins, Horovod, and what torch does in Python to find the current stream. Two runs with the
same versions of Python and torch have equal counts. A count is the mean of two steps: `acpsgd` does other work in even
and in odd ones.

Front ends:

  ddp        DistributedDataParallel with gradzip's hook, on a process group without peers
  horovod    a stand-in for Horovod's optimizer, with gradzip as its compression
"""

from __future__ import annotations

import contextlib
import functools
import gc
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._library.simple_registry
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradzip
import gradzip.ddp
import gradzip.horovod
from benchmarks.common.arguments import Parser, at_least, method, output_file
from benchmarks.common.results import RESULTS, ROOT, provenance, replace_block, stored, write_json
from benchmarks.common.tables import goal as verdict
from benchmarks.common.tables import markdown
from benchmarks.device_ops.__main__ import BUCKET, fake_group
from benchmarks.device_ops.stand_in import DEVICE, MULTIPROCESSORS, PARAMETERS, compute, simt_module
from gradzip import _C, ops
from gradzip.averaging.buckets import MOST_BUCKETS
from gradzip.cli import models
from gradzip.collectives import cost
from gradzip.methods.base.registry import registered
from gradzip.methods.spec import unparse

STORED = RESULTS / "host_work.json"
PAGE = ROOT / "docs" / "gpu.md"
START = "<!-- table: python -m benchmarks.host_work --write -->\n\n"
RECORD = "python -m benchmarks.host_work --opcodes --json benchmarks/results/host_work.json"  # counts anew

MODEL = "resnet50"
SIZES = (8, 32)
WARM_UP, COUNTED = 3, 2  # steps: DDP chooses its buckets in the first one, and ACPSGD has two in turns
LR = 1e-4
TOP = 20  # functions of --top

EXAMPLES = f"""\
examples:
  python -m benchmarks.host_work topk acpsgd --ranks 8 --front-end ddp     two methods
  python -m benchmarks.host_work topk --ranks 8 --top                      the functions that are called most
  {RECORD}
  python -m benchmarks.host_work --write                                   the table of docs/gpu.md, from that file
"""


@dataclass(frozen=True)
class Cell:
    """One step of one method."""

    method: str
    model: str
    front_end: str
    ranks: int
    calls: float
    torch_ops: float
    bytecodes: float | None = None


Shapes = dict[str, tuple[int, ...]]


def default_specs() -> list[str]:
    """A spec of each method that is not made of others, and whose payloads' lengths do not depend on the gradients.

    With default arguments, if these are among the examples of the method.
    """
    specs = []
    for name, cls in registered().items():
        spec = name if name in cls.examples else cls.examples[0]
        own = gradzip.parse(spec)
        if own.parts == [own] and not own.adapts and getattr(own, "fixed_nbytes", True):
            specs.append(spec)
    return specs


def shapes_of(model: str) -> tuple[Shapes, float]:
    """The shapes of a network's parameters, and the share of its elements that they have.

    Dimensions are an eighth, but at least 32: the same parameters are compressed as in the network itself. Buckets are
    smaller, too, and as many.
    """
    parameters = list(models.MODELS[model]())
    shapes = {p.name: tuple(max(32, n // 8) if n >= 64 else n for n in p.shape) for p in parameters}
    small, whole = (sum(torch.Size(s).numel() for s in of) for of in (shapes.values(), [p.shape for p in parameters]))
    return shapes, small / whole


# --- counting


class Host:
    """Runs gradzip as on a host with a CUDA device, and counts what it does. Made by `stand_in`."""

    def __init__(self, opcodes: bool) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.bytecodes: Counter[CodeType] = Counter()
        self.torch_ops: Counter[str] = Counter()
        self.counts = False  # what runs; else it warms up
        self.running = False  # tensors are on the device
        self.depth = 0  # of calls within stand-ins
        self._opcodes = opcodes
        self._mode = _Mode(self)

    def __enter__(self) -> None:
        """Until `__exit__`, gradzip runs, in a part of a step."""
        self._before = sys.getprofile(), sys.gettrace()
        self._mode.__enter__()
        self.running = True
        if self.counts:
            self.depth = 1  # this method, until it returns
            sys.settrace(self._trace if self._opcodes else self._before[1])
            sys.setprofile(self._profile)

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(self._before[0])
        sys.settrace(self._before[1])
        self.running, self.depth = False, 0
        self._mode.__exit__(*error)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of gradzip, as part of a step."""
        with self:
            return function(*args)

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if code.co_filename in STAND_INS:
            self.depth += 1 if event == "call" else -1
        elif event == "call" and not self.depth and self.counts:
            self.calls[code] += 1

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if self.depth or code.co_filename in STAND_INS:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def local(frame: FrameType, event: str, argument: object) -> Any:
            self.bytecodes[code] += event == "opcode"
            return local

        return local


# Files whose functions are not counted, nor what they call: this one, and what torch calls because of `_Mode` alone.
STAND_INS = {f.__code__.co_filename for f in (Host.run, torch._library.simple_registry.find_torch_dispatch_rule)}


class _Mode(TorchDispatchMode):
    """Counts torch's operations. What they make on the device is in host memory."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, which takes seconds, to keep out of it

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = host

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._host.counts and self._host.depth == 1 and func.namespace == "aten":
            self._host.torch_ops[func.__name__.partition(".")[0]] += 1
        if kwargs and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **(kwargs or {}))


class _Kernels:
    """In place of gradzip._C.cuda. Launchers queue nothing, and the CPU's kernels compute."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        launcher, parameters = getattr(simt_module(), name), PARAMETERS[name]

        def kernel(workspace: int, *arguments: Any) -> int:
            missing = launcher(workspace, *arguments)
            if not missing:
                compute(name, parameters, list(arguments[:-1]))
            return missing

        setattr(self, name, kernel)
        return kernel


class _Callbacks:
    """In place of autograd's engine: what gradzip has it call at the end of a backward pass is part of a step."""

    def __init__(self, host: Host, engine: Any) -> None:
        self._host, self._engine = host, engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def queue_callback(self, callback: Callable[[], None]) -> None:
        self._engine.queue_callback(lambda: self._host.run(callback))


def _attribute(host: Host, name: str, on_device: Any) -> property:
    """An attribute of tensors that is another one while gradzip runs."""
    real = getattr(Tensor, name)
    return property(lambda tensor: on_device if host.running else real.__get__(tensor))


@contextlib.contextmanager
def stand_in(opcodes: bool = False) -> Iterator[Host]:
    """Have `Host.run` take all tensors for those of a device. Needs g++, to compile the launchers, once."""
    host, simt = Host(opcodes), simt_module()
    stream = SimpleNamespace(cuda_stream=0)
    make_future = torch.futures.Future.__init__
    with contextlib.ExitStack() as stack:
        simt.count_only(MULTIPROCESSORS)
        stack.callback(simt.count_only, 0)
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # tensors are small
        for target, name, value in (
            (Tensor, "device", _attribute(host, "device", DEVICE)),
            (Tensor, "is_cuda", _attribute(host, "is_cuda", True)),
            (Tensor, "is_cpu", _attribute(host, "is_cpu", False)),
            (_C, "cuda", _Kernels()),
            (_C, "cuda_built", True),
            (torch.autograd.Variable, "_execution_engine", _Callbacks(host, torch.autograd.Variable._execution_engine)),
            (torch.futures.Future, "__init__", lambda future, *, devices=None: make_future(future)),
            (Tensor, "record_stream", lambda tensor, stream: None),
            (ops.tensors, "CopyLater", lambda x: SimpleNamespace(result=x.clone, is_done=lambda: True)),
            (torch.cuda, "_lazy_init", lambda: None),
            (torch.cuda, "_exchange_device", lambda device: device),
            (torch.cuda, "_maybe_exchange_device", lambda device: device),
            (torch.cuda, "current_stream", lambda device=None: stream),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "current_device", lambda: 0),
        ):
            stack.enter_context(mock.patch.object(target, name, value, create=True))
        yield host


# --- front ends


class Net(nn.Module):
    """Parameters, each with twice its values as its gradient."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.named = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
        for name, parameter in self.named.items():
            self.register_parameter(name.replace(".", "_"), parameter)

    def forward(self) -> Tensor:
        return torch.stack([(p * p).sum() for p in self.parameters()]).sum()


Step = Callable[[], None]


@contextlib.contextmanager
def ddp(host: Host, compressor: gradzip.Compressor, net: Net, share: float, size: int) -> Iterator[Step]:
    """Steps under DDP. share: of a network's bytes, that `net` has."""
    with fake_group(size):
        model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=share * BUCKET / 2**20)
        state = gradzip.ddp.HookState(compressor, None, net.named.items(), find_unused_parameters=False)

        def hook(state: object, bucket: Any) -> Any:
            return host.run(gradzip.ddp.hook, state, bucket)

        # DDP checks annotations, and refuses strings.
        hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
        model.register_comm_hook(state, hook)
        optimizer = torch.optim.SGD(net.parameters(), LR)

        def step() -> None:
            optimizer.zero_grad(set_to_none=False)
            model().backward()
            optimizer.step()

        yield step


class HorovodOptimizer(torch.optim.SGD):
    """In place of Horovod's: has what its front end looks for, and calls `compress` and `decompress` as it does."""

    def __init__(self, host: Host, compressor: gradzip.Compressor, net: Net, op: Any, process_set: Any) -> None:
        super().__init__(net.parameters(), LR)
        self._host, self._compression = host, compressor
        self.op, self.process_set = op, process_set
        self._parameter_names = {parameter: name for name, parameter in sorted(net.named.items())}
        self._requires_update = set(net.parameters())
        self._handles: dict[Any, Any] = {}
        self._nodes = [parameter.expand_as(parameter).grad_fn.next_functions[0][0] for parameter in net.parameters()]
        for parameter, node in zip(net.parameters(), self._nodes):
            node.register_hook(functools.partial(self._start, parameter))

    def _start(self, p: Any, *_: Any) -> None:
        with self._host:
            handle = self._compression.compress(p.grad)
        self._handles[p] = handle

    def synchronize(self) -> None:
        for p, (tensor, context) in self._handles.items():
            p.grad.set_(self._host.run(self._compression.decompress, tensor, context))
        self._handles.clear()


class _Horovod:
    """Horovod's collectives, as started by one rank whose peers send what it sends. A handle is what is received."""

    def __init__(self, size: int) -> None:
        self._size = size

    def allreduce_async_(self, tensor: Tensor, **_: Any) -> Any:
        return tensor

    def broadcast_async(self, tensor: Tensor, *_: Any, **__: Any) -> Any:
        return tensor

    def allgather_async(self, tensor: Tensor, **_: Any) -> Any:
        return torch.cat([tensor] * self._size)

    def alltoall_async(self, tensor: Tensor, splits: Tensor, **_: Any) -> Any:
        own, *_others = splits.tolist()
        return tensor[:own].repeat(self._size), torch.full_like(splits, own)

    def poll(self, handle: Any) -> bool:
        return True

    def synchronize(self, handle: Any) -> Any:
        return handle


@contextlib.contextmanager
def horovod(host: Host, compressor: gradzip.Compressor, net: Net, share: float, size: int) -> Iterator[Step]:
    """The same under Horovod."""
    import horovod.torch as hvd

    everyone = SimpleNamespace(rank=lambda: 0, size=lambda: size, ranks=list(range(size)), process_set_id=0)
    nbytes = max(share * BUCKET, sum(p.nbytes for p in net.parameters()) / MOST_BUCKETS)  # as by default on a device
    gradzip.horovod.bucketed(compressor, nbytes / 2**20)
    optimizer = HorovodOptimizer(host, compressor, net, hvd.Average, everyone)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        net().backward()
        optimizer.synchronize()
        optimizer.step()

    collectives = _Horovod(size)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(cost, "SMALL_BUCKET_NBYTES", share * cost.SMALL_BUCKET_NBYTES))
        for name in [name for name in vars(_Horovod) if not name.startswith("_")]:
            stack.enter_context(mock.patch.object(hvd, name, getattr(collectives, name)))
        yield step


FRONT_ENDS = {"ddp": ddp, "horovod": horovod}


# --- counts


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collections: they call functions of others, whenever it is their time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def count(compressor: gradzip.Compressor, model: str, size: int, front_end: str, opcodes: bool = False) -> Host:
    """Count two steps of the first of `size` ranks, after others."""
    shapes, share = shapes_of(model)
    net = Net(shapes)
    with uncollected(), stand_in(opcodes) as host, FRONT_ENDS[front_end](host, compressor, net, share, size) as step:
        for number in range(WARM_UP + COUNTED):
            host.counts = number >= WARM_UP
            step()
    assert not compressor.last_step_skipped
    return host


def cell(spec: str, model: str, size: int, front_end: str, opcodes: bool = False) -> tuple[Cell, list[str]]:
    """Count one step of a method: the mean of two. Also lists the functions that are called most."""
    host = count(gradzip.parse(spec), model, size, front_end, opcodes)
    calls, torch_ops, bytecodes = (of.total() / COUNTED for of in (host.calls, host.torch_ops, host.bytecodes))
    top = [f"{n / COUNTED:9.1f} {place(code)}" for code, n in host.calls.most_common(TOP)]
    return Cell(spec, model, front_end, size, calls, torch_ops, bytecodes if opcodes else None), top


def place(code: CodeType) -> str:
    """Where a function is, and its name."""
    file = code.co_filename
    root = max((root for root in (str(ROOT), *sys.path) if file.startswith(f"{root}/")), key=len, default="")
    return f"{file.removeprefix(f'{root}/')}:{code.co_firstlineno} {code.co_name}"


# --- goals, and what is printed

# Most calls, by method. Others: OTHER.
GOALS = ((("none", "fp16"), 500), (("powersgd", "acpsgd"), 900), (("block-float", "topk", "randomk"), 900))
OTHER = 1200
MOMENTUM = 300  # beyond the method that compresses the momenta
GROWTH = 1.1  # of calls, from 8 to 32 ranks


def goal(spec: str) -> int:
    """The most calls that a method should take under each front end with 8 ranks."""
    compressor = gradzip.parse(spec)
    if isinstance(compressor, gradzip.Momentum):
        return MOMENTUM + goal(unparse(compressor.inner))
    name = spec.partition(":")[0]
    return next((most for names, most in GOALS if name in names), OTHER)


def load(path: Path) -> dict[tuple[str, str, int], Cell]:
    """Stored counts, by method, front end and ranks. Raises ResultsError."""
    with stored(path) as document:
        cells = [Cell(**row) for row in document["cells"]]
    return {(c.method, c.front_end, c.ranks): c for c in cells if c.model == MODEL}


def table(cells: dict[tuple[str, str, int], Cell]) -> Iterator[str]:
    """Markdown: a row for each method, columns for the front ends and ranks."""
    columns = [(front_end, size) for front_end in FRONT_ENDS for size in SIZES]
    methods = sorted({method for method, _, _ in cells})
    found = {(c.method, c.front_end, c.ranks): f"{c.calls:.0f}" for c in cells.values()}
    rows = ([f"`{method}`", *(found.get((method, *column), "") for column in columns)] for method in methods)
    return markdown(["method", *(f"{front_end}, {size} ranks" for front_end, size in columns)], rows)


def blocks() -> dict[tuple[Path, str], str]:
    """The block of docs/gpu.md: its page and the mark it starts with."""
    return {(PAGE, START): "".join(f"{line}\n" for line in table(load(STORED)))}


def main() -> None:
    parser = Parser("host_work", __doc__, EXAMPLES)
    parser.add_argument("methods", metavar="SPEC", nargs="*", type=method, help="methods (default: one spec of each)")
    parser.add_argument("--model", choices=models.MODELS, default=MODEL, help="whose gradients (default: %(default)s)")
    parser.add_argument("--ranks", action="append", type=at_least(2), help="repeat for several (default: 8 and 32)")
    parser.add_argument("--front-end", action="append", choices=FRONT_ENDS, help="repeat for several (default: both)")
    parser.add_argument("--opcodes", action="store_true", help="count bytecodes too, which takes longer")
    parser.add_argument("--top", action="store_true", help=f"list the {TOP} functions that are called most")
    parser.add_argument("--json", metavar="PATH", type=output_file, help="add the counts to this file")
    parser.add_argument("--write", action="store_true", help="write the table of docs/gpu.md, and count nothing")
    args = parser.parse_args()
    if args.write:
        for (page, start), block in blocks().items():
            replace_block(page, start, block)
        return
    cells: dict[tuple[str, ...], dict[str, Any]] = {}

    def key(row: dict[str, Any]) -> tuple[str, ...]:
        return tuple(row[name] for name in ("model", "method", "front_end", "ranks"))

    if args.json and args.json.exists():
        with stored(args.json) as document:
            cells = {key(row): row for row in document["cells"]}
    for spec in args.methods or default_specs():
        for front_end in args.front_end or FRONT_ENDS:
            eight = None
            for size in args.ranks or SIZES:
                c, top = cell(spec, args.model, size, front_end, args.opcodes)
                cells[key(asdict(c))] = asdict(c)
                eight = c.calls if size == SIZES[0] else eight
                most = goal(spec) * (GROWTH if size == SIZES[-1] else 1)
                code = "" if c.bytecodes is None else f"{c.bytecodes:9.0f} bytecodes"
                print(
                    f"{spec:50} {front_end:8}{size:3} ranks{c.calls:9.1f} calls{c.torch_ops:8.1f} torch ops{code}"
                    f"  goal: {verdict(c.calls, round(most), most=True)}",
                    *top * args.top, sep="\n", flush=True,
                )  # fmt: skip
        if args.json:
            versions = {"python": platform.python_version()}
            write_json(args.json, {"provenance": provenance() | versions, "cells": list(cells.values())})


if __name__ == "__main__":
    main()
