"""How random draws of captured steps differ between replays: kernels read a number on the device when they run.

A CUDA graph repeats launches with the same arguments, so also with the same keys. Kernels that draw therefore take the
address of a number, which makes another key of each (`replay_key` in csrc/common/philox.h). torch's own generators do
so, too.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor


class _OfThread(threading.local):
    """What draws of this thread depend on if they are captured.

    Attributes:
        numbers: by device, int64 of 1 element, of which each value gives other draws. None: draws depend on their keys
            alone.
    """

    numbers: Mapping[torch.device, Tensor] | None = None


current = _OfThread()


def address(where: Tensor, draws: bool = True) -> int:
    """The address of the number that draws on the device of `where` depend on; 0 if they depend on their keys alone.

    draws: whether there are any. Raises RuntimeError if a step is captured on a device without a number.
    """
    numbers = current.numbers
    if numbers is None or not (draws and where.is_cuda and torch.cuda.is_current_stream_capturing()):
        return 0
    if where.device not in numbers:
        got = f"got a step to capture that draws random numbers on {where.device}"
        raise RuntimeError(f"{got}, expected a step before it on that device that is not captured")
    return numbers[where.device].data_ptr()
