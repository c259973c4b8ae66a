"""Orthonormal transforms of short blocks, fused with selection and with decoding (csrc/common/transform.h)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import _native, groups
from .bitmap import bitmap_nbytes
from .pack_bits import packed_nbytes
from .range_float import WORDS, RangeFloat

_DCT, _FOURIER, _PAIRS = range(3)
_TILE = 8192  # elements of a tile, at most: kTransformTile
_MOST_KERNEL, _MOST_AXIS = 128, 16
_SAMPLE = 1 << 15  # groups that estimate the threshold


@dataclass(frozen=True)
class Transform:
    """An orthonormal transform of rows of `length` consecutive elements.

    The elements after the last whole row stay as they are. Coefficients come in groups of `group` numbers, which are
    kept or dropped together: 1 for real coefficients, 2 for complex ones.
    """

    code: int
    length: int
    group: int
    lengths: tuple[int, ...] = ()  # of the axes of a DCT

    def __str__(self) -> str:
        if self.code & 255 == _DCT and self.lengths:
            return f"the DCT of {'x'.join(map(str, self.lengths))}"
        return f"the Fourier transform of {self.length}" if self.code & 255 == _FOURIER else "no transform"

    @classmethod
    def kernel_exists(cls, *lengths: int) -> bool:
        """Whether there is a DCT along axes of these lengths as those of convolution kernels are: each of 2 to 16."""
        return cls.dct_exists(*lengths) and max(lengths, default=0) <= _MOST_AXIS

    @classmethod
    def dct(cls, *lengths: int) -> Transform:
        """The DCT-II of rows of prod(lengths) elements, along axes of the given lengths; no lengths: no transform.

        Up to three lengths of 2 to 16 with a product of at most 128, or one power of two up to 256. Raises ValueError
        for others; `dct_exists` tells.
        """
        if not cls.dct_exists(*lengths):
            raise ValueError(
                f"Transform.dct: got lengths {lengths}, expected up to three of 2 to {_MOST_AXIS} with a product of at "
                f"most {_MOST_KERNEL}, or one power of two up to 256"
            )
        code = _DCT
        for axis, n in enumerate(lengths):
            code |= (n - 1) << 8 * (axis + 1)
        return cls(code, math.prod(lengths), 1, lengths)

    @staticmethod
    def dct_exists(*lengths: int) -> bool:
        """Whether there is a DCT of these lengths."""
        if not all(isinstance(n, int) for n in lengths):
            return False
        kernel = all(2 <= n <= _MOST_AXIS for n in lengths) and math.prod(lengths) <= _MOST_KERNEL
        return (len(lengths) <= 3 and kernel) or lengths in ((32,), (64,), (128,), (256,))

    @classmethod
    def fourier(cls, length: int) -> Transform:
        """The real Fourier transform of rows of `length` elements: a power of two, 8 to 1024.

        Coefficient 0 < j < length / 2 is sqrt(2 / length) times bin j of the FFT. Coefficient 0 holds bins 0 and
        length / 2, which are real, times sqrt(1 / length). Raises ValueError for other lengths; `fourier_exists` tells.
        """
        if not cls.fourier_exists(length):
            raise ValueError(f"Transform.fourier: got length {length}, expected a power of two from 8 to 1024")
        return cls(_FOURIER | (length.bit_length() - 1) << 8, length, 2)

    @staticmethod
    def fourier_exists(length: int) -> bool:
        """Whether there is a Fourier transform of that length."""
        return isinstance(length, int) and 8 <= length <= 1024 and length & (length - 1) == 0

    @classmethod
    def pairs(cls) -> Transform:
        """No transform; the data are complex numbers, real and imaginary parts in turn."""
        return cls(_PAIRS, 2, 2)

    @property
    def tile_rows(self) -> int:
        """The number of rows in a whole tile, a power of two."""
        return 1 << (_TILE // self.length).bit_length() - 1

    def groups(self, numel: int) -> int:
        """The number of groups of coefficients of `numel` elements."""
        return -(-numel // self.group)

    def segment(self, numel: int) -> int:
        """The number of groups, in the order of `transform`, that one segment of the coded bitmap holds.

        A multiple of 64, at most 1024. Real coefficients of different numbers are kept at different rates, so a segment
        holds the same coefficient of several rows; rounded down if there are few rows. Complex ones of neighbouring
        frequencies are kept at nearly the same rate, so a segment may hold several.
        """
        if self.group == 2:
            return 1024
        return max(64, min(1024, self.tile_rows, numel // self.length // 64 * 64))


class TransformPart(NamedTuple):
    """Selected coefficients, coded."""

    bitmap: Tensor  # uint8: the status bitmap of the groups
    packed: Tensor  # uint8: a stream of k * group codes of `number`
    k: int  # groups
    number: RangeFloat


def transform(x: Tensor, transform: Transform) -> Tensor:
    """Return the coefficients of x.

    x: n elements, float32. Returns float32 of groups(n) * group elements: tiles of up to 8192 elements, whole rows; in
    a tile, the first coefficient of every row, then the second one of every row, and so on; then the elements after the
    last whole row. Of complex coefficients, the real parts of a tile come first. Deterministic: finite results have the
    same bits on every device (but for the sign of zero).

    >>> transform(torch.tensor([1.0, 1.0, 2.0, 2.0, 5.0]), Transform.dct(2))
    tensor([1.4142, 2.8284, 0.0000, 0.0000, 5.0000])
    """
    x = _native.check(x, torch.float32, "transform: x")
    out = torch.empty(transform.groups(x.numel()) * transform.group, dtype=torch.float32, device=x.device)
    _native.run("transform", x, x.data_ptr(), x.numel(), transform.code, out.data_ptr())
    return out


def transform_inverse(coefficients: Tensor, transform: Transform, numel: int) -> Tensor:
    """Return the `numel` elements that have these coefficients: the inverse of `transform`. Deterministic."""
    expected = transform.groups(numel) * transform.group
    coefficients = _native.check(coefficients, torch.float32, "transform_inverse: coefficients", expected)
    out = torch.empty(numel, dtype=torch.float32, device=coefficients.device)
    _native.run("transform_inverse", coefficients, coefficients.data_ptr(), numel, transform.code, out.data_ptr())
    return out


def transform_select(
    x: Tensor,
    transform: Transform,
    k: int,
    bitmap: Tensor | None = None,
    values: Tensor | None = None,
    scratch: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (bitmap, values) of the k groups of coefficients of largest magnitude.

    x: n elements, float32, float16 or bfloat16. bitmap: uint8 of ceil(groups / 8), in the order of `transform`; of
    equal magnitudes, the first are kept. values: float32 of k * group: of each tile, the kept coefficients in order
    (complex ones: real parts, then imaginary parts). bitmap and values: outputs, in place if given. scratch: float32;
    `transform_scratch_numel` elements save allocating memory, and a second read of x on a CPU. Deterministic. Does not
    wait for the device.
    """
    x = _native.check(x, _native.FLOATS, "transform_select: x")
    count = transform.groups(x.numel())
    if not 1 <= k <= count:
        raise ValueError(f"transform_select: got k = {k}, expected 1 to {count}, the number of groups")
    bitmap = _native.output(bitmap, bitmap_nbytes(count), torch.uint8, x.device, "transform_select: bitmap")
    values = _native.output(values, k * transform.group, torch.float32, x.device, "transform_select: values")
    scratch_numel = 0 if scratch is None else scratch.numel()
    scratch = _native.output(scratch, scratch_numel, torch.float32, x.device, "transform_select: scratch")
    groups.transform_select([x], transform.code, [k], [bitmap], [values], [scratch])
    return bitmap, values


def transform_scratch_numel(numel: int, transform: Transform, k: int, device: torch.device) -> int:
    """Return how many elements of scratch memory `transform_select` uses: on a CPU as a rule, on CUDA at most."""
    groups = transform.groups(numel)
    if device.type == "cuda":  # whole tiles
        tile = transform.tile_rows * transform.length
        return -(-numel // tile) * tile
    candidates = groups if groups < 4 * _SAMPLE else min(groups, k + k // 2 + _SAMPLE)
    return candidates * (1 if transform.group == 1 else 3)


def transform_decode(
    parts: Sequence[TransformPart], transform: Transform, out: Tensor, weight: float, add: bool = False
) -> int | None:
    """Set `out` to weight * the inverse transform of the sum of the parts, or add that to it.

    out: n elements, float32, in place. The parts are added in order, 16 at a time, and each sum is transformed back.
    Deterministic. Returns the index of the first part whose bitmap does not have k bits set, with `out` unchanged
    by its sum, or None. On CUDA, which does not wait for the device, `out` becomes NaN instead, so that all ranks skip
    the step.
    """
    _native.in_place(out, torch.float32, "transform_decode: out")
    nbytes, device = bitmap_nbytes(transform.groups(out.numel())), out.device
    if not parts:
        raise ValueError("transform_decode: got no parts, expected at least one")
    held = []
    for part in parts:
        bitmap = _native.check(part.bitmap, torch.uint8, "transform_decode: bitmap", nbytes, device)
        coded = packed_nbytes(part.k * transform.group, part.number.bits)
        held.append((bitmap, _native.check(part.packed, torch.uint8, "transform_decode: packed", coded, device)))
    bitmaps, packed = (groups.addresses(column) for column in zip(*held))
    formats = np.concatenate([part.number._words.cpu().numpy().view(WORDS) for part in parts])
    coded_parts = groups.transform_parts(
        bitmaps, packed, groups.numels([own for _, own in held]), [part.k for part in parts], formats
    )
    failed = groups.transform_decode(coded_parts, transform.code, [out], weight, add)
    return failed - 1 if failed else None
