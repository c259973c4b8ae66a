"""Sparse indices on the wire: a bitmap or Rice-coded gaps, whichever is smaller (csrc/common/index_code.h)."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _native, groups
from .bitmap import bitmap_count, bitmap_indices, bitmap_nbytes
from .errors import PayloadError
from .weighted_sum import WeightedSum, decode_sums

_HEADER = struct.Struct("<III")  # coded, count, nbytes
_BLOCK = 2048  # kIndexBlock


def _check_indices(indices: Tensor, numel: int) -> Tensor:
    if not 0 <= numel < 2**31:
        raise ValueError(f"index_code_encode: got {numel} elements, expected 0 to 2^31 - 1")
    return _native.check(indices, torch.int32, "index_code_encode: indices")


def _valid_nbytes(nbytes: int, numel: int) -> int:
    if nbytes < 0:
        raise ValueError(f"index_code_encode: got indices that are not strictly ascending, or not within [0, {numel})")
    return nbytes


@functools.lru_cache(maxsize=4096)
def index_code_capacity(count: int, numel: int) -> int:
    """Return a number of bytes that suffices for the stream of any `count` indices below `numel`.

    At a density of 1 % that is 5 % more than the stream of random indices.
    """
    plain = bitmap_nbytes(numel)
    if count == 0:
        return _HEADER.size
    # With k low bits, gaps of the mean g take k + 1 + g / 2^k bits each. Every block chooses the best k; the best of
    # all that is concave in g, so blocks take most if their mean gaps are equal.
    gap = (numel - count) / count
    bits = min(k + 1 + gap / (1 << k) for k in range(31))
    blocks = -(-count // _BLOCK)
    coded = blocks * (8 + 1 + 2) + int(count * bits / 8) + 1  # of each block: entry, k, parts of a byte; all: rounding
    return _HEADER.size + min(plain, coded)


def index_code_write(indices: Tensor, numel: int, out: Tensor) -> int | Tensor:
    """Write the stream of `index_code_encode` to the beginning of `out`, and return its size in bytes.

    indices: int32, strictly ascending; out: uint8. `index_code_capacity` bytes always suffice; nothing is written if
    the stream is longer than `out`. Raises ValueError if the indices are not ascending. On CUDA, which does not wait
    for the device, the size is a 0-dim tensor, and -1 for such indices.
    """
    indices = _check_indices(indices, numel)
    _native.in_place(out, torch.uint8, "index_code_write: out", device=indices.device)
    (written,) = groups.index_code_write([indices], [numel], [out])
    return _valid_nbytes(written, numel) if isinstance(written, int) else written


def index_code_encode(indices: Tensor, numel: int) -> Tensor:
    """Encode ascending indices below `numel`.

    indices: int32, strictly ascending, or a bitmap of them (uint8 of ceil(numel / 8)). Returns uint8. At a density of
    1 % an index costs 1.02 bytes (the entropy is 1.01); at 15 % it costs 0.61 bit per element; never more than a plain
    bitmap and 12 bytes. Deterministic. Raises ValueError if the indices are not ascending. On CUDA, waits for the
    device to know the size.

    >>> stream = index_code_encode(torch.tensor([3, 700], dtype=torch.int32), 100_000)
    >>> stream.numel(), index_code_decode(stream, 100_000).tolist()
    (24, [3, 700])
    """
    if isinstance(indices, Tensor) and indices.dtype == torch.uint8:
        bits = _native.check(indices, torch.uint8, "index_code_encode: bitmap", bitmap_nbytes(numel))
        indices = bitmap_indices(bits, numel, bitmap_count(bits, numel))
    indices = _check_indices(indices, numel)
    out = torch.empty(index_code_capacity(indices.numel(), numel), dtype=torch.uint8, device=indices.device)
    return out[: _valid_nbytes(int(index_code_write(indices, numel, out)), numel)]


def index_code_open(buffer: Tensor) -> tuple[Tensor, int]:
    """Return the stream at the beginning of a buffer, as a view, and the number of indices it claims.

    buffer: uint8. Raises PayloadError if the stream is truncated. Waits for the device if the buffer is on CUDA.
    """
    buffer = _native.check(buffer, torch.uint8, "index_code_open: buffer")
    if buffer.numel() < _HEADER.size:
        raise PayloadError(f"truncated indices: got {buffer.numel()} bytes, expected at least {_HEADER.size}")
    _, count, nbytes = _HEADER.unpack(buffer[: _HEADER.size].cpu().numpy().tobytes())
    if not _HEADER.size <= nbytes <= buffer.numel():
        raise PayloadError(f"truncated or corrupt indices: got {buffer.numel()} bytes, but they claim {nbytes}")
    return buffer[:nbytes], count


def _opened(stream: Tensor, numel: int) -> tuple[Tensor, int]:
    opened, count = index_code_open(stream)
    if opened.numel() != stream.numel():
        raise PayloadError(f"corrupt indices: got {stream.numel()} bytes, expected {opened.numel()}")
    if not 0 <= numel < 2**31 or count > numel:
        raise PayloadError(f"corrupt indices: got {count} of them, expected at most {numel}")
    return opened, count


def index_code_decode(stream: Tensor, numel: int, count: int | None = None) -> Tensor:
    """Return the indices that `index_code_encode` encoded: int32, strictly ascending, below `numel`.

    stream: uint8, exactly what `index_code_encode` wrote (`index_code_open` finds it in a longer buffer). count: the
    number of indices, if it is known. Raises PayloadError if the stream is corrupt; any bytes are safe. Waits for the
    device if the stream is on CUDA and `count` is not given. With `count`, any bytes may follow the stream there, and
    what cannot be decoded becomes 0.
    """
    stream = _native.check(stream, torch.uint8, "index_code_decode: stream")
    waits = False
    if count is None or not stream.is_cuda:
        waits = True
        stream, claimed = _opened(stream, numel)
        if count not in (None, claimed):
            raise PayloadError(f"corrupt indices: got {claimed} of them, expected {count}")
        count = claimed
    out = torch.zeros(count, dtype=torch.int32, device=stream.device)
    table = _native.Table("<QqqqQ")  # struct IndexStream of csrc/common/index_code.h
    table.add(stream, stream.numel(), numel, count, out)
    if table.run_failed("index_code_decode", wait=waits):
        raise PayloadError(f"corrupt indices: they are not {count} ascending ones below {numel}")
    return out


def index_code_decode_add(stream: Tensor, values: Tensor, out: Tensor, weight: float = 1.0) -> None:
    """Add weight * value to out[i], for each index i of the stream and its value.

    stream: uint8, as for `index_code_decode`; values: float32, one per index; out: float32, any shape, contiguous, in
    place. Raises PayloadError if the stream is corrupt or has another number of indices; out then holds part of the
    sum, and nothing outside it is written. On CUDA, which does not wait for the device, any bytes may follow the
    stream, and out becomes NaN if it is corrupt, so that all ranks skip the step.
    """
    index_code_decode_add_all([WeightedSum(out, [((stream, values), weight)])])


def index_code_decode_add_all(sums: Sequence[WeightedSum]) -> None:
    """Compute several sums of sparse tensors, as `index_code_decode_add` adds them, in one call.

    sums: their terms are ((stream, values), weight). All tensors are on one device. The terms of a sum are added in
    order, with the bits of as many calls of `index_code_decode_add`.

    Raises:
        PayloadError: a stream is corrupt, or has another number of indices than values; `index` of the exception is the
            index of the term among those of all sums. That sum then holds part of its terms. On CUDA, it becomes NaN
            instead.

    >>> stream, out = index_code_encode(torch.tensor([1], dtype=torch.int32), 3), torch.empty(3)
    >>> index_code_decode_add_all([WeightedSum(out, [((stream, torch.ones(1)), w) for w in (1.0, 0.5)], add=False)])
    >>> out.tolist()
    [0.0, 1.5, 0.0]
    """
    if failed := decode_sums("index_code_decode_add", sums, "<QqQqd", _term, half=False):  # struct IndexTerm
        raise PayloadError("corrupt indices: they are not ascending ones of the size of the sum", failed - 1)


def _term(encoded: tuple[Tensor, Tensor], out: Tensor, weight: float) -> tuple[Tensor, int, Tensor, int, float]:
    stream, values = encoded
    values = _native.check(values, torch.float32, "index_code_decode_add: values", device=out.device)
    stream = _native.check(stream, torch.uint8, "index_code_decode_add: stream", device=out.device)
    count = values.numel()
    if out.numel() >= 2**31:
        raise PayloadError(f"corrupt indices: they are below 2^31, got {out.numel()} elements to add to")
    if not out.is_cuda:
        _, claimed = _opened(stream, out.numel())
        if claimed != count:
            raise PayloadError(f"corrupt indices: got {claimed} of them, expected {count}, one per value")
    return stream, stream.numel(), values, count, weight
