"""A stand-in for a CUDA device that counts what is queued on it, and when the host waits for it. Needs no GPU.

Tensors "on" it (`StandInTensor`) keep their data in host memory, and say that their device is CUDA. Operations of torch
on them are computed by the CPU and counted by a dispatch mode. A kernel of gradzip is counted by its CUDA launcher,
compiled for the host (tests/simt), which queues what it would queue on a device; the CPU's kernel computes the result.
A DTensor is on the device of its local tensor.

What is counted (`Counts`):

    ops     Kernels and memory fills that launchers queue; one for each operation of torch that writes to memory, though
            some of them, such as cat, sort or an FFT, queue several.
    syncs   The host waits for the device: it reads a value (`item`, a truth value), copies to or from pageable host
            memory, or asks for a result whose shape depends on values.
    read, written   Bytes of the arrays that operations take, and of those that they fill or change, each once per
            operation. A kernel that reads an array several times counts as one that reads it once.
    repeated  Kernels that draw random numbers by their keys alone: a replay of a CUDA graph draws them again.
    in_hook Syncs within `Counts.hook`: in a backward pass, they stall its own kernels.

Not counted: allocations, views, and what a process group does.

What is counted does not depend on values. Without `compute`, large tensors are not computed, which makes counting fast
for large networks: they are zeros. New small ones are ones, so that no scale is 0.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import sys
import types
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from ctypes import addressof, c_int32, c_int64, memmove
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import gradzip.ops._native as native
from gradzip import _C, ops

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda", 0)
MULTIPROCESSORS = 132  # of an H100 or H200

# Operations that read the device's memory on the host: for a value, or for the shape of their result.
READERS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim",
    "unique_consecutive", "_linalg_svd", "linalg_qr", "_linalg_eigh",
}  # fmt: skip
# Structs of tables in host memory of which kernels read all arrays.
READ_WHOLE = r"TransformPart|\w+Term|Matrix"
# Kernels whose results the host looks at: headers, checksums, and formats of numbers in headers.
READ_BY_HOST = {"payload_seal", "payload_inspect", "payload_verify", "range_float_fit"}
SMALL = 1 << 20  # bytes: larger tensors are not computed without `compute`
# In-place operations that do not read what they overwrite.
FILLS = {"copy_", "fill_", "zero_", "_foreach_copy_"}


@dataclass
class Counts:
    """What was queued on the device, and how often the host waited for it."""

    ops: int = 0
    syncs: int = 0
    read: int = 0
    written: int = 0
    in_hook: int = 0
    repeated: int = 0
    names: Counter[str] = field(default_factory=Counter)  # operations by name
    waits: Counter[str] = field(default_factory=Counter)  # syncs by operation
    _depth: int = 0  # of `hook`

    @contextlib.contextmanager
    def hook(self) -> Iterator[None]:
        """Count syncs as those of a backward hook, too."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def add(self, other: Counts) -> None:
        """Add the counts of another part of the work."""
        for name in ("ops", "syncs", "read", "written", "in_hook", "repeated"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.names.update(other.names)
        self.waits.update(other.waits)

    def add_op(self, name: str, count: int, read: int, written: int) -> None:
        self.ops += count
        self.names[name] += count
        self.read += read
        self.written += written

    def add_sync(self, name: str) -> None:
        self.syncs += 1
        self.in_hook += self._depth > 0
        self.waits[name] += 1


class Allocated:
    """Bytes of the device's memory that tensors hold: now, and at most since the last `start`."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._holders: Counter[int] = Counter()  # of each storage, by its number

    def start(self) -> int:
        """Forget the peak. Returns the bytes that are held now."""
        self.peak = self.now
        return self.now

    def hold(self, tensor: StandInTensor) -> None:
        """Count the memory of a tensor as long as it lives."""
        if tensor.release is not None:  # it had other memory
            tensor.release()
        tensor.allocated, tensor.release = self, None
        if tensor.is_away:
            return
        storage = tensor.host.untyped_storage()
        number, nbytes = storage._cdata, storage.nbytes()
        self._holders[number] += 1
        if self._holders[number] == 1:
            self.now += nbytes
            self.peak = max(self.peak, self.now)
        tensor.release = weakref.finalize(tensor, self._release, number, nbytes, storage)

    def _release(self, number: int, nbytes: int, storage: Any) -> None:
        self._holders[number] -= 1
        if not self._holders[number]:
            del self._holders[number]
            self.now -= nbytes


class StandInTensor(Tensor):
    """A tensor on the stand-in device. host: its data, on the CPU."""

    host: Tensor
    addresses: dict[int, int]  # of the mode: bytes by the addresses that were asked for since the last kernel
    allocated: Allocated | None = None  # that counts its memory
    release: Callable[[], Any] | None = None  # has that count it no more
    is_away: bool = False  # whether `data` was set to a tensor in host memory
    is_meta = False

    @staticmethod
    def __new__(cls, host: Tensor, addresses: dict[int, int]) -> StandInTensor:
        # For C++, a tensor without memory: what gets around the dispatch mode fails.
        wrapper = Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            device="meta",
        )  # fmt: skip
        wrapper.host, wrapper.addresses = host, addresses
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func}: got a tensor of the stand-in device outside of `stand_in`")

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.is_away else DEVICE

    @property
    def is_cuda(self) -> bool:
        return not self.is_away

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        self.is_away = not isinstance(other, StandInTensor)
        made = StandInTensor(_host(other).detach(), self.addresses)
        Tensor.data.__set__(self, made)  # type: ignore[attr-defined]
        self.host = made.host
        if self.allocated is not None:
            self.allocated.hold(self)

    def data_ptr(self) -> int:
        address = self.host.data_ptr()
        self.addresses[address] = self.host.nbytes
        return address

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Any) -> None:
        pass  # there is one

    def untyped_storage(self) -> Any:
        return self.host.untyped_storage()

    def __repr__(self) -> str:
        return f"StandInTensor({self.host})"


class _Mode(TorchDispatchMode):
    """Runs torch's operations on tensors of the stand-in device, and counts them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, which takes seconds, to keep out of it

    def __init__(self, counts: Counts, small: float) -> None:
        super().__init__()
        self.counts = counts
        self.small = small
        self.allocated: Allocated | None = None  # if memory is counted
        self.addresses: dict[int, int] = {}

    def wrap(self, host: Tensor) -> StandInTensor:
        made = StandInTensor(host, self.addresses)
        if self.allocated is not None:
            self.allocated.hold(made)
        return made

    def copy_later(self, x: Tensor) -> Any:
        """`ops.CopyLater`. Its result is waited for, unless it is asked for in a later step, of other counts."""
        host, counts = _host(x).clone(), self.counts
        counts.add_op("copy_later", 1, host.nbytes, host.nbytes)

        def result() -> Tensor:
            if self.counts is counts:
                counts.add_sync("copy_later")
            return host

        return types.SimpleNamespace(result=result, is_done=lambda: True)

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # for the shape of a DTensor
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(isinstance(x, DTensor) for x in given):
            return NotImplemented  # it comes back with local tensors
        mine = {id(x.host): x for x in given if isinstance(x, StandInTensor)}
        target = kwargs.get("device")
        to_device = target is not None and torch.device(target).type in (DEVICE.type, "meta")  # C++ asks for the latter
        if func is torch.ops.c10d.alltoall_base_.default:  # a fake group's: rank 0 gets the first part of each rank
            result, size = func(*map(_host, args), **kwargs), dist.ProcessGroup.unbox(args[2]).size()
            received, sent = (_host(x).view(size, -1) for x in args[:2])
            received.copy_(sent[:1].expand_as(received))
            return result
        if not mine and not to_device:
            return func(*args, **kwargs)
        name = func.__name__.partition(".")[0]
        if name == "_to_copy" and mine and to_device and kwargs.get("dtype") in (None, args[0].dtype):
            return args[0]
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        stays = target is not None and not to_device  # on the host
        to_host = name == "_to_copy" and stays
        others = [x for x in given if not isinstance(x, StandInTensor) and x.dim() > 0]
        crosses = to_host or (name == "_to_copy" and not mine) or (name == "copy_" and bool(others))
        if others and not crosses and func.namespace == "aten":
            raise RuntimeError(f"{func}: got tensors on {DEVICE} and on the CPU, expected all on one device")
        args, kwargs = tree_map(_host, (args, kwargs))
        result = func(*args, **kwargs) if crosses else self._result(func, name, args, kwargs)
        if func.namespace == "aten":
            self._count(func, name, args, kwargs, result, crosses)
        if stays or name == "_local_scalar_dense" or (name == "copy_" and id(args[0]) not in mine):
            return result
        return tree_map(lambda x: self._wrapped(x, mine), result)

    def _result(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """What an operation returns, computed unless it is large."""
        if self.small == math.inf or func.namespace != "aten" or func.is_view:
            return func(*args, **kwargs)
        if name.startswith(("empty", "new_empty")):
            made = func(*args, **kwargs)
            ones = made.is_floating_point() and made.nbytes <= self.small
            return made.fill_(1) if ones else zeros(made.shape, made.dtype)
        changed = _changed(func, args, kwargs)
        if not any(self._is_large(x) for x in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if changed:
            skipped = changed[0] if func._schema.returns else None
            return skipped if self._is_large(changed[0]) else func(*args, **kwargs)
        made = func(*tree_map(_without_data, args), **tree_map(_without_data, kwargs))
        if name == "_foreach_norm":  # 1, as other small tensors
            return [torch.ones(x.shape, dtype=x.dtype) for x in made]
        if not all(self._is_large(x) for x in tree_leaves(made)):
            return func(*args, **kwargs)
        return tree_map(lambda x: zeros(x.shape, x.dtype), made)

    def _is_large(self, x: Any) -> bool:
        """Whether to skip computing x. Bytes may be payloads, whose headers the host reads."""
        return isinstance(x, Tensor) and x.nbytes > self.small and x.dtype != torch.uint8

    def _wrapped(self, x: Any, mine: dict[int, StandInTensor]) -> Any:
        if not isinstance(x, Tensor):
            return x
        return mine[id(x)] if id(x) in mine else self.wrap(x)

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, result: Any, crosses: bool) -> None:
        changed = _changed(func, args, kwargs)
        taken = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        storages = {x.untyped_storage().data_ptr() for x in taken}
        fresh = [x for x in made if x.untyped_storage().data_ptr() not in storages]
        masks = name == "index" and any(x.dtype in (torch.bool, torch.uint8) for x in taken[1:])
        if crosses or masks or name in READERS:
            self.counts.add_sync(name)
        if name.startswith(("empty", "new_empty")) or not any(x.numel() for x in [*changed, *fresh]):
            return
        only_filled = changed if name in FILLS or "out" in kwargs else []
        read = sum(x.nbytes for x in taken if not any(x is y for y in only_filled))
        self.counts.add_op(name, 1, read, sum(x.nbytes for x in [*changed, *fresh]))


def _host(x: Any) -> Any:
    return x.host if isinstance(x, StandInTensor) else x


def zeros(shape: torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros that take no memory until they are written to, unlike those of torch."""
    if 0 in shape:
        return torch.zeros(shape, dtype=dtype)  # views of no bytes have no other type
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _without_data(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _changed(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation overwrites."""
    changed = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed += tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name))
    return [x for x in changed if isinstance(x, Tensor)]


class _Stream:
    """The stream of the device, which does all work at once. Also its events."""

    cuda_stream = 0

    def __init__(self, mode: _Mode) -> None:
        self._mode = mode

    def synchronize(self) -> None:
        self._mode.counts.add_sync("synchronize")

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def elapsed_time(self, end: Any) -> float:
        return 1.0

    def record(self, stream: Any = None) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...


class _Kernels:
    """In place of gradzip._C.cuda: counts what each launcher queues, and lets the CPU's kernel compute."""

    def __init__(self, mode: _Mode, simt: types.ModuleType) -> None:
        self._mode = mode
        self._simt = simt

    def __getattr__(self, name: str) -> Callable[..., int]:
        parameters = PARAMETERS[name]

        def kernel(workspace: int, *arguments: Any) -> int:
            *arguments, stream = arguments
            before = self._simt.queued()
            missing = getattr(self._simt, name)(workspace, *arguments, stream)
            if missing:
                return missing
            self._mode.addresses.pop(workspace, None)
            self._count(name, parameters, arguments, self._simt.queued() - before)
            if self._mode.small == math.inf or name in READ_BY_HOST:
                compute(name, parameters, arguments)
            return 0

        return kernel

    def _count(self, name: str, parameters: list[str], arguments: list[Any], ops: int) -> None:
        addresses = self._mode.addresses
        starts = sorted(addresses)
        read = written = 0
        for parameter, argument in zip(parameters, arguments):
            struct = re.match(r"const (\w+)\*", parameter)
            pointers, const = [argument] * ("*" in parameter), [parameter.startswith("const ")]
            if struct and struct[1] in TABLES:
                const = TABLES[struct[1]]
                entries = arguments[parameters.index("int64_t count")]
                pointers = (c_int64 * (entries * len(const))).from_address(argument)
            for pointer, is_const in zip(pointers, itertools.cycle(const)):
                # Tensors are counted whole: a table may point at each of their parts.
                start = starts[bisect_right(starts, pointer) - 1] if starts else 0
                if start <= pointer < start + max(1, addresses.get(start, 0)):
                    nbytes = addresses.pop(start, 0)
                    read, written = (read + nbytes, written) if is_const else (read, written + nbytes)
        if any(re.match(rf"const (\w+\* const|{READ_WHOLE})\*", p) for p in parameters):
            read += sum(addresses.values())  # what a table in host memory lists
        addresses.clear()
        self._mode.counts.add_op(name, ops, read, written)
        self._mode.counts.repeated += _draws_by_keys_alone(dict(zip(parameters, arguments)))


def _draws_by_keys_alone(arguments: dict[str, Any]) -> bool:
    """Whether a kernel draws random numbers that depend on arguments of its launch alone. arguments: by parameter."""
    if not (arguments.get("bool stochastic", True) and arguments.get("const uint64_t* keys", True)):
        return False
    return not arguments.get("const int64_t* replays", arguments.keys().isdisjoint(KEYS))


def compute(name: str, parameters: list[str], arguments: list[Any]) -> None:
    """Run the CPU's kernel."""
    unread = c_int32()
    if parameters[-1] == "int32_t* failed" and not arguments[-1]:
        arguments = [*arguments[:-1], addressof(unread)]
    if name == "bitmap_code_encode":  # the CPU's kernel needs more room than its stream
        address, count = arguments
        for bitmap, numel, segment, out, nbytes in np.array((c_int64 * 5 * count).from_address(address)).tolist():
            room = torch.empty(ops.bitmap_code_capacity(numel, segment), dtype=torch.uint8)
            source = (c_int64 * 5)(bitmap, numel, segment, room.data_ptr(), nbytes)
            _C.bitmap_code_encode(addressof(source), 1, torch.get_num_threads())
            memmove(out, room.data_ptr(), c_int64.from_address(nbytes).value)
        return
    getattr(_C, name)(*arguments, torch.get_num_threads())


def _parameters() -> dict[str, list[str]]:
    """The parameters of each kernel, from csrc/kernels.h."""
    text = (ROOT / "csrc" / "kernels.h").read_text()
    found = re.findall(r"^KERNEL(?:_WITH_WORKSPACE)?\((\w+), ([^;]*)\);", text, re.MULTILINE)
    return {name: [re.sub(r"\s+", " ", p.strip()) for p in listed.split(",")] for name, listed in found}


PARAMETERS = _parameters()


def _structs() -> dict[str, str]:
    """The fields of each struct of a table, as in the headers."""
    structs = []
    for header in sorted((ROOT / "csrc" / "common").glob("*.h")):
        text = re.sub(r"//.*", "", header.read_text())
        structs += re.findall(r"^struct (\w+) {\n([^}]*)};\nstatic_assert\(.* writes it", text, re.MULTILINE)
    return dict(structs)


def _tables() -> dict[str, list[bool]]:
    """For each field of the structs of tables, 8 bytes each: whether it is a pointer to constants."""

    def words(fields: str) -> int:
        return 6 if "PayloadHeader" in fields else fields.count(",") + 1

    return {
        name: ["const" in fields for fields in body.split(";")[:-1] for _ in range(words(fields))]
        for name, body in STRUCTS.items()
        if not re.fullmatch(READ_WHOLE, name)
    }


STRUCTS = _structs()
TABLES = _tables()
# Parameters by which kernels take keys of the random generator.
KEYS = {"uint64_t key", *(f"const {name}* table" for name, fields in STRUCTS.items() if "uint64_t key;" in fields)}


class StandIn:
    """The device in use. Made by `stand_in`."""

    def __init__(self, mode: _Mode) -> None:
        self._mode = mode

    def tensor(self, host: Tensor) -> Tensor:
        """A tensor on the device with these data, which it shares."""
        return self._mode.wrap(host)

    @contextlib.contextmanager
    def counting(self, counts: Counts | None = None) -> Iterator[Counts]:
        """Count from here to the end of the block, in addition to `counts`; otherwise nothing is kept."""
        before, self._mode.counts = self._mode.counts, Counts() if counts is None else counts
        try:
            yield self._mode.counts
        finally:
            self._mode.counts = before

    def allocated(self) -> Allocated:
        """Count the memory of all tensors that are made from here on."""
        self._mode.allocated = self._mode.allocated or Allocated()
        return self._mode.allocated

    def capturing(self) -> contextlib.AbstractContextManager[Any]:
        """What is queued from here to the end of the block is captured as a CUDA graph, as far as gradzip knows."""
        return mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True)

    def uncounted(self) -> contextlib.AbstractContextManager[Counts]:
        """Count nothing within the block: transfers."""
        return self.counting()


@contextlib.contextmanager
def stand_in(compute: bool = True, small: int = SMALL) -> Iterator[StandIn]:
    """Make tensors on CUDA tensors of the stand-in device. Needs g++, to compile the launchers, once.

    Without `compute`, tensors of more than `small` bytes are not computed, nor are gradzip's kernels.
    """
    simt = simt_module()
    mode = _Mode(Counts(), math.inf if compute else small)
    stream = _Stream(mode)

    class Event(_Stream):
        def __init__(self, **options: Any) -> None:
            super().__init__(mode)

    kernels = types.SimpleNamespace(**vars(_C) | {"cuda": _Kernels(mode, simt), "cuda_built": True})
    with contextlib.ExitStack() as stack:
        simt.count_only(MULTIPROCESSORS)
        stack.callback(simt.count_only, 0)
        for target, name, value in (
            (native, "_C", kernels),
            (ops.tensors, "CopyLater", mode.copy_later),
            (torch.cuda, "_lazy_init", lambda: None),
            (torch.cuda, "device", contextlib.nullcontext),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "synchronize", lambda device=None: mode.counts.add_sync("synchronize")),
            (torch.cuda, "current_stream", lambda device=None: stream),
            (torch.cuda, "Stream", lambda **options: stream),
            (torch.cuda, "Event", Event),
            (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
            (DTensor, "device", property(lambda x: x._local_tensor.device)),
            (DTensor, "is_cuda", property(lambda x: x._local_tensor.is_cuda)),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(torch.no_grad())
        stack.enter_context(mode)
        yield StandIn(mode)


def simt_module() -> types.ModuleType:
    if "simt_cuda" not in sys.modules:
        sys.path.append(str(ROOT / "tests" / "support"))
        import importlib.util

        import simt_build

        spec = importlib.util.spec_from_file_location("simt_cuda", simt_build.module())
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["simt_cuda"] = module
    return sys.modules["simt_cuda"]
