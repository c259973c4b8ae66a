"""The time, once a device has done its work."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Clock = Callable[[torch.device], float]  # waits for the device, and returns seconds


def now(device: torch.device) -> float:
    """Wait for the device, and return the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
