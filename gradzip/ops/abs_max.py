"""Largest magnitudes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _native


def abs_max(x: Tensor) -> float:
    """Return max |x|: 0 for an empty tensor, NaN if any element is NaN.

    x: any shape, float32, float16 or bfloat16. One read of x. Deterministic. Waits for the device if x is on CUDA.
    ``math.isfinite(abs_max(x))`` is the cheapest check that all elements are finite.
    """
    return abs_max_tensor(x).item()


def abs_max_tensor(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return max |x| as a float32 tensor of 1 element on x's device, without waiting for it."""
    x = _native.check(x, _native.FLOATS, "abs_max: x")
    out = _native.output(out, 1, torch.float32, x.device, "abs_max: out")
    _native.run("abs_max", x, *_native.floats(x), x.numel(), out.data_ptr())
    return out


def abs_max_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return `abs_max_tensor` of each of several tensors of one type, on one device; on CUDA in one call.

    >>> abs_max_all([torch.tensor([1.0, -2.0]), torch.zeros(0)])
    [tensor([2.]), tensor([0.])]
    """
    if not (tensors and tensors[0].is_cuda):
        return [abs_max_tensor(x) for x in tensors]
    return abs_max_columns([x.reshape(-1, 1) for x in tensors])


def abs_max_columns(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return max |x| of each column of each matrix, NaN if one is NaN, in one call.

    matrices: (n, r) each, float32, all on one device; or float16 or bfloat16, all of one type, with r = 1. Results:
    (r,) each, float32, adjacent in memory.

    >>> abs_max_columns([torch.tensor([[1.0, -2.0], [0.0, 3.0]]), torch.zeros(0, 1)])
    [tensor([1., 3.]), tensor([0.])]
    """
    table = array("q")  # struct Matrix of csrc/common/orthogonalize.h
    kept: list[Tensor] = []
    for x in matrices:
        dtypes, device = (kept[0].dtype, kept[0].device) if kept else (_native.FLOATS, None)
        x = _native.check(x, dtypes, "abs_max_columns", device=device)
        if x.dim() != 2 or (x.dtype != torch.float32 and x.shape[1] != 1):
            expected = "(n, r)" if x.dtype == torch.float32 else "(n, 1)"
            raise ValueError(f"abs_max_columns: got {x.dtype} of shape {tuple(x.shape)}, expected {expected}")
        kept.append(x)
        table.extend((x.data_ptr(), *x.shape))
    if not kept:
        return []
    columns = [x.shape[1] for x in kept]
    out = torch.empty(sum(columns), dtype=torch.float32, device=kept[0].device)
    dtype = _native.FLOATS.index(kept[0].dtype)
    _native.run("abs_max_columns", kept[0], table.buffer_info()[0], len(kept), dtype, out.data_ptr())
    return list(out.split_with_sizes(columns))
