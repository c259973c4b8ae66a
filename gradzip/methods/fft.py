"""FFT-based gradient sparsification with range-based floats."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..ops import tensors as ops
from .base.registry import register
from .base.transform import inverse_transform, pairs_to_spectrum, spectra, spectrum_to_pairs, transform_shape
from .base.transform_codec import TransformCodec


@register(
    "fft-range",
    number=1,
    examples=[
        "theta=0.5",
        "error_feedback=False",
        "block=None,error_feedback=False",
        "block=8,rounding=stochastic",
        "block=100,bits=2,value_range=1.0,error_feedback=False",
    ],
)
@dataclass
class FFTRange(TransformCodec):
    """Sends the largest frequencies of the gradient as N-bit floats fitted to their range.

    The gradient is cut into rows of `block` elements, and each row is transformed by a real FFT. Of the C frequencies
    of all rows, the k = round((1 - theta) C) largest in magnitude are kept, and their real and imaginary parts coded as
    range-based floats of N bits. The first and the last frequency of a row are real, and are kept or dropped together.
    The ranks' frequencies are added before they are transformed back, so a step needs one inverse transform for any
    world size.

    At equal bytes, the error is smaller than that of `TopK` for convolutions, for which that of `DCTRange` is smaller
    still. Matrices of dense layers and of transformers have no structure along their rows: there `TopK`, and
    `DCTRange`, which does not transform them, have smaller errors.

    Args:
        theta: fraction of the frequencies that is dropped, in [0, 1), or a schedule step -> theta.
        bits: N, 2 to 16.
        mantissa: mantissa bits m, 1 to N. None chooses, for each payload, the m with the least expected squared error.
        value_range: range of the floats: r for (-r, r), or (min, max). Values beyond it are clamped, and counted in
            `clamped`. None fits the range to each payload. (The paper fixes it.)
        block: length of the transforms. Powers of two from 8 to 1024 have a kernel, which does not transform the
            elements after the last whole row. Other lengths use torch.fft, in rows of equal length up to `block`. None
            transforms the whole gradient at once, as the paper does.
        error_feedback: add what was not sent to the next gradient. The paper does not. Without it, the accuracy is
            some points lower (docs/accuracy.md).
        seed: of stochastic rounding.
        rounding: "nearest" or "stochastic". Stochastic rounding is unbiased for values up to the largest one that has a
            code, which is within half a step (a relative 2^-(m+1)) of the end of a fitted range.

    Payload: header; 2 k range floats; coded status bitmap of the C = n / 2 frequencies: 48 + ceil(2 k N / 8) + I bytes,
    padded to 16. Each run of 1024 frequencies of the bitmap is coded for its own density (gradzip/ops/bitmap_code.py).
    I is at most C / 8 plus 2 for each run. At theta = 0.85 it is 0.63 C / 8 bytes if all frequencies have the same
    density, and less otherwise; with N = 10, the payload is then 17.6 times smaller than float32 (16.0 times with the
    paper's uncoded bitmap).

    Deterministic for a seed. If `block` has a kernel, the bits are the same on every device; otherwise all ranks need
    the same FFT library. On a CUDA device, payloads have room for the longest coded bitmap of k frequencies, so that
    nothing waits for its length: 1.4 % more than the average length at the defaults.

    Source: Wang et al., FFT-based Gradient Sparsification for the Distributed Training of Deep Neural Networks, HPDC
    2020, figure 3.
    """

    block: int | None = 64
    error_feedback: bool = True
    seed: int = 0
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        super().__post_init__()
        valid = self.block is None or (isinstance(self.block, int) and self.block >= 2)
        self.check("block", valid, "None or an integer >= 2")

    @property
    def reads_half(self) -> bool:  # type: ignore[override]
        return self._transform is not _PAIRS and super().reads_half  # torch.fft takes float32

    @property
    def _transform(self) -> ops.Transform:
        """The transform of the kernel, or pairs of numbers, which hold the spectra of torch.fft."""
        return _transform_of(self.block)

    def transform_for(self, shape: torch.Size) -> ops.Transform:
        return self._transform

    def transform_with_lengths(self, lengths: tuple[int, ...]) -> ops.Transform | None:
        return None if lengths else self._transform

    # --- rows that torch.fft transforms

    def signal_numel(self, numel: int) -> int:
        if self._transform is not _PAIRS:
            return numel
        rows, length = transform_shape(numel, self.block)
        return rows * 2 * ((length + 1) // 2)

    def row_length(self, transform: ops.Transform, numel: int) -> int:
        return transform_shape(numel, self.block)[1] if transform is _PAIRS else transform.length

    def signals(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """The gradients, or their frequencies by torch.fft as pairs of real and imaginary parts."""
        flats = super().signals(grads)
        if self._transform is not _PAIRS:
            return flats
        numels = list(map(self.signal_numel, map(Tensor.numel, flats)))
        found = list(self._cut("pairs", numels, torch.float32, flats[0].device))
        for flat, signal in zip(flats, found):
            pairs, length = self._pairs(signal, flat.numel())
            for chunk, spectrum in spectra(flat, self.block, self.workspace):
                spectrum_to_pairs(spectrum, length, out=pairs[chunk])
        return found

    def _pairs(self, signal: Tensor, numel: int) -> tuple[Tensor, int]:
        """The signal of a gradient as rows of pairs, and the length of the rows that are transformed."""
        rows, length = transform_shape(numel, self.block)
        return torch.view_as_complex(signal.view(-1, 2)).view(rows, (length + 1) // 2), length

    def inverse(
        self, parts: np.ndarray, transform: ops.Transform, outs: Sequence[Tensor], weight: float, add: bool
    ) -> None:
        if self._transform is not _PAIRS:
            super().inverse(parts, transform, outs, weight, add)
            return
        for table, out in zip(parts.reshape(len(outs), -1), outs):
            signal = self.workspace.empty("pairs", (self.signal_numel(out.numel()),), torch.float32, out.device)
            super().inverse(table, transform, [signal], weight, False)
            pairs, length = self._pairs(signal, out.numel())
            spectrum = self.workspace.empty("spectrum", (len(pairs), length // 2 + 1), torch.complex64, out.device)
            pairs_to_spectrum(pairs, length, out=spectrum)
            inverse_transform(spectrum, out, add, length, self.workspace)


_PAIRS = ops.Transform.pairs()


@functools.cache
def _transform_of(block: int | None) -> ops.Transform:
    return ops.Transform.fourier(block) if block is not None and ops.Transform.fourier_exists(block) else _PAIRS
