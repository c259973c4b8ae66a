"""The largest elements by magnitude."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native, groups


def topk_abs(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return (indices, values) of the k elements of largest magnitude, ascending by index.

    x: n < 2^31 elements, float32; 0 <= k <= n. indices: int32; values: float32; exactly k of each. Of equal magnitudes,
    those of lowest index are taken; NaN counts as larger than infinity. Deterministic. Does not wait for the device.

    >>> indices, values = topk_abs(torch.tensor([1.0, -3.0, 0.5, 3.0]), 2)
    >>> indices.tolist(), values.tolist()
    ([1, 3], [-3.0, 3.0])
    """
    x = _native.check(x, torch.float32, "topk_abs: x")
    if not 0 <= k <= x.numel():
        raise ValueError(f"topk_abs: got k = {k}, expected 0 to {x.numel()} (the number of elements)")
    if x.numel() >= 2**31:
        raise ValueError(f"topk_abs: got {x.numel()} elements, expected fewer than 2^31")
    if k == 0:
        return torch.empty(0, dtype=torch.int32, device=x.device), torch.empty(0, dtype=torch.float32, device=x.device)
    values = torch.empty(k, dtype=torch.float32, device=x.device)
    return groups.topk_abs([x], [k], [values])[0], values
