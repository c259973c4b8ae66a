"""The residual of error feedback, added to a gradient of any type."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native, groups


def add_residual(x: Tensor, residual: Tensor, out: Tensor | None = None) -> Tensor:
    """Return x + residual, float32, in one pass.

    x: n elements, any shape, float32, float16 or bfloat16. residual: n elements, float32. Returns n elements, float32,
    in `out` if given, which may be x if that is float32. Each sum is rounded once. Deterministic. Does not wait for the
    device.

    >>> add_residual(torch.tensor([1.0, -4.0], dtype=torch.bfloat16), torch.tensor([0.5, 1e-4])).tolist()
    [1.5, -3.9999001026153564]
    """
    what = "add_residual"
    x = _native.check(x, _native.FLOATS, f"{what}: x")
    residual = _native.check(residual, torch.float32, f"{what}: residual", x.numel(), x.device)
    out = _native.output(out, x.numel(), torch.float32, x.device, f"{what}: out")
    groups.add_residual([([x], residual, [out])])
    return out
