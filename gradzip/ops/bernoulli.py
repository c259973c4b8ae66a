"""Independent draws, each with its own probability."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native
from .bitmap import bitmap_nbytes


def bernoulli(p: Tensor, key: int, out: Tensor | None = None) -> Tensor:
    """Return a bitmap in which bit i is set with probability p[i].

    p: n elements, any shape, float32; values <= 0 and NaN are never drawn, values >= 1 always. key: 64-bit key of the
    random generator. Returns uint8 of ceil(n / 8), in `out` if given: bit i % 8 of byte i // 8 is for element i, spare
    bits are 0. Bit i is set if draw i of `key`, 32 bits, is below 2^32 p[i]. Deterministic. Does not wait for the
    device.

    >>> bernoulli(torch.tensor([1.0, 0.0, 1.0, 1.0]), key=7).tolist()
    [13]
    """
    _native.check_key(key, "bernoulli")
    p = _native.check(p, torch.float32, "bernoulli: p")
    out = _native.output(out, bitmap_nbytes(p.numel()), torch.uint8, p.device, "bernoulli: out")
    _native.run("bernoulli", p, p.data_ptr(), p.numel(), key, out.data_ptr())
    return out
