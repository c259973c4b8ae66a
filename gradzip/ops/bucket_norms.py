"""Norms of a whole tensor, or of each of its buckets."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native

NORMS = {"l2": 0, "max": 1, "l1": 2}  # numbers as in csrc/kernels.h


def num_buckets(numel: int, bucket: int) -> int:
    """Return the number of buckets of `bucket` elements; the last one may be shorter."""
    return -(-numel // bucket)


def bucket_norms(x: Tensor, bucket: int | None = None, norm: str = "l2") -> Tensor:
    """Return the norm of each `bucket` consecutive elements, or of all of them if None.

    x: n elements, any shape, float32, float16 or bfloat16; norm: "l2", "max" or "l1". Returns float32 of ceil(n /
    bucket). NaN counts as 0, infinity as the largest float, which no norm exceeds. Summed in double in a fixed order:
    no underflow, deterministic. Does not wait for the device.

    >>> bucket_norms(torch.tensor([3.0, -4.0, 5.0]), 2).tolist(), bucket_norms(torch.ones(7), norm="l1").tolist()
    ([5.0, 5.0], [7.0])
    """
    x = _native.check(x, _native.FLOATS, "bucket_norms: x")
    n = x.numel()
    bucket = max(1, n) if bucket is None else bucket
    if not (isinstance(bucket, int) and bucket >= 1):
        raise ValueError(f"bucket_norms: got bucket = {bucket!r}, expected None or an integer >= 1")
    if norm not in NORMS:
        raise ValueError(f"bucket_norms: got norm = {norm!r}, expected 'l2', 'max' or 'l1'")
    norms = torch.empty(num_buckets(n, bucket), dtype=torch.float32, device=x.device)
    _native.run("bucket_norms", x, *_native.floats(x), n, min(bucket, max(1, n)), NORMS[norm], norms.data_ptr())
    return norms
