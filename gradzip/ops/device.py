"""Where results are, and which of them the host knows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from operator import attrgetter

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


def largest_magnitudes(tensors: Sequence[Tensor]) -> Tensor:
    """Return max |x| of each of several tensors on one device, as one vector, NaN or inf where an element is.

    tensors: dense, any floating-point or complex types; 0 for an empty one. On CUDA in one call for each run of equal
        dtypes, which does not wait for the device.

    >>> largest_magnitudes([torch.tensor([1.0, torch.nan]), torch.tensor([1.0, -3.0])])
    tensor([nan, 3.])
    """
    if not all(map(Tensor.numel, tensors)):
        tensors = [x if x.numel() else x.new_zeros(1) for x in tensors]
    if not on_device(tensors[0]):
        return torch.cat([abs_max_tensor(x) if x.dtype == torch.float32 else x.abs().max().view(1) for x in tensors])
    found: list[Tensor] = []
    for _, of_type in itertools.groupby(tensors, attrgetter("dtype")):
        found.append(torch.stack(torch._foreach_norm(list(of_type), math.inf)))
    return torch.cat(found) if len(found) > 1 else found[0]


class CopyLater:
    """A copy of a tensor of a device to the host, behind the work queued so far. The host does not wait to start it."""

    def __init__(self, x: Tensor) -> None:
        self._host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
        self._host.copy_(x, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(x.device))

    def is_done(self) -> bool:
        """Whether the copy is there: the host need not wait for it."""
        return self._done.query()

    def result(self) -> Tensor:
        """Wait for the copy, and return it."""
        self._done.synchronize()
        return self._host


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all elements are finite. Waits once for each device that tensors are on.

    tensors: dense, any floating-point or complex types.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor)
    numbers = [largest_magnitudes(of_device).tolist() for of_device in by_device.values()]
    return all(map(math.isfinite, itertools.chain(*numbers)))
