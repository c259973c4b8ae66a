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
    """How long `encode_indices` makes them, header included: at most 12 + ceil(numel / 8). Waits for the device where
    they are on one."""
    indices = _check_indices(indices, numel, "encode_indices")
    if _native.on_cuda(indices):
        nbytes = int(_encode_on_cuda(indices, numel, None))
    else:
        nbytes = _native.kernels().encoded_indices_nbytes(indices.data_ptr(), indices.numel(), numel, _native.threads())
    return _sound_nbytes(nbytes, numel)


def _sound_nbytes(nbytes: int, numel: int) -> int:
    if nbytes < 0:
        raise ValueError(f"encode_indices: got indices that are not strictly ascending, or not within [0, {numel})")
    return nbytes


def _encode_on_cuda(indices: Tensor, numel: int, out: Tensor | None) -> Tensor:
    """Writes the stream to `out`, if it has room; its length, or -1 for unsound indices."""
    nbytes = torch.empty(1, dtype=torch.int64, device=indices.device)
    _native.launch(
        "encode_indices",
        indices.device,
        indices.data_ptr(),
        indices.numel(),
        numel,
        0 if out is None else out.data_ptr(),
        0 if out is None else out.numel(),
        nbytes.data_ptr(),
        workspace_for=indices.numel(),
    )
    return nbytes


def encode_indices(indices: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
    """Ascending indices below `numel`, coded.

    indices: int32, strictly ascending, or a bitmap of them (uint8 of ceil(numel / 8)). out: uint8 of
    `encoded_indices_nbytes`. At a density of 1 % an index costs 1.02 bytes (the entropy is 1.01), at 15 % 0.61 bit per
    element; never more than a plain bitmap and 12 bytes. Deterministic.

    On CUDA, only without `out` or from a bitmap does anything wait, to know the size; with it, what is written for
    unsound indices or into an `out` of another size is unspecified.

    >>> stream = encode_indices(torch.tensor([3, 700], dtype=torch.int32), 100_000)
    >>> stream.numel(), decode_indices(stream, 100_000).tolist()
    (24, [3, 700])
    """
    if isinstance(indices, Tensor) and indices.dtype == torch.uint8:
        bits = _native.check(indices, torch.uint8, "encode_indices: bitmap", bitmap_nbytes(numel))
        indices = marked_indices(bits, numel, count_marked(bits, numel))
    indices = _check_indices(indices, numel, "encode_indices")
    if out is not None:
        _native.in_place(out, torch.uint8, "encode_indices: out", device=indices.device)
    if _native.on_cuda(indices):
        if out is not None:
            _encode_on_cuda(indices, numel, out)
            return out
        most = torch.empty(_HEADER.size + bitmap_nbytes(numel), dtype=torch.uint8, device=indices.device)
        return most[: _sound_nbytes(int(_encode_on_cuda(indices, numel, most)), numel)]
    if out is None:
        out = torch.empty(encoded_indices_nbytes(indices, numel), dtype=torch.uint8, device=indices.device)
    failed = _native.kernels().encode_indices(
        indices.data_ptr(), indices.numel(), numel, out.data_ptr(), out.numel(), _native.threads()
    )
    if failed:
        expected = encoded_indices_nbytes(indices, numel)  # raises where the indices are wrong
        raise ValueError(f"encode_indices: out: got {out.numel()} elements, expected {expected}")
    return out


def open_indices(buffer: Tensor) -> tuple[Tensor, int]:
    """The stream that begins a buffer (uint8), and how many indices it claims; PayloadError when it is cut off. Waits
    for the device where the buffer is on one."""
    buffer = _native.check(buffer, torch.uint8, "open_indices: buffer")
    if buffer.numel() < _HEADER.size:
        raise PayloadError(f"truncated indices: got {buffer.numel()} bytes, expected at least {_HEADER.size}")
    _, count, nbytes = _HEADER.unpack(buffer[: _HEADER.size].cpu().numpy().tobytes())
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
    it is corrupt, whatever the bytes are (on CUDA, the device is waited for to know).
    """
    stream, count = _opened(stream, numel)
    out = torch.empty(count, dtype=torch.int32, device=stream.device)
    arguments = (stream.data_ptr(), stream.numel(), numel, count, out.data_ptr())
    if int(_native.run("decode_indices", stream, *arguments, flag=True, workspace_for=numel)):
        raise PayloadError(f"corrupt indices: they are not {count} ascending ones below {numel}")
    return out


def sparse_decode_add(stream: Tensor, values: Tensor, out: Tensor, weight: float = 1.0) -> None:
    """out[i] += weight * value, for each index i of the stream and its value.

    stream: uint8, as for `decode_indices`; values: float32, one per index; out: float32, any shape, contiguous, in
    place. PayloadError when the stream is corrupt or has another number of indices; out then holds part of the sum,
    but nothing outside it is written. On CUDA, where nothing waits for the device to know, out becomes NaN instead: all
    ranks skip the step.
    """
    _native.in_place(out, torch.float32, "sparse_decode_add: out")
    values = _native.check(values, torch.float32, "sparse_decode_add: values", device=out.device)
    stream = _native.check(stream, torch.uint8, "sparse_decode_add: stream", device=out.device)
    count = values.numel()
    arguments = (stream.data_ptr(), stream.numel(), values.data_ptr(), count, weight, out.data_ptr(), out.numel())
    if out.numel() >= 2**31:
        raise PayloadError(f"corrupt indices: they are below 2^31, got {out.numel()} elements to add to")
    if not _native.on_cuda(out):
        _, claimed = _opened(stream, out.numel())
        if claimed != count:
            raise PayloadError(f"corrupt indices: got {claimed} of them, expected {count}, one per value")
    failed = _native.run("sparse_decode_add", out, *arguments, flag=True, workspace_for=out.numel())
    if not _native.on_cuda(out) and failed:
        raise PayloadError(f"corrupt indices: they are not {count} ascending ones below {out.numel()}")
