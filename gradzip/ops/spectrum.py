"""FFTRange in the frequency domain, on spectra in the layout of torch.fft.rfft."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native
from .bitmap import bitmap_nbytes
from .errors import PayloadError
from .pack_bits import packed_nbytes
from .range_float import RangeFloat


def spectrum_power(spectrum: Tensor, length: int, amax: float | Tensor, out: Tensor | None = None) -> Tensor:
    """Return the energy of each bin: weight * \\|s * bin\\|^2, weight 2 for interior bins, which stand for two each.

    spectrum: (rows, length // 2 + 1), complex64; amax: largest magnitude of the signal, as a number or from
    `abs_max_tensor`. s is the power of two that scales amax into [1, 2), so that squares stay within float32's range.
    Returns float32, flat, of as many elements, in `out` if given. With an orthonormal transform, dropping bins costs
    exactly their energy / s^2 (Parseval). Deterministic. Does not wait for the device.
    """
    spectrum = _native.check(spectrum, torch.complex64, "spectrum_power: spectrum")
    if length < 1:
        raise ValueError(f"spectrum_power: got length = {length}, expected at least 1")
    if spectrum.dim() != 2 or spectrum.shape[1] != length // 2 + 1:
        raise ValueError(f"spectrum_power: got {tuple(spectrum.shape)}, expected (rows, {length // 2 + 1})")
    out = _native.output(out, spectrum.numel(), torch.float32, spectrum.device, "spectrum_power: out")
    address, _amax = _native.scalar(amax, spectrum, "spectrum_power: amax")
    arguments = (spectrum.data_ptr(), spectrum.shape[0], length, address, out.data_ptr())
    _native.run("spectrum_power", spectrum, *arguments)
    return out


def spectrum_decode_add(
    spectrum: Tensor, bitmap: Tensor, packed: Tensor, count: int, number: RangeFloat, weight: float
) -> None:
    """Add weight * the next pair of codes, decoded, to spectrum[i] if bit i is set.

    spectrum: complex64, in place; bitmap: uint8 of ceil(numel / 8); packed: uint8 stream of 2 * count codes of
    `number`. Deterministic. Raises PayloadError, with the spectrum unchanged, if the bitmap does not have `count` bits
    set. On CUDA, which does not wait for the device, the spectrum becomes NaN instead, so that all ranks skip the step.
    """
    _native.in_place(spectrum, torch.complex64, "spectrum_decode_add: spectrum")
    device = spectrum.device
    bitmap = _native.check(bitmap, torch.uint8, "spectrum_decode_add: bitmap", bitmap_nbytes(spectrum.numel()), device)
    nbytes = packed_nbytes(2 * count, number.bits)
    packed = _native.check(packed, torch.uint8, "spectrum_decode_add: packed", nbytes, device)
    words = number._words_on(device)
    arguments = (
        words.data_ptr(),
        bitmap.data_ptr(),
        packed.data_ptr(),
        nbytes,
        count,
        weight,
        spectrum.data_ptr(),
        spectrum.numel(),
    )
    if _native.run_failed("spectrum_decode_add", spectrum, *arguments):
        raise PayloadError(f"corrupt payload: its bitmap does not mark the {count} coefficients it claims")
