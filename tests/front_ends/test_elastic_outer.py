"""Local steps in real elastic Horovod jobs: workers join, are killed with SIGKILL and replaced."""

import itertools
from dataclasses import dataclass

import pytest
import torch

import gradzip
from contract import gradient
from launch import elastic_horovodrun, shortened

pytest.importorskip("horovod.torch")
from elastic_jobs import HOSTS, records
from elastic_outer_worker import COMMIT_EVERY, EVERY, LR, PLANS, Plan

MOSTLY_WAIT = True


@dataclass
class Job:
    """The records of a plan's workers, and the global parameters of all models at the beginning and at the end.

    generations: [{(host, event, batch): record}, ...].
    """

    plan: Plan
    generations: list[dict]
    begin: list[dict]
    end: list[dict]

    def commit(self, number):
        """The last batch of a generation that its workers have committed."""
        return max(batch for _, event, batch in self.generations[number + 1] if event == "begin")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    done = {}

    def get(name):
        if name not in done:
            folder, plan = tmp_path_factory.mktemp(name), PLANS[name]
            hosts = HOSTS[: plan.sizes[0]]
            code, output = elastic_horovodrun("elastic_outer_worker.py", folder, name, hosts, timeout=240)
            assert code == 0, shortened(output)
            generations = [{} for _ in plan.sizes]
            for record in records(folder):
                generations[record["generation"]][record["host"], record["event"], record["batch"]] = record
            ends = (torch.load(folder / f"{name}.pt", weights_only=True) for name in ("begin", "end"))
            done[name] = Job(plan, generations, *ends)
        return done[name]

    return get


def world(generation):
    """Return the hosts of a generation's workers in rank order."""
    ranks = {record["rank"]: host for (host, event, _), record in generation.items() if event == "begin"}
    return [ranks[rank] for rank in sorted(ranks)]


def check_replicas(job):
    """Ranks have the same global parameters, outer and shared states after every batch, and all is equal in the end."""
    assert [len(world(generation)) for generation in job.generations] == job.plan.sizes
    for generation, hosts in zip(job.generations, map(world, job.generations)):
        for event, batch in {key[1:] for key in generation}:
            same = [generation[host, event, batch]["models"] for host in hosts if (host, event, batch) in generation]
            for models in zip(*same):
                for field in ("exchanges", "steps", "common"):
                    assert len({model[field] for model in models}) == 1, (event, batch, field)
    ends = [job.generations[-1][host, "end", job.plan.batches] for host in world(job.generations[-1])]
    for end in ends:
        for model in end["models"]:
            assert model["global"] == model["local"]


def check_survivors(job, but=()):
    """Survivors go on from the last commit as they were then, and joining workers from the global parameters.

    but: (generation, rank) of survivors that join as a new worker does.
    """
    for number, (before, after) in enumerate(itertools.pairwise(job.generations)):
        commit = job.commit(number)
        hosts = world(after)
        for rank, host in enumerate(hosts):
            begin, first = after[host, "begin", commit], after[hosts[0], "begin", commit]
            if host in world(before) and (number + 1, rank) not in but:
                committed = before[host, "commit", commit]
                assert begin["restarts"] == 0
                assert begin["models"] == committed["models"]
            else:
                assert begin["restarts"] == (host in world(before))
                for model, of_first in zip(begin["models"], first["models"]):
                    assert model["local"] == model["global"] == of_first["global"]
                    assert model["inner"] == of_first["inner"] and model["buffers"] == of_first["buffers"]
                    assert not model["own"]


@pytest.mark.long
def test_local_steps_survive_workers_that_join_and_die(jobs):
    job = jobs("rounds")
    check_replicas(job)
    check_survivors(job)
    for number, (_, batch, _) in job.plan.killed.items():
        assert job.commit(number) == (batch - 1) // COMMIT_EVERY * COMMIT_EVERY
    kept = [record["models"] for generation in job.generations for record in generation.values()]
    assert any(models[1]["own"] for models in kept)  # residuals
    locals_ = [
        record["models"][0] for (_, event, _), record in job.generations[3].items() if event == "begin"
    ]  # between two exchanges
    assert len({model["local"] for model in locals_}) == len(locals_) == 2


@pytest.mark.long
def test_every_step_that_is_committed_counts_once(jobs):
    """Without compression and outer optimizer, an exchange subtracts the mean of the workers' steps since the last one.

    A worker that has joined since then has fewer of them.
    """
    job = jobs("rounds")
    got, expected = job.end[0], {name: tensor.double() for name, tensor in job.begin[0].items()}
    first = [0, *(job.commit(number) for number in range(len(job.generations) - 1)), job.plan.batches]
    hosts = {}  # by batch
    for generation, (begin, end) in zip(job.generations, itertools.pairwise(first)):
        hosts |= dict.fromkeys(range(begin + 1, end + 1), world(generation))
    exchanges = [*range(0, job.plan.batches, EVERY), job.plan.batches]
    for begin, end in itertools.pairwise(exchanges):
        for host in hosts[end]:
            for batch in range(begin + 1, end + 1):
                # A worker takes a batch in the generation in which it is committed, and keeps it while it lives.
                if host in hosts[batch]:
                    for name, tensor in expected.items():
                        tensor -= LR / len(hosts[end]) * gradient(name, host, batch, tuple(tensor.shape)).double()
    for name, tensor in expected.items():
        # A rounding to float32 in each step and in some sums of each exchange, of numbers below 16.
        tolerance = (job.plan.batches + 4 * len(exchanges)) * 16 * 2**-24
        torch.testing.assert_close(got[name].double(), tensor, rtol=0, atol=tolerance)


@pytest.mark.long
def test_exchanges_in_the_background_survive_workers_that_join_and_die(jobs):
    job = jobs("streamed")
    check_replicas(job)
    check_survivors(job)


@pytest.mark.long
def test_a_worker_goes_on_when_another_is_removed(jobs):
    job = jobs("removed")
    check_replicas(job)
    check_survivors(job)


def test_a_worker_that_is_behind_an_exchange_joins_as_a_new_one(jobs):
    job = jobs("behind")
    check_replicas(job)
    check_survivors(job, but=[(1, 1)])


def test_a_model_beside_its_local_steps_is_refused(monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = gradzip.outer.LocalSteps(model, optimizer, every=1, group="horovod")  # no collectives
    for name, value in (("model", model), ("module", torch.nn.Sequential(model)), ("optimizer", optimizer)):
        with pytest.raises(ValueError, match=f"got {name}, which is a part of local_steps, expected local_steps alone"):
            gradzip.horovod.elastic_state(local_steps=outer, **{name: value})
    gradzip.horovod.elastic_state(local_steps=outer, model=torch.nn.Linear(4, 4))
    model.weight.grad = torch.ones_like(model.weight)
    with pytest.raises(RuntimeError, match=r"before the state was synchronized.*elastic_state\(local_steps=outer\)"):
        optimizer.step()
