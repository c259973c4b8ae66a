"""ReplicaMonitor finds, names and repairs replicas that differ."""

import pytest
import torch

import gradzip
from launch import horovodrun, scenarios, torchrun


@pytest.fixture(scope="module", params=[horovodrun, torchrun], ids=lambda run: run.__name__)
def results(request, tmp_path_factory):
    run, folder = request.param, tmp_path_factory.mktemp("monitor")
    if run is horovodrun:
        pytest.importorskip("horovod.torch")
    return scenarios(3, "replicas_worker.py", folder, run=run)


def test_different_replicas_are_found_and_repaired(results):
    for messages, weight in results["steps"]:
        *fine, different, step7, repaired = messages
        assert fine == [""] * 5 and step7 == repaired == ""
        assert "step 6: rank 1 and rank 0 differ in 1 of 6 parameters, the first is '1.weight';" in different
        assert torch.equal(weight, results["steps"][0][1])


def test_flipped_bit_is_found_in_every_kind_of_tensor(results):
    for errors, tensors in results["flips"]:
        for what, message in errors.items():
            if what == "" or "repaired" in what:
                assert message == "", what
            else:
                assert f"rank 2 and rank 0 differ in 1 of 9 parameters, the first is {what!r};" in message
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, results["flips"][0][1][name], rtol=0, atol=0, equal_nan=True)


def test_buffers_and_momenta_are_compared_if_passed(results):
    for equal, all_equal, after_batch, buffers, after_flip, momenta, after_step in results["trained"]:
        assert equal == all_equal == after_batch == after_flip == ""
        assert "rank 1 and rank 0 differ in 2 of 7 parameters, the first is '1.running_mean';" in buffers
        assert "rank 1 and rank 0 differ in 1 of 4 parameters, the first is 'momentum 0';" in momenta
        assert "rank 1 and rank 0 differ in 1 of 4 parameters, the first is '0.weight';" in after_step


def test_sparse_tensors_are_refused():
    with pytest.raises(ValueError, match="ReplicaMonitor: got 'w' of torch.sparse_coo, expected dense tensors"):
        gradzip.ReplicaMonitor([("w", torch.eye(3).to_sparse())])


def test_a_process_that_is_not_connected_is_refused():
    with pytest.raises(RuntimeError, match="ReplicaMonitor: got neither Horovod nor torch.distributed initialized"):
        gradzip.ReplicaMonitor(torch.nn.Linear(2, 2).named_parameters(), check_every=1).step()


def test_bad_intervals():
    for name in ("check_every", "broadcast_every"):
        with pytest.raises(ValueError, match=f"ReplicaMonitor: got {name} = -1, expected an integer >= 0"):
            gradzip.ReplicaMonitor([], **{name: -1})
