"""Natural compression: stochastic rounding to powers of two, of which the sign and the exponent are sent.

Horváth, Ho, Horváth, Sahu, Canini, Richtárik, Natural Compression for Distributed Deep Learning, 2019.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _native, groups
from .errors import PayloadError
from .pack_bits import packed_nbytes

NOT_POWERS = "corrupt payload: got the exponent of infinity, expected powers of two"
_BITS = 9  # of a code: the sign and 8 bits of exponent of a float32


def natural_nbytes(numel: int) -> int:
    """Return the size of `numel` codes, 9 bits each."""
    return packed_nbytes(numel, _BITS)


def natural_encode(x: Tensor, key: int = 0, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (packed, most): x rounded at random to powers of two, and max \\|x\\| as by `abs_max_tensor`.

    x: n elements, any shape, float32, float16 or bfloat16. packed: uint8 of ceil(9 n / 8), in `out` if given: a
    little-endian bit stream, per element the 8 bits of its exponent and the sign above them. most: float32 of 1
    element. One pass over x.

    If 2^a <= \\|x\\| <= 2^(a+1), the magnitude becomes 2^(a + b), b = Bernoulli(\\|x\\| / 2^a - 1), from draw i of the
    key for element i. Magnitudes below 2^-126 become 0 or 2^-126, those above 2^127 become 2^127. Elements that are not
    finite have any code. Deterministic. Does not wait for the device.

    >>> packed, most = natural_encode(torch.tensor([1.0, -4.0]))
    >>> packed.tolist(), most.item()  # 127; 129 and the sign, 256, nine bits further on
    ([127, 2, 3], 4.0)
    """
    key = _native.check_key(key, "natural_encode")
    x = _native.check(x, _native.FLOATS, "natural_encode: x")
    out = _native.output(out, natural_nbytes(x.numel()), torch.uint8, x.device, "natural_encode: out")
    return out, groups.natural_encode([x], [key], groups.addresses([out]))


def natural_decode_sum(payloads: Sequence[Tensor], out: Tensor, weight: float = 1.0, add: bool = False) -> None:
    """Write weight * the sum of the powers of two of several ranks, added in order, to `out`, in one pass.

    payloads: what `natural_encode` packed, uint8 of ceil(9 n / 8) each; out: n elements, float32, or with at most 240
    payloads float16 or bfloat16, to which the sum is rounded once; add: to `out`, which is float32, rather than
    overwrite it. Deterministic. Does not wait for the device.

    Raises:
        PayloadError: a length is wrong, or a code has the exponent of infinity, which no encoder writes, and `out` has
            any content; `index` of the exception is that of the payload. On CUDA, the element of such a code becomes
            infinite or NaN instead, so that all ranks skip the step.

    >>> natural_decode_sum([natural_encode(torch.tensor([1.0, -4.0]))[0]] * 2, out := torch.empty(2), weight=0.25)
    >>> out.tolist()
    [0.5, -2.0]
    """
    what = "natural_decode_sum"
    out = _native.sum_of(len(payloads), out, f"{what}: out", add)
    n = out.numel()
    checked = [
        _native.check_nbytes(payload, natural_nbytes(n), f"{n} elements", f"{what}: payload", out.device, index)
        for index, payload in enumerate(payloads)
    ]
    if failed := groups.natural_decode_sum(groups.addresses(checked), out, weight, add):
        raise PayloadError(NOT_POWERS, failed - 1)
