"""A thread that exchanges while training goes on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


@dataclass
class Seconds:
    """The time of a rank's exchanges.

    Attributes:
        exposed: during which training waited.
        total: during which an exchange was in progress, in the background or not.
    """

    exposed: float = 0.0
    total: float = 0.0

    @property
    def hidden(self) -> float:
        """During which training went on."""
        return max(0.0, self.total - self.exposed)


class Foreground(Generic[T]):
    """Runs functions at once, and counts their time."""

    def __init__(self, seconds: Seconds) -> None:
        self._seconds = seconds

    def submit(self, function: Callable[..., T], *arguments: Any) -> Callable[[], T]:
        """Run a function. Returns what waits for its result."""
        begin = time.perf_counter()
        result = function(*arguments)
        self._count(time.perf_counter() - begin)
        return lambda: result

    def _count(self, seconds: float) -> None:
        self._seconds.total += seconds
        self._seconds.exposed += seconds

    def close(self) -> None:
        """Run no more."""


class Background(Foreground[T]):
    """Runs functions one by one in a thread, and on a device on a stream of its own."""

    def __init__(self, seconds: Seconds, device: torch.device) -> None:
        super().__init__(seconds)
        self._thread = ThreadPoolExecutor(1, "gradzip.outer")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, function: Callable[..., T], *arguments: Any) -> Callable[[], T]:
        """Have the thread run a function. Returns what waits for its result, and raises its errors.

        The function works on what is queued on the current stream so far, and may change its arguments.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        future = self._thread.submit(self._run, function, *arguments)

        def wait() -> T:
            begin = time.perf_counter()
            result = future.result()
            if self._stream is not None:
                torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._seconds.exposed += time.perf_counter() - begin
            return result

        return wait

    def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        begin = time.perf_counter()
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            result = function(*arguments)
        self._seconds.total += time.perf_counter() - begin
        return result

    def close(self) -> None:
        self._thread.shutdown()
