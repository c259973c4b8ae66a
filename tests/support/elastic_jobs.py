"""What workers of elastic Horovod jobs, and the tests of those, share: hosts, digests and records of states.

A worker appends records of its state to FOLDER/HOST.jsonl.
"""

import hashlib
import json
import os
import signal
import time

import torch

# Names of this machine. Horovod does not use a host again after a failure.
HOSTS = ["localhost", "127.0.0.1", "127.1", "LOCALHOST"]


def digest(value):
    """Return a hash of tensors and numbers in nested dicts and lists. It differs if one bit differs."""
    hasher = hashlib.sha256()

    def add(x):
        if isinstance(x, dict):
            for key in sorted(x):
                hasher.update(str(key).encode())
                add(x[key])
        elif isinstance(x, (list, tuple)):
            for item in x:
                add(item)
        elif isinstance(x, torch.Tensor):
            hasher.update(x.detach().contiguous().numpy().tobytes())
        else:
            hasher.update(repr(x).encode())

    add(value)
    return hasher.hexdigest()[:16]


def write(folder, host, record):
    """Append a record of a worker's state to its file."""
    with open(folder / f"{host}.jsonl", "a") as file:
        file.write(json.dumps({"host": host, **record}) + "\n")


def records(folder):
    """Yield the records of all workers."""
    for host in HOSTS:
        path = folder / f"{host}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            yield json.loads(line)


def change_hosts(state, folder, host, rank, others):
    """Have rank 0 set the hosts that the discovery script lists, and wait on all workers for HostsUpdatedInterrupt.

    host: of this worker.
    """
    if rank == 0:
        new = folder / f"hosts.{host}"
        new.write_text("".join(f"{name}:1\n" for name in dict.fromkeys((host, *others))))
        new.rename(folder / "hosts")
    while True:
        time.sleep(0.1)
        state.check_host_updates()


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
