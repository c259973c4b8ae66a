"""The rule by which front ends split gradients into buckets."""

from __future__ import annotations

from collections.abc import Iterable

# The first of DDP's buckets is small, so that communication starts early, and the last of Horovod's, so that little is
# left to exchange after the backward pass.
SMALL_BUCKET_NBYTES = 1 << 20


def cut(sizes: Iterable[int], nbytes: float, *, large_alone: bool) -> list[list[int]]:
    """Split gradients into buckets of at least `nbytes`: returns their numbers, in order.

    Args:
        sizes: of the gradients, in bytes. The first bucket is full at `SMALL_BUCKET_NBYTES`, if that is less.
        nbytes: 0 makes one bucket for each gradient, infinity one of all others.
        large_alone: whether a gradient of `nbytes` or more is a bucket of its own, as with Horovod. DDP adds it to
            those before it.

    >>> cut([1 << 20] * 6, 2 << 20, large_alone=True)
    [[0], [1, 2], [3, 4], [5]]
    >>> cut([1000, 4 << 20, 1000], 2 << 20, large_alone=True), cut([1000, 4 << 20, 1000], 2 << 20, large_alone=False)
    ([[0], [1], [2]], [[0, 1], [2]])
    """
    buckets: list[list[int]] = []
    missing = 0.0  # bytes until the bucket is full
    for number, size in enumerate(sizes):
        if missing <= 0 or (large_alone and size >= nbytes):
            missing = nbytes if buckets else min(nbytes, SMALL_BUCKET_NBYTES)
            buckets.append([])
        buckets[-1].append(number)
        missing -= size
    return buckets
