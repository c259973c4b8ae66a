"""The largest elements of each chunk of a gradient, with 2-bit values (csrc/common/chunk_topk.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native, groups
from .errors import PayloadError

BAD_LEVELS = "the levels of a chunk are not those of finite numbers"
_MOST_CHUNK = 4096


def check_chunk(chunk: int, what: str) -> None:
    """Raise ValueError unless there are chunks of `chunk` elements."""
    if isinstance(chunk, bool) or not (isinstance(chunk, int) and 32 <= chunk <= _MOST_CHUNK and chunk % 32 == 0):
        raise ValueError(f"{what}: got chunk = {chunk!r}, expected a multiple of 32 from 32 to {_MOST_CHUNK}")


def chunk_topk_count(numel: int, k: int, chunk: int) -> int:
    """Return the number of elements kept: k of each chunk, and ceil(k m / chunk) of the m elements of a shorter one."""
    return numel // chunk * k + -(-k * (numel % chunk) // chunk)


def chunk_topk_nbytes(numel: int, k: int, chunk: int) -> int:
    """Return the bytes of the records of `numel` elements: 4 + k / 4 for each chunk, padded to 4."""
    return -(-numel // chunk) * (4 + 4 * -(-k // 16))


def chunk_topk(x: Tensor, k: int, chunk: int, records: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Find the k elements of largest magnitude of each chunk, in one pass. Return (indices, records).

    x: n < 2^31 elements, float32, float16 or bfloat16; chunk: a multiple of 32, 4096 at most; 1 <= k <= chunk. indices:
    int32, ascending, `chunk_topk_count` of them. records: uint8 of `chunk_topk_nbytes`, or the memory for them. Of
    equal magnitudes, those of lowest index are taken; NaN counts as larger than infinity.

    A record is two levels, bfloat16, and for each element kept 2 bits: its sign and its level. The levels are the means
    of the magnitudes at most, and of those above, the mean of the kept magnitudes: their squared error is the least for
    this split. If an element of a chunk is not finite, its levels are NaN. Deterministic. Does not wait for the device.

    >>> indices, records = chunk_topk(torch.tensor([0.5, -8.0, 1.0, 2.0, 0.0, 6.0]).repeat(6)[:32], k=4, chunk=32)
    >>> indices.tolist(), chunk_topk_values(records, 32, 4, 32).tolist()
    ([1, 7, 13, 19], [-8.0, -8.0, -8.0, -8.0])
    """
    what = "chunk_topk"
    check_chunk(chunk, what)
    x = _native.check(x, _native.FLOATS, f"{what}: x")
    n = x.numel()
    if not 1 <= k <= chunk:
        raise ValueError(f"{what}: got k = {k}, expected 1 to {chunk} (the elements of a chunk)")
    if n >= 2**31:
        raise ValueError(f"{what}: got {n} elements, expected fewer than 2^31")
    nbytes = chunk_topk_nbytes(n, k, chunk)
    records = _native.output(records, nbytes, torch.uint8, x.device, f"{what}: records")
    (indices,), _ = groups.chunk_topk([x], [chunk_topk_count(n, k, chunk)], [k], chunk, [records])
    return indices, records


def chunk_topk_values(records: Tensor, numel: int, k: int, chunk: int) -> Tensor:
    """Return the values of the elements kept of `numel`: float32, in the order of their indices.

    records, k, chunk: as of `chunk_topk`. Raises PayloadError if the length of the records does not fit, or the levels
    of a chunk are not those of finite numbers. On CUDA, which does not wait for the device, its values become NaN.
    """
    what = "chunk_topk_values"
    check_chunk(chunk, what)
    records = _native.check(records, torch.uint8, f"{what}: records")
    nbytes = chunk_topk_nbytes(numel, k, chunk)
    if not 1 <= k <= chunk or records.numel() != nbytes:
        raise PayloadError(f"{what}: got {records.numel()} bytes, expected {nbytes} for {k} elements of each {chunk}")
    if records.is_cuda and records.data_ptr() % 4:  # which reads words
        records = records.clone()
    counts = [chunk_topk_count(numel, k, chunk)]
    (values,), failed = groups.chunk_topk_values([records], [numel], [k], counts, chunk)
    if failed:
        raise PayloadError(f"{what}: corrupt records: {BAD_LEVELS}")
    return values
