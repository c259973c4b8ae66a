"""Transform coding along the kernels of convolutions, with range-based floats."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ..ops import tensors as ops
from .base.registry import register
from .base.transform_codec import TransformCodec


@register("dct-range", number=4, examples=["theta=0.8", "", "block=16,bits=2"])
@dataclass
class DCTRange(TransformCodec):
    """Sends the largest coefficients of a transform chosen by the gradient's shape, as N-bit floats.

    The gradient of a convolution is transformed by a DCT-II along the positions of each kernel: the axes after the
    first two, if each has up to 16 positions, and all of them together up to 128. Neighbouring positions see nearly the
    same image, so most of a kernel's energy is in few coefficients. Other gradients are not transformed, because
    neighbouring elements of a matrix are unrelated; nor are the partitions of "scatter_reduce" if there are fewer rows
    than ranks.

    Of the n coefficients, the k = round((1 - theta) n) largest in magnitude are kept, and coded as range-based floats
    of N bits. The ranks' coefficients are added before they are transformed back. Front ends join the gradients of a
    bucket that have kernels of the same lengths, and those that have none; n is the size of the joined gradient.

    Args:
        theta: fraction of the coefficients that is dropped, in [0, 1), or a schedule step -> theta.
        bits: N, 2 to 16. At equal bytes, 6 has the smallest error on one layer (docs/transforms.md).
        mantissa: mantissa bits m, 1 to N. None chooses, for each payload, the m with the least expected squared error.
        value_range: range of the floats: r for (-r, r), or (min, max). Values beyond it are clamped, and counted in
            `clamped`. None fits the range to each payload.
        block: length of DCTs along rows of the flat gradient, for gradients without kernels: a power of two from 8 to
            256. None does not transform these gradients.
        error_feedback: add what was not sent to the next gradient. It improves the accuracy by some points
            (docs/transforms.md).
        seed: of stochastic rounding.
        rounding: "nearest" or "stochastic".

    Payload: header; k range floats; coded status bitmap: 48 + ceil(k N / 8) + I bytes, padded to 16. The bitmap has the
    first coefficient of many kernels, then their second one, and so on. Each segment of 64 to 1024 elements of it is
    coded for its own density (gradzip/ops/bitmap_code.py). I is at most n / 8 plus 2 for each segment. At theta = 0.85
    it is 0.63 n / 8 bytes if all coefficients have the same density, and less otherwise.

    Deterministic for a seed: the same bits on every device. On a CUDA device, payloads have room for the longest coded
    bitmap of k coefficients, so that nothing waits for its length.

    Source: the coding of Wang et al., HPDC 2020 (`FFTRange`), with the transform of Ahmed, Natarajan, Rao, Discrete
    Cosine Transform, IEEE Transactions on Computers, 1974.
    """

    bits: int = 6
    block: int | None = None
    error_feedback: bool = True
    seed: int = 0
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        super().__post_init__()
        lengths = (8, 16, 32, 64, 128, 256)
        valid = self.block is None or (isinstance(self.block, int) and self.block in lengths)
        self.check("block", valid, f"None or one of {lengths}")

    def joined_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """Join gradients with kernels of the same lengths, and, as a vector, gradients without kernels."""
        kernel = _kernel(shape)
        return (-1, 1, *kernel) if kernel else (-1,)

    def transform_for(self, shape: torch.Size) -> ops.Transform:
        kernel = _kernel(shape) or (() if self.block is None else (self.block,))
        return ops.Transform.dct(*kernel)

    def transform_with_lengths(self, lengths: tuple[int, ...]) -> ops.Transform | None:
        return _transform_of(lengths)


@functools.cache
def _transform_of(lengths: tuple[int, ...]) -> ops.Transform | None:
    return ops.Transform.dct(*lengths) if ops.Transform.dct_exists(*lengths) else None


@functools.cache
def _kernel(shape: torch.Size) -> tuple[int, ...]:
    """The lengths of the kernels of a gradient of that shape; empty without kernels, and for too long ones."""
    kernel = tuple(n for n in shape[2:] if n > 1)
    return kernel if ops.Transform.kernel_exists(*kernel) else ()
