"""Exchanges that run while training goes on, and how long it waits for them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch

T = TypeVar("T")

_SECONDS_AT_EXIT = 5.0  # for the last exchange of a process: other ranks may not take part in it

_threads: WeakSet[Thread] = WeakSet()


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


class Runner(Generic[T]):
    """Runs functions, and counts their time: at once, or in a thread, and on a device on a stream of its own.

    The thread is a daemon: a rank that fails exits, and does not wait for long for an exchange that other ranks do not
    take part in.
    """

    def __init__(self, seconds: Seconds, device: torch.device, in_background: bool) -> None:
        self._seconds = seconds
        self._in_background = in_background
        self._stream = torch.cuda.Stream(device) if in_background and device.type == "cuda" else None
        self._thread: Thread | None = None  # of the last function
        self._is_closed = False

    def submit(self, function: Callable[..., T], *arguments: Any) -> Callable[[], T]:
        """Run a function. Returns what waits for its result, and raises the errors of the thread.

        In the background, one function runs at a time. It works on what is queued on the current stream so far, and may
        change its arguments.
        """
        if not self._in_background:
            result = self._run(function, *arguments)
            self._seconds.exposed = self._seconds.total
            return lambda: result
        if self._is_closed:
            raise RuntimeError("LocalSteps: got an exchange after remove(), expected none: make a new LocalSteps")
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(self._run(function, *arguments))
            except BaseException as error:
                future.set_exception(error)

        def wait() -> T:
            begin = time.perf_counter()
            result = future.result()
            if self._stream is not None:
                torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._seconds.exposed += time.perf_counter() - begin
            return result

        _join_at_exit()
        self._thread = Thread(target=run, name="gradzip.outer", daemon=True)
        _threads.add(self._thread)
        self._thread.start()
        return wait

    def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        begin = time.perf_counter()
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            result = function(*arguments)
        self._seconds.total += time.perf_counter() - begin
        return result

    def close(self) -> None:
        """Run no more in the background, and wait for what runs there."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.join()


@functools.cache
def _join_at_exit() -> None:
    """Have the end of the process wait for threads.

    A thread that comes back from a collective when the interpreter has ended is unwound through torch's C++ code, which
    ends the process ("terminate called without an active exception").
    """

    def join() -> None:
        end = time.monotonic() + _SECONDS_AT_EXIT
        for thread in list(_threads):
            thread.join(max(0.0, end - time.monotonic()))

    atexit.register(join)
