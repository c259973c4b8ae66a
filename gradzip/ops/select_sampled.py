"""Approximate top-k by magnitude: a threshold found on a random sample.

"Multiple sampling": Zhang et al., ACP-SGD, ICDCS 2023, section III-B.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native, groups


def select_sampled(x: Tensor, k: int, key: int) -> tuple[Tensor, int]:
    """Return (selection, count): a selection of about k elements of x, and their number.

    x: n elements, float32; 1 <= k <= n; key: 64-bit key of the random generator. selection: 16 bytes for `bitmap`, as
    from `select`. count is within 10 % of k; or exactly k if no sample comes that close (small k, many ties); or the
    number of nonzero elements if that is less than k. The threshold is found by binary search on the sample. Expected
    cost: one read of x. Deterministic. Waits for the device if x is on CUDA, to return the count.
    """
    x = _native.check(x, torch.float32, "select_sampled: x")
    if not 1 <= k <= x.numel():
        raise ValueError(f"select_sampled: got k = {k}, expected 1 to {x.numel()} (the number of elements)")
    selections, (count,) = groups.select_sampled([x], [k], [key & (2**64 - 1)])
    return selections[0], count
