"""Weighted sums of encoded tensors, for decoders that compute several in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _native
from .errors import PayloadError


class WeightedSum(NamedTuple):
    """A weighted sum of encoded tensors."""

    out: Tensor  # n elements, any shape; float32, or as the decoder says
    terms: Sequence[tuple[Any, float]]  # (encoded, weight) of each; what is encoded is the decoder's first arguments
    add: bool = True  # to `out`, rather than overwrite it


# A row of a decoder's table of terms, of an encoded tensor, the sum's `out` and the weight.
Term = Callable[[Any, Tensor, float], tuple[Any, ...]]


def decode_sums(
    kernel: str, sums: Sequence[WeightedSum], layout: str, term: Term, fails: bool = True, half: bool = True
) -> int:
    """Run a decoder's kernel. Return what it failed with, 0 if it did not.

    layout: of the rows of `term`. `index` of a PayloadError that `term` raises becomes the index of the term among
    those of all sums. fails: whether the kernel can. half: whether it writes 16-bit floats.
    """
    table, terms = _native.Table("<QqQQQ"), _native.Table(layout)  # struct WeightedSum of csrc/common/weighted_sum.h
    for out, own, add in sums:
        dtypes = _native.FLOATS if half and not add else torch.float32
        _native.in_place(out, dtypes, f"{kernel}: out", device=table.device)
        table.add(out, out.numel(), len(own), add, _native.FLOATS.index(out.dtype))
        for encoded, weight in own:
            try:
                row = term(encoded, out, float(weight))
            except PayloadError as error:
                error.index = terms.count
                raise
            terms.add(*row)
    if fails:
        return table.run_failed(kernel, terms.address)
    table.run(kernel, terms.address)
    return 0
