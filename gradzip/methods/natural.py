"""Natural compression: unbiased stochastic rounding to powers of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from torch import Tensor

from ..memory.state import Key
from ..ops import groups
from ..ops import tensors as ops
from .base.gather import CodedSum, GatherCompressor, part_lengths
from .base.registry import register


@register("natural", number=21)
@dataclass
class Natural(GatherCompressor):
    """Rounds the magnitude of each element at random to one of the two powers of two next to it.

    With 2^a <= |g_i| <= 2^(a+1), g_i is decoded as

        sign(g_i) 2^(a + b_i),    b_i = Bernoulli(|g_i| / 2^a - 1)

    so that the sign and exponent of a float32 are sent, and its mantissa is the probability of the next exponent.
    Unbiased, and the variance of an element is at most g_i^2 / 8. Magnitudes below 2^-126 are rounded to 0 or 2^-126.
    Those above 2^127, which have no next power, count as infinite.

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
    undone_on_device = True
    reads_half = writes_half = sums_parts = True

    def encode_lists(self, lists: Sequence[Sequence[Tensor]], keys: Sequence[Key]) -> list[Tensor]:
        seals = list(map(self._unsealed, map(itemgetter(0), lists), keys))
        return ops.seal_payloads(seals, method=self.number, digest=self.digest)

    def _unsealed(self, grad: Tensor, key: Key) -> ops.Seal:
        """The payload of a vector, to be sealed."""
        numel = grad.numel()
        payload = ops.new_payload(ops.natural_nbytes(numel), grad.device)
        body = payload[ops.HEADER_NBYTES :][: ops.natural_nbytes(numel)]
        _, largest = ops.natural_encode(grad, key.bits, out=body)
        if ops.known_non_finite(largest):
            payload = ops.new_payload(0, grad.device)
        return ops.Seal(payload, numel, magnitudes=largest)

    def sum_all(self, sums: Sequence[CodedSum]) -> None:
        for coded in sums:
            (out,) = coded.outs
            numel = out.numel() if coded.parts == 1 else part_lengths(out.numel(), coded.parts)
            packed = ops.body_addresses(coded.payloads, ops.natural_nbytes(numel))
            if failed := groups.natural_decode_sum(packed, out, coded.weight, coded.add, coded.parts):
                raise ops.PayloadError(ops.NOT_POWERS, failed - 1)
