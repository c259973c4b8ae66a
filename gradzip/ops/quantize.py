"""Stochastic quantization by buckets (QSGD).

Alistarh, Grubic, Li, Tomioka, Vojnovic, QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding,
NeurIPS 2017, section 3.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native
from ._keys import check_key
from .pack_bits import packed_nbytes
from .payload import PayloadError

NORMS = {"l2": 0, "max": 1}


def num_buckets(numel: int, bucket: int) -> int:
    """Buckets of so many elements, the last of which may be shorter."""
    return -(-numel // bucket)


def check_buckets(bits: int, bucket: int, what: str) -> None:
    if not (isinstance(bits, int) and 2 <= bits <= 16):
        raise ValueError(f"{what}: got bits = {bits!r}, expected an integer from 2 to 16")
    if not (isinstance(bucket, int) and bucket >= 1):
        raise ValueError(f"{what}: got bucket = {bucket!r}, expected an integer >= 1")


def check_quantizer(bits: int, bucket: int, norm: str, key: int, what: str) -> None:
    check_buckets(bits, bucket, what)
    check_key(key, what)
    if norm not in NORMS:
        raise ValueError(f"{what}: got norm = {norm!r}, expected 'l2' or 'max'")


def quantizer_arguments(
    x: Tensor, bits: int, bucket: int, norm: str, key: int, norms: Tensor | None, what: str
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """(x, norms, arguments): both checked, norms new where None, and what the kernels take about x and its levels."""
    check_quantizer(bits, bucket, norm, key, what)
    x = _native.check(x, torch.float32, f"{what}: x")
    n = x.numel()
    norms = _native.output(norms, num_buckets(n, bucket), torch.float32, x.device, f"{what}: norms")
    return x, norms, (x.data_ptr(), n, bits, min(bucket, max(1, n)), NORMS[norm], key)


def quantize(x: Tensor, bits: int, bucket: int = 512, norm: str = "l2", key: int = 0) -> tuple[Tensor, Tensor]:
    """(codes, norms): signed levels that are s * x / norm of their bucket on average.

    x: n elements, any shape, float32. codes: int32 of x's shape, in [-s, s], s = 2^(bits - 1) - 1; norms: float32 of
    ceil(n / bucket), the l2 norm or the largest magnitude of each `bucket` consecutive elements. bits: 2 to 16.

    level = floor(s * \\|x\\| / norm + u), u uniform in [0, 1), 24 bits, draw i of `key` for element i. Unbiased:
    E[dequantize] = x. A bucket of zeros has norm 0 and levels 0; NaN counts as 0, infinity as the largest float. Norms
    are summed in double in a fixed order. Deterministic.
    """
    x, norms, arguments = quantizer_arguments(x, bits, bucket, norm, key, None, "quantize")
    codes = torch.empty(x.shape, dtype=torch.int32, device=x.device)
    _native.run("quantize", x, *arguments, codes.data_ptr(), norms.data_ptr(), workspace_for=x.numel())
    return codes, norms


def dequantize(codes: Tensor, norms: Tensor, bits: int, bucket: int = 512) -> Tensor:
    """level / s * norm: what `quantize` stands for.

    codes: n elements, any shape, int32; norms: float32 of ceil(n / bucket). Returns float32 of the codes' shape.
    ValueError for a level beyond s = 2^(bits - 1) - 1 (on CUDA, the device is waited for to know).

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
    if int(_native.run("dequantize", codes, *arguments, flag=True)):
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
    """(packed, norms): `quantize` and packing in one pass over x, of the same levels.

    x: n elements, float32. packed: uint8 of ceil(n * bits / 8), written to `out` where given: a little-endian bit
    stream, per element \\|level\\| in the low bits - 1 bits and the sign above it; zero has no sign. norms: float32 of
    ceil(n / bucket), likewise. Deterministic.

    >>> packed, norms = quantize_packed(torch.tensor([3.0, 0.0, -3.0]), bits=4, norm="max")
    >>> [hex(byte) for byte in packed.tolist()]
    ['0x7', '0xf']
    """
    x, norms, arguments = quantizer_arguments(x, bits, bucket, norm, key, norms, "quantize_packed")
    out = _native.output(out, packed_nbytes(x.numel(), bits), torch.uint8, x.device, "quantize_packed: out")
    _native.run("quantize_packed", x, *arguments, out.data_ptr(), norms.data_ptr(), workspace_for=x.numel())
    return out, norms


def quantized_decode_add(
    packed: Tensor, norms: Tensor, out: Tensor, bits: int, bucket: int = 512, weight: float = 1.0
) -> None:
    """out += weight * what (packed, norms) of `quantize_packed` stand for, in one pass.

    packed: uint8 of ceil(n * bits / 8); norms: float32 of ceil(n / bucket); out: n elements, float32, in place.
    Every bit pattern decodes to a level in [-s, s]. PayloadError, and out untouched, when a length is wrong, or a norm
    is negative or not finite. On CUDA, where nothing waits for the device to know, the elements of that bucket become
    NaN instead: all ranks skip the step.
    """
    check_buckets(bits, bucket, "quantized_decode_add")
    out = _native.in_place(out, torch.float32, "quantized_decode_add: out")
    packed = _native.check(packed, torch.uint8, "quantized_decode_add: packed", device=out.device)
    norms = _native.check(norms, torch.float32, "quantized_decode_add: norms", device=out.device)
    n = out.numel()
    nbytes, buckets = packed_nbytes(n, bits), num_buckets(n, bucket)
    if packed.numel() != nbytes or norms.numel() != buckets:
        raise PayloadError(
            f"quantized_decode_add: got {packed.numel()} bytes and {norms.numel()} norms, expected {nbytes} and "
            f"{buckets} for {n} elements of {bits} bits in buckets of {bucket}"
        )
    arguments = (packed.data_ptr(), norms.data_ptr(), n, bits, min(bucket, max(1, n)), weight, out.data_ptr())
    failed = _native.run("quantized_decode_add", out, *arguments, flag=True)
    if failed and not _native.on_cuda(out):
        raise PayloadError("corrupt payload: the norm of a bucket is negative or not finite")
