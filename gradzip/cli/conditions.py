"""Where times are measured: device, threads and load, and what makes them too long."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

# Threads wait for cores that others use if they take this many times as long as one thread. Otherwise they are faster.
CONTENDED = 1.5


@dataclass(frozen=True)
class Conditions:
    """Where and when times are measured.

    Args:
        device: of the methods.
        threads: of torch.
        cores: of the machine.
        load: processes that run or wait for one of them, the mean of a minute; None if it is not known.
        contention: time of an addition with all threads, divided by its time with one; 1 on another device.
    """

    device: str
    threads: int
    cores: int
    load: float | None
    contention: float

    @property
    def line(self) -> str:
        """The conditions, for people."""
        load = "" if self.load is None else f"; load {self.load:.1f} on {_count(self.cores, 'core')}"
        return f"methods measured on {self.device}, {_count(self.threads, 'thread')}{load}"

    def warnings(self) -> Iterator[str]:
        """What makes times too long, and what to do about it."""
        if self.contention > CONTENDED:
            yield (
                f"Warning: torch's {self.threads} threads take {self.contention:,.1f} times as long as one for the "
                "same addition, because they spin on cores that others need: times are too long, in training as here, "
                "and the advice is worth little. Start with OMP_WAIT_POLICY=passive, or with OMP_NUM_THREADS=1."
            )
        if self.load is not None and self.load > self.cores + 1:  # this process is one of them
            yield (
                f"Warning: {self.load:.1f} processes share {_count(self.cores, 'core')}: times are too long. Measure "
                "when the machine is idle."
            )


def conditions(device: torch.device) -> Conditions:
    """The conditions now. Takes some milliseconds."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    contention = _contention() if device.type == "cpu" else 1.0
    return Conditions(str(device), torch.get_num_threads(), os.cpu_count() or 1, load, contention)


def _contention(repeats: int = 9) -> float:
    """Time of an addition with all threads of torch, divided by its time with one thread. Medians."""
    threads = torch.get_num_threads()
    if threads == 1:
        return 1.0
    x = torch.zeros(1 << 18)

    def seconds() -> float:
        start = time.perf_counter()
        x.add_(1.0)
        return time.perf_counter() - start

    try:
        seconds()
        many = statistics.median(seconds() for _ in range(repeats))
        torch.set_num_threads(1)
        one = statistics.median(seconds() for _ in range(repeats))
    finally:
        torch.set_num_threads(threads)
    return many / one


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
