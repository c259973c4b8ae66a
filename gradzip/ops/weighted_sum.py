"""Weighted sums of encoded tensors, for decoders that compute several in one call."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _native
from .errors import PayloadError

_SUM = struct.Struct("<QqQQ")  # struct WeightedSum of csrc/common/weighted_sum.h


class WeightedSum(NamedTuple):
    """A weighted sum of encoded tensors."""

    out: Tensor  # n elements, float32, any shape
    terms: Sequence[tuple[Any, float]]  # (encoded, weight) of each; what is encoded is the decoder's first arguments
    add: bool = True  # to `out`, rather than overwrite it


def decode_sums(
    kernel: str,
    sums: Sequence[WeightedSum],
    term: Callable[[Any, float, Tensor], tuple[bytes, Sequence[Tensor]]],
    run: Callable[..., int | None] = _native.run_failed,
) -> int:
    """Run a decoder's kernel. Return what it failed with, 0 if it did not.

    term: of an encoded tensor, its weight and the sum's `out`, the kernel's struct of the term and the tensors that it
    has addresses of. `index` of a PayloadError that it raises becomes the index of the term among those of all sums.
    """
    table, terms = bytearray(), bytearray()
    kept: list[Sequence[Tensor]] = []
    device = None
    for out, own, add in sums:
        _native.in_place(out, torch.float32, f"{kernel}: out", device=device)
        device = out.device
        table += _SUM.pack(out.data_ptr(), out.numel(), len(own), add)
        for encoded, weight in own:
            try:
                packed, tensors = term(encoded, weight, out)
            except PayloadError as error:
                error.index = len(kept)
                raise
            terms += packed
            kept.append(tensors)
    if not sums:
        return 0
    addresses = [_native.address_of(buffer) for buffer in (table, terms)]
    return run(kernel, sums[0].out, addresses[0], len(sums), addresses[1]) or 0
