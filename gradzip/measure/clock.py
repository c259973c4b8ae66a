"""Time on a device."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """The time, when the device has done all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
