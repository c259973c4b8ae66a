"""Complex parameters are averaged uncompressed, beside real ones that are compressed, in real jobs."""

import pytest
import torch

from launch import horovodrun, scenarios, torchrun

STEPS, SHARDS = 3, 2


@pytest.fixture(scope="module", params=["horovod", "torch"])
def job(request, tmp_path_factory):
    size, run = {"horovod": (2, horovodrun), "torch": (4, torchrun)}[request.param]
    return scenarios(size, "complex_worker.py", tmp_path_factory.mktemp(request.param), run=run)


def assert_mean(got, of_ranks, factor=1.0):
    for average in got:
        for name, first in got[0].items():
            assert torch.equal(average[name], first)
            if first.is_complex():
                mean = sum(own[name] for own in of_ranks) / len(of_ranks)
                torch.testing.assert_close(first, factor * mean)


def test_averages_are_means(job):
    for run, of_ranks in enumerate(zip(*job["averages"])):
        got, own = zip(*of_ranks)
        of_steps = [[of_rank[step] for of_rank in own] for step in range(STEPS)]
        if run == 2:  # DGC applies momentum to what it does not compress
            decayed = [0.9 ** (STEPS - 1 - step) for step in range(STEPS)]
            velocity = [{n: sum(d * g[n] for d, g in zip(decayed, of_rank)) for n in of_rank[0]} for of_rank in own]
            assert_mean(got, velocity)
        else:
            assert_mean(got, of_steps[-1], len(own) if run == 3 and len(own) == 2 else 1.0)  # op=Sum
        assert got[0]["w"].count_nonzero() < got[0]["w"].numel() or run == 1  # it is compressed


def test_local_steps(job):
    assert_mean(*zip(*job["local_steps"]))


def test_shards(job):
    if "shards" not in job:
        pytest.skip("Horovod has no shards")
    for shard in range(SHARDS):
        got = [averages for averages, _ in job["shards"][shard::SHARDS]]
        own = [{n: g.chunk(SHARDS)[shard] for n, g in of[-1].items() if n in got[0]} for _, of in job["shards"]]
        assert_mean(got, own)
