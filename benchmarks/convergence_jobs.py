"""Processes that serve requests and print lines of JSON, several at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import queue
import subprocess
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
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
    command: Sequence[str], requests: Mapping[Job, str], at_a_time: int, pass_fds: Sequence[int] = ()
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Send requests, in order, to processes of a command, of which `at_a_time` run side by side.

    A process reads requests from its standard input, a line each, and prints lines of JSON, the last of which has the
    key "end". One process serves many requests, because it takes seconds to load torch. If it ends early, another one
    serves the next request.

    Yields (job, line) for each line of JSON as it comes, and at the end (job, {"end": text}). The text is None, or the
    last line that the process printed if it ended early. Closing the generator kills the processes. They do not see the
    terminal's Ctrl-C: whoever iterates decides.
    """
    waiting: queue.SimpleQueue[tuple[Job, str]] = queue.SimpleQueue()
    for entry in requests.items():
        waiting.put(entry)
    lines: queue.SimpleQueue[tuple[Job, dict[str, Any]]] = queue.SimpleQueue()
    processes: list[subprocess.Popen[str]] = []
    closing = threading.Event()

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True, pass_fds=pass_fds,
        )  # fmt: skip
        processes.append(process)
        if closing.is_set():  # the processes before it have been killed already
            process.kill()
        return process

    def serve() -> None:
        process = None
        with contextlib.suppress(queue.Empty):
            while not closing.is_set():
                job, request = waiting.get_nowait()
                process = process or start()
                failure = ask(process, job, request)
                if failure:
                    process = None
                lines.put((job, {"end": failure}))

    def ask(process: subprocess.Popen[str], job: Job, request: str) -> str | None:
        """Pass on what a process prints about a request. Returns why it ended early, or None."""
        last = ""
        with contextlib.suppress(BrokenPipeError):
            print(request, file=process.stdin, flush=True)
        for text in process.stdout or ():
            if not (text.startswith("{") and text.endswith("\n")):  # the last line of a killed process may be cut
                last = text.strip() or last
                continue
            line = json.loads(text)
            if "end" in line:
                return None
            lines.put((job, line))
        return last or f"exit status {process.wait()}"

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(at_a_time)]
    try:
        for thread in threads:
            thread.start()
        for _ in requests:
            line: dict[str, Any] = {}
            while "end" not in line:
                job, line = lines.get()
                yield job, line
    finally:
        closing.set()
        for process in [*processes]:
            process.kill()
        for thread in threads:
            thread.join()
        for process in processes:
            with process:  # closes its pipes
                pass
