"""How random draws of captured steps differ between replays: kernels read a number on the device when they run.

A CUDA graph repeats launches with the same arguments, so also with the same keys. Kernels that draw therefore take the
address of a number, which makes another key of each (`replay_key` in csrc/common/philox.h). torch's own generators do
so, too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


class _OfThread(threading.local):
    numbers: Mapping[torch.device, Tensor] | None = None


_current = _OfThread()


@contextlib.contextmanager
def counted_by(numbers: Mapping[torch.device, Tensor]) -> Iterator[None]:
    """Have what this thread draws on a device within the block depend on a number there: each value gives other draws.

    numbers: by device, int64 of 1 element. They are read when the kernels run.
    """
    before, _current.numbers = _current.numbers, numbers
    try:
        yield
    finally:
        _current.numbers = before


def address(where: Tensor) -> int:
    """The address of the number that draws on the device of `where` depend on; 0 if they depend on their keys alone.

    Raises RuntimeError for a device without one.
    """
    numbers = _current.numbers
    if numbers is None or not where.is_cuda:
        return 0
    if where.device not in numbers:
        got = f"got a step to capture that draws random numbers on {where.device}"
        raise RuntimeError(f"{got}, expected a step before it on that device that is not captured")
    return numbers[where.device].data_ptr()
