"""Calls kernels of csrc on checked tensors.

A kernel has the same name and parameters on both devices (csrc/kernels.h); `run` picks the device of a tensor.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from collections.abc import Sequence
from ctypes import addressof, c_char, c_int32, c_int64
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import replays
from .errors import PayloadError

try:
    from gradzip import _C
except ImportError as error:  # reported when a kernel is called, so that `import gradzip` always works
    _missing: ImportError | None = error
else:
    _missing = None

Dtypes = torch.dtype | tuple[torch.dtype, ...]
HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # numbered as in csrc/common/half.h
MOST_HALF_TERMS = 240  # that kernels add to 16-bit floats in one launch on CUDA, with one rounding
READ_ONLY = "_gradzip_read_only"  # attribute of tensors that share the memory of read-only arrays (arrays.py)


def kernels() -> ModuleType:
    """Return the compiled module. Raises RuntimeError, with what to do, if it was not built."""
    if _missing is not None:
        raise RuntimeError(f"gradzip's compiled kernels cannot be loaded ({_missing}); {remedy()}") from _missing
    return _C


def remedy() -> str:
    """Return what to do without the compiled module."""
    own = Path(__file__).resolve().parents[1]
    # As Python looks for it in each folder of its path. A source tree comes first if Python was started in it.
    spec = PathFinder.find_spec("gradzip._C", [os.path.join(folder, "gradzip") for folder in sys.path])
    installed = Path(spec.origin).resolve().parent if spec and spec.origin else own
    if installed == own:
        return "build them with `pip install -e .` in the gradzip source tree (needs g++)"
    return (
        f"the sources in {own.parent} hide the gradzip that is installed in {installed.parent}: start Python in "
        "another folder, or install the sources with `pip install -e .`"
    )


def run(name: str, where: Tensor, *arguments: float) -> None:
    """Run a kernel on the device of `where`; on CUDA, queue it on the current stream."""
    module = kernels() if _missing is not None else _C
    if not where.is_cuda:
        getattr(module, name)(*arguments, torch.get_num_threads())
        return
    if not module.cuda_built:
        raise ValueError(
            f"{name}: got a tensor on {where.device}, but this build of gradzip has kernels for the CPU only; build it "
            "without GRADZIP_CUDA=0"
        )
    device = where.device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            run(name, where, *arguments)
        return
    kernel, stream = getattr(module.cuda, name), torch.cuda.current_stream(device).cuda_stream
    nbytes = kernel(0, *arguments, stream)  # runs the kernel unless it needs a workspace
    if nbytes:
        # Freed on return: the next user of the memory is queued behind this kernel.
        workspace = torch.empty(nbytes, dtype=torch.uint8, device=device)
        kernel(workspace.data_ptr(), *arguments, stream)


def run_count(name: str, where: Tensor, *arguments: float) -> int | Tensor:
    """Run a kernel whose last parameter is an ``int64_t*``.

    Returns the number it writes: on CUDA a 0-dim tensor, so that nothing waits for the device.
    """
    if where.is_cuda:
        on_device = torch.empty((), dtype=torch.int64, device=where.device)
        run(name, where, *arguments, on_device.data_ptr())
        return on_device
    count = c_int64()
    run(name, where, *arguments, addressof(count))
    return count.value


def run_failed(name: str, where: Tensor, *arguments: float, wait: bool = False) -> int:
    """Run a kernel whose last parameter is ``int32_t* failed``.

    Returns what it writes: 0 if it did not fail. On CUDA that is known only after waiting for the device: without
    `wait`, returns 0, and the kernel itself marks what it could not decode with NaN.
    """
    if not where.is_cuda:
        flag = c_int32()
        run(name, where, *arguments, addressof(flag))
        return flag.value
    if not wait:
        run(name, where, *arguments, 0)
        return 0
    on_device = torch.zeros(1, dtype=torch.int32, device=where.device)
    run(name, where, *arguments, on_device.data_ptr())
    return int(on_device)


def check(x: Any, dtype: Dtypes, what: str, numel: int | None = None, device: torch.device | None = None) -> Tensor:
    """Return `x`, contiguous.

    Raises ValueError unless it is a tensor of that dtype, number of elements and device.
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"{what}: got {type(x).__name__}, expected a torch tensor, or an array with __dlpack__")
    if x.dtype is not dtype and x.dtype not in (dtypes := dtype if isinstance(dtype, tuple) else (dtype,)):
        raise ValueError(f"{what}: got {x.dtype}, expected {' or '.join(map(str, dtypes))}")
    if not (x.is_cuda or x.is_cpu):
        raise ValueError(f"{what}: got a tensor on {x.device}, expected one on the CPU or a CUDA device")
    if device is not None and x.device != device:
        raise ValueError(f"{what}: got a tensor on {x.device}, expected one on {device} like the others")
    if numel is not None and x.numel() != numel:
        raise ValueError(f"{what}: got {x.numel()} elements, expected {numel}")
    # Conjugation and negation may be lazy: kernels read memory as it is.
    plain = x.is_contiguous() and not x.is_conj() and not x.is_neg()
    return x if plain else x.resolve_conj().resolve_neg().contiguous()


def check_nbytes(
    x: Any, nbytes: int, contents: str, what: str, device: torch.device | None = None, index: int | None = None
) -> Tensor:
    """Return `x`, uint8, contiguous. Raises PayloadError unless it has `nbytes` bytes, which its contents take.

    index: which of several payloads it is.
    """
    x = check(x, torch.uint8, what, device=device)
    if x.numel() != nbytes:
        raise PayloadError(f"{what}: got {x.numel()} bytes, expected {nbytes} for {contents}", index)
    return x


def check_distinct(tensors: Sequence[Tensor], what: str) -> None:
    """Raise ValueError if two matrices are at the same address."""
    addresses = [x.data_ptr() for x in tensors if x.numel()]
    if len(set(addresses)) != len(addresses):
        raise ValueError(f"{what}: got the same matrix more than once, expected distinct ones")


def check_key(key: int, what: str) -> int:
    """Return `key`, a 64-bit key of the random generator (csrc/common/philox.h). Raises ValueError for others."""
    if not (isinstance(key, int) and 0 <= key < 1 << 64):
        raise ValueError(f"{what}: got key = {key!r}, expected an integer from 0 to 2**64 - 1")
    return key


def row_keys(x: Any, keys: Sequence[int] | None, what: str) -> array[int]:
    """Return the table of the keys of the rows of x. Without keys it is empty, and has the address 0.

    Raises ValueError unless x is a matrix with as many rows as keys.
    """
    if not isinstance(x, Tensor) or x.dim() != 2:
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{what}: got {got}, expected a tensor of shape (rows, n)")
    if keys is not None and len(keys) != x.shape[0]:
        raise ValueError(f"{what}: got {len(keys)} keys, expected one for each of {x.shape[0]} rows")
    return array("Q", [check_key(key, what) for key in keys or ()])


def floats(x: Tensor) -> tuple[int, int]:
    """Return the address of a tensor of one of `FLOATS`, and the number of its type, as kernels take them."""
    return x.data_ptr(), FLOATS.index(x.dtype)


def address(x: Tensor | None) -> int:
    """Return the address of a tensor that a kernel may go without, 0 for None."""
    return 0 if x is None else x.data_ptr()


class Table:
    """Rows that a kernel reads from host memory, and the tensors whose addresses are in them."""

    def __init__(self, layout: str) -> None:
        self.device: torch.device | None = None  # of the tensors
        self.count = 0
        self._pack = struct.Struct(layout).pack
        self._rows = bytearray()
        self._kept: list[Tensor] = []  # alive until the kernel has run: they may be contiguous copies

    def add(self, *fields: Any) -> None:
        """Add a row. A tensor stands for its address, None for the address 0."""
        row = []
        for field in fields:
            if isinstance(field, Tensor):
                self._kept.append(field)
                field = field.data_ptr()
            row.append(0 if field is None else field)
        self._rows += self._pack(*row)
        self.count += 1
        self.device = self._kept[0].device

    @property
    def address(self) -> int:
        return addressof(c_char.from_buffer(self._rows)) if self._rows else 0

    @property
    def replays(self) -> int:
        return replays.address(self._kept[0]) if self._rows else 0

    def run(self, name: str, *arguments: float) -> None:
        """Run a kernel on the rows, unless there are none: their address, their number, and more arguments."""
        if self._rows:
            run(name, self._kept[0], self.address, self.count, *arguments)

    def run_failed(self, name: str, *arguments: float, wait: bool = False) -> int:
        """`run` for a kernel of `run_failed`."""
        return run_failed(name, self._kept[0], self.address, self.count, *arguments, wait=wait) if self._rows else 0


def scalar(value: float | Tensor, where: Tensor, what: str) -> Tensor:
    """Return `value` as a float32 tensor of 1 element on the device of `where`."""
    if isinstance(value, Tensor) and where.is_cuda:
        return check(value, torch.float32, what, 1, where.device)
    return torch.full((1,), float(value), dtype=torch.float64, device=where.device).float()


def output(out: Tensor | None, numel: int, dtype: torch.dtype, device: torch.device, what: str = "out") -> Tensor:
    """Return `out`, checked by `in_place`, or a new tensor if it is None."""
    if numel < 0:
        raise ValueError(f"{what}: got {numel} elements to write, expected a number >= 0")
    if out is None:
        return torch.empty(numel, dtype=dtype, device=device)
    return in_place(out, dtype, what, numel, device)


def sum_of(terms: int, out: Any, what: str, add: bool = False, device: torch.device | None = None) -> Tensor:
    """Return `out`, checked by `in_place`, for the sum of so many terms. add: to `out`.

    Raises ValueError if it has 16-bit floats, and would be rounded more than once.
    """
    once = terms <= MOST_HALF_TERMS and not add
    return in_place(out, FLOATS if once else torch.float32, what, device=device)


def in_place(x: Any, dtype: Dtypes, what: str, numel: int | None = None, device: torch.device | None = None) -> Tensor:
    """Return `x`, checked, for a kernel to write to. Raises ValueError if it is read-only or not contiguous."""
    checked = check(x, dtype, what, numel, device)
    if getattr(x, READ_ONLY, False):
        raise ValueError(f"{what}: got a read-only array, expected one to write to; pass a copy")
    if checked is x:
        return x
    raise ValueError(f"{what}: got strides {x.stride()}, expected a contiguous tensor")
