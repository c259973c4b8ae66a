"""Start real `horovodrun` and `torchrun` jobs, and commands on slow networks."""

import atexit
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import turns
from paths import ROOT, TESTS

WARM = Path(__file__).with_name("warm.py")
SHAPED_NET = ROOT / "scripts" / "shaped_net.sh"


def worker_path(name):
    """Return the path of a script for ranks: `tests/*/NAME`, or `name` itself if it is a path."""
    (path,) = [name] if isinstance(name, Path) else TESTS.glob(f"*/{name}")
    return path


def environment(**variables):
    """Return the environment of a rank: this process's, the modules of tests/support, one thread, and `variables`."""
    path = os.pathsep.join([str(TESTS / "support"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1") | variables


def python(interpreter=sys.executable):
    """Return the command that replaces `python` in a job: it forks a process that has torch loaded (warm.py)."""
    turns.take()
    return _warm_python(str(interpreter))


def executable():
    """Return the path of a `python` for jobs on other networks, which does as `python()`, beside a `horovodrun`."""
    command = python()
    return Path(command[-1]) / "python" if command[1:] else Path(command[0])


SHIM = """#!/bin/sh
# `python` for what a job starts by itself.
case "$1 $2" in
"-u -m" | "-u "[!-]* | "-m "* | [!-]*) exec {real} -S -E {warm} {folder} "$@" ;;
*) exec {real} "$@" ;;
esac
"""


@functools.cache
def _warm_python(interpreter):
    if not hasattr(os, "pidfd_open"):  # warm.py needs Linux
        return [interpreter]
    folder = Path(tempfile.mkdtemp(prefix="gradzip-tests-"))
    atexit.register(shutil.rmtree, folder)
    shims = {
        "python": SHIM.format(real=interpreter, warm=WARM, folder=folder),
        "horovodrun": f'#!/bin/sh\nexec {folder}/python {Path(interpreter).with_name("horovodrun")} "$@"\n',
    }
    for name, text in shims.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    server = subprocess.Popen(
        [interpreter, WARM, folder], env=dict(os.environ, OMP_NUM_THREADS="1"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    atexit.register(server.communicate)  # closes its standard input, which ends it
    assert server.stdout.readline() == "ready\n"
    return [interpreter, "-S", "-E", str(WARM), str(folder)]


def launcher():
    """Return the command that starts `horovodrun` on this machine. With --gloo, it does not look for MPI."""
    return [*python(), str(Path(sys.executable).with_name("horovodrun")), "--gloo", "--network-interface", "lo"]


def horovodrun(ranks, script, *arguments, timeout=120, hosts=None):
    """Run a script (`worker_path`) on `ranks` processes of this machine. Return the finished process.

    hosts: names of this machine, and their numbers of processes, as horovodrun takes them.
    """
    options = ["-np", str(ranks), *(["-H", hosts] if hosts else [])]
    command = [*launcher(), *options, *python(), str(worker_path(script)), *map(str, arguments)]
    # On a busy machine, a rank may be delayed for longer than gloo's default timeout of 30 seconds.
    variables = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "10", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30",
                 "HOROVOD_GLOO_TIMEOUT_SECONDS": "100"}  # fmt: skip
    return subprocess.run(
        command, env=environment(**variables), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
    )


def elastic_horovodrun(script, folder, plan, hosts, timeout):
    """Run `SCRIPT PLAN FOLDER` on the hosts listed in folder/hosts, at most three at a time.

    A worker of Horovod may hang when another dies. Its background thread holds the lock of its queue while it frees
    tensors. With torch 2.10 and newer, it needs Python's lock for that. A thread that has Python's lock may want the
    queue's, to launch an operation. Such a job is run a second time.

    Args:
        hosts: names of this machine, listed at the start.

    Returns:
        The job's exit code and output.
    """
    code, output = _elastic_job(script, folder, plan, hosts, timeout)
    if code is None and _hangs_in_horovod(output):
        for path in folder.iterdir():
            path.unlink()
        code, output = _elastic_job(script, folder, plan, hosts, timeout)
    if code is None:
        pytest.fail(f"not done after {timeout} s:\n{shortened(output)}")
    return code, output


def _hangs_in_horovod(output):
    """Whether a worker hangs where Horovod launches an operation, and its background loop has failed."""
    lines = re.sub(r"^\[\d+\]<\w+>:", "", output, flags=re.MULTILINE)
    stacks = re.findall(r"most recent call first\):\n +File \"([^\"]*)\", line \d+ in (\w+)", lines)
    launches = any(path.endswith("horovod/torch/mpi_ops.py") and "_async" in name for path, name in stacks)
    return launches and "Horovod background loop uncaught exception" in output


def _elastic_job(script, folder, plan, hosts, timeout):
    """`elastic_horovodrun` once. The exit code is None if the job was not done in time."""
    import psutil  # comes with Horovod

    size = len(hosts)
    (folder / "hosts").write_text("".join(f"{name}:1\n" for name in hosts))
    (folder / "discover").write_text(f"#!/bin/sh\ncat '{folder}/hosts'\n")
    (folder / "discover").chmod(0o755)
    # A rank that does not communicate with the dead worker directly notices its death by this timeout.
    limits = ["--gloo-timeout-seconds", "20"]
    elastic = ["-np", str(size), "--min-np", "1", "--max-np", "3", "--host-discovery-script", str(folder / "discover")]
    command = [*launcher(), *limits, *elastic, *python()]
    with open(folder / "output", "w") as output:
        job = subprocess.Popen(
            [*command, str(worker_path(script)), plan, str(folder)],
            env=environment(), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = job.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # Each worker runs in its own session. It is found by its argument, this folder.
            for process in psutil.process_iter(["cmdline"]):
                if str(folder) in (process.info["cmdline"] or []):
                    process.kill()
            job.kill()
            job.wait()
    return code, (folder / "output").read_text()


def torchrun(ranks, script, *arguments, timeout=120, interpreter=python):
    """Run a script (`worker_path`) under `torchrun`. Arguments and result are those of `horovodrun`.

    interpreter: returns the command that replaces `python`.
    """
    options = ["--standalone", "--nproc-per-node", str(ranks), "--no-python"]
    launcher = [*interpreter(), "-m", "torch.distributed.run", *options]
    command = [*launcher, *interpreter(), str(worker_path(script)), *map(str, arguments)]
    return subprocess.run(
        command,
        env=environment(GLOO_SOCKET_IFNAME="lo"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def assert_done(job):
    """Fail, with what a finished job has printed, if it has failed."""
    assert job.returncode == 0, shortened(job.stdout) + shortened(job.stderr)


def shortened(output, length=4000):
    """What a job of several ranks has printed: from the first traceback, which the others follow, and the end."""
    first = output.find("Traceback (most recent call last)")
    if first < 0 or first >= len(output) - length:
        return output[-length:]
    return f"{output[first:][:length]}\n[...]\n{output[max(first + length, len(output) - length) :]}"


def scenarios(ranks, script, folder, *names, run=horovodrun, timeout=120):
    """Run scenarios of a worker script. Return each scenario's results by rank: {name: [of rank 0, ...]}."""
    job = run(ranks, script, folder, *names, timeout=timeout)
    assert_done(job)
    per_rank = [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
    return {name: [results[name] for results in per_rank] for name in per_rank[0]}


class Jobs(dict):
    """Results of scenarios by name, in batches: a job runs a batch when one of its scenarios is asked for.

    Args:
        run: run(names) returns what `scenarios` returns.
        batches: lists of names. Those in no list are what run([]) returns.
    """

    def __init__(self, run, batches):
        super().__init__()
        self.run, self.batches = run, batches

    def __missing__(self, name):
        self.update(self.run(next((batch for batch in self.batches if name in batch), [])))
        return self[name]


def shaped(*arguments, timeout=60, **options):
    """Run scripts/shaped_net.sh. Return the finished process."""
    turns.take()
    command = ["bash", str(SHAPED_NET), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)


def no_shaping_reason():
    """Return why this machine cannot shape a network, or None if it can."""
    if os.geteuid() != 0:
        return "only root may make a network namespace"
    missing = [tool for tool in ("ip", "tc", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    result = shaped("1gbit", 1, "--", "true")
    return result.stderr.strip() if result.returncode else None


_REASON = no_shaping_reason()
needs_network = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))


def processes(ranks, script, folder, *names, timeout=120):
    """Run a script in `ranks` processes without a launcher. They rendezvous in `folder` and save their results there.

    Returns:
        The results as `scenarios` returns them, None for a rank that saved none, and the exit statuses.
    """
    workers = [
        subprocess.Popen(
            [*python(), str(worker_path(script)), str(folder), *names],
            env=environment(GLOO_SOCKET_IFNAME="lo", WORLD_SIZE=str(ranks), RANK=str(rank)),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        outputs = [worker.communicate(timeout=timeout)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    saved = [Path(folder) / f"{rank}.pt" for rank in range(ranks)]
    per_rank = [torch.load(path, weights_only=True) if path.exists() else None for path in saved]
    first = next((results for results in per_rank if results is not None), None)
    assert first is not None, "\n".join(map(shortened, outputs))
    return (
        {name: [results and results[name] for results in per_rank] for name in first},
        [worker.returncode for worker in workers],
    )
