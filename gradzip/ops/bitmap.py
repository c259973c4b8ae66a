"""Status bitmaps: bit i % 8 of byte i // 8 tells whether element i is kept (HPDC'20, section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native


def bitmap_nbytes(numel: int) -> int:
    """Return the size of a bitmap of `numel` elements."""
    return (numel + 7) // 8


def bitmap(x: Tensor, selection: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the bitmap of the elements that `select` chose.

    x: n elements, float32; selection: from ``select(x, k)``. Returns uint8 of ceil(n / 8), in `out` if given, with
    exactly k bits set; spare bits are 0. Deterministic. Does not wait for the device.
    """
    return bitmap_and_count(x, selection, out)[0]


def bitmap_and_count(x: Tensor, selection: Tensor, out: Tensor | None = None) -> tuple[Tensor, int | Tensor]:
    """Return the same bitmap and the number of bits set, on CUDA as a 0-dim tensor."""
    x = _native.check(x, torch.float32, "bitmap: x")
    selection = _native.check(selection, torch.uint8, "bitmap: selection", 16, x.device)
    out = _native.output(out, bitmap_nbytes(x.numel()), torch.uint8, x.device, "bitmap: out")
    return out, _native.run_count("bitmap", x, x.data_ptr(), x.numel(), selection.data_ptr(), out.data_ptr())


def bitmap_count(bitmap: Tensor, numel: int) -> int:
    """Return the number of bits set among the first `numel`.

    bitmap: uint8 of ceil(numel / 8). Waits for the device if the bitmap is on CUDA.
    """
    bits = _native.check(bitmap, torch.uint8, "bitmap_count: bitmap", bitmap_nbytes(numel))
    return int(_native.run_count("bitmap_count", bits, bits.data_ptr(), numel))


def bitmap_indices(bitmap: Tensor, numel: int, count: int, out: Tensor | None = None) -> Tensor:
    """Return the indices of the set bits, ascending.

    bitmap: uint8 of ceil(numel / 8) with `count` bits set, numel < 2^31. Returns int32 of `count`, in `out` if given.
    Raises ValueError if another number of bits is set; on CUDA, which does not wait for the device, the result is
    unspecified instead.

    >>> bitmap_indices(torch.tensor([5], dtype=torch.uint8), 4, 2).tolist()
    [0, 2]
    """
    if not 0 <= numel < 2**31:
        raise ValueError(f"bitmap_indices: got {numel} elements, expected 0 to 2^31 - 1")
    bitmap = _native.check(bitmap, torch.uint8, "bitmap_indices: bitmap", bitmap_nbytes(numel))
    out = _native.output(out, count, torch.int32, bitmap.device, "bitmap_indices: out")
    found = _native.run_count("bitmap_indices", bitmap, bitmap.data_ptr(), numel, count, out.data_ptr())
    if isinstance(found, int) and found != count:
        raise ValueError(f"bitmap_indices: got a bitmap with {found} bits set, expected {count} bits set")
    return out
