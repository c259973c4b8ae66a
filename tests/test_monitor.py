"""ReplicaMonitor: replicas that differ are found, named and mended."""

import pytest
import torch

import gradzip
from launch import horovodrun, torchrun


@pytest.mark.parametrize("run", [horovodrun, torchrun])
def test_replicas_that_differ_are_found_and_mended(tmp_path, run):
    if run is horovodrun:
        pytest.importorskip("horovod.torch")
    job = run(3, "monitor_worker.py", tmp_path)
    assert job.returncode == 0, job.stdout + job.stderr
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(3)]
    for rank in ranks:
        assert rank["unconnected"].startswith("ReplicaMonitor: got neither Horovod nor torch.distributed initialized")
        *fine, different, step7, mended = rank["messages"]
        assert fine == [""] * 5 and step7 == mended == ""
        assert different.startswith("step 6: rank 1 and rank 0 differ in 1 of 6 parameters, the first is '1.weight';")
        assert torch.equal(rank["weight"], ranks[0]["weight"])


def test_bad_intervals():
    for name in ("check_every", "broadcast_every"):
        with pytest.raises(ValueError, match=f"ReplicaMonitor: got {name} = -1, expected an integer >= 0"):
            gradzip.ReplicaMonitor([], **{name: -1})
