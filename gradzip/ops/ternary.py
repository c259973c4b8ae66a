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
    x: Tensor, scale: float | Tensor, clip: float | Tensor | None = None, key: int = 0, out: Tensor | None = None
) -> Tensor:
    """sign(x) * Bernoulli(min(\\|x\\|, clip) / scale), five to a byte.

    x: n elements, any shape, float32; scale: finite, >= 0; clip: > 0, None for no clipping. Where x is on a CUDA device
    both may be tensors there, float32 of 1 element: nothing waits for them, nor are they checked. Returns uint8 of
    ceil(n / 5), `out` where given. Of every 320 elements (of what is left of them, at the end) w = ceil(320 / 5) bytes
    are made: byte j is the sum of 3^k t over the elements k * w + j, t = 0 for zero, 1 for plus, 2 for minus.

    Unbiased, E[scale * trit] = clipped x, where scale >= max \\|clipped x\\|; above scale the probability stays 1.
    scale 0 gives zeros; NaN counts as 0. Draw i of `key` belongs to element i. Deterministic.

    >>> ternary_packed(torch.tensor([1.0, -1.0, 0.0, 0.0, 1.0]), scale=1.0).tolist()  # 1 + 2 * 3 + 1 * 81
    [88]
    """
    check_key(key, "ternary_packed")
    x = _native.check(x, torch.float32, "ternary_packed: x")
    scale, clip = _number(scale, x), None if clip is None else _number(clip, x)
    if not isinstance(scale, Tensor) and not (math.isfinite(scale) and scale >= 0):
        raise ValueError(f"ternary_packed: got scale = {scale}, expected a finite number >= 0")
    if not isinstance(clip, Tensor) and clip is not None and not clip > 0:
        raise ValueError(f"ternary_packed: got clip = {clip}, expected None or a number > 0")
    out = _native.output(out, ternary_nbytes(x.numel()), torch.uint8, x.device, "ternary_packed: out")
    if _native.on_cuda(x):
        scale, clip = _on_device(scale, x), None if clip is None else _on_device(clip, x)
        limits: tuple[float, float] = (scale.data_ptr(), 0 if clip is None else clip.data_ptr())
    else:
        limits = (float(scale), math.inf if clip is None else float(clip))
    _native.run("ternary_packed", x, x.data_ptr(), x.numel(), *limits, key, out.data_ptr())
    return out


def ternary_decode_add(packed: Tensor, scale: float | Tensor, out: Tensor, weight: float = 1.0) -> None:
    """out += weight * scale * trit.

    packed: uint8 of ceil(n / 5), as from `ternary_packed`; out: n elements, float32, in place. PayloadError, and out
    untouched, when the length or scale is wrong or a byte is above 242, which no five trits make. On CUDA, where
    nothing waits for the device to know, the elements of such a byte become NaN instead, or all where the scale is a
    tensor and wrong: all ranks skip the step.
    """
    out = _native.in_place(out, torch.float32, "ternary_decode_add: out")
    packed = _native.check(packed, torch.uint8, "ternary_decode_add: packed", device=out.device)
    if packed.numel() != ternary_nbytes(out.numel()):
        raise PayloadError(
            f"ternary_decode_add: got {packed.numel()} bytes, expected {ternary_nbytes(out.numel())} "
            f"for {out.numel()} elements"
        )
    scale = _number(scale, out)
    if not isinstance(scale, Tensor) and not (math.isfinite(scale) and scale >= 0):
        raise PayloadError(f"corrupt payload: its scale is {scale}, expected a finite number >= 0")
    if _native.on_cuda(out):
        if not isinstance(scale, Tensor):  # one product of two doubles, as on the CPU
            scale, weight = 1.0, weight * scale
        scale = _on_device(scale, out)
        arguments = (packed.data_ptr(), out.numel(), scale.data_ptr(), weight, out.data_ptr())
        _native.run("ternary_decode_add", out, *arguments, flag=True)
        return
    if _native.run("ternary_decode_add", out, packed.data_ptr(), out.numel(), weight * float(scale), out.data_ptr()):
        raise PayloadError("corrupt payload: got a byte above 242, the largest that five trits make")


def _number(value: float | Tensor, where: Tensor) -> float | Tensor:
    """`value` as a number, unless it is a tensor on the CUDA device of `where`."""
    return value if isinstance(value, Tensor) and _native.on_cuda(where) else float(value)


def _on_device(value: float | Tensor, where: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return _native.check(value, torch.float32, "ternary: scale or clip", 1, where.device)
    return torch.full((1,), value, dtype=torch.float32, device=where.device)
