"""Jobs of several ranks on networks of limited bandwidth, and their results as they come."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SHAPED_NET = Path(__file__).parents[2] / "scripts" / "shaped_net.sh"
# A network namespace of its own: its loopback counts this job's bytes alone. The machine's name may resolve to an
# interface outside.
OWN_NET = ["unshare", "--net", "--uts", "sh", "-c", 'hostname localhost && ip link set lo up && exec "$@"', "own_net"]


class JobError(Exception):
    """A job ended early. The message is one line."""


@functools.cache
def has_own_net() -> bool:
    """Whether this process may make network namespaces."""
    if not all(shutil.which(tool) for tool in ("unshare", "ip", "hostname")):
        return False
    return subprocess.run([*OWN_NET, "true"], capture_output=True).returncode == 0


def network(rate: str, ranks: int, hosts: int = 1) -> list[str]:
    """The command that runs others on a network; empty for the machine's own.

    rate: bandwidth of each rank, or of the link between two hosts; "none" for no limit.
    """
    if hosts > 1:
        return [str(SHAPED_NET), "--hosts", str(hosts), "--inter", rate, "--"]
    if rate != "none":
        return [str(SHAPED_NET), rate, str(ranks), "--"]
    return OWN_NET if has_own_net() else []


def shaping_error(rate: str, ranks: int, hosts: int = 1) -> str | None:
    """Why this machine cannot shape a network to a rate; None if it can."""
    shaped = subprocess.run([*network(rate, ranks, hosts), "true"], capture_output=True, text=True)
    return shaped.stderr.strip() if shaped.returncode else None


def launcher(front_end: str, ranks: int, hosts: int = 1) -> list[str]:
    """The command line that starts ranks of a module: horovodrun for Horovod, torchrun for all others."""
    if front_end == "horovod":
        script = str(Path(sys.executable).with_name("horovodrun"))
        return [script, "--network-interface", "lo", "-np", str(ranks), sys.executable, "-m"]
    rendezvous = ["--standalone"] if hosts == 1 else []  # or that of shaped_net.sh
    return [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", str(ranks // hosts), "-m"]


def run(command: Sequence[str], threads: int, timeout: float) -> Iterator[dict[str, Any]]:
    """Run a job, with the name of a file as its last argument. Yields the lines of JSON that it appends to the file.

    Args:
        threads: of each rank, for OpenMP.
        timeout: seconds without a new line until the job is ended.

    Raises:
        JobError: the job failed or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        results, output = Path(folder) / "results.jsonl", Path(folder) / "output"
        results.touch()
        with (
            output.open("w") as log,
            results.open() as lines,
            started([*command, str(results)], threads, log) as process,
        ):
            news = time.monotonic()
            while True:
                ended = process.poll() is not None  # before the last lines are read
                while line := complete_line(lines):
                    news = time.monotonic()
                    yield json.loads(line)
                if ended:
                    break
                if time.monotonic() - news > timeout:
                    raise JobError(f"not done after {timeout:g} s; see --timeout")
                time.sleep(0.05)
        if process.returncode:
            text = output.read_text(errors="replace")
            raise JobError(error_line(text) or f"ended with status {process.returncode} and no output")


def complete_line(file: Any) -> str:
    """The next line of a growing file, or "" if it is not complete yet."""
    position = file.tell()
    line = file.readline()
    if line.endswith("\n"):
        return line
    file.seek(position)
    return ""


def pin(rank: int, ranks: int) -> None:
    """Give each rank its own cores. If there are fewer cores than ranks, ranks share one."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        share = len(cores) // ranks
        mine = cores[rank * share : (rank + 1) * share] if share else [cores[rank % len(cores)]]
        os.sched_setaffinity(0, mine)


@contextmanager
def started(command: Sequence[str], threads: int, log: Any) -> Iterator[subprocess.Popen]:
    """A running command, which is ended with the block."""
    # DDP must use loopback, as Horovod does.
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads), GLOO_SOCKET_IFNAME="lo")
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            # Launchers stop their ranks on SIGTERM, but not on SIGKILL.
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def error_line(output: str) -> str | None:
    """The most useful line of a failed job's output: the first exception's message, else the last line."""
    lines = [re.sub(r"^\[(rank)?\d+\](<std(out|err)>)?: ?", "", line).strip() for line in output.splitlines()]
    lines = [line for line in lines if line]
    raised = (line for line in lines if re.match(r"(what\(\)|\S*(Error|Exception)): ", line))
    return next(raised, lines[-1] if lines else None)
