"""One bit per value, and two means per row.

Seide, Fu, Droppo, Li, Yu, 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
of Speech DNNs, Interspeech 2014.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native
from .bitmap import bitmap_nbytes
from .errors import PayloadError


def _shape(x: Tensor, what: str) -> tuple[int, int]:
    if x.dim() != 2:
        raise ValueError(f"{what}: got shape {tuple(x.shape)}, expected (rows, columns)")
    return x.shape[0], x.shape[1]


def one_bit_packed(
    x: Tensor, key: int = 0, out: Tensor | None = None, means: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (packed, means): the signs and, per row, the mean of the values with either sign.

    x: (rows, columns), float32. packed: uint8 of ceil(rows * columns / 8), the bits of ``pack_signs(x, key)``; means:
    (rows, 2), float32, of the values whose bit is clear and of those whose bit is set, 0 if there are none. Written to
    `out` and `means` if given. The means minimise the squared error for the given bits. NaN counts as 0, and an
    infinity makes its mean the largest float. Summed in double in a fixed order; deterministic. Does not wait for the
    device.

    >>> packed, means = one_bit_packed(torch.tensor([[1.0, 3.0, -4.0]]))
    >>> packed.tolist(), means.tolist()
    ([4], [[2.0, -4.0]])
    """
    _native.check_key(key, "one_bit_packed")
    x = _native.check(x, torch.float32, "one_bit_packed: x")
    rows, columns = _shape(x, "one_bit_packed: x")
    out = _native.output(out, bitmap_nbytes(x.numel()), torch.uint8, x.device, "one_bit_packed: out")
    means = _native.output(means, 2 * rows, torch.float32, x.device, "one_bit_packed: means").view(rows, 2)
    _native.run("one_bit_packed", x, x.data_ptr(), rows, columns, key, out.data_ptr(), means.data_ptr())
    return out, means


def one_bit_decode_add(packed: Tensor, means: Tensor, out: Tensor, weight: float = 1.0) -> None:
    """Add weight * the mean for its row and bit to each element of `out`.

    packed: uint8 of ceil(rows * columns / 8); means: (rows, 2), float32; out: (rows, columns), float32, in place.
    Raises PayloadError, with out unchanged, if a length is wrong or a mean is not finite. On CUDA, which does not wait
    for the device, the elements of a row whose mean is not finite become NaN instead, so that all ranks skip the step.
    """
    out = _native.in_place(out, torch.float32, "one_bit_decode_add: out")
    rows, columns = _shape(out, "one_bit_decode_add: out")
    packed = _native.check(packed, torch.uint8, "one_bit_decode_add: packed", device=out.device)
    means = _native.check(means, torch.float32, "one_bit_decode_add: means", device=out.device)
    nbytes = bitmap_nbytes(out.numel())
    if packed.numel() != nbytes or means.numel() != 2 * rows:
        raise PayloadError(
            f"one_bit_decode_add: got {packed.numel()} bytes and {means.numel()} means, expected {nbytes} and "
            f"{2 * rows} for shape {(rows, columns)}"
        )
    arguments = (packed.data_ptr(), means.data_ptr(), rows, columns, weight, out.data_ptr())
    if _native.run_failed("one_bit_decode_add", out, *arguments):
        raise PayloadError("corrupt payload: the mean of a row is not finite")
