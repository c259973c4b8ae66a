"""The largest elements by magnitude."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native
from .compact import bitmap, bitmap_nbytes
from .select import select


def topk_abs(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k elements of largest magnitude: (indices, values), ascending by index.

    x: n < 2^31 elements, float32; 0 <= k <= n. indices: int32; values: float32; k of each, exactly: of equal
    magnitudes those of lower index are taken, and NaN counts as larger than infinity. Deterministic. On CUDA, nothing
    waits.

    >>> indices, values = topk_abs(torch.tensor([1.0, -3.0, 0.5, 3.0]), 2)
    >>> indices.tolist(), values.tolist()
    ([1, 3], [-3.0, 3.0])
    """
    x = _native.check(x, torch.float32, "topk_abs: x")
    if not 0 <= k <= x.numel():
        raise ValueError(f"topk_abs: got k = {k}, expected 0 to {x.numel()} (the number of elements)")
    if x.numel() >= 2**31:
        raise ValueError(f"topk_abs: got {x.numel()} elements, expected fewer than 2^31")
    indices = torch.empty(k, dtype=torch.int32, device=x.device)
    values = torch.empty(k, dtype=torch.float32, device=x.device)
    if k:
        _marked_indices(bitmap(x, select(x, k)), x.numel(), x, indices, values)
    return indices, values


def _marked_indices(bitmap: Tensor, numel: int, x: Tensor | None, indices: Tensor, values: Tensor | None) -> int:
    """Writes where bits are set, and the values there; how many are set, if nobody has to wait to know it."""
    arguments = (
        bitmap.data_ptr(),
        numel,
        0 if x is None else x.data_ptr(),
        indices.numel(),
        indices.data_ptr(),
        0 if values is None else values.data_ptr(),
    )
    if not _native.on_cuda(bitmap):
        return _native.kernels().marked_indices(*arguments, _native.threads())
    ignored = torch.empty(1, dtype=torch.int64, device=bitmap.device)
    _native.launch("marked_indices", bitmap.device, *arguments, ignored.data_ptr(), workspace_for=numel)
    return indices.numel()


def marked_indices(bitmap: Tensor, numel: int, count: int, out: Tensor | None = None) -> Tensor:
    """Where bits are set, ascending.

    bitmap: uint8 of ceil(numel / 8) with `count` bits set. Returns int32 of `count`. ValueError when it has more or
    fewer bits set; on CUDA, where that would mean to wait, the result is unspecified then.

    >>> marked_indices(torch.tensor([5], dtype=torch.uint8), 4, 2).tolist()
    [0, 2]
    """
    if not 0 <= numel < 2**31:
        raise ValueError(f"marked_indices: got {numel} elements, expected 0 to 2^31 - 1")
    bitmap = _native.check(bitmap, torch.uint8, "marked_indices: bitmap", bitmap_nbytes(numel))
    out = _native.output(out, count, torch.int32, bitmap.device, "marked_indices: out")
    if _marked_indices(bitmap, numel, None, out, None) != count:
        raise ValueError(f"marked_indices: got a bitmap with other than the expected {count} bits set")
    return out


def sampled_threshold(x: Tensor, k: int, key: int) -> tuple[Tensor, int]:
    """A selection of about k elements, found on a random sample: (selection, count).

    x: n elements, float32; 1 <= k <= n; key: of the counter-based generator, 64 bits. selection is what `bitmap`
    understands, and count is how many it marks: within 10 % of k, or exactly k where no sample came that close (small
    k, many ties), or all that are not zero where those are fewer than k. Deterministic.

    "Multiple sampling" (Zhang et al., ACP-SGD, ICDCS 2023, section III-B): binary search of the threshold on a sample.
    Expected cost: one read of x. Waits for the device where x is on one, to return the count.
    """
    x = _native.check(x, torch.float32, "sampled_threshold: x")
    if not 1 <= k <= x.numel():
        raise ValueError(f"sampled_threshold: got k = {k}, expected 1 to {x.numel()} (the number of elements)")
    selection = torch.empty(16, dtype=torch.uint8, device=x.device)
    arguments = (x.data_ptr(), x.numel(), k, key & (2**64 - 1), selection.data_ptr())
    if not _native.on_cuda(x):
        return selection, _native.kernels().select_sampled(*arguments, _native.threads())
    count = torch.empty(1, dtype=torch.int64, device=x.device)
    _native.launch("select_sampled", x.device, *arguments, count.data_ptr(), workspace_for=(x.numel(), k))
    return selection, int(count)
