"""Count the Python work of gradzip in one training step on a device. Needs no GPU.

The gradients of a network are averaged by a front end, on one of several ranks whose transfers are stand-ins. The tensors
are in host memory, and say that they are on a CUDA device while gradzip runs. The launchers of its CUDA kernels, compiled
for the host, queue nothing; the CPU's kernels compute the results, and are not counted.

What is counted:

    calls      of Python functions, and of generators to continue, by gradzip and by what it calls: torch, too.
    bytecodes  that they execute (--opcodes).
    torch ops  operations and views that torch's dispatcher runs.

Not counted: stand-ins, DDP and the optimizer. gradzip runs in DDP's hook and at the end of the backward pass, and in
Horovod's calls of `compress` and `decompress`. The counts of a version of Python do not vary. They are means of two
steps, because ACPSGD does other work in even and odd ones.

Front ends:

  ddp      DistributedDataParallel with gradzip's hook, on a process group that does nothing.
  horovod  a stand-in for Horovod's optimizer, with gradzip as its compression.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._library.simple_registry
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import gradzip
import gradzip.ddp
from benchmarks.device_ops.__main__ import BUCKET, fake_group
from benchmarks.device_ops.stand_in import DEVICE, MULTIPROCESSORS, PARAMETERS, compute, simt_module
from gradzip import _C
from gradzip.cli import models

WARM_UP, COUNTED = 4, 2  # steps. Methods with phases compress after the first ones

Shapes = dict[str, tuple[int, ...]]


def shapes_of(model: str) -> tuple[Shapes, float]:
    """The shapes of a network's parameters with an eighth of the channels, at least 32, and the share of its bytes.

    The same parameters are compressed: matrices have at least 1024 elements.
    """
    parameters = list(models.MODELS[model]())
    shapes = {p.name: tuple(max(32, n // 8) if n >= 64 else n for n in p.shape) for p in parameters}
    numels = [sum(torch.Size(shape).numel() for shape in of) for of in (shapes.values(), (p.shape for p in parameters))]
    return shapes, numels[0] / numels[1]


# --- counting


class Host:
    """Runs functions as on a host with a CUDA device, and counts what they do. Made by `stand_in`."""

    def __init__(self, opcodes: bool) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.opcodes: Counter[CodeType] = Counter()
        self.torch_ops: Counter[str] = Counter()
        self.counts = False  # or leaves out what runs
        self.running = False  # a function of `run`
        self._with_opcodes = opcodes
        self.depth = 0  # of calls of this file by what is counted
        self._mode = _Mode(self)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, and count what it does."""
        before = sys.getprofile(), sys.gettrace()
        with self._mode:
            self.running = True
            if self._with_opcodes and self.counts:
                sys.settrace(self._trace)
            sys.setprofile(self._profile)
            try:
                return function(*args, **kwargs)
            finally:
                sys.setprofile(before[0])
                sys.settrace(before[1])
                self.running = False

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
            self.opcodes[code] += event == "opcode"
            return local

        return local


# This file, and what torch calls only because of `_Mode`.
STAND_INS = {f.__code__.co_filename for f in (Host.run, torch._library.simple_registry.find_torch_dispatch_rule)}


class _Mode(TorchDispatchMode):
    """Has torch's operations make tensors in host memory in place of the device's, and counts the operations."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, which takes seconds, to keep out of it

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = host

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._host.counts and self._host.depth == 1 and func.namespace == "aten":
            self._host.torch_ops[func.__name__.partition(".")[0]] += 1
        return func(*tree_map(_in_memory, args), **tree_map(_in_memory, kwargs or {}))


def _in_memory(x: Any) -> Any:
    return torch.device("cpu") if isinstance(x, torch.device) else x


class _Kernels:
    """In place of gradzip._C.cuda: launchers that queue nothing; the CPU's kernels compute."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        launcher, parameters = getattr(simt_module(), name), PARAMETERS[name]

        def kernel(workspace: int, *arguments: Any) -> int:
            missing = launcher(workspace, *arguments)
            if not missing:
                compute(name, parameters, list(arguments[:-1]))
            return missing

        setattr(self, name, kernel)
        return kernel


@contextlib.contextmanager
def stand_in(opcodes: bool = False) -> Iterator[Host]:
    """Make what `Host.run` runs take all tensors for those of a device. Needs g++, to compile the launchers, once."""
    host = Host(opcodes)
    stream = SimpleNamespace(cuda_stream=0)
    real = {name: getattr(Tensor, name) for name in ("device", "is_cuda", "is_cpu")}
    on_device = {"device": DEVICE, "is_cuda": True, "is_cpu": False}
    make_future = torch.futures.Future.__init__
    engine = torch.autograd.Variable._execution_engine

    def attribute(name: str) -> property:
        return property(lambda tensor: on_device[name] if host.running else real[name].__get__(tensor))

    class Callbacks:
        """In place of autograd's engine, which gradzip has run functions at the end of the backward pass."""

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        def queue_callback(self, callback: Callable[[], None]) -> None:
            engine.queue_callback(lambda: host.run(callback))

    with contextlib.ExitStack() as stack:
        simt_module().count_only(MULTIPROCESSORS)
        stack.callback(simt_module().count_only, 0)
        for target, name, value in (
            *((Tensor, name, attribute(name)) for name in real),
            (_C, "cuda", _Kernels()),
            (_C, "cuda_built", True),
            (torch.autograd.Variable, "_execution_engine", Callbacks()),
            (torch.futures.Future, "__init__", lambda future, *, devices=None: make_future(future)),
            (torch.cuda, "_lazy_init", lambda: None),
            (torch.cuda, "_exchange_device", lambda device: device),
            (torch.cuda, "_maybe_exchange_device", lambda device: device),
            (torch.cuda, "current_stream", lambda device=None: stream),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
        ):
            stack.enter_context(mock.patch.object(target, name, value, create=True))
        yield host


# --- front ends


class Net(nn.Module):
    """Parameters, each with twice its values as its gradient."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator)
            self.register_parameter(name.replace(".", "_"), nn.Parameter(values))

    def forward(self) -> Tensor:
        return torch.stack([(p * p).sum() for p in self.parameters()]).sum()


@contextlib.contextmanager
def ddp(host: Host, compressor: gradzip.Compressor, shapes: Shapes, share: float, size: int) -> Iterator[Callable[[], None]]:
    with fake_group(size):
        net = Net(shapes)
        model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=share * BUCKET / 2**20)
        state = gradzip.ddp.HookState(compressor, named_parameters=net.named_parameters())

        def hook(state: object, bucket: Any) -> Any:
            return host.run(gradzip.ddp.hook, state, bucket)

        hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
        model.register_comm_hook(state, hook)
        optimizer = torch.optim.SGD(net.parameters(), 1e-4)

        def step() -> None:
            optimizer.zero_grad(set_to_none=False)
            model().backward()
            optimizer.step()

        yield step


FRONT_ENDS = {"ddp": ddp}


def count(spec: str, model: str, size: int, front_end: str, opcodes: bool = False) -> Host:
    compressor = gradzip.parse(spec)
    shapes, share = shapes_of(model)
    with stand_in(opcodes) as host, FRONT_ENDS[front_end](host, compressor, shapes, share, size) as step:
        for i in range(WARM_UP + COUNTED):
            host.counts = i >= WARM_UP
            step()
    assert not compressor.last_step_skipped
    return host


if __name__ == "__main__":
    h = count(sys.argv[1], "resnet50", int(sys.argv[2]), sys.argv[3], "--opcodes" in sys.argv)
    print(sum(h.calls.values()) / 2, sum(h.opcodes.values()) / 2, sum(h.torch_ops.values()) / 2)
    for code, n in h.calls.most_common(10):
        print(n / 2, code.co_filename.split("/site-packages/")[-1], code.co_qualname)
    print(h.torch_ops)
