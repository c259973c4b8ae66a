"""Sparse indices on the wire: a bitmap or Rice-coded gaps, whichever is smaller (csrc/common/index_code.h)."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from . import _native
from .compact import bitmap_nbytes, count_marked
from .payload import PayloadError
from .topk import marked_indices

_HEADER = struct.Struct("<III")  # coded, count, nbytes


def _check_indices(indices: Tensor, numel: int, what: str) -> Tensor:
    if not 0 <= numel < 2**31:
        raise ValueError(f"{what}: got {numel} elements, expected 0 to 2^31 - 1")
    return _native.check(indices, torch.int32, f"{what}: indices")


def encoded_indices_nbytes(indices: Tensor, numel: int) -> int:
    """How long `encode_indices` makes them, header included: at most 12 + ceil(numel / 8)."""
    indices = _check_indices(indices, numel, "encode_indices")
    nbytes = _native.kernels().encoded_indices_nbytes(indices.data_ptr(), indices.numel(), numel, _native.threads())
    if nbytes < 0:
        raise ValueError(f"encode_indices: got indices that are not strictly ascending, or not within [0, {numel})")
    return nbytes


def encode_indices(indices: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
    """Ascending indices below `numel`, coded.

    indices: int32, strictly ascending, or a bitmap of them (uint8 of ceil(numel / 8)). out: uint8 of
    `encoded_indices_nbytes`. At a density of 1 % an index costs 1.02 bytes (the entropy is 1.01), at 15 % 0.61 bit per
    element; never more than a plain bitmap and 12 bytes. Deterministic.

    >>> stream = encode_indices(torch.tensor([3, 700], dtype=torch.int32), 100_000)
    >>> stream.numel(), decode_indices(stream, 100_000).tolist()
    (24, [3, 700])
    """
    if isinstance(indices, Tensor) and indices.dtype == torch.uint8:
        bits = _native.check(indices, torch.uint8, "encode_indices: bitmap", bitmap_nbytes(numel))
        indices = marked_indices(bits, numel, count_marked(bits, numel))
    indices = _check_indices(indices, numel, "encode_indices")
    if out is None:
        out = torch.empty(encoded_indices_nbytes(indices, numel), dtype=torch.uint8)
    _native.in_place(out, torch.uint8, "encode_indices: out")
    failed = _native.kernels().encode_indices(
        indices.data_ptr(), indices.numel(), numel, out.data_ptr(), out.numel(), _native.threads()
    )
    if failed:
        expected = encoded_indices_nbytes(indices, numel)  # raises where the indices are wrong
        raise ValueError(f"encode_indices: out: got {out.numel()} elements, expected {expected}")
    return out


def open_indices(buffer: Tensor) -> tuple[Tensor, int]:
    """The stream that begins a buffer (uint8), and how many indices it claims; PayloadError when it is cut off."""
    buffer = _native.check(buffer, torch.uint8, "open_indices: buffer")
    if buffer.numel() < _HEADER.size:
        raise PayloadError(f"truncated indices: got {buffer.numel()} bytes, expected at least {_HEADER.size}")
    _, count, nbytes = _HEADER.unpack(buffer[: _HEADER.size].numpy().tobytes())
    if not _HEADER.size <= nbytes <= buffer.numel():
        raise PayloadError(f"truncated or corrupt indices: got {buffer.numel()} bytes, but they claim {nbytes}")
    return buffer[:nbytes], count


def _opened(stream: Tensor, numel: int) -> tuple[Tensor, int]:
    opened, count = open_indices(stream)
    if opened.numel() != stream.numel():
        raise PayloadError(f"corrupt indices: got {stream.numel()} bytes, expected {opened.numel()}")
    if not 0 <= numel < 2**31 or count > numel:
        raise PayloadError(f"corrupt indices: got {count} of them, expected at most {numel}")
    return opened, count


def decode_indices(stream: Tensor, numel: int) -> Tensor:
    """The inverse of `encode_indices`: int32, strictly ascending, below `numel`.

    stream: uint8, exactly what `encode_indices` wrote (`open_indices` finds it in a longer buffer). PayloadError when
    it is corrupt, whatever the bytes are.
    """
    stream, count = _opened(stream, numel)
    out = torch.empty(count, dtype=torch.int32)
    failed = _native.kernels().decode_indices(
        stream.data_ptr(), stream.numel(), numel, count, out.data_ptr(), _native.threads()
    )
    if failed:
        raise PayloadError(f"corrupt indices: they are not {count} ascending ones below {numel}")
    return out


def sparse_decode_add(stream: Tensor, values: Tensor, out: Tensor, weight: float = 1.0) -> None:
    """out[i] += weight * value, for each index i of the stream and its value.

    stream: uint8, as for `decode_indices`; values: float32, one per index; out: float32, any shape, contiguous, in
    place. PayloadError when the stream is corrupt or has another number of indices; out then holds part of the sum,
    but nothing outside it is written.
    """
    _native.in_place(out, torch.float32, "sparse_decode_add: out")
    values = _native.check(values, torch.float32, "sparse_decode_add: values")
    stream, count = _opened(stream, out.numel())
    if count != values.numel():
        raise PayloadError(f"corrupt indices: got {count} of them, expected {values.numel()}, one per value")
    failed = _native.kernels().sparse_decode_add(
        stream.data_ptr(),
        stream.numel(),
        values.data_ptr(),
        count,
        weight,
        out.data_ptr(),
        out.numel(),
        _native.threads(),
    )
    if failed:
        raise PayloadError(f"corrupt indices: they are not {count} ascending ones below {out.numel()}")
