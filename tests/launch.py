"""Starts real `horovodrun` and `torchrun` jobs for tests, and commands on slow networks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
SHAPED_NET = HERE.parent / "scripts" / "shaped_net.sh"


def horovodrun(ranks, script, *arguments, timeout=120):
    """Runs a script of this folder on `ranks` processes of this machine; returns the finished process."""
    launcher = ["horovodrun", "--network-interface", "lo", "-np", str(ranks), sys.executable]
    return launch(launcher, script, arguments, timeout)


def torchrun(ranks, script, *arguments, timeout=120):
    """The same with PyTorch's launcher."""
    return launch(["torchrun", "--standalone", "--nproc-per-node", str(ranks)], script, arguments, timeout)


def launch(launcher, script, arguments, timeout):
    """Runs a launcher of this environment."""
    name, *options = launcher
    command = [str(Path(sys.executable).with_name(name)), *options, str(HERE / script), *map(str, arguments)]
    environment = dict(os.environ, OMP_NUM_THREADS="1", HOROVOD_STALL_CHECK_TIME_SECONDS="10",
                       HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="30")  # fmt: skip
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
    )


def scenarios(ranks, script, folder, *names):
    """Runs the named scenarios of a script, which saves each rank's results; returns {name: [of rank 0, ...]}."""
    job = horovodrun(ranks, script, folder, *names)
    assert job.returncode == 0, job.stdout[-4000:] + job.stderr[-4000:]
    of_ranks = [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
    return {name: [results[name] for results in of_ranks] for name in of_ranks[0]}


def shaped(*arguments, **options):
    """Runs scripts/shaped_net.sh; returns the finished process."""
    command = ["bash", str(SHAPED_NET), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def why_not_shaped():
    """Why a network cannot be shaped here, or None."""
    if os.geteuid() != 0:
        return "only root may make a network namespace"
    missing = [tool for tool in ("ip", "tc", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    done = shaped("1gbit", 1, "--", "true")
    return done.stderr.strip() if done.returncode else None


_REASON = why_not_shaped()
needs_network = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
