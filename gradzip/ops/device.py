"""Where results are, and which of them the host knows."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from . import _native


def on_device(x: Tensor) -> bool:
    """Return whether x is on a CUDA device, where the host has to wait to know its values."""
    return _native.on_cuda(x)


def known_non_finite(magnitudes: Tensor) -> bool:
    """Return whether the host knows that one of a few numbers is inf or NaN. On CUDA it does not, nor waits to know."""
    return not _native.on_cuda(magnitudes) and not all(map(math.isfinite, magnitudes.tolist()))


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all elements are finite. Waits once for each device that tensors are on.

    tensors: dense, any floating-point types.
    """
    flags: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        flags.setdefault(tensor.device, []).append(tensor.isfinite().all())
    return all(bool(torch.stack(of_device).all()) for of_device in flags.values())
