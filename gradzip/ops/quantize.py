"""Stochastic quantization in buckets (QSGD).

Alistarh, Grubic, Li, Tomioka, Vojnovic, QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding,
NeurIPS 2017, section 3.1.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from . import _native, groups, replays
from .bucket_norms import NORMS, num_buckets
from .errors import PayloadError
from .pack_bits import packed_nbytes

BAD_NORM = "corrupt payload: the norm of a bucket is negative or not finite"


def check_buckets(bits: int, bucket: int, what: str) -> None:
    """Raise ValueError unless there are levels of `bits` bits and buckets of `bucket` elements."""
    if not (isinstance(bits, int) and 2 <= bits <= 16):
        raise ValueError(f"{what}: got bits = {bits!r}, expected an integer from 2 to 16")
    if not (isinstance(bucket, int) and bucket >= 1):
        raise ValueError(f"{what}: got bucket = {bucket!r}, expected an integer >= 1")


def check_quantizer(bits: int, bucket: int, norm: str, key: int, what: str) -> None:
    """Raise ValueError unless the arguments are valid for `quantize`."""
    check_buckets(bits, bucket, what)
    _native.check_key(key, what)
    if norm not in ("l2", "max"):
        raise ValueError(f"{what}: got norm = {norm!r}, expected 'l2' or 'max'")


def quantizer_arguments(
    x: Tensor, bits: int, bucket: int, norm: str, key: int, norms: Tensor | None, what: str,
    dtypes: _native.Dtypes = torch.float32,
) -> tuple[Tensor, Tensor, tuple[int, ...]]:  # fmt: skip
    """Return (x, norms, arguments): both checked, norms new if None, and arguments of the kernels from n to the key."""
    check_quantizer(bits, bucket, norm, key, what)
    x = _native.check(x, dtypes, f"{what}: x")
    n = x.numel()
    norms = _native.output(norms, num_buckets(n, bucket), torch.float32, x.device, f"{what}: norms")
    return x, norms, (n, bits, min(bucket, max(1, n)), NORMS[norm], key)


def quantize(x: Tensor, bits: int, bucket: int = 512, norm: str = "l2", key: int = 0) -> tuple[Tensor, Tensor]:
    """Return (codes, norms): signed levels whose expectation is s * x / norm of their bucket.

    x: n elements, any shape, float32. codes: int32 of x's shape, in [-s, s], s = 2^(bits - 1) - 1; norms: float32 of
    ceil(n / bucket), the l2 norm or the largest magnitude of each `bucket` consecutive elements. bits: 2 to 16.

    level = floor(s * \\|x\\| / norm + u), u uniform in [0, 1), 24 bits, from draw i of `key` for element i. Unbiased:
    E[dequantize] = x. A bucket of zeros has norm 0 and levels 0; NaN counts as 0, infinity as the largest float. Norms
    are summed in double in a fixed order. Deterministic. Does not wait for the device.
    """
    x, norms, arguments = quantizer_arguments(x, bits, bucket, norm, key, None, "quantize")
    codes = torch.empty(x.shape, dtype=torch.int32, device=x.device)
    _native.run("quantize", x, x.data_ptr(), *arguments, codes.data_ptr(), norms.data_ptr())
    return codes, norms


def dequantize(codes: Tensor, norms: Tensor, bits: int, bucket: int = 512) -> Tensor:
    """Return level / s * norm, the values that `quantize` quantized.

    codes: n elements, any shape, int32; norms: float32 of ceil(n / bucket). Returns float32 of the codes' shape.
    Deterministic. Raises ValueError for a level beyond s = 2^(bits - 1) - 1. Waits for the device if the codes are on
    CUDA.

    >>> codes, norms = quantize(torch.tensor([3.0, 0.0, -4.0]), bits=8, norm="max")
    >>> dequantize(codes, norms, bits=8)[2].item(), norms.item()
    (-4.0, 4.0)
    """
    check_buckets(bits, bucket, "dequantize")
    codes = _native.check(codes, torch.int32, "dequantize: codes")
    n = codes.numel()
    norms = _native.check(norms, torch.float32, "dequantize: norms", num_buckets(n, bucket), codes.device)
    x = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    arguments = (codes.data_ptr(), norms.data_ptr(), n, bits, min(bucket, max(1, n)), x.data_ptr())
    if _native.run_failed("quantize_decode", codes, *arguments, wait=True):
        raise ValueError(f"dequantize: got a level beyond {(1 << (bits - 1)) - 1}, the largest of {bits} bits")
    return x


def quantize_packed(
    x: Tensor,
    bits: int,
    bucket: int = 512,
    norm: str = "l2",
    key: int = 0,
    out: Tensor | None = None,
    norms: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (packed, norms): the levels of `quantize` as a bit stream, in one pass over x.

    x: n elements, float32, float16 or bfloat16. packed: uint8 of ceil(n * bits / 8), in `out` if given: a little-endian
    bit stream, per element \\|level\\| in the low bits - 1 bits and the sign above it; zero has no sign. norms: float32
    of ceil(n / bucket), in `norms` if given. Deterministic. Does not wait for the device.

    >>> packed, norms = quantize_packed(torch.tensor([3.0, 0.0, -3.0]), bits=4, norm="max")
    >>> [hex(byte) for byte in packed.tolist()]
    ['0x7', '0xf']
    """
    what = "quantize_packed"
    x, norms, (n, *arguments, key) = quantizer_arguments(x, bits, bucket, norm, key, norms, what, _native.FLOATS)
    out = _native.output(out, packed_nbytes(n, bits), torch.uint8, x.device, f"{what}: out")
    address, dtype = _native.floats(x)
    source = array("Q", (address, n, key, out.data_ptr(), norms.data_ptr()))  # struct QuantizeSource
    _native.run(what, x, source.buffer_info()[0], 1, dtype, *arguments, replays.address(x), 0)
    return out, norms


def quantize_packed_all(
    x: Tensor, bits: int, bucket: int, norm: str, keys: Sequence[int], payloads: Tensor, most: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`quantize_packed` for each row of a matrix, in one call, into payloads that hold both results.

    x: (rows, n), float32, float16 or bfloat16; keys: of each row; payloads: (rows, size), uint8, in place. A payload
    has its norms first, then the packed levels: its size is a multiple of 4, and at least that of both. What follows
    them is unchanged. most: (rows,), float32, in place: gets max \\|x\\| of each row, as by `abs_max_tensor`. Returns
    (packed, norms), views of the payloads: (rows, ceil(n * bits / 8)), uint8, and (rows, ceil(n / bucket)), float32.
    Deterministic. Does not wait for the device.

    >>> payloads = torch.empty(2, 8, dtype=torch.uint8)
    >>> packed, norms = quantize_packed_all(torch.tensor([[3.0, 0.0], [0.0, -4.0]]), 4, 512, "max", [1, 2], payloads)
    >>> packed.tolist(), norms.tolist()
    ([[7], [240]], [[3.0], [4.0]])
    """
    what = "quantize_packed_all"
    check_quantizer(bits, bucket, norm, 0, what)
    row_keys = _native.row_keys(x, keys, what)
    x = _native.check(x, _native.FLOATS, f"{what}: x")
    rows, n = x.shape
    norms_end = 4 * num_buckets(n, bucket)
    end = norms_end + packed_nbytes(n, bits)
    size = payloads.shape[-1]
    if payloads.shape != (rows, size) or size % 4 or size < end:
        raise ValueError(
            f"{what}: got payloads of shape {tuple(payloads.shape)}, expected {rows} of a multiple of 4 bytes, at "
            f"least {end}, for rows of {n} elements of {bits} bits in buckets of {bucket}"
        )
    _native.in_place(payloads, torch.uint8, f"{what}: payloads", device=x.device)
    if most is not None:
        _native.in_place(most, torch.float32, f"{what}: most", rows, x.device)
    if rows:
        begin = groups.addresses(payloads.unbind())
        groups.quantize_packed(x.unbind(), bits, bucket, norm, row_keys, begin + np.uint64(norms_end), begin, most)
    words = payloads.view(-1).view(torch.float32).view(rows, size // 4)
    return payloads[:, norms_end:end], words[:, : norms_end // 4]


def quantize_decode_add(
    packed: Tensor, norms: Tensor, out: Tensor, bits: int, bucket: int = 512, weight: float = 1.0
) -> None:
    """Add weight * the values that `quantize_packed` quantized to `out`, in one pass.

    packed: uint8 of ceil(n * bits / 8); norms: float32 of ceil(n / bucket); out: n elements, float32, in place.
    Every bit pattern decodes to a level in [-s, s]. Deterministic. Raises PayloadError, with out unchanged, if a length
    is wrong, or a norm is negative or not finite. On CUDA, which does not wait for the device, the elements of a bucket
    with such a norm become NaN instead, so that all ranks skip the step.
    """
    _decode_sum([(packed, norms)], out, bits, bucket, weight, True, "quantize_decode_add")


def quantize_decode_sum(
    terms: Sequence[tuple[Tensor, Tensor]], out: Tensor, bits: int, bucket: int = 512, weight: float = 1.0
) -> None:
    """Write weight * the sum of the values that `quantize_packed` quantized, added in order, to `out`, in one pass.

    terms: (packed, norms) of each rank, as for `quantize_decode_add`; out: n elements, float32, or with at most 240
    terms float16 or bfloat16, to which the sum is rounded once. It has the bits of as many calls of
    `quantize_decode_add` onto zeros. Deterministic. Does not wait for the device.

    Raises:
        PayloadError: with `out` unchanged, a length is wrong, or a norm is negative or not finite; `index` of the
            exception is that of the term. On CUDA, the elements of a bucket with such a norm become NaN instead.

    >>> terms = [quantize_packed(torch.tensor([3.0, 0.0, sign * 3.0]), bits=4, norm="max") for sign in (1, -1)]
    >>> quantize_decode_sum(terms, out := torch.empty(3), bits=4, weight=0.5)
    >>> out.tolist()
    [3.0, 0.0, 0.0]
    """
    _decode_sum(terms, out, bits, bucket, weight, False, "quantize_decode_sum")


def _decode_sum(
    terms: Sequence[tuple[Tensor, Tensor]], out: Tensor, bits: int, bucket: int, weight: float, add: bool, what: str
) -> None:
    check_buckets(bits, bucket, what)
    out = _native.sum_of(len(terms), out, f"{what}: out", add)
    n = out.numel()
    nbytes, buckets = packed_nbytes(n, bits), num_buckets(n, bucket)
    all_packed, all_norms = [], []
    for index, (packed, norms) in enumerate(terms):
        packed = _native.check(packed, torch.uint8, f"{what}: packed", device=out.device)
        norms = _native.check(norms, torch.float32, f"{what}: norms", device=out.device)
        if packed.numel() != nbytes or norms.numel() != buckets:
            raise PayloadError(
                f"{what}: got {packed.numel()} bytes and {norms.numel()} norms, expected {nbytes} and {buckets} for "
                f"{n} elements of {bits} bits in buckets of {bucket}",
                index,
            )
        all_packed.append(packed)
        all_norms.append(norms)
    addresses = groups.addresses(all_packed), groups.addresses(all_norms)
    if failed := groups.quantize_decode_sum(*addresses, out, bits, bucket, weight, add):
        raise PayloadError(BAD_NORM, failed - 1)
