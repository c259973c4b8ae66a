"""The frequency side of FFTRange, on spectra as torch.fft.rfft makes them."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native
from .compact import bitmap_nbytes
from .pack_bits import packed_nbytes
from .payload import PayloadError
from .range_float import RangeFloat


def spectrum_power(spectrum: Tensor, length: int, amax: float | Tensor, out: Tensor | None = None) -> Tensor:
    """Energy of each bin: weight * \\|s * bin\\|^2, weight 2 for interior bins, which stand for a conjugate pair each.

    spectrum: (rows, length // 2 + 1), complex64; amax: largest magnitude of the signal, as a number or as from
    `abs_max_tensor` (s is the power of two that brings it into [1, 2), so that squares keep within float32's range).
    Returns float32, flat, of as many elements.
    With an orthonormal transform, dropping bins costs exactly their energy / s^2 (Parseval).
    """
    spectrum = _native.check(spectrum, torch.complex64, "spectrum_power: spectrum")
    if length < 1:
        raise ValueError(f"spectrum_power: got length = {length}, expected at least 1")
    if spectrum.dim() != 2 or spectrum.shape[1] != length // 2 + 1:
        raise ValueError(f"spectrum_power: got {tuple(spectrum.shape)}, expected (rows, {length // 2 + 1})")
    out = _native.output(out, spectrum.numel(), torch.float32, spectrum.device, "spectrum_power: out")
    source = (spectrum.data_ptr(), spectrum.shape[0], length)
    if _native.on_cuda(spectrum):
        if not isinstance(amax, Tensor):
            amax = torch.full((1,), amax, dtype=torch.float32, device=spectrum.device)
        amax = _native.check(amax, torch.float32, "spectrum_power: amax", 1, spectrum.device)
        _native.launch("spectrum_power", spectrum.device, *source, amax.data_ptr(), out.data_ptr())
    else:
        _native.kernels().spectrum_power(*source, float(amax), out.data_ptr(), _native.threads())
    return out


def spectrum_decode_add(
    spectrum: Tensor, bitmap: Tensor, packed: Tensor, count: int, number: RangeFloat, weight: float
) -> None:
    """spectrum[i] += weight * the next pair of codes, where bit i is set.

    spectrum: complex64, in place; bitmap: uint8 of ceil(numel / 8); packed: uint8 stream of 2 * count codes of
    `number`. PayloadError, and spectrum untouched, when the bitmap does not have `count` bits set. On CUDA, where
    nothing waits for the device to know, the spectrum becomes NaN instead: all ranks skip the step.
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
    if _native.on_cuda(spectrum):
        flag = torch.zeros(1, dtype=torch.int32, device=device)
        _native.launch("spectrum_decode_add", device, *arguments, flag.data_ptr(), workspace_for=spectrum.numel())
        return
    if _native.kernels().spectrum_decode_add(*arguments, _native.threads()):
        raise PayloadError(f"corrupt payload: its bitmap does not mark the {count} coefficients it claims")
