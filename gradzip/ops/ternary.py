"""Ternary gradients (TernGrad).

Wen, Xu, Yan, Wu, Wang, Chen, Li, TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning,
NeurIPS 2017.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import _native
from ._keys import check_key
from .payload import PayloadError


def ternary_nbytes(numel: int) -> int:
    """Five elements to a byte: 1.6 bits each."""
    return (numel + 4) // 5


def ternary_packed(
    x: Tensor, scale: float, clip: float | None = None, key: int = 0, out: Tensor | None = None
) -> Tensor:
    """sign(x) * Bernoulli(min(\\|x\\|, clip) / scale), five to a byte.

    x: n elements, any shape, float32; scale: finite, >= 0; clip: > 0, None for no clipping. Returns uint8 of
    ceil(n / 5), `out` where given. Of every 320 elements (of what is left of them, at the end) w = ceil(320 / 5) bytes
    are made: byte j is the sum of 3^k t over the elements k * w + j, t = 0 for zero, 1 for plus, 2 for minus.

    Unbiased, E[scale * trit] = clipped x, where scale >= max \\|clipped x\\|; above scale the probability stays 1.
    scale 0 gives zeros; NaN counts as 0. Draw i of `key` belongs to element i. Deterministic.

    >>> ternary_packed(torch.tensor([1.0, -1.0, 0.0, 0.0, 1.0]), scale=1.0).tolist()  # 1 + 2 * 3 + 1 * 81
    [88]
    """
    check_key(key, "ternary_packed")
    if not (math.isfinite(scale) and scale >= 0):
        raise ValueError(f"ternary_packed: got scale = {scale}, expected a finite number >= 0")
    if clip is not None and not clip > 0:
        raise ValueError(f"ternary_packed: got clip = {clip}, expected None or a number > 0")
    x = _native.check(x, torch.float32, "ternary_packed: x")
    out = _native.output(out, ternary_nbytes(x.numel()), torch.uint8, x.device, "ternary_packed: out")
    _native.kernels().ternary_packed(
        x.data_ptr(),
        x.numel(),
        scale,
        math.inf if clip is None else clip,
        key,
        out.data_ptr(),
        _native.threads(),
    )
    return out


def ternary_decode_add(packed: Tensor, scale: float, out: Tensor, weight: float = 1.0) -> None:
    """out += weight * scale * trit.

    packed: uint8 of ceil(n / 5), as from `ternary_packed`; out: n elements, float32, in place. PayloadError, and out
    untouched, when the length or scale is wrong or a byte is above 242, which no five trits make.
    """
    out = _native.in_place(out, torch.float32, "ternary_decode_add: out")
    packed = _native.check(packed, torch.uint8, "ternary_decode_add: packed")
    if packed.numel() != ternary_nbytes(out.numel()):
        raise PayloadError(
            f"ternary_decode_add: got {packed.numel()} bytes, expected {ternary_nbytes(out.numel())} "
            f"for {out.numel()} elements"
        )
    if not (math.isfinite(scale) and scale >= 0):
        raise PayloadError(f"corrupt payload: its scale is {scale}, expected a finite number >= 0")
    failed = _native.kernels().ternary_decode_add(
        packed.data_ptr(), out.numel(), weight * scale, out.data_ptr(), _native.threads()
    )
    if failed:
        raise PayloadError("corrupt payload: got a byte above 242, the largest that five trits make")
