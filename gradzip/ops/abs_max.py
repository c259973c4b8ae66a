"""Largest magnitude."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native


def abs_max(x: Tensor) -> float:
    """Return max |x|: 0 for an empty tensor, NaN if any element is NaN.

    x: any shape, float32. One read of x. Deterministic. Waits for the device if x is on CUDA.
    ``math.isfinite(abs_max(x))`` is the cheapest check that all elements are finite.
    """
    return abs_max_tensor(x).item()


def abs_max_tensor(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return max |x| as a float32 tensor of 1 element on x's device, without waiting for it."""
    x = _native.check(x, torch.float32, "abs_max: x")
    out = _native.output(out, 1, torch.float32, x.device, "abs_max: out")
    _native.run("abs_max", x, x.data_ptr(), x.numel(), out.data_ptr())
    return out
