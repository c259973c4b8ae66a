"""Prefix-sum packing: a sparse tensor as a status bitmap and a dense vector (HPDC'20, section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native
from .payload import PayloadError

_ITEMS = (torch.float32, torch.complex64)


def bitmap_nbytes(numel: int) -> int:
    return (numel + 7) // 8


def bitmap(x: Tensor, selection: Tensor, out: Tensor | None = None) -> Tensor:
    """Status bitmap of what `select` chose.

    x: n elements, float32; selection: as from ``select(x, k)``. Returns uint8 of ceil(n / 8): bit i % 8 of byte i // 8
    is set where x[i] is kept; exactly k are.
    """
    x = _native.check(x, torch.float32, "bitmap: x")
    selection = _native.check(selection, torch.uint8, "bitmap: selection", 16, x.device)
    out = _native.output(out, bitmap_nbytes(x.numel()), torch.uint8, x.device, "bitmap: out")
    _bitmap(x, selection, out)
    return out


def _bitmap(x: Tensor, selection: Tensor, out: Tensor) -> Tensor | int:
    """Writes the bitmap; how many bits are set (on CUDA a tensor)."""
    if not _native.on_cuda(x):
        return _native.kernels().bitmap(
            x.data_ptr(), x.numel(), selection.data_ptr(), out.data_ptr(), _native.threads()
        )
    count = torch.empty(1, dtype=torch.int64, device=x.device)
    _native.launch(
        "bitmap",
        x.device,
        x.data_ptr(),
        x.numel(),
        selection.data_ptr(),
        out.data_ptr(),
        count.data_ptr(),
        workspace_for=x.numel(),
    )
    return count


def count_marked(bitmap: Tensor, numel: int) -> int:
    """How many of the first numel bits of a bitmap (uint8 of ceil(numel / 8)) are set. Waits for the device where it is
    on one."""
    bits = _native.check(bitmap, torch.uint8, "count_marked: bitmap", bitmap_nbytes(numel))
    if not _native.on_cuda(bits):
        return _native.kernels().count_marked(bits.data_ptr(), numel, _native.threads())
    count = torch.empty(1, dtype=torch.int64, device=bits.device)
    _native.launch("count_marked", bits.device, bits.data_ptr(), numel, count.data_ptr(), workspace_for=numel)
    return int(count)


def gather_marked(x: Tensor, bitmap: Tensor, count: int, out: Tensor | None = None) -> Tensor:
    """The elements of x whose bit is set, in order.

    x: n elements, float32 or complex64; bitmap: uint8 of ceil(n / 8) with `count` bits set. Returns `count` elements.
    ValueError when the bitmap has more or fewer bits set; on CUDA, where that would mean to wait, the result is
    unspecified then.
    """
    x = _native.check(x, _ITEMS, "gather_marked: x")
    bitmap = _native.check(bitmap, torch.uint8, "gather_marked: bitmap", bitmap_nbytes(x.numel()), x.device)
    out = _native.output(out, count, x.dtype, x.device, "gather_marked: out")
    if _native.on_cuda(x):
        ignored = torch.empty(1, dtype=torch.int64, device=x.device)
        _native.launch(
            "compact",
            x.device,
            x.data_ptr(),
            x.numel(),
            x.element_size(),
            bitmap.data_ptr(),
            out.data_ptr(),
            count,
            ignored.data_ptr(),
            workspace_for=x.numel(),
        )
        return out
    found = _native.kernels().compact(
        x.data_ptr(), x.numel(), x.element_size(), bitmap.data_ptr(), out.data_ptr(), count, _native.threads()
    )
    if found != count:
        raise ValueError(f"gather_marked: got a bitmap with other than the expected {count} bits set")
    return out


def compact(x: Tensor, threshold: float | Tensor) -> tuple[Tensor, Tensor]:
    """Keeps \\|x\\| >= threshold: (values, bitmap).

    x: n elements, float32. values: float32, in order; bitmap: uint8 of ceil(n / 8). Deterministic. Waits for the
    device where x is on one: how many values there are decides how much memory they need.

    >>> values, bits = compact(torch.tensor([4.0, 0.0, -5.0, 0.0]), 1.0)
    >>> values.tolist(), bits.tolist()
    ([4.0, -5.0], [5])
    """
    x = _native.check(x, torch.float32, "compact: x")
    if float(threshold) < 0 or float(threshold) != float(threshold):
        raise ValueError(f"compact: got threshold {float(threshold)}, expected a number >= 0")
    selection = torch.empty(16, dtype=torch.uint8, device="cpu")
    selection[:4].view(torch.float32)[0] = float(threshold)
    selection[8:].view(torch.int64)[0] = x.numel()  # all ties
    bits = torch.empty(bitmap_nbytes(x.numel()), dtype=torch.uint8, device=x.device)
    count = int(_bitmap(x, selection.to(x.device), bits))
    return gather_marked(x, bits, count), bits


def expand(values: Tensor, bitmap: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
    """The inverse of `compact`: the values where bits are set, zeros elsewhere.

    values: float32 or complex64; bitmap: uint8 of ceil(numel / 8). Returns numel elements. PayloadError when the
    bitmap does not have as many bits set as there are values (on CUDA, the device is waited for to know).
    """
    values = _native.check(values, _ITEMS, "expand: values")
    bitmap = _native.check(bitmap, torch.uint8, "expand: bitmap", bitmap_nbytes(numel), values.device)
    out = _native.output(out, numel, values.dtype, values.device, "expand: out")
    arguments = (
        values.data_ptr(),
        values.numel(),
        values.element_size(),
        bitmap.data_ptr(),
        out.data_ptr(),
        numel,
    )
    if _native.on_cuda(values):
        count = torch.empty(1, dtype=torch.int64, device=values.device)
        _native.launch("expand", values.device, *arguments, count.data_ptr(), workspace_for=numel)
        found = int(count)
    else:
        found = _native.kernels().expand(*arguments, _native.threads())
    if found != values.numel():
        raise PayloadError(f"expand: got {values.numel()} values, but the bitmap marks another number of elements")
    return out
