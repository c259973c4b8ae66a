"""Elias-coded integers for quantized gradients, most of which are zero.

QSGD (NeurIPS 2017), section 3.2; Elias, Universal codeword sets and representations of the integers, 1975.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _native, groups
from .bucket_norms import num_buckets
from .errors import PayloadError
from .quantize import check_buckets, quantizer_arguments

BAD_STREAM = "corrupt payload: the bytes do not code its levels, or a norm is negative or not finite"
_CHUNK = 4096
_TOP = 65535


def elias_capacity(numel: int, bits: int = 17) -> int:
    """Return a number of bytes that suffices for any `numel` levels of `bits` bits, sign included."""
    return -(-numel // _CHUNK) * (2 + 1) + -(-numel * (2 * bits - 1) // 8)


def elias_encode(codes: Tensor, out: Tensor | None = None) -> Tensor:
    """Return signed levels as a byte stream, which is short if most are zero and the others small.

    codes: n elements, any shape, int32, magnitudes up to 65535. Returns uint8: the beginning of `out` if given.
    elias_capacity(n) bytes always suffice; raises ValueError if `out` is too short. Deterministic. Waits for the device
    if the codes are on CUDA, to know the length.

    Stream: the size of each chunk of 4096 elements in bytes as uint16, little-endian, then the chunks. A chunk is a
    little-endian bit stream, zero-padded to a whole byte. Each nonzero level is gamma(number of zeros before it + 1),
    its sign (1 is negative), gamma(\\|level\\|); trailing zeros are gamma(zeros + 1). gamma(v) is floor(log2 v) zeros,
    a one, and the bits of v below its top bit, lowest first.

    >>> elias_encode(torch.tensor([0, -1, 0, 0], dtype=torch.int32)).tolist()  # 010 1 1 110: runs of 1 and 2 zeros
    [1, 0, 218]
    """
    codes = _native.check(codes, torch.int32, "elias_encode: codes")
    if out is None:
        out = torch.empty(elias_capacity(codes.numel()), dtype=torch.uint8, device=codes.device)
    out = _native.in_place(out, torch.uint8, "elias_encode: out", device=codes.device)
    nbytes = int(_native.run_count("elias_encode", codes, codes.data_ptr(), codes.numel(), out.data_ptr(), out.numel()))
    if nbytes == -1:
        raise ValueError(f"elias_encode: got a level beyond {_TOP}, the largest there is a code for")
    return _written(out, nbytes, "elias_encode")


def elias_decode(buffer: Tensor, numel: int, top: int = _TOP) -> Tensor:
    """Return the levels that `elias_encode` encoded: int32 of `numel`.

    buffer: uint8. Raises PayloadError unless it is exactly a stream of `numel` levels, none beyond `top`. Waits for the
    device if the buffer is on CUDA.
    """
    buffer = _native.check(buffer, torch.uint8, "elias_decode: buffer")
    if not 0 <= top <= _TOP:
        raise ValueError(f"elias_decode: got top = {top}, expected 0 to {_TOP}")
    codes = torch.empty(numel, dtype=torch.int32, device=buffer.device)
    arguments = (buffer.data_ptr(), buffer.numel(), numel, top, codes.data_ptr())
    if _native.run_failed("elias_decode", buffer, *arguments, wait=True):
        raise PayloadError(
            f"elias_decode: got {buffer.numel()} bytes that are not a stream of {numel} levels up to {top}"
        )
    return codes


def elias_quantize(
    x: Tensor,
    bits: int,
    bucket: int = 512,
    norm: str = "l2",
    key: int = 0,
    out: Tensor | None = None,
    norms: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (buffer, norms): `elias_encode` of the levels of `quantize`, in one pass over x.

    x: n elements, float32. buffer: uint8, the beginning of `out` if given; elias_capacity(n, bits) bytes always
    suffice. norms: float32 of ceil(n / bucket), in `norms` if given. Deterministic. Waits for the device if x is on
    CUDA, to know the length of the buffer.
    """
    x, norms, arguments = quantizer_arguments(x, bits, bucket, norm, key, norms, "elias_quantize")
    if out is None:
        out = torch.empty(elias_capacity(x.numel(), bits), dtype=torch.uint8, device=x.device)
    out = _native.in_place(out, torch.uint8, "elias_quantize: out", device=x.device)
    results = (out.data_ptr(), out.numel(), norms.data_ptr())
    nbytes = int(_native.run_count("elias_quantize", x, x.data_ptr(), *arguments, *results))
    return _written(out, nbytes, "elias_quantize"), norms


def elias_decode_add(
    buffer: Tensor, norms: Tensor, out: Tensor, bits: int, bucket: int = 512, weight: float = 1.0
) -> None:
    """Add weight * the values that `elias_quantize` encoded to `out`, with the bits of `quantize_decode_add`.

    As `elias_decode_sum` of one term, with add=True.
    """
    elias_decode_sum([(buffer, norms)], out, bits, bucket, weight, True)


def elias_decode_sum(
    terms: Sequence[tuple[Tensor, Tensor]], out: Tensor, bits: int, bucket: int = 512, weight: float = 1.0,
    add: bool = False,
) -> None:  # fmt: skip
    """Write weight * the sum of the values that `elias_quantize` encoded, added in order, to `out`, in one pass.

    terms: (buffer, norms) of each rank, uint8, and float32 of ceil(n / bucket); out: n elements, float32; add: to `out`
    rather than overwrite it. The bits are those of `quantize_decode_sum`. Deterministic. Does not wait for the device.

    Raises:
        PayloadError: the number of norms is wrong, or a norm is negative or not finite (`out` is unchanged), or the
            bytes are not a stream of n levels of `bits` bits (`out` may hold part of the sum); `index` of the exception
            is that of the term. On CUDA, the elements that cannot be decoded (a chunk, a bucket, or all) become NaN
            instead, so that all ranks skip the step.

    >>> terms = [elias_quantize(torch.tensor([3.0, 0.0, sign * 3.0]), bits=4, norm="max") for sign in (1, -1)]
    >>> elias_decode_sum(terms, out := torch.empty(3), bits=4, weight=0.5)
    >>> out.tolist()
    [3.0, 0.0, 0.0]
    """
    what = "elias_decode_sum"
    check_buckets(bits, bucket, what)
    out = _native.in_place(out, torch.float32, f"{what}: out")
    n = out.numel()
    streams, all_norms = [], []
    for index, (buffer, norms) in enumerate(terms):
        streams.append(_native.check(buffer, torch.uint8, f"{what}: buffer", device=out.device))
        all_norms.append(_native.check(norms, torch.float32, f"{what}: norms", device=out.device))
        if norms.numel() != num_buckets(n, bucket):
            raise PayloadError(
                f"{what}: got {norms.numel()} norms, expected {num_buckets(n, bucket)} for {n} elements in buckets of "
                f"{bucket}",
                index,
            )
    nbytes = groups.numels(streams)
    addresses = groups.addresses(streams), nbytes, groups.addresses(all_norms)
    if failed := groups.elias_decode_sum(*addresses, out, bits, bucket, weight, add):
        got = f"got {nbytes[failed - 1]} bytes that are not a stream of {n} levels of {bits} bits, or a norm"
        raise PayloadError(f"corrupt payload: {got} that is negative or not finite", failed - 1)


def _written(out: Tensor, nbytes: int, what: str) -> Tensor:
    if nbytes < 0:
        raise ValueError(f"{what}: out: got {out.numel()} bytes, which is less than the stream needs")
    return out.view(-1)[:nbytes]
