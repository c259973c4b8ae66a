"""One bit per value, and two means per row.

Seide, Fu, Droppo, Li, Yu, 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
of Speech DNNs, Interspeech 2014.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _native
from .bitmap import bitmap_nbytes
from .errors import PayloadError
from .weighted_sum import WeightedSum, decode_sums


def _shape(x: Tensor, what: str) -> tuple[int, int]:
    if x.dim() != 2:
        raise ValueError(f"{what}: got shape {tuple(x.shape)}, expected (rows, columns)")
    return x.shape[0], x.shape[1]


def one_bit_packed(
    x: Tensor, key: int = 0, out: Tensor | None = None, means: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (packed, means): the signs and, per row, the mean of the values with either sign.

    x: (rows, columns), float32. packed: uint8 of ceil(rows * columns / 8), the bits of ``pack_signs(x, key)``; means:
    (rows, 2), float32, of the values whose bit is clear and of those whose bit is set, 0 if there are none. Written to
    `out` and `means` if given. The means minimise the squared error for the given bits. NaN counts as 0, and an
    infinity makes its mean the largest float. Summed in double in a fixed order; deterministic. Does not wait for the
    device.

    >>> packed, means = one_bit_packed(torch.tensor([[1.0, 3.0, -4.0]]))
    >>> packed.tolist(), means.tolist()
    ([4], [[2.0, -4.0]])
    """
    x = _native.check(x, torch.float32, "one_bit_packed: x")
    rows, _ = _shape(x, "one_bit_packed: x")
    out = _native.output(out, bitmap_nbytes(x.numel()), torch.uint8, x.device, "one_bit_packed: out")
    means = _native.output(means, 2 * rows, torch.float32, x.device, "one_bit_packed: means").view(rows, 2)
    one_bit_packed_all([(x, key, out, means)])
    return out, means


def one_bit_packed_all(sources: Sequence[tuple[Tensor, int, Tensor, Tensor]]) -> list[Tensor]:
    """`one_bit_packed` for several tensors, in one call.

    sources: (x, key, out, means) of each, all on one device. Returns max \\|x\\| of each, as by `abs_max_tensor`,
    adjacent in memory.

    >>> out, means = torch.empty(1, dtype=torch.uint8), torch.empty(1, 2)
    >>> one_bit_packed_all([(torch.tensor([[1.0, 3.0, -4.0]]), 0, out, means)]), out.item(), means.tolist()
    ([tensor([4.])], 4, [[2.0, -4.0]])
    """
    table = _native.Table("<QqqQQQ")  # struct OneBitSource of csrc/common/one_bit.h
    for x, key, out, means in sources:
        x = _native.check(x, torch.float32, "one_bit_packed: x", device=table.device)
        rows, columns = _shape(x, "one_bit_packed: x")
        _native.in_place(out, torch.uint8, "one_bit_packed: out", bitmap_nbytes(x.numel()), x.device)
        _native.in_place(means, torch.float32, "one_bit_packed: means", 2 * rows, x.device)
        table.add(x, rows, columns, _native.check_key(key, "one_bit_packed"), out, means)
    most = torch.empty(len(sources), dtype=torch.float32, device=table.device)
    table.run("one_bit_packed", table.replays, most.data_ptr())
    return list(most.split(1)) if sources else []


def one_bit_decode_add(packed: Tensor, means: Tensor, out: Tensor, weight: float = 1.0) -> None:
    """Add weight * the mean for its row and bit to each element of `out`.

    packed: uint8 of ceil(rows * columns / 8); means: (rows, 2), float32; out: (rows, columns), float32, in place.
    Raises PayloadError, with out unchanged, if a length is wrong or a mean is not finite. On CUDA, which does not wait
    for the device, the elements of a row whose mean is not finite become NaN instead, so that all ranks skip the step.
    """
    rows, columns = _shape(out, "one_bit_decode_add: out")
    if means.numel() != 2 * rows or packed.numel() != bitmap_nbytes(out.numel()):
        raise PayloadError(
            f"one_bit_decode_add: got {packed.numel()} bytes and {means.numel()} means, expected "
            f"{bitmap_nbytes(out.numel())} and {2 * rows} for shape {(rows, columns)}"
        )
    one_bit_decode_add_all([WeightedSum(out, [((packed, means), weight)])])


def one_bit_decode_add_all(sums: Sequence[WeightedSum]) -> None:
    """Compute several sums of terms, as `one_bit_decode_add` adds them, in one call and one pass over each `out`.

    sums: their terms are ((packed, means), weight); the rows of the means divide n. A sum that is not added to
    `out` may be float16 or bfloat16: it is rounded once. All tensors are on one device. The terms of a sum are added in
    order, with the bits of as many calls of `one_bit_decode_add`.

    Raises:
        PayloadError: with nothing changed, a length is wrong or a mean is not finite; `index` of the exception is the
            index of the term among those of all sums. On CUDA, rows become NaN instead if a mean is not finite.

    >>> out, packed = torch.empty(3), torch.tensor([4], dtype=torch.uint8)
    >>> one_bit_decode_add_all([WeightedSum(out, [((packed, torch.tensor([[2.0, -4.0]])), 0.5)], add=False)])
    >>> out.tolist()
    [1.0, 1.0, -2.0]
    """
    if failed := decode_sums("one_bit_decode_add", sums, "<QQqd", _term):  # struct OneBitTerm
        raise PayloadError("corrupt payload: the mean of a row is not finite", index=failed - 1)


def _term(encoded: tuple[Tensor, Tensor], out: Tensor, weight: float) -> tuple[Tensor, Tensor, int, float]:
    packed, means = encoded
    numel, rows = out.numel(), means.numel() // 2
    what = "one_bit_decode_add: packed"
    packed = _native.check_nbytes(packed, bitmap_nbytes(numel), f"{numel} signs", what, out.device)
    means = _native.check(means, torch.float32, "one_bit_decode_add: means", device=out.device)
    if numel and (means.numel() != 2 * rows or rows == 0 or numel % rows):
        raise PayloadError(
            f"one_bit_decode_add: got {means.numel()} means, expected two for each row of {numel} elements"
        )
    return packed, means, numel // max(1, rows), weight
