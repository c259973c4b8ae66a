"""Elastic Horovod for real: workers join, are killed in mid-step and replaced, on several names of this machine."""

import copy
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

import gradzip

pytest.importorskip("horovod.torch")
from elastic_worker import COMMIT_EVERY, HOSTS, KILLED, LAST_STEP, SPECS, loss, networks

HERE = Path(__file__).parent
SIZES = [2, 3, 3, 2]  # of the worlds, one after the other


def elastic_horovodrun(folder, *arguments, timeout):
    """Runs the worker on two processes that may become one to three, as folder/hosts says at a time; returns the
    finished job's exit code and output."""
    (folder / "hosts").write_text("".join(f"{name}:1\n" for name in HOSTS[:2]))
    (folder / "discover").write_text(f"#!/bin/sh\ncat '{folder}/hosts'\n")
    (folder / "discover").chmod(0o755)
    # A rank that waits for one that is not the dead one's neighbour finds out by this timeout.
    limits = ["--network-interface", "lo", "--gloo-timeout-seconds", "10"]
    elastic = ["-np", "2", "--min-np", "1", "--max-np", "3", "--host-discovery-script", str(folder / "discover")]
    command = [str(Path(sys.executable).with_name("horovodrun")), *limits, *elastic, sys.executable]
    with open(folder / "output", "w") as output:
        job = subprocess.Popen(
            [*command, str(HERE / "elastic_worker.py"), *arguments, str(folder)],
            env=dict(os.environ, OMP_NUM_THREADS="1"), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            job.wait(timeout)
        finally:
            # Each worker has a session of its own, and this folder as an argument.
            for process in psutil.process_iter(["cmdline"]):
                if str(folder) in (process.info["cmdline"] or []):
                    process.kill()
            job.kill()
            job.wait()
    return job.returncode, (folder / "output").read_text()


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """What every worker wrote, by generation: [{(host, event, step): record}, ...]; and the models before and after."""
    folder = tmp_path_factory.mktemp("elastic")
    code, output = elastic_horovodrun(folder, timeout=110)
    assert code == 0, output[-6000:]
    generations = [{} for _ in SIZES]
    for host in HOSTS:
        for line in (folder / f"{host}.jsonl").read_text().splitlines():
            record = json.loads(line)
            generations[record["generation"]][host, record["event"], record["step"]] = record
    return generations, *(torch.load(folder / f"{name}.pt", weights_only=True) for name in ("begin", "end"))


def world(generation):
    """The hosts of a generation's workers, in the order of their ranks."""
    ranks = {record["rank"]: host for (host, event, _), record in generation.items() if event == "begin"}
    return [ranks[rank] for rank in sorted(ranks)]


def test_workers_join_are_lost_and_are_replaced(records):
    worlds = [world(generation) for generation in records[0]]
    assert [len(hosts) for hosts in worlds] == SIZES
    for generation, hosts in zip(records[0], worlds):
        assert {record["size"] for record in generation.values()} == {len(hosts)}
    killed = [worlds[generation][1] for generation in KILLED]
    assert worlds[0] == worlds[1][:2]  # one more
    assert worlds[2] == [*(h for h in worlds[1] if h != killed[0]), *(h for h in HOSTS if h not in worlds[1])]
    assert worlds[3] == [h for h in worlds[2] if h != killed[1]]
    assert all((host, "end", LAST_STEP) in records[0][3] for host in worlds[3])


def test_replicas_are_identical_after_every_step(records):
    for generation in records[0]:
        steps = {step for _, _, step in generation}
        assert len(steps) > 3
        for step in steps:
            for event in ("begin", "step", "commit", "end"):
                there = [record for (_, e, s), record in generation.items() if (e, s) == (event, step)]
                assert len(there) in (0, len(world(generation)))
                for what in ("model", "momentum", "common", "steps"):
                    assert all(record[what] == there[0][what] for record in there), (what, event, step)


def test_survivors_go_on_from_the_last_commit_with_their_residuals(records):
    for before, after in zip(records[0], records[0][1:]):
        commit = max(step for _, event, step in before if event == "commit")
        newest = max(step for _, _, step in before)
        assert newest - COMMIT_EVERY < commit <= newest
        for host in world(after):
            begin = after[host, "begin", commit]
            if host in world(before):
                committed = before[host, "commit", commit]
                for what in ("model", "momentum", "common", "steps", "own"):
                    assert begin[what] == committed[what], what
                assert [len(residuals) for residuals in begin["own"]] == [2, 2]
            else:
                assert begin["own"] == [{}, {}]  # a new worker has nothing left to send
        # What was done after the commit is undone: steps count on from there.
        assert all(count == commit for counts in begin["steps"] for count in counts.values())


def test_steps_in_mid_air_are_dropped(records):
    for number, (step, _) in KILLED.items():
        generation = records[0][number]
        assert max(s for _, _, s in generation) == step
        assert max(s for _, event, s in generation if event == "commit") < step


def replay(generations, begin):
    """The same training in one process, without any failure: of each world, the steps that counted."""
    networks_, kept = list(networks()), {}
    for part, state_dict in zip(itertools.chain(*networks_), begin):
        part.load_state_dict(state_dict)
    last = [max(s for _, event, s in g if event == "commit") for g in generations]
    for hosts, first, end in zip(map(world, generations), [0, *last], last):
        groups = [gradzip.LocalGroup(gradzip.parse(spec), len(hosts)) for spec in SPECS]
        for i, group in enumerate(groups):
            for rank, (host, compressor) in enumerate(zip(hosts, group.compressors)):
                compressor.states = copy.deepcopy(kept.get((i, host), kept.get((i, hosts[0]), {})))
                for state in compressor.states.values():
                    if (i, host) not in kept:
                        state.residual = None
                    if (state.rank, state.size) != (rank, len(hosts)):
                        state.owner_residual = None  # of another shard
                    state.rank, state.size = rank, len(hosts)
        for step in range(first, end):
            for (network, optimizer), group in zip(networks_, groups):
                grads = []
                for rank in range(len(hosts)):
                    optimizer.zero_grad()
                    loss(network, step, rank).backward()
                    grads.append([p.grad.clone() for p in network.parameters()])
                for (name, p), *own in zip(network.named_parameters(), *grads):
                    p.grad = group.average(own, name)[0]
                optimizer.step()
        for i, group in enumerate(groups):
            kept |= {(i, host): compressor.states for host, compressor in zip(hosts, group.compressors)}
    return [network.state_dict() for network, _ in networks_]


def test_the_same_as_without_any_failure(records):
    generations, begin, end = records
    for spec, ours, theirs, first in zip(SPECS, end[::2], replay(generations, begin), begin[::2]):
        for name, got in ours.items():
            moved = (theirs[name] - first[name]).norm()
            assert (got - theirs[name]).norm() < 1e-5 * moved, (spec, name)


def test_horovods_own_state_is_refused_when_a_worker_joins(tmp_path):
    code, output = elastic_horovodrun(tmp_path, "plain", timeout=60)
    assert code != 0
    assert output.count("parameter '0.weight': rank 2 has compressed it 0 times, rank 0 6 times; load the") == 3, output
    assert "train elastically with gradzip.horovod.elastic_state" in output
