"""Exact top-k by magnitude: the threshold that keeps k elements."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native


def select(x: Tensor, k: int) -> Tensor:
    """Return a selection of exactly k elements of x: a threshold, and how many of the elements equal to it to keep.

    x: any shape, float32; 1 <= k <= x.numel(). Returns 16 bytes (uint8) for `bitmap`: threshold float32, 4 unused
    bytes, number of ties int64. Of equal magnitudes, those of lowest index are kept; NaN counts as larger than
    infinity. Deterministic. Expected cost: one read of x; on CUDA two, three at most. Does not wait for the device.
    """
    x = _native.check(x, torch.float32, "select: x")
    if not 1 <= k <= x.numel():
        raise ValueError(f"select: got k = {k}, expected 1 to {x.numel()} (the number of elements)")
    selection = torch.empty(16, dtype=torch.uint8, device=x.device)
    _native.run("select", x, x.data_ptr(), x.numel(), k, selection.data_ptr())
    return selection


def select_threshold(x: Tensor, k: int) -> Tensor:
    """Return the k-th largest \\|x\\|, exact, as a 0-dim float32 tensor.

    >>> select_threshold(torch.tensor([1.0, -3.0, 2.0]), 2).item()
    2.0
    """
    return select(x, k)[:4].view(torch.float32)[0]
