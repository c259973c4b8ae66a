"""Elias-coded integers for quantized gradients, most of which are zero.

QSGD (NeurIPS 2017), section 3.2; Elias, Universal codeword sets and representations of the integers, 1975.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native
from .payload import PayloadError
from .quantize import check_buckets, num_buckets, quantizer_arguments

_CHUNK = 4096
_TOP = 65535


def elias_capacity(numel: int, bits: int = 17) -> int:
    """Bytes that suffice for any `numel` levels of `bits` bits, sign included."""
    return -(-numel // _CHUNK) * (2 + 1) + -(-numel * (2 * bits - 1) // 8)


def elias_encode(codes: Tensor, out: Tensor | None = None) -> Tensor:
    """Signed levels as a byte stream: short where most are zero, and the others small. On CUDA, the device is waited
    for to know how long it is.

    codes: n elements, any shape, int32, magnitudes up to 65535. Returns uint8 of as many bytes as it takes: the
    beginning of `out` where given (elias_capacity(n) bytes are always enough; ValueError when it is too short).

    Stream: the bytes of each chunk of 4096 elements as uint16, little-endian, then the chunks. A chunk is a
    little-endian bit stream, zero-padded to a whole byte: for each level that is not zero gamma(zeros before it + 1),
    its sign (1 is negative), gamma(\\|level\\|); then gamma(zeros + 1) if it ends in zeros. gamma(v) is floor(log2 v)
    zeros, a one, and the bits of v below its top one, lowest first. Deterministic.

    >>> elias_encode(torch.tensor([0, -1, 0, 0], dtype=torch.int32)).tolist()  # 010 1 1 110: runs of 1 and 2 zeros
    [1, 0, 218]
    """
    codes = _native.check(codes, torch.int32, "elias_encode: codes")
    if out is None:
        out = torch.empty(elias_capacity(codes.numel()), dtype=torch.uint8, device=codes.device)
    out = _native.in_place(out, torch.uint8, "elias_encode: out", device=codes.device)
    arguments = (codes.data_ptr(), codes.numel(), out.data_ptr(), out.numel())
    nbytes = _run_sized("elias_encode", codes, *arguments, workspace_for=codes.numel())
    if nbytes == -1:
        raise ValueError(f"elias_encode: got a level beyond {_TOP}, the largest there is a code for")
    return _written(out, nbytes, "elias_encode")


def elias_decode(buffer: Tensor, numel: int, top: int = _TOP) -> Tensor:
    """The levels of `elias_encode`: int32 of `numel`.

    buffer: uint8. PayloadError unless it is such a stream, whole, with no level beyond `top` (on CUDA, the device is
    waited for to know).
    """
    buffer = _native.check(buffer, torch.uint8, "elias_decode: buffer")
    if not 0 <= top <= _TOP:
        raise ValueError(f"elias_decode: got top = {top}, expected 0 to {_TOP}")
    codes = torch.empty(numel, dtype=torch.int32, device=buffer.device)
    arguments = (buffer.data_ptr(), buffer.numel(), numel, top, codes.data_ptr())
    if int(_native.run("elias_decode", buffer, *arguments, flag=True, workspace_for=numel)):
        raise PayloadError(
            f"elias_decode: got {buffer.numel()} bytes that are not a stream of {numel} levels up to {top}"
        )
    return codes


def quantize_elias(
    x: Tensor,
    bits: int,
    bucket: int = 512,
    norm: str = "l2",
    key: int = 0,
    out: Tensor | None = None,
    norms: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(buffer, norms): `elias_encode` of the levels of `quantize`, in one pass over x.

    x: n elements, float32. buffer: uint8 of as many bytes as it takes, the beginning of `out` where given
    (elias_capacity(n, bits) bytes are always enough); norms: float32 of ceil(n / bucket), likewise. Deterministic. On
    CUDA, the device is waited for to know how long the buffer is.
    """
    x, norms, arguments = quantizer_arguments(x, bits, bucket, norm, key, norms, "quantize_elias")
    n = x.numel()
    if out is None:
        out = torch.empty(elias_capacity(n, bits), dtype=torch.uint8, device=x.device)
    out = _native.in_place(out, torch.uint8, "quantize_elias: out", device=x.device)
    written = (out.data_ptr(), out.numel(), norms.data_ptr())
    nbytes = _run_sized("quantize_elias", x, *arguments, *written, workspace_for=(n, bits))
    return _written(out, nbytes, "quantize_elias"), norms


def elias_decode_add(
    buffer: Tensor, norms: Tensor, out: Tensor, bits: int, bucket: int = 512, weight: float = 1.0
) -> None:
    """out += weight * what (buffer, norms) of `quantize_elias` stand for: the bits of `quantized_decode_add`.

    buffer: uint8; norms: float32 of ceil(n / bucket); out: n elements, float32, in place. PayloadError, and out partly
    added to, when the bytes are not a stream of n levels of `bits` bits; out is untouched when a norm is negative or
    not finite, or their number is wrong. On CUDA, where nothing waits for the device to know, what cannot be decoded
    (a chunk, a bucket, or all) becomes NaN instead: all ranks skip the step.
    """
    check_buckets(bits, bucket, "elias_decode_add")
    out = _native.in_place(out, torch.float32, "elias_decode_add: out")
    buffer = _native.check(buffer, torch.uint8, "elias_decode_add: buffer", device=out.device)
    norms = _native.check(norms, torch.float32, "elias_decode_add: norms", device=out.device)
    n = out.numel()
    if norms.numel() != num_buckets(n, bucket):
        raise PayloadError(
            f"elias_decode_add: got {norms.numel()} norms, expected {num_buckets(n, bucket)} for {n} elements "
            f"in buckets of {bucket}"
        )
    failed = _native.run(
        "elias_decode_add",
        out,
        buffer.data_ptr(),
        buffer.numel(),
        norms.data_ptr(),
        n,
        bits,
        min(bucket, max(1, n)),
        weight,
        out.data_ptr(),
        flag=True,
        workspace_for=n,
    )
    if failed and not _native.on_cuda(out):
        raise PayloadError(
            f"corrupt payload: got {buffer.numel()} bytes that are not a stream of {n} levels of {bits} bits, "
            "or a norm that is negative or not finite"
        )


def _run_sized(name: str, where: Tensor, *arguments: int, workspace_for: int | tuple[int, ...]) -> int:
    """The length of the stream that an encoder has written, or why it has not."""
    if not _native.on_cuda(where):
        return _native.run(name, where, *arguments)
    nbytes = torch.empty(1, dtype=torch.int64, device=where.device)
    _native.launch(name, where.device, *arguments, nbytes.data_ptr(), workspace_for=workspace_for)
    return int(nbytes)


def _written(out: Tensor, nbytes: int, what: str) -> Tensor:
    if nbytes < 0:
        raise ValueError(f"{what}: out: got {out.numel()} bytes, which is less than the stream needs")
    return out.view(-1)[:nbytes]
