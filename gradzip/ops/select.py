"""Exact top-k by magnitude: which threshold keeps k elements."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native


def select(x: Tensor, k: int) -> Tensor:
    """What keeps exactly k of x: the threshold, and how many of the elements equal to it to take (the first ones).

    x: any shape, float32; 1 <= k <= x.numel(). Returns 16 bytes (uint8) that `bitmap` understands: threshold float32,
    4 bytes unused, number of ties int64. Deterministic; NaN counts as larger than infinity. Expected cost: one read
    of x; on CUDA three at most. They are on x's device, and nothing waits for them.
    """
    x = _native.check(x, torch.float32, "select: x")
    if not 1 <= k <= x.numel():
        raise ValueError(f"select: got k = {k}, expected 1 to {x.numel()} (the number of elements)")
    selection = torch.empty(16, dtype=torch.uint8, device=x.device)
    if _native.on_cuda(x):
        _native.launch("select", x.device, x.data_ptr(), x.numel(), k, selection.data_ptr(), workspace_for=x.numel())
        return selection
    _native.kernels().select(x.data_ptr(), x.numel(), k, selection.data_ptr(), _native.threads())
    return selection


def select_threshold(x: Tensor, k: int) -> Tensor:
    """The k-th largest \\|x\\|, exact, as a 0-dim float32 tensor.

    >>> select_threshold(torch.tensor([1.0, -3.0, 2.0]), 2).item()
    2.0
    """
    return select(x, k)[:4].view(torch.float32)[0]
