"""Largest magnitude."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native


def abs_max(x: Tensor) -> float:
    """max |x|, 0 for an empty tensor, NaN when any element is NaN.

    x: any shape, float32. One read of x, deterministic. ``math.isfinite(abs_max(x))`` is the cheapest check that all
    of x is finite.
    """
    x = _native.check(x, torch.float32, "abs_max: x")
    return _native.kernels().abs_max(x.data_ptr(), x.numel(), _native.threads())
