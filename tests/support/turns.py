"""Jobs of several ranks take turns: of the workers of pytest-xdist, one for each two cores runs a job at a time.

A test, or the setup of a fixture, that starts a process of a job (launch.py) takes its turn; conftest.py ends it. Not
so the tests of a file with MOSTLY_WAIT = True: their jobs wait for time-outs, and leave the cores to others.
"""

import fcntl
import os

AT_A_TIME = max(1, len(os.sched_getaffinity(0)) // 2)

needed = True  # whether the current test takes turns

_path = None
_file = None


def share(folder):
    """Take turns with other processes that share this folder."""
    global _path
    worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    _path = folder / f"job{worker % AT_A_TIME}"


def take():
    """Wait for this process's turn."""
    global _file
    if needed and _path and not _file:
        _file = open(_path, "w")  # noqa: SIM115
        fcntl.flock(_file, fcntl.LOCK_EX)


def end():
    global _file
    if _file:
        _file.close()
        _file = None
