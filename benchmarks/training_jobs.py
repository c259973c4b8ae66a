"""Start the jobs of benchmarks/training.py, and read the results of their ranks as they come."""

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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training_variants import front_end

HERE = Path(__file__).parent
SHAPED_NET = HERE.parent / "scripts" / "shaped_net.sh"
# A network namespace of its own: its loopback counts this job's bytes alone. The machine's name may resolve to an
# interface outside.
OWN_NET = ["unshare", "--net", "--uts", "sh", "-c", 'hostname localhost && ip link set lo up && exec "$@"', "own_net"]


@dataclass(frozen=True)
class Job:
    """What the ranks of one job do, one after the other.

    Args:
        variants: of one front end.
        hosts: over which the ranks are spread; with more than one, `rate` is that of the link between them.
        link: measure the link.
        profile: also profile the model in the variant without communication.
        codecs: specs of methods to measure.
    """

    model: str
    rate: str
    ranks: int
    variants: tuple[str, ...]
    data: str | None
    batch_size: int
    seed: int
    warmup: int
    steps: int
    seconds: float
    threads: int
    hosts: int = 1
    link: bool = False
    profile: bool = False
    codecs: tuple[str, ...] = ()


class JobError(Exception):
    """A job ended early. The message is one line."""


@functools.cache
def has_own_net() -> bool:
    """Whether this process may make network namespaces."""
    if not all(shutil.which(tool) for tool in ("unshare", "ip", "hostname")):
        return False
    return subprocess.run([*OWN_NET, "true"], capture_output=True).returncode == 0


def network(rate: str, ranks: int, hosts: int) -> list[str]:
    """The command that runs others on a network; empty for the machine's own."""
    if hosts > 1:
        return [str(SHAPED_NET), "--hosts", str(hosts), "--inter", rate, "--"]
    if rate != "none":
        return [str(SHAPED_NET), rate, str(ranks), "--"]
    return OWN_NET if has_own_net() else []


def shaping_error(rate: str, ranks: int, hosts: int) -> str | None:
    """Why this machine cannot shape a network to a rate; None if it can."""
    shaped = subprocess.run([*network(rate, ranks, hosts), "true"], capture_output=True, text=True)
    return shaped.stderr.strip() if shaped.returncode else None


def launcher(front: str, ranks: int, hosts: int) -> list[str]:
    """The launcher's command line for a front end."""
    if front == "horovod":
        script = str(Path(sys.executable).with_name("horovodrun"))
        return [script, "--network-interface", "lo", "-np", str(ranks), sys.executable]
    rendezvous = ["--standalone"] if hosts == 1 else []  # or that of shaped_net.sh
    return [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", str(ranks // hosts)]


def run(job: Job, timeout: float) -> Iterator[dict[str, Any]]:
    """Run a job. Yields what rank 0 writes, as it comes.

    timeout: seconds without a new line until the job is ended.

    Raises:
        JobError: the job failed or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        results, output = Path(folder) / "results.jsonl", Path(folder) / "output"
        results.touch()
        (Path(folder) / "job.json").write_text(json.dumps(asdict(job)))
        command = [
            *network(job.rate, job.ranks, job.hosts), *launcher(front_end(job.variants[0]), job.ranks, job.hosts),
            str(HERE / "training_rank.py"), str(Path(folder) / "job.json"), str(results),
        ]  # fmt: skip
        with output.open("w") as log, results.open() as lines, started(command, job.threads, log) as process:
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


@contextmanager
def started(command: list[str], threads: int, log: Any) -> Iterator[subprocess.Popen]:
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
