"""Starts real `horovodrun` and `torchrun` jobs for tests."""

import os
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent


def horovodrun(ranks, script, *arguments, timeout=120):
    """Runs a script of this folder on `ranks` processes of this machine; returns the finished process."""
    command = [
        str(Path(sys.executable).with_name("horovodrun")), "--network-interface", "lo", "-np", str(ranks),
        sys.executable, str(HERE / script), *map(str, arguments),
    ]  # fmt: skip
    environment = dict(os.environ, OMP_NUM_THREADS="1", HOROVOD_STALL_CHECK_TIME_SECONDS="10",
                       HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="30")  # fmt: skip
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
    )


def torchrun(ranks, script, *arguments, timeout=120):
    """The same under `torchrun`."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        str(HERE / script), *map(str, arguments),
    ]  # fmt: skip
    environment = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
    )


def scenarios(ranks, script, folder, *names, run=horovodrun):
    """Runs the named scenarios of a script, which saves each rank's results; returns {name: [of rank 0, ...]}."""
    job = run(ranks, script, folder, *names)
    assert job.returncode == 0, job.stdout[-4000:] + job.stderr[-4000:]
    of_ranks = [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
    return {name: [results[name] for results in of_ranks] for name in of_ranks[0]}
