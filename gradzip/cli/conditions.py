"""Where times are measured: device, threads and load, and what makes them too long."""

from __future__ import annotations

import os
import statistics

import torch

# Threads wait for cores that others use if they take this many times as long as one thread. Otherwise they are faster.
CONTENDED = 1.5


def conditions(device: torch.device) -> tuple[str, list[str]]:
    """Device, threads and load now, and warnings about what makes times too long. Takes some milliseconds."""
    threads, cores, load = torch.get_num_threads(), os.cpu_count() or 1, os.getloadavg()[0]
    warnings = []
    contention = _contention() if device.type == "cpu" else 1.0
    if contention > CONTENDED:
        warnings.append(
            f"Warning: torch's {threads} threads take {contention:,.1f} times as long as one for the same addition, "
            "because they spin on cores that others need: times are too long, in training as here, and the advice is "
            "worth little. Start with OMP_WAIT_POLICY=passive, or with OMP_NUM_THREADS=1."
        )
    if load > cores + 1:  # this process is one of them
        warnings.append(
            f"Warning: the load is {load:.1f} on {cores} cores: times are too long. Measure when the machine is idle."
        )
    return f"methods measured on {device}, threads: {threads}; load {load:.1f}, cores: {cores}", warnings


def _contention(repeats: int = 9) -> float:
    """Time of an addition with all threads of torch, divided by its time with one thread. Medians."""
    # Here: it takes a tenth of a second, and logs a warning where nvcc is and no driver. All commands import this file.
    from torch.utils.benchmark import Timer

    x = torch.zeros(1 << 18, device="cpu")
    timers = [Timer("x.add_(1.0)", globals={"x": x}, num_threads=n) for n in (torch.get_num_threads(), 1)]
    many, one = (statistics.median(timer.timeit(1).mean for _ in range(repeats)) for timer in timers)
    return many / one
