"""Real elastic Horovod jobs: workers join, are killed in a step and replaced. Hosts are names of this machine."""

import copy
import itertools
from dataclasses import dataclass

import pytest
import torch

import gradzip
from contract import average_bucket, kept_residual
from launch import elastic_horovodrun, shortened

pytest.importorskip("horovod.torch")
from elastic_jobs import HOSTS, digest, records
from elastic_worker import COMMIT_EVERY, PLANS, Plan, batch_seeds, loss, networks_and_optimizers

MOSTLY_WAIT = True


@dataclass
class Job:
    """The records of a plan's workers, and state dicts of models and optimizers at the beginning and at the end.

    generations: [{(host, event, step): record}, ...].
    """

    plan: Plan
    generations: list[dict]
    begin: list[dict]
    end: list[dict]


@pytest.fixture(scope="module", params=["grouped", pytest.param("joined", marks=pytest.mark.long)])
def job(request, tmp_path_factory):
    folder, plan = tmp_path_factory.mktemp(request.param), PLANS[request.param]
    code, output = elastic_horovodrun("elastic_worker.py", folder, request.param, HOSTS[: plan.sizes[0]], timeout=240)
    assert code == 0, shortened(output)
    generations = [{} for _ in plan.sizes]
    for record in records(folder):
        generations[record["generation"]][record["host"], record["event"], record["step"]] = record
    return Job(plan, generations, *(torch.load(folder / f"{name}.pt", weights_only=True) for name in ("begin", "end")))


def world(generation):
    """Return the hosts of a generation's workers in rank order."""
    ranks = {record["rank"]: host for (host, event, _), record in generation.items() if event == "begin"}
    return [ranks[rank] for rank in sorted(ranks)]


def test_workers_join_fail_and_are_replaced(job):
    worlds = [world(generation) for generation in job.generations]
    assert [len(hosts) for hosts in worlds] == job.plan.sizes
    for generation, hosts in zip(job.generations, worlds):
        assert {record["size"] for record in generation.values()} == {len(hosts)}
    for number, (before, after) in enumerate(itertools.pairwise(worlds)):
        survivors = before.copy()
        if number in job.plan.killed:
            del survivors[job.plan.killed[number][0]]
        assert after[: len(survivors)] == survivors
        assert set(after[len(survivors) :]).isdisjoint(itertools.chain(*worlds[: number + 1]))
    assert all((host, "end", job.plan.last_step) in job.generations[-1] for host in worlds[-1])


def test_replicas_are_identical_after_every_step(job):
    for generation in job.generations:
        steps = {step for _, _, step in generation}
        assert len(steps) > 3
        for step in steps:
            for event in ("begin", "step", "commit", "end"):
                records = [record for (_, e, s), record in generation.items() if (e, s) == (event, step)]
                assert len(records) in (0, len(world(generation)))
                for field in ("model", "momentum", "common", "steps"):
                    assert all(record[field] == records[0][field] for record in records), (field, event, step)


def test_survivors_continue_from_the_last_commit_with_their_residuals(job):
    has_residuals = [gradzip.parse(spec).keeps_residual for spec, _ in job.plan.models]
    for before, after in itertools.pairwise(job.generations):
        commit = max(step for _, event, step in before if event == "commit")
        newest = max(step for _, _, step in before)
        assert newest - COMMIT_EVERY < commit <= newest
        for host in world(after):
            begin = after[host, "begin", commit]
            if host in world(before):
                committed = before[host, "commit", commit]
                for field in ("model", "momentum", "common", "steps", "own"):
                    assert begin[field] == committed[field], field
                assert [len(residuals) for residuals in begin["own"]] == [2 * has for has in has_residuals]
            else:
                assert not any(begin["own"])  # a new worker has no residuals
        # Steps after the commit are undone; step counts continue from the commit.
        assert all(count == commit for counts in begin["steps"] for count in counts.values())


def test_uncommitted_steps_are_dropped(job):
    for number, (_, step, _, _) in job.plan.killed.items():
        generation = job.generations[number]
        assert max(s for _, _, s in generation) == step
        assert max(s for _, event, s in generation if event == "commit") < step


def replay(job):
    """Repeat the committed steps of each world in one process, without failures. Return the networks' state dicts."""
    pairs, states = list(networks_and_optimizers(job.plan)), {}
    for obj, state_dict in zip(itertools.chain(*pairs), job.begin):
        obj.load_state_dict(state_dict)
    last = [max(s for _, event, s in g if event == "commit") for g in job.generations]
    for hosts, first, end in zip(map(world, job.generations), [0, *last], last):
        groups = [gradzip.LocalGroup(gradzip.parse(spec), len(hosts)) for spec, _ in job.plan.models]
        for i, group in enumerate(groups):
            for rank, (host, compressor) in enumerate(zip(hosts, group.compressors)):
                parked = compressor.memory.parked = copy.deepcopy(states.get((i, host), states.get((i, hosts[0]), {})))
                for fields in parked.values():
                    if (i, host) not in states:
                        for name in compressor.rank_local:
                            fields.pop(name, None)
                    if "owner_residual" in fields:  # of a partition of the world before
                        fields["residual"] = kept_residual(fields)
                        del fields["owner_residual"], fields["owner_start"]
                    fields |= {"rank": rank, "size": len(hosts)}
        for step in range(first, end):
            for (network, optimizer), group, (_, options) in zip(pairs, groups, job.plan.models):
                grads = []
                for rank in range(len(hosts)):
                    optimizer.zero_grad()
                    for seed in batch_seeds(step, rank, options):
                        loss(network, seed).backward()
                    grads.append([p.grad.clone() for p in network.parameters()])
                of_ranks = dict(zip((name for name, _ in network.named_parameters()), zip(*grads)))
                averages = average_bucket(group, of_ranks)
                for name, p in network.named_parameters():
                    p.grad = averages[name]
                optimizer.step()
        for i, group in enumerate(groups):
            saved = [compressor.memory.by_parameter() for compressor in group.compressors]
            states |= {(i, host): of_rank for host, of_rank in zip(hosts, saved)}
    return [network.state_dict() for network, _ in pairs]


def test_result_equals_training_without_failures(job):
    for (spec, _), elastic, replayed, first in zip(job.plan.models, job.end[::2], replay(job), job.begin[::2]):
        for name, got in elastic.items():
            change = (replayed[name] - first[name]).norm()
            assert (got - replayed[name]).norm() < 1e-5 * change, (spec, name)


@pytest.mark.parametrize("local", [False, True])
def test_a_commit_can_be_restored_twice(local, monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    step()
    if local:
        outer = gradzip.outer.LocalSteps(model, optimizer, every=100, group="horovod")
        state = gradzip.horovod.elastic_state(local_steps=outer)
    else:
        state = gradzip.horovod.elastic_state(model=model, optimizer=optimizer)
    saved = digest([model.state_dict(), optimizer.state_dict()["state"]])
    for _ in range(2):
        step()
        assert digest([model.state_dict(), optimizer.state_dict()["state"]]) != saved
        state.restore()
        assert digest([model.state_dict(), optimizer.state_dict()["state"]]) == saved


@pytest.mark.long
def test_torch_state_is_refused_when_a_worker_is_replaced(tmp_path):
    code, output = elastic_horovodrun("elastic_worker.py", tmp_path, "plain", HOSTS[:2], timeout=110)
    assert code != 0
    assert output.count("parameter '0.weight': rank 1 has compressed it 0 times, rank 0 6 times; load the") == 2, output
    assert "train elastically with gradzip.horovod.elastic_state" in output
