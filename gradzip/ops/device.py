"""Where results are, and which of them the host knows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .abs_max import abs_max_tensor


def on_device(x: Tensor) -> bool:
    """Return whether x is on a CUDA device, where the host has to wait to know its values."""
    return x.is_cuda  # `x.device` makes an object


def is_capturing(x: Tensor) -> bool:
    """Return whether what is done on x is captured as a CUDA graph, and repeated later with the same memory."""
    return on_device(x) and torch.cuda.is_current_stream_capturing()


def known_non_finite(magnitudes: Tensor) -> bool:
    """Return whether the host knows that one of a few numbers is inf or NaN. On CUDA it does not, nor waits to know."""
    return not magnitudes.is_cuda and not all(map(math.isfinite, magnitudes.tolist()))


def finite_if_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a number for each tensor, on its device, that is finite if all its elements are. Does not wait.

    tensors: dense, any floating-point or complex types, not empty, all on one device. Results: 1 element. On CUDA in
        one call.

    >>> finite_if_all([torch.tensor([1.0, torch.nan]), torch.tensor([1.0, -3.0])])
    [tensor([nan]), tensor([3.])]
    """
    if on_device(tensors[0]):
        return [norm.view(1) for norm in torch._foreach_norm(list(tensors), math.inf)]
    return [abs_max_tensor(x) if x.dtype == torch.float32 else x.abs().max().view(1) for x in tensors]


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all elements are finite. Waits once for each device that tensors are on.

    tensors: dense, any floating-point or complex types.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor)
    numbers = [torch.cat(finite_if_all(of_device)).tolist() for of_device in by_device.values()]
    return all(map(math.isfinite, itertools.chain(*numbers)))
