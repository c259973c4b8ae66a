"""One rank of a job of benchmarks/cpu_memory.

Usage: `rank.py SPEC FILE`, with the spec of a method, or "" for DDP alone. Rank 0 writes one line of JSON to the file:
{"allocated": bytes that malloc has handed out, "between", "in_step": resident bytes of this process, "faults": page
faults of a step}, medians of the last steps.
"""

from __future__ import annotations

import ctypes
import json
import re
import resource
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gradzip
import gradzip.ddp
from benchmarks.cpu_memory.__main__ import MATRICES, SIDE

WARM_UP, STEPS = 3, 3


def resident(field: str) -> int:
    """Bytes of this process: VmRSS, now, or VmHWM, at most since the last `restart`."""
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def restart() -> None:
    """Let VmHWM begin with what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


_ARENA = "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"


class _MallocInfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in _ARENA]


def allocated() -> int:
    """Bytes that malloc has handed out and that are not freed. What is freed may stay resident."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _MallocInfo
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)


def main(spec: str, file: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(MATRICES)))
    ddp = nn.parallel.DistributedDataParallel(model)
    if spec:
        gradzip.ddp.register(ddp, gradzip.parse(spec))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    rows = []
    for _ in range(WARM_UP + STEPS):
        batch = torch.randn(2, SIDE)
        restart()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        now = {"allocated": allocated(), "between": resident("VmRSS")}
        rows.append(now | {"in_step": resident("VmHWM"), "faults": faults})
    if dist.get_rank() == 0:
        found = {name: statistics.median(row[name] for row in rows[WARM_UP:]) for name in rows[0]}
        with Path(file).open("a") as lines:
            lines.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
