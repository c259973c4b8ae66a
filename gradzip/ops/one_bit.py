"""One bit per value, and two means per row.

Seide, Fu, Droppo, Li, Yu, 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
of Speech DNNs, Interspeech 2014.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native
from ._keys import check_key
from .compact import bitmap_nbytes
from .payload import PayloadError


def _shape(x: Tensor, what: str) -> tuple[int, int]:
    if x.dim() != 2:
        raise ValueError(f"{what}: got shape {tuple(x.shape)}, expected (rows, columns)")
    return x.shape[0], x.shape[1]


def one_bit_packed(
    x: Tensor, key: int = 0, out: Tensor | None = None, means: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(packed, means): signs, and per row the mean of the values on either side.

    x: (rows, columns), float32. packed: uint8 of ceil(rows * columns / 8), the bits of ``pack_signs(x, key)``; means:
    (rows, 2), float32, of the values whose bit is clear and of those whose bit is set, 0 where there are none. Written
    to `out` and `means` where given. These means are the best two values for the bits (least squared error). NaN
    counts as 0, and an infinity makes its mean the largest float. Summed in double in a fixed order; deterministic.

    >>> packed, means = one_bit_packed(torch.tensor([[1.0, 3.0, -4.0]]))
    >>> packed.tolist(), means.tolist()
    ([4], [[2.0, -4.0]])
    """
    check_key(key, "one_bit_packed")
    x = _native.check(x, torch.float32, "one_bit_packed: x")
    rows, columns = _shape(x, "one_bit_packed: x")
    out = _native.output(out, bitmap_nbytes(x.numel()), torch.uint8, x.device, "one_bit_packed: out")
    means = _native.output(means, 2 * rows, torch.float32, x.device, "one_bit_packed: means").view(rows, 2)
    arguments = (x.data_ptr(), rows, columns, key, out.data_ptr(), means.data_ptr())
    _native.run("one_bit_packed", x, *arguments, workspace_for=x.numel())
    return out, means


def one_bit_decode_add(packed: Tensor, means: Tensor, out: Tensor, weight: float = 1.0) -> None:
    """out += weight * the mean of each element's row and bit.

    packed: uint8 of ceil(rows * columns / 8); means: (rows, 2), float32; out: (rows, columns), float32, in place.
    PayloadError, and out untouched, when a length is wrong or a mean is not finite. On CUDA, where nothing waits for
    the device to know, the elements of such a row become NaN instead: all ranks skip the step.
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
    failed = _native.run("one_bit_decode_add", out, *arguments, flag=True)
    if failed and not _native.on_cuda(out):
        raise PayloadError("corrupt payload: the mean of a row is not finite")
