"""Independent draws, each with its own probability."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native
from ._keys import check_key
from .compact import bitmap_nbytes


def bernoulli(p: Tensor, key: int, out: Tensor | None = None) -> Tensor:
    """Bitmap of the elements that are drawn: bit i % 8 of byte i // 8 is set with probability p[i].

    p: n elements, any shape, float32; 0, below and NaN are never drawn, 1 and above always. Returns uint8 of
    ceil(n / 8), spare bits 0, `out` where given. Draw i of `key` decides for element i, by all its 32 bits: set where
    it is below 2^32 p. Deterministic.

    >>> bernoulli(torch.tensor([1.0, 0.0, 1.0, 1.0]), key=7).tolist()
    [13]
    """
    check_key(key, "bernoulli")
    p = _native.check(p, torch.float32, "bernoulli: p")
    out = _native.output(out, bitmap_nbytes(p.numel()), torch.uint8, p.device, "bernoulli: out")
    _native.run("bernoulli", p, p.data_ptr(), p.numel(), key, out.data_ptr())
    return out
