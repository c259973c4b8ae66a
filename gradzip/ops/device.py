"""Where results are, and which of them the host knows."""

from __future__ import annotations

import math

from torch import Tensor

from . import _native


def on_device(x: Tensor) -> bool:
    """Return whether x is on a CUDA device, where the host has to wait to know its values."""
    return _native.on_cuda(x)


def known_non_finite(magnitude: Tensor) -> bool:
    """Return whether the host knows that a number is inf or NaN. On CUDA it does not, and does not wait to know.

    magnitude: 1 element.
    """
    return not _native.on_cuda(magnitude) and not math.isfinite(magnitude.item())
