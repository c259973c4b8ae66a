"""Work for the processes of test_convergence_benchmark.py, in a module that loads fast."""

import os
import signal
import time


def meet(folder, name, report):
    """Wait until two processes are here; fail, die or sleep if that is the name."""
    if name == "bad":
        raise ValueError("no luck")
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / name).touch()
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.01)
    report({"pid": os.getpid()})
    if name == "sleeps":
        time.sleep(60)
