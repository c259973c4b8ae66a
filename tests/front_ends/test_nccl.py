"""Ranks with GPUs and NCCL: averages are those of the CPU with gloo, with all front ends but Horovod.

With fewer GPUs than ranks, ranks share them. NCCL 2.30 or later does so if it is told to, as by

    NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=2 pytest tests/front_ends/test_nccl.py

with LD_PRELOAD=.../libnccl.so.2 where torch's own is older.
"""

import os

import pytest
import torch

from launch import scenarios, torchrun

TIMEOUT = 150  # seconds of a job: ranks that share a GPU take turns


def reason():
    if not torch.cuda.is_available():
        return "no GPU"
    if torch.cuda.device_count() >= 4:
        return None
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        return "fewer than 4 GPUs, and NCCL was not told that ranks share them"
    return None


pytestmark = [pytest.mark.cuda, pytest.mark.skipif(reason() is not None, reason=str(reason()))]

JOBS = [
    (2, ["collectives", "methods", "local", "others"], {}),
    (2, ["captured"], {}),
    (2, ["of_devices"], {"NCCL_WORKER_BACKEND": "nccl"}),
    (2, ["of_devices"], {"NCCL_WORKER_BACKEND": "nccl", "NCCL_WORKER_DEVICE_ID": "1"}),
    (4, ["collectives", "first_methods", "fsdp", "others"], {}),
]


@pytest.mark.parametrize("ranks, names, variables", JOBS)
def test_averages_are_those_of_the_cpu(ranks, names, variables, tmp_path, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = scenarios(ranks, "nccl_worker.py", tmp_path, *names, run=torchrun, timeout=TIMEOUT)
    assert sorted(found) == sorted(names)
    wrong = {
        (name, case): error
        for name, of_ranks in found.items()
        for of_rank in of_ranks
        for case, error in of_rank.items()
        if error
    }
    assert all(of_rank for of_ranks in found.values() for of_rank in of_ranks) and wrong == {}
