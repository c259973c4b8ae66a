"""Largest magnitude."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native


def abs_max(x: Tensor) -> float:
    """max |x|, 0 for an empty tensor, NaN when any element is NaN.

    x: any shape, float32. One read of x, deterministic. ``math.isfinite(abs_max(x))`` is the cheapest check that all
    of x is finite. Waits for the device where x is on one.
    """
    return abs_max_tensor(x).item()


def abs_max_tensor(x: Tensor, out: Tensor | None = None) -> Tensor:
    """The same, as a float32 tensor of one element on x's device: nothing waits for it."""
    x = _native.check(x, torch.float32, "abs_max: x")
    out = _native.output(out, 1, torch.float32, x.device, "abs_max: out")
    if _native.on_cuda(x):
        _native.launch("abs_max", x.device, x.data_ptr(), x.numel(), out.data_ptr())
        return out
    return out.fill_(_native.kernels().abs_max(x.data_ptr(), x.numel(), _native.threads()))
