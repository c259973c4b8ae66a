"""Work in processes, several at a time."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

Job = TypeVar("Job", bound=Hashable)


class BusyError(Exception):
    """Another process uses a folder. The message is one line."""


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[int]:
    """Make a folder, and reserve it. Removes it at the end if it is empty.

    Yields the file descriptor that holds the reservation. Processes that inherit it hold it as well.

    Raises:
        BusyError: another process has reserved it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lock"
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"{folder}: another run uses it; wait until that has ended, or give another") from None
        yield lock.fileno()
        path.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def run_all(
    work: Callable[..., object], jobs: Mapping[Job, tuple[Any, ...]], at_a_time: int, lock: int
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Call work(*arguments, report) for each job, in order, in processes of which `at_a_time` run side by side.

    Yields (job, line) for each line that it reports, as it comes, and at the end (job, {"end": text}). The text is
    None, or why the work ended early. Closing the generator kills the processes. They do not see the terminal's Ctrl-C:
    whoever iterates decides.

    lock: a file descriptor that the processes inherit.
    """
    context = multiprocessing.get_context("forkserver")  # loads torch once; a fork of this process would hang in it
    context.set_forkserver_preload([work.__module__])
    waiting = list(jobs.items())
    running: dict[Any, tuple[Job, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                job, arguments = waiting.pop(0)
                here, there = context.Pipe(duplex=False)
                # A process inherits file descriptors as connections.
                process = context.Process(target=_work, args=(work, arguments, there, Connection(os.dup(lock))))
                process.start()
                there.close()
                running[here] = job, process
            for pipe in wait(list(running)):
                job, process = running[pipe]
                try:
                    line = pipe.recv()
                except EOFError:
                    process.join()
                    line = {"end": f"exit status {process.exitcode}"}
                if "end" in line:
                    process.join()
                    pipe.close()
                    del running[pipe]
                yield job, line
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def _work(work: Callable[..., object], arguments: tuple[Any, ...], pipe: Connection, lock: Connection) -> None:
    os.setsid()
    try:
        try:
            work(*arguments, pipe.send)
            end = None
        except Exception as error:
            end = f"{type(error).__name__}: {error}"
        pipe.send({"end": end})
    except BrokenPipeError:  # whoever started this is gone
        os._exit(1)
