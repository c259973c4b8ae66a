"""A rank that is killed in mid-training ends the job with an error, in a real `horovodrun`: nobody waits for ever."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("horovod.torch")

# Horovod notices a closed connection at once. Its launcher kills whoever has not ended 5 seconds after it asked.
SECONDS_TO_NOTICE = 10
SECONDS_TO_END = 40


def wait_for(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} seconds"
        time.sleep(0.05)


def is_running(pid):
    """Whether there is such a process, and not just its entry, which nobody has asked for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def step_of(path):
    text = path.read_text() if path.exists() else ""
    return int(text) if text else -1


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, ranks, killed",
    [
        ("topk:theta=0.9", 3, 1),  # gathers
        ("powersgd", 2, 0),  # two rounds of averages; rank 0 is Horovod's coordinator
    ],
)
def test_a_killed_rank_ends_the_others(method, ranks, killed, tmp_path):
    log = tmp_path / "log"
    with open(log, "w") as output:
        job = subprocess.Popen(
            [Path(sys.executable).with_name("horovodrun"), "--network-interface", "lo", "-np", str(ranks),
             sys.executable, Path(__file__).with_name("fault_worker.py"), method, tmp_path],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    pids = {}
    try:
        wait_for(
            lambda: job.poll() is not None or all(step_of(tmp_path / f"{r}.step") >= 3 for r in range(ranks)),
            90, "three steps on every rank",
        )  # fmt: skip
        assert job.poll() is None, log.read_text()[-4000:]
        pids = {rank: int((tmp_path / f"{rank}.pid").read_text()) for rank in range(ranks)}
        began = time.time()
        os.kill(pids[killed], signal.SIGKILL)
        assert job.wait(SECONDS_TO_END) != 0
        for rank in set(range(ranks)) - {killed}:
            when, _, error = (tmp_path / f"{rank}.error").read_text().partition(" ")
            assert error.startswith("HorovodInternalError"), error
            assert float(when) - began < SECONDS_TO_NOTICE
        assert not (tmp_path / f"{killed}.error").exists()
        wait_for(lambda: not any(map(is_running, pids.values())), 10, "the end of all processes")
    finally:
        for path in tmp_path.glob("*.pid"):
            if is_running(pid := int(path.read_text())):
                os.kill(pid, signal.SIGKILL)
        if job.poll() is None:
            job.kill()
        job.wait()
