"""Callbacks of Lightning, in real jobs: with the same bits as without Lightning."""

import os
import subprocess

import pytest
import torch

from launch import environment, worker_path
from paths import ROOT

PYTHON = ROOT / ".venv-integrations" / "bin" / "python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-integrations: make integrations")


def scenarios(ranks, folder, *names):
    """Run scenarios of lightning_worker.py. Return each one's results by rank."""
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    job = subprocess.run(
        [str(part) for part in (*command, worker_path("lightning_worker.py"), folder, *names)],
        env=environment(GLOO_SOCKET_IFNAME="lo", PYTHONPATH=os.pathsep.join(map(str, (ROOT, ROOT / "tests/support")))),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout[-4000:] + job.stderr[-4000:]
    of_ranks = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
    return {name: [of_rank[name] for of_rank in of_ranks] for name in of_ranks[0]}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return scenarios(2, tmp_path_factory.mktemp("two"))


PARAMETERS = 6  # which are followed by the running statistics of each rank


def equal(ours, theirs):
    return len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))


def test_trainer_gives_the_bits_of_ddp_with_the_hook(two):
    for spec, ((ours, sent), (theirs, sent_without)) in two["plain"][0].items():
        assert equal(ours, theirs), spec
        assert sent == sent_without > 0, spec
        assert equal(ours[:PARAMETERS], two["plain"][1][spec][0][0][:PARAMETERS]), spec


def test_gradients_are_accumulated(two):
    for ours, theirs in two["accumulated"]:
        assert equal(ours, theirs)
    assert not equal(two["accumulated"][0][0], two["plain"][0]["acpsgd:rank=2"][0][0])


def test_compressor_follows_the_scaler_of_mixed_precision(two):
    for ours, theirs, follows, scale in two["scaled"]:
        assert follows and equal(ours, theirs)
        assert scale != 2.0**20 and all(tensor.isfinite().all() for tensor in ours)


def test_resumed_trainer_gives_the_bits_of_an_uninterrupted_one(two):
    for of_rank in two["resumed"]:
        for spec, (whole, continued, _) in of_rank.items():
            assert equal(whole, continued), spec


def test_checkpoint_has_the_residuals_of_all_ranks(two):
    for spec, (_, _, residuals) in two["resumed"][0].items():
        assert len(residuals) == 2 and not torch.equal(*residuals), spec


def test_fabric(two):
    for ours, theirs, follows in two["fabric"]:
        assert equal(ours, theirs) and follows


def test_local_steps_give_the_bits_of_a_plain_loop(two):
    for ours, theirs, (sent, sent_without), exchanges, ddp_is_freed in two["local_steps"]:
        assert equal(ours, theirs)
        assert sent == sent_without > 0 and exchanges > 4 and ddp_is_freed
    (first, *_), (second, *_) = two["local_steps"]
    assert equal(first[:PARAMETERS], second[:PARAMETERS])
    assert not torch.equal(first[PARAMETERS], second[PARAMETERS])  # running means, which nothing averages


def test_resumed_local_steps_give_the_bits_of_uninterrupted_ones(two):
    for whole, continued in two["local_steps_resumed"]:
        assert equal(whole, continued)


def test_refused_by_name(two):
    for errors in two["refused"]:
        assert errors["class"].startswith("TypeError: Compression: got <class 'gradzip.methods.low_rank.ACPSGD'>")
        assert errors["other"].startswith("ValueError: Compression: got Other, expected strategy='ddp'")
        assert errors["model parallel"].startswith("ValueError: Compression: got ModelParallelStrategy, expected")
        assert "sharded over all 2 ranks, expected replicas of shards" in errors["no replicas"]
        assert errors["local fsdp2"].startswith("ValueError: LocalSteps: got ModelParallelStrategy and 1 optimizers")
        assert errors["local optimizers"].startswith("ValueError: LocalSteps: got DDPStrategy and 2 optimizers")
        assert errors["local options"] == "ValueError: LocalSteps: got every = 0, expected an integer >= 1"


def test_one_process(tmp_path):
    ((whole, continued, without),) = scenarios(1, tmp_path, "alone")["alone"]
    assert equal(whole, without) and equal(continued, without)


@pytest.mark.long
def test_shards_of_fsdp2(tmp_path):
    for whole, continued, theirs in scenarios(4, tmp_path, "sharded")["sharded"]:
        assert equal(whole, theirs) and equal(continued[:PARAMETERS], theirs[:PARAMETERS])
