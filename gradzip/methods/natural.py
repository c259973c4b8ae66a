"""Natural compression: unbiased stochastic rounding to powers of two."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter

import numpy as np
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
        vectors = list(map(itemgetter(0), lists))
        numels = list(map(Tensor.numel, vectors))
        payloads = ops.new_payloads(list(map(ops.natural_nbytes, numels)), vectors[0].device)
        begin = groups.addresses(payloads) + np.uint64(ops.HEADER_NBYTES)
        most = groups.natural_encode(vectors, list(map(attrgetter("bits"), keys)), begin)
        magnitudes = most.split_with_sizes([1] * len(vectors))
        return self.seal_vectors(payloads, numels, itertools.repeat(bytes(16)), magnitudes)

    def sum_all(self, sums: Sequence[CodedSum]) -> None:
        for coded in sums:
            (out,) = coded.outs
            numel = out.numel() if coded.parts == 1 else part_lengths(out.numel(), coded.parts)
            packed = ops.body_addresses(coded.payloads, ops.natural_nbytes(numel))
            if failed := groups.natural_decode_sum(packed, out, coded.weight, coded.add, coded.parts):
                raise ops.PayloadError(ops.NOT_POWERS, failed - 1)
