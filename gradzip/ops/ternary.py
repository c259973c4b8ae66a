"""Ternary gradients (TernGrad).

Wen, Xu, Yan, Wu, Wang, Chen, Li, TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning,
NeurIPS 2017.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _native
from .errors import PayloadError
from .weighted_sum import WeightedSum, decode_sums


def ternary_nbytes(numel: int) -> int:
    """Return the size of `numel` packed trits, five to a byte: 1.6 bits each."""
    return (numel + 4) // 5


def ternary_packed(
    x: Tensor, scale: float | Tensor, clip: float | Tensor | None = None, key: int = 0, out: Tensor | None = None
) -> Tensor:
    """Return sign(x) * Bernoulli(min(\\|x\\|, clip) / scale), five trits to a byte.

    x: n elements, any shape, float32, float16 or bfloat16; scale: finite, >= 0; clip: > 0, or None to clip nothing. If
    x is on CUDA, scale and clip may be tensors there, float32 of 1 element; nothing waits for them, and their values
    are not checked. Returns uint8 of ceil(n / 5), in `out` if given. Each 320 elements (the last group may be shorter)
    take w = ceil(320 / 5) bytes: byte j is the sum of 3^k t over the elements k * w + j, t = 0 for zero, 1 for plus, 2
    for minus.

    Unbiased, E[scale * trit] = clipped x, if scale >= max \\|clipped x\\|; elements above scale have probability 1.
    scale 0 gives zeros; NaN counts as 0. Draw i of `key` belongs to element i. Deterministic.

    >>> ternary_packed(torch.tensor([1.0, -1.0, 0.0, 0.0, 1.0]), scale=1.0).tolist()  # 1 + 2 * 3 + 1 * 81
    [88]
    """
    x = _native.check(x, _native.FLOATS, "ternary_packed: x")
    if not (_stays_on_device(scale, x) or 0 <= scale < math.inf):
        raise ValueError(f"ternary_packed: got scale = {scale}, expected a finite number >= 0")
    if not (clip is None or _stays_on_device(clip, x) or clip > 0):
        raise ValueError(f"ternary_packed: got clip = {clip}, expected None or a number > 0")
    out = _native.output(out, ternary_nbytes(x.numel()), torch.uint8, x.device, "ternary_packed: out")
    ternary_packed_all([(x, scale, clip, key, out)])
    return out


def ternary_packed_all(
    sources: Sequence[tuple[Tensor, float | Tensor, float | Tensor | None, int, Tensor]],
) -> None:
    """`ternary_packed` for several tensors, in one call.

    sources: (x, scale, clip, key, out) of each, all on one device. The values of scale and clip are not checked.

    >>> outs = [torch.empty(1, dtype=torch.uint8) for _ in range(2)]
    >>> ternary_packed_all([(torch.tensor([sign]), 1.0, None, 0, out) for sign, out in zip((1.0, -1.0), outs)]), outs
    (None, [tensor([1], dtype=torch.uint8), tensor([2], dtype=torch.uint8)])
    """
    table = _native.Table("<QqqQQQQ")  # struct TernarySource of csrc/common/ternary.h
    for x, scale, clip, key, out in sources:
        x = _native.check(x, _native.FLOATS, "ternary_packed: x", device=table.device)
        _native.in_place(out, torch.uint8, "ternary_packed: out", ternary_nbytes(x.numel()), x.device)
        scale = _native.scalar(scale, x, "ternary_packed: scale")
        clip = None if clip is None else _native.scalar(clip, x, "ternary_packed: clip")
        key = _native.check_key(key, "ternary_packed")
        table.add(x, _native.FLOATS.index(x.dtype), x.numel(), scale, clip, key, out)
    table.run("ternary_packed", table.replays)


def ternary_decode_add(packed: Tensor, scale: float | Tensor, out: Tensor, weight: float = 1.0) -> None:
    """Add weight * scale * trit to each element of `out`.

    packed: uint8 of ceil(n / 5), as from `ternary_packed`; scale as there; out: n elements, float32, in place.
    Deterministic. Raises PayloadError, with out unchanged, if the size or the scale is wrong or a byte is above 242,
    the largest that five trits make. On CUDA, which does not wait for the device, the elements of such a byte become
    NaN instead, or all of them if the scale is a tensor and wrong, so that all ranks skip the step.
    """
    ternary_decode_add_all([WeightedSum(out, [((packed, scale), weight)])])


def ternary_decode_add_all(sums: Sequence[WeightedSum]) -> None:
    """Compute several sums of terms, as `ternary_decode_add` adds them, in one call and one pass over each `out`.

    sums: their terms are ((packed, scale), weight). A sum that is not added to `out` may be float16 or bfloat16: it is
    rounded once. All tensors are on one device. The terms of a sum are added in order, with the bits of as many calls
    of `ternary_decode_add`.

    Raises:
        PayloadError: with nothing changed, a size, a scale or a byte is wrong; `index` of the exception is the index of
            the term among those of all sums. On CUDA, elements become NaN instead if a byte or a scale there is wrong.

    >>> out, packed = torch.empty(2), torch.tensor([1 + 3 * 2], dtype=torch.uint8)
    >>> ternary_decode_add_all([WeightedSum(out, [((packed, 4.0), 0.5)], add=False)])
    >>> out.tolist()
    [2.0, -2.0]
    """
    if failed := decode_sums("ternary_decode_add", sums, "<QQd", _term):  # struct TernaryTerm
        raise PayloadError("corrupt payload: got a byte above 242, the largest that five trits make", failed - 1)


def _term(encoded: tuple[Tensor, float | Tensor], out: Tensor, weight: float) -> tuple[Tensor, Tensor | None, float]:
    packed, scale = encoded
    n = out.numel()
    packed = _native.check_nbytes(packed, ternary_nbytes(n), f"{n} elements", "ternary_decode_add: packed", out.device)
    if _stays_on_device(scale, out):
        return packed, _native.check(scale, torch.float32, "ternary_decode_add: scale", 1, out.device), weight
    scale = float(scale)
    if not 0 <= scale < math.inf:
        raise PayloadError(f"corrupt payload: its scale is {scale}, expected a finite number >= 0")
    return packed, None, weight * scale  # a product of doubles, rounded once


def _stays_on_device(value: float | Tensor, where: Tensor) -> bool:
    """Whether `value` is a tensor that is passed on unread: reading it would wait for the device."""
    return isinstance(value, Tensor) and where.is_cuda
