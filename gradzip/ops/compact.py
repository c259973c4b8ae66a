"""Prefix-sum packing: a sparse tensor as a status bitmap and a dense vector (HPDC'20, section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native
from .bitmap import bitmap_and_count, bitmap_nbytes
from .errors import PayloadError

_ITEMS = (torch.float32, torch.complex64)


def compact(x: Tensor, threshold: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return (values, bitmap) of the elements with \\|x\\| >= threshold.

    x: n elements, float32. values: float32, in order; bitmap: uint8 of ceil(n / 8). Deterministic. Waits for the device
    if x is on CUDA, because the number of values decides how much memory they need.

    >>> values, bits = compact(torch.tensor([4.0, 0.0, -5.0, 0.0]), 1.0)
    >>> values.tolist(), bits.tolist()
    ([4.0, -5.0], [5])
    """
    x = _native.check(x, torch.float32, "compact: x")
    if float(threshold) < 0 or float(threshold) != float(threshold):
        raise ValueError(f"compact: got threshold {float(threshold)}, expected a number >= 0")
    selection = torch.empty(16, dtype=torch.uint8, device="cpu")  # struct Selection of csrc/common/selection.h
    selection[:4].view(torch.float32)[0] = float(threshold)
    selection[8:].view(torch.int64)[0] = x.numel()  # all ties
    bits, count = bitmap_and_count(x, selection.to(x.device))
    return compact_values(x, bits, int(count)), bits


def compact_values(x: Tensor, bitmap: Tensor, count: int, out: Tensor | None = None) -> Tensor:
    """Return the elements of x whose bit is set, in order.

    x: n elements, float32 or complex64; bitmap: uint8 of ceil(n / 8) with `count` bits set. Returns `count` elements,
    in `out` if given. Deterministic. Raises ValueError if another number of bits is set; on CUDA, which does not wait
    for the device, the result is unspecified instead.
    """
    x = _native.check(x, _ITEMS, "compact_values: x")
    bitmap = _native.check(bitmap, torch.uint8, "compact_values: bitmap", bitmap_nbytes(x.numel()), x.device)
    out = _native.output(out, count, x.dtype, x.device, "compact_values: out")
    arguments = (x.data_ptr(), x.numel(), x.element_size(), bitmap.data_ptr(), out.data_ptr(), count)
    found = _native.run_count("compact", x, *arguments)
    if isinstance(found, int) and found != count:
        raise ValueError(f"compact_values: got a bitmap with {found} bits set, expected {count} bits set")
    return out


def expand(values: Tensor, bitmap: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
    """Return the values where bits are set, zeros elsewhere: the inverse of `compact`.

    values: float32 or complex64; bitmap: uint8 of ceil(numel / 8). Returns `numel` elements, in `out` if given.
    Deterministic. Raises PayloadError if the number of bits set is not the number of values. Waits for the device if
    the values are on CUDA.
    """
    values = _native.check(values, _ITEMS, "expand: values")
    bitmap = _native.check(bitmap, torch.uint8, "expand: bitmap", bitmap_nbytes(numel), values.device)
    out = _native.output(out, numel, values.dtype, values.device, "expand: out")
    source = (values.data_ptr(), values.numel(), values.element_size())
    arguments = (*source, bitmap.data_ptr(), out.data_ptr(), numel)
    if int(_native.run_count("compact_expand", values, *arguments)) != values.numel():
        raise PayloadError(f"expand: got {values.numel()} values, but the bitmap marks another number of elements")
    return out
