"""Entropy-coded status bitmaps, for densities that vary along the bitmap (csrc/common/bitmap_code.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native
from .bitmap import bitmap_nbytes
from .errors import PayloadError

_MOST_SEGMENT = 1024


def bitmap_code_capacity(numel: int, segment: int = _MOST_SEGMENT) -> int:
    """Return a number of bytes that suffices for any bitmap of `numel` elements: a plain one and 2 for each segment."""
    return 2 * -(-numel // _checked(segment)) + bitmap_nbytes(numel)


def bitmap_code_encode(bitmap: Tensor, numel: int, segment: int = _MOST_SEGMENT, out: Tensor | None = None) -> Tensor:
    """Encode a bitmap.

    bitmap: uint8 of ceil(numel / 8), spare bits 0. segment: a multiple of 64, up to 1024. out: uint8 of at least
    `bitmap_code_capacity(numel, segment)`; what follows the stream in it is unspecified. Returns uint8: the beginning
    of `out` if given. Each segment of so many elements is Rice-coded with a parameter for its own density p, or stays
    as it is: it costs at most 5 % more than the entropy of independent bits, and 3 bytes. Deterministic. Waits for the
    device if the bitmap is on CUDA, to know the size.

    >>> bitmap = torch.zeros(1000, dtype=torch.uint8)
    >>> bitmap[300] = 32
    >>> stream = bitmap_code_encode(bitmap, 8000)
    >>> stream.numel(), torch.equal(bitmap_code_decode(stream, 8000, 1), bitmap)
    (18, True)
    """
    bitmap = _native.check(bitmap, torch.uint8, "bitmap_code_encode: bitmap", bitmap_nbytes(numel))
    capacity = bitmap_code_capacity(numel, segment)
    if out is None:
        out = torch.empty(capacity, dtype=torch.uint8, device=bitmap.device)
    out = _native.in_place(out, torch.uint8, "bitmap_code_encode: out", device=bitmap.device)
    if out.numel() < capacity:
        raise ValueError(f"bitmap_code_encode: out: got {out.numel()} bytes, expected at least {capacity}")
    arguments = (bitmap.data_ptr(), numel, segment, out.data_ptr())
    return out.view(-1)[: int(_native.run_count("bitmap_code_encode", bitmap, *arguments))]


def bitmap_code_decode(
    stream: Tensor, numel: int, count: int, segment: int = _MOST_SEGMENT, out: Tensor | None = None
) -> Tensor:
    """Return the bitmap that `bitmap_code_encode` encoded: uint8 of ceil(numel / 8), in `out` if given.

    stream: uint8, any bytes; count: the number of bits set; segment: that of the encoder. Raises PayloadError unless it
    is a stream of `numel` elements with `count` bits set. On CUDA, which does not wait for the device, the result of a
    corrupt stream has another number of bits set instead, so that those who take `count` values by it notice.
    """
    stream = _native.check(stream, torch.uint8, "bitmap_code_decode: stream")
    out = _native.output(out, bitmap_nbytes(numel), torch.uint8, stream.device, "bitmap_code_decode: out")
    what = f"corrupt bitmap: got {stream.numel()} bytes that are not a bitmap of {numel} elements with {count} set"
    arguments = (stream.data_ptr(), stream.numel(), numel, _checked(segment), count, out.data_ptr())
    # Without elements, there is nothing by which CUDA could show that a stream is corrupt.
    if (numel == 0 and (stream.numel() or count)) or _native.run_failed("bitmap_code_decode", stream, *arguments):
        raise PayloadError(what)
    return out


def _checked(segment: int) -> int:
    if not (isinstance(segment, int) and 64 <= segment <= _MOST_SEGMENT and segment % 64 == 0):
        raise ValueError(f"bitmap_code: got segment = {segment!r}, expected a multiple of 64 up to {_MOST_SEGMENT}")
    return segment
