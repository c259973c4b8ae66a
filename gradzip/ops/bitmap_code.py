"""Entropy-coded status bitmaps, for densities that vary along the bitmap (csrc/common/bitmap_code.h)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _native, groups
from .bitmap import bitmap_nbytes
from .errors import PayloadError

_MOST_SEGMENT = 1024


def bitmap_code_capacity(numel: int, segment: int = _MOST_SEGMENT, count: int | None = None) -> int:
    """Return a number of bytes that suffices for any bitmap of `numel` elements.

    That is a plain bitmap and 2 bytes for each segment; or less, if the number of bits set is known to be `count`. With
    15 % set, it is 2 % more than random bits take.
    """
    plain = 2 * -(-numel // _checked(segment)) + bitmap_nbytes(numel)
    if count is None:
        return plain
    whole, rest = divmod(numel, segment)
    if whole == 0:
        return plain
    # Segments differ in density. By concavity, they take most if the bits are spread evenly over the whole ones.
    each = _most_segment_nbytes(segment, min(count / whole, segment / 2))
    return min(plain, 2 * whole + math.ceil(whole * each) + (2 + bitmap_nbytes(rest) if rest else 0))


@functools.cache
def _segment_hull(segment: int) -> list[tuple[int, int]]:
    """The upper convex hull of (bits set, most bytes) of a segment, for up to half of its bits."""
    points = [(0, 0)]
    for count in range(1, segment // 2 + 1):
        k = 0
        while (54 * count) << k < 13 * (2 * segment - count):  # bitmap_low_bits
            k += 1
        bits = count * (k + 1) + (segment - count >> k)  # a one and k low bits for each; their zeros
        points.append((count, min(segment // 8, -(-bits // 8))))
        while len(points) > 2 and not _turns_down(*points[-3:]):
            del points[-2]
    return points


def _turns_down(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> bool:
    return (b[1] - a[1]) * (c[0] - b[0]) > (c[1] - b[1]) * (b[0] - a[0])


def _most_segment_nbytes(segment: int, count: float) -> float:
    """The most bytes that segments of a mean number of bits set take on average."""
    for (x, low), (end, high) in itertools.pairwise(_segment_hull(segment)):
        if count <= end:
            return low + (high - low) * (count - x) / (end - x)
    raise ValueError(f"bitmap_code_capacity: got {count} bits of {segment}, expected at most half")


def bitmap_code_write(bitmap: Tensor, numel: int, segment: int, out: Tensor, count: int | None = None) -> int | Tensor:
    """Write the stream of `bitmap_code_encode` to the beginning of `out`, and return its size in bytes.

    out: uint8 of at least `bitmap_code_capacity(numel, segment)`; what follows the stream in it is unspecified. count:
    the number of bits set, if it is known: on CUDA, the capacity for it suffices. On CUDA the size is a 0-dim tensor,
    so that nothing waits for the device.
    """
    bitmap = _native.check(bitmap, torch.uint8, "bitmap_code_encode: bitmap", bitmap_nbytes(numel))
    out = _native.in_place(out, torch.uint8, "bitmap_code_encode: out", device=bitmap.device)
    capacity = bitmap_code_capacity(numel, segment, count if bitmap.is_cuda else None)
    if out.numel() < capacity:
        raise ValueError(f"bitmap_code_encode: out: got {out.numel()} bytes, expected at least {capacity}")
    (nbytes,) = groups.bitmap_code_write([bitmap], [numel], [segment], [out])
    return nbytes


def bitmap_code_encode(bitmap: Tensor, numel: int, segment: int = _MOST_SEGMENT, out: Tensor | None = None) -> Tensor:
    """Encode a bitmap.

    bitmap: uint8 of ceil(numel / 8), spare bits 0. segment: a multiple of 64, up to 1024. out: uint8, as for
    `bitmap_code_write`. Returns uint8: the beginning of `out` if given. Each segment of so many elements is Rice-coded
    with a parameter for its own density p, or stays as it is: it costs at most 5 % more than the entropy of independent
    bits, and 3 bytes. Deterministic. Waits for the device if the bitmap is on CUDA, to know the size.

    >>> bitmap = torch.zeros(1000, dtype=torch.uint8)
    >>> bitmap[300] = 32
    >>> stream = bitmap_code_encode(bitmap, 8000)
    >>> stream.numel(), torch.equal(bitmap_code_decode(stream, 8000, 1), bitmap)
    (18, True)
    """
    bitmap = _native.check(bitmap, torch.uint8, "bitmap_code_encode: bitmap", bitmap_nbytes(numel))
    if out is None:
        out = torch.empty(bitmap_code_capacity(numel, segment), dtype=torch.uint8, device=bitmap.device)
    nbytes = int(bitmap_code_write(bitmap, numel, segment, out))
    return out.view(-1)[:nbytes]


def bitmap_code_decode(
    stream: Tensor, numel: int, count: int, segment: int = _MOST_SEGMENT, out: Tensor | None = None
) -> Tensor:
    """Return the bitmap that `bitmap_code_encode` encoded: uint8 of ceil(numel / 8), in `out` if given.

    stream: uint8, any bytes; count: the number of bits set; segment: that of the encoder. Raises PayloadError unless it
    is a stream of `numel` elements with `count` bits set. On CUDA, which does not wait for the device, any bytes may
    follow the stream, and the result of a corrupt one has another number of bits set instead, so that those who take
    `count` values by it notice.
    """
    [out], corrupt = bitmap_code_decode_all([stream], numel, [count], segment, None if out is None else [out])
    if corrupt is not None:
        raise PayloadError(
            f"corrupt bitmap: got {stream.numel()} bytes that are not a bitmap of {numel} elements with {count} set"
        )
    return out


def bitmap_code_decode_all(
    streams: Sequence[Tensor],
    numel: int,
    counts: Sequence[int],
    segment: int = _MOST_SEGMENT,
    out: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], int | None]:
    """Decode streams of bitmaps of equal sizes, each as `bitmap_code_decode` does, on a device 16 in one launch.

    Returns the bitmaps, and the index of the first corrupt stream, or None. On CUDA, which does not wait for the
    device, that is None.
    """
    segment, nbytes = _checked(segment), bitmap_nbytes(numel)
    bitmaps = []
    table = _native.Table("<QqqQqq")  # struct BitmapStream
    for i, (stream, count) in enumerate(zip(streams, counts, strict=True)):
        stream = _native.check(stream, torch.uint8, "bitmap_code_decode: stream", device=table.device)
        given = None if out is None else out[i]
        bitmaps.append(_native.output(given, nbytes, torch.uint8, stream.device, "bitmap_code_decode: out"))
        table.add(stream, stream.numel(), count, bitmaps[i], numel, segment)
    if numel == 0:  # there is nothing by which CUDA could show that a stream is corrupt
        return bitmaps, next(
            (i for i, (s, count) in enumerate(zip(streams, counts)) if count or (s.numel() and not s.is_cuda)), None
        )
    failed = table.run_failed("bitmap_code_decode", not bitmaps[0].is_cuda) if bitmaps else 0
    return bitmaps, failed - 1 if failed else None


def _checked(segment: int) -> int:
    if not (isinstance(segment, int) and 64 <= segment <= _MOST_SEGMENT and segment % 64 == 0):
        raise ValueError(f"bitmap_code: got segment = {segment!r}, expected a multiple of 64 up to {_MOST_SEGMENT}")
    return segment
