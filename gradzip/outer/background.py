"""A thread that exchanges while training goes on."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
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
    """Runs functions one by one in a thread, and on a device on a stream of its own.

    The thread is a daemon: a rank that fails exits, and does not wait for an exchange that other ranks do not take part
    in.
    """

    def __init__(self, seconds: Seconds, device: torch.device) -> None:
        super().__init__(seconds)
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=_run_all, args=(self._tasks,), name="gradzip.outer", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._tasks.put, None)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, function: Callable[..., T], *arguments: Any) -> Callable[[], T]:
        """Have the thread run a function. Returns what waits for its result, and raises its errors.

        The function works on what is queued on the current stream so far, and may change its arguments.
        """
        if not self._end.alive:
            raise RuntimeError("LocalSteps: got an exchange after remove(), expected none: make a new LocalSteps")
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        future: Future[T] = Future()
        self._tasks.put(lambda: self._run(future, function, *arguments))

        def wait() -> T:
            begin = time.perf_counter()
            result = future.result()
            if self._stream is not None:
                torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._seconds.exposed += time.perf_counter() - begin
            return result

        return wait

    def _run(self, future: Future[T], function: Callable[..., T], *arguments: Any) -> None:
        begin = time.perf_counter()
        try:
            with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                result = function(*arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            self._seconds.total += time.perf_counter() - begin
            future.set_result(result)

    def close(self) -> None:
        self._end()
        self._thread.join()


def _run_all(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    """Run tasks until there is None. It keeps none: they refer to the Background, whose end is the thread's."""
    while (task := tasks.get()) is not None:
        task()
        del task
