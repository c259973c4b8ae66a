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
    selection = _native.check(selection, torch.uint8, "bitmap: selection", 16)
    out = _native.output(out, bitmap_nbytes(x.numel()), torch.uint8, "bitmap: out")
    _native.kernels().bitmap(x.data_ptr(), x.numel(), selection.data_ptr(), out.data_ptr(), _native.threads())
    return out


def gather_marked(x: Tensor, bitmap: Tensor, count: int, out: Tensor | None = None) -> Tensor:
    """The elements of x whose bit is set, in order.

    x: n elements, float32 or complex64; bitmap: uint8 of ceil(n / 8) with `count` bits set. Returns `count` elements.
    """
    x = _native.check(x, _ITEMS, "gather_marked: x")
    bitmap = _native.check(bitmap, torch.uint8, "gather_marked: bitmap", bitmap_nbytes(x.numel()))
    out = _native.output(out, count, x.dtype, "gather_marked: out")
    found = _native.kernels().compact(
        x.data_ptr(), x.numel(), x.element_size(), bitmap.data_ptr(), out.data_ptr(), count, _native.threads()
    )
    if found != count:
        raise ValueError(f"gather_marked: got a bitmap with other than the expected {count} bits set")
    return out


def compact(x: Tensor, threshold: float | Tensor) -> tuple[Tensor, Tensor]:
    """Keeps \\|x\\| >= threshold: (values, bitmap).

    x: n elements, float32. values: float32, in order; bitmap: uint8 of ceil(n / 8). Deterministic.

    >>> values, bits = compact(torch.tensor([4.0, 0.0, -5.0, 0.0]), 1.0)
    >>> values.tolist(), bits.tolist()
    ([4.0, -5.0], [5])
    """
    x = _native.check(x, torch.float32, "compact: x")
    if float(threshold) < 0 or float(threshold) != float(threshold):
        raise ValueError(f"compact: got threshold {float(threshold)}, expected a number >= 0")
    selection = torch.empty(16, dtype=torch.uint8)
    selection[:4].view(torch.float32)[0] = float(threshold)
    selection[8:].view(torch.int64)[0] = x.numel()  # all ties
    bits = torch.empty(bitmap_nbytes(x.numel()), dtype=torch.uint8)
    count = _native.kernels().bitmap(x.data_ptr(), x.numel(), selection.data_ptr(), bits.data_ptr(), _native.threads())
    return gather_marked(x, bits, count), bits


def expand(values: Tensor, bitmap: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
    """The inverse of `compact`: the values where bits are set, zeros elsewhere.

    values: float32 or complex64; bitmap: uint8 of ceil(numel / 8). Returns numel elements. PayloadError when the
    bitmap does not have as many bits set as there are values.
    """
    values = _native.check(values, _ITEMS, "expand: values")
    bitmap = _native.check(bitmap, torch.uint8, "expand: bitmap", bitmap_nbytes(numel))
    out = _native.output(out, numel, values.dtype, "expand: out")
    found = _native.kernels().expand(
        values.data_ptr(),
        values.numel(),
        values.element_size(),
        bitmap.data_ptr(),
        out.data_ptr(),
        numel,
        _native.threads(),
    )
    if found != values.numel():
        raise PayloadError(f"expand: got {values.numel()} values, but the bitmap marks another number of elements")
    return out
