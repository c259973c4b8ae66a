"""`Hierarchical` in real jobs of 4 ranks, as 2 nodes of 2."""

import functools

import pytest
import torch

import gradzip
from hierarchical_reference import Reference
from hierarchical_worker import NODES, PLACES, SPECS, STEPS, gradients
from launch import horovodrun, scenarios, torchrun

SIZE = NODES * PLACES
HOSTS = "localhost:2,127.0.0.1:2"  # both are this machine


def expected(spec):
    """The averages of all steps, by name."""
    references = {name: Reference(gradzip.parse(spec).inner, NODES, PLACES) for name in ("w", "v")}
    steps = []
    for step in range(STEPS):
        steps.append({name: of.average(gradients(name, step, SIZE), name) for name, of in references.items()})
        steps[-1]["b"] = sum(gradients("b", step, SIZE)) / SIZE
    return steps


def assert_as_expected(results):
    for spec, of_ranks in results.items():
        for got in of_ranks:
            for averages, first, wanted in zip(got["averages"], of_ranks[0]["averages"], expected(spec), strict=True):
                for name, want in wanted.items():
                    assert torch.equal(averages[name], first[name]), (spec, name)
                    if name == "b":  # added in the order of an all-reduce
                        torch.testing.assert_close(averages[name], want)
                    else:  # a sum of two does not depend on the order
                        assert torch.equal(averages[name], want), (spec, name)
            assert 0 < got["bytes_sent"] < got["bytes_dense"] / 4
            assert got["bytes_dense"] < got["bytes_in_node"] < 2 * got["bytes_dense"]
            assert got["same_after_checkpoint"]
            assert got["skipped"] == [False, True, False]


every_method = pytest.mark.parametrize("specs", [SPECS[:1], pytest.param(SPECS[1:], marks=pytest.mark.long)])


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
@every_method
def test_torchrun(tmp_path, specs):
    results = scenarios(SIZE, "hierarchical_worker.py", tmp_path, *specs, "unknown_place", run=torchrun)
    for message in results.pop("unknown_place"):
        assert "ValueError: Hierarchical: rank 1: TorchEngine: got LOCAL_RANK=None, LOCAL_WORLD_SIZE=None" in message
    assert results.keys() == set(specs)
    assert_as_expected(results)


@every_method
def test_horovodrun(tmp_path, monkeypatch, specs):
    pytest.importorskip("horovod.torch")
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    results = scenarios(
        SIZE, "hierarchical_worker.py", tmp_path, *specs, "process_set", run=functools.partial(horovodrun, hosts=HOSTS)
    )
    assert_on_a_process_set(results.pop("process_set"))
    assert results.keys() == set(specs)
    assert_as_expected(results)


def assert_on_a_process_set(of_ranks):
    """Scopes among ranks 1 and 3 need process sets that exist: the other ranks would not add them."""
    for rank in (0, 3):
        error, *means = of_ranks[rank]
        assert "there are no process sets of the ranks [0], [3], which only all ranks of the job together" in error
        assert "\n" not in error
        assert means == [rank, 1.5]


@pytest.mark.long
@pytest.mark.parametrize("hosts, message", [
    ("localhost:2,127.0.0.1:2", "ranks [0, 1], [2, 3], [0, 2], [1, 3] (Set HOROVOD_DYNAMIC_PROCESS_SETS=1"),
    ("localhost:2,127.0.0.1:1", "Hierarchical: rank 2 is number 0 of 1 on its node, expected number 0 of 2: start as"),
])  # fmt: skip
def test_errors_are_raised_on_all_ranks(tmp_path, monkeypatch, hosts, message):
    pytest.importorskip("horovod.torch")
    monkeypatch.delenv("HOROVOD_DYNAMIC_PROCESS_SETS", raising=False)
    ranks = sum(int(host[-1]) for host in hosts.split(","))
    run = functools.partial(horovodrun, hosts=hosts)
    results = scenarios(ranks, "hierarchical_worker.py", tmp_path, "error", run=run)
    assert len(results["error"]) == ranks
    for error in results["error"]:
        assert message in error and "\n" not in error
