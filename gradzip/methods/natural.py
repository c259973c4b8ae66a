"""Natural compression: unbiased stochastic rounding to powers of two."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..memory.state import VECTOR, Key
from .base.gather import GatherCompressor
from .base.registry import register

_MANTISSA = 23  # bits of a float32; above it are 8 bits of exponent and the sign
_BITS = 9
_INF = 0xFF  # the exponent of inf and NaN


@register("natural", number=21)
@dataclass
class Natural(GatherCompressor):
    """Rounds the magnitude of each element at random to one of the two powers of two next to it.

    With 2^a <= |g_i| <= 2^(a+1), g_i is decoded as

        sign(g_i) 2^(a + b_i),    b_i = Bernoulli(|g_i| / 2^a - 1)

    so that the sign and exponent of a float32 are sent, and its mantissa is the probability of the next exponent.
    Unbiased, and the variance of an element is at most g_i^2 / 8. Magnitudes below 2^-126 are rounded to 0 or 2^-126.
    Those above 2^127, which have no next power, are rounded to 2^127: they alone are biased.

    Args:
        seed: of the b_i.

    Payload: header; 9 bits for each element: 48 + ceil(9 n / 8) bytes, padded to 16.

    Deterministic for a seed. Does not wait for a CUDA device.

    Source: Horváth, Ho, Horváth, Sahu, Canini, Richtárik, Natural Compression for Distributed Deep Learning, 2019,
    definition 1 and theorem 1.
    """

    seed: int = 0

    fixed_nbytes = True
    unbiased = True

    def joined_shape(self, shape: torch.Size) -> tuple[int, ...]:
        return VECTOR

    def encode(self, grad: Tensor, key: Key) -> Tensor:
        numel, magnitude = grad.numel(), ops.abs_max_tensor(grad)
        if ops.known_non_finite(magnitude):
            return self.non_finite(grad)
        bits = grad.view(-1).view(torch.int32)
        mantissa = (bits & ((1 << _MANTISSA) - 1)).float().mul_(2.0**-_MANTISSA)
        up = ops.unpack_bits(ops.bernoulli(mantissa, key.bits), 1, numel)
        codes = (bits >> _MANTISSA).add_(up)
        codes -= ((codes & _INF) == _INF).int()
        payload = ops.new_payload(ops.packed_nbytes(numel, _BITS), grad.device)
        ops.pack_bits(codes, _BITS, out=payload[ops.HEADER_NBYTES :][: ops.packed_nbytes(numel, _BITS)])
        return self.seal([ops.Seal(payload, numel, bytes(16), magnitudes=magnitude)])[0]

    def decode_add(self, payload: ops.Payload, out: Tensor, weight: float) -> None:
        (packed,) = payload.sections(ops.packed_nbytes(out.numel(), _BITS))
        codes = ops.unpack_bits(packed, _BITS, out.numel())
        # On a device, where this check would wait, an exponent of inf makes the average non-finite.
        if not ops.on_device(codes) and bool(((codes & _INF) == _INF).any()):
            raise ops.PayloadError("natural: got the exponent of inf, expected powers of two: the payload is corrupt")
        out.view(-1).add_((codes << _MANTISSA).view(torch.float32), alpha=weight)
