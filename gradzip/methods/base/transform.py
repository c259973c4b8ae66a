"""Real Fourier transforms of gradients, in rows of equal length."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ...memory.state import Workspace
from .threads import one_thread

_CHUNK_NUMEL = 1 << 20  # elements that stay in a processor's cache between two kernels


@functools.cache
def transform_shape(numel: int, block: int | None) -> tuple[int, int]:
    """(rows, length) of the transforms for a gradient of `numel` elements.

    There are as few rows as `block` allows, of equal length, so that little padding is needed: with rows of `block`
    elements, a gradient of 1.1 blocks would be padded to twice its size. The length is even and has only the prime
    factors 2, 3 and 5, which are fast in every library, unless it would exceed `block`.

    block: largest length; None for one row.
    """
    rows = 1 if block is None else -(-numel // block)
    shortest = -(-numel // rows)
    length = _smooth(shortest + shortest % 2)
    return rows, length if block is None or length <= block else shortest


def _smooth(length: int) -> int:
    """The smallest even number >= length with no prime factor above 5."""
    best = 1 << (length - 1).bit_length()
    five = 1
    while five < best:
        three = five
        while three < best:
            two = max(2, 1 << (-(-length // three) - 1).bit_length())
            best = min(best, three * two)
            three *= 3
        five *= 5
    return best


def _chunks(rows: int, length: int, device: torch.device) -> list[slice]:
    """Split rows into chunks to transform together: all at once on a device, cache-sized chunks on a CPU."""
    step = max(1, _CHUNK_NUMEL // length) if device.type == "cpu" else rows
    return [slice(begin, begin + step) for begin in range(0, rows, step)]


def spectra(grad: Tensor, block: int | None, workspace: Workspace) -> Iterator[tuple[slice, Tensor]]:
    """The orthonormal transforms of the rows of a gradient, padded by zeros: rows, and their spectra, by chunks."""
    rows, length = transform_shape(grad.numel(), block)
    signal = grad = grad.reshape(-1)
    if rows * length != grad.numel():
        signal = workspace.empty("signal", (rows * length,), torch.float32, grad.device)
        signal[: grad.numel()] = grad
        signal[grad.numel() :] = 0
    for chunk in _chunks(rows, length, grad.device):
        yield chunk, torch.fft.rfft(signal.view(rows, length)[chunk], norm="ortho")


def inverse_transform(spectrum: Tensor, out: Tensor, add: bool, length: int, workspace: Workspace) -> None:
    """Write the inverse orthonormal transforms of spectra to `out`, or add them. The same bits on all ranks.

    length: of the rows.
    """
    rows = len(spectrum)
    signal = workspace.empty("signal", (rows, length), torch.float32, out.device)
    for chunk in _chunks(rows, length, out.device):
        # Threads divide several rows among them, but split a single one, whose rounding then depends on their number.
        with one_thread() if len(signal[chunk]) == 1 else contextlib.nullcontext():
            torch.fft.irfft(spectrum[chunk], n=length, norm="ortho", out=signal[chunk])
    decoded = signal.view(-1)[: out.numel()].view(out.shape)
    if add:
        out.add_(decoded)
    else:
        out.copy_(decoded)


def spectrum_to_pairs(spectrum: Tensor, length: int, out: Tensor) -> None:
    """Write spectra of orthonormal real transforms as coefficients of an orthonormal basis.

    An interior bin stands for itself and its conjugate, so it is multiplied by sqrt(2). If the length is even, the
    first and the last bin are real: the last one becomes the imaginary part of the first.

    Shape:
        spectrum: (rows, length // 2 + 1), complex64.
        out: (rows, (length + 1) // 2), complex64.
    """
    pairs = (length + 1) // 2
    torch.mul(spectrum[:, :pairs], math.sqrt(2.0), out=out)
    out[:, 0] = torch.complex(spectrum.real[:, 0], spectrum.real[:, -1] if length % 2 == 0 else spectrum.imag[:, 0])


def pairs_to_spectrum(pairs: Tensor, length: int, out: Tensor) -> None:
    """The inverse of `spectrum_to_pairs`."""
    torch.mul(pairs, math.sqrt(0.5), out=out[:, : pairs.shape[1]])
    out[:, 0] = torch.complex(pairs.real[:, 0], torch.zeros_like(pairs.real[:, 0]))
    if length % 2 == 0:
        out[:, -1] = torch.complex(pairs.imag[:, 0], torch.zeros_like(pairs.imag[:, 0]))
