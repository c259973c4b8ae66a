"""Ranks with GPUs and NCCL: averages are those of the CPU with gloo, with all front ends.

With fewer GPUs than ranks, ranks share them. NCCL 2.30 or later does so if it is told to, as by

    NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=2 pytest tests/front_ends/test_nccl.py

with LD_PRELOAD=.../libnccl.so.2 where torch's own is older.
"""

import os

import pytest
import torch

from launch import horovodrun, scenarios, torchrun

TIMEOUT = 150  # seconds of a job: ranks that share a GPU take turns


def lacks(ranks, run):
    """What a job of so many ranks needs that this machine does not have."""
    if not torch.cuda.is_available():
        return "no GPU"
    if torch.cuda.device_count() < ranks and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        return f"fewer than {ranks} GPUs, and NCCL was not told that ranks share them"
    if run is horovodrun and not pytest.importorskip("horovod.torch").nccl_built():
        return "a Horovod without NCCL: HOROVOD_GPU_OPERATIONS=NCCL scripts/build_horovod.sh builds one"
    return None


JOBS = [
    (torchrun, 2, ["collectives", "methods", "local", "others"], {}),
    (torchrun, 2, ["captured"], {}),
    (torchrun, 2, ["of_devices"], {"NCCL_WORKER_BACKEND": "nccl"}),
    (torchrun, 2, ["of_devices"], {"NCCL_WORKER_BACKEND": "nccl", "NCCL_WORKER_DEVICE_ID": "1"}),
    (torchrun, 4, ["collectives", "first_methods", "fsdp", "others"], {}),
    (horovodrun, 2, ["horovod"], {}),
]
ON_A_CPU = [job for job in JOBS if not job[3] and job[2] != ["captured"]]


def wrong(run, ranks, names, folder):
    """What is wrong with which cases of some scenarios."""
    found = scenarios(ranks, "nccl_worker.py", folder, *names, run=run, timeout=TIMEOUT)
    assert sorted(found) == sorted(names)
    assert all(of_rank for of_ranks in found.values() for of_rank in of_ranks)
    return {
        (name, case): error
        for name, of_ranks in found.items()
        for of_rank in of_ranks
        for case, error in of_rank.items()
        if error
    }


@pytest.mark.cuda
@pytest.mark.parametrize("run, ranks, names, variables", JOBS)
def test_averages_are_those_of_the_cpu(run, ranks, names, variables, tmp_path, monkeypatch):
    if reason := lacks(ranks, run):
        pytest.skip(reason)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert wrong(run, ranks, names, tmp_path) == {}


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("run, ranks, names, variables", ON_A_CPU)
def test_the_script_runs_without_a_gpu(run, ranks, names, variables, tmp_path):
    """Both sides are the CPU's."""
    if run is horovodrun:
        pytest.importorskip("horovod.torch")
    assert wrong(run, ranks, names, tmp_path) == {}
