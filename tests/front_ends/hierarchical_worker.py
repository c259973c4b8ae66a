"""Scenarios for test_hierarchical_jobs.py, on 2 nodes of 2 ranks: one for each of SPECS, and those on request."""

import copy
import functools
import os

import torch

import gradzip
from contract import gradient
from gradzip.collectives import Mean, among
from harness import SCENARIOS, UNDER_HOROVOD, Training, gather, main, message, on_request, scenario

NODES, PLACES = 2, 2
SHAPES = {"b": (48,), "v": (33, 8, 3, 3), "w": (64, 48)}
STEPS = 3
SPECS = [
    "hierarchical:inner=acpsgd,local_size=2",
    "hierarchical:inner=powersgd",
    "hierarchical:inner=topk(theta=0.9)",
    "hierarchical:inner=topk(theta=0.9,exchange=scatter_reduce)",
]


def gradients(name, step, size, shape=None):
    """The gradients of all ranks."""
    return [gradient(name, rank, step, shape or SHAPES[name]) for rank in range(size)]


def training(compressor):
    return Training(compressor, SHAPES, bucket_cap_mb=0.01)


def train(spec, rank, size):
    if not UNDER_HOROVOD:  # as torchrun sets them on two nodes
        os.environ |= {"LOCAL_RANK": str(rank % PLACES), "LOCAL_WORLD_SIZE": str(PLACES)}
    compressor = gradzip.parse(spec)
    job = training(compressor)
    averages = [job.step(step) for step in range(STEPS)]
    traffic = copy.copy(compressor.traffic)
    merged = gradzip.checkpoint.merge(gather(compressor.state_dict()))
    resumed = gradzip.parse(spec)
    resumed.load_state_dict(gradzip.checkpoint.shard(merged, rank, size))
    straight, after = ([j.step(s) for s in range(STEPS, STEPS + 2)] for j in (job, training(resumed)))
    return {
        "averages": averages,
        "bytes_sent": traffic.bytes_sent,
        "bytes_in_node": traffic.bytes_in_node,
        "bytes_dense": traffic.bytes_dense,
        # Of what is compressed: Horovod adds all ranks' vectors in an order that depends on what it joins them with.
        "same_after_checkpoint": all(torch.equal(a[n], b[n]) for a, b in zip(straight, after) for n in ("w", "v")),
        "skipped": skipped_steps(spec, rank == size - 1),
    }


SCENARIOS |= {spec: functools.partial(train, spec) for spec in SPECS}


def skipped_steps(spec, overflows):
    """Which of three steps GradScaler skips, and leaves states as they were, if one rank overflows in the second."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    compressor = gradzip.parse(spec).follow(scaler)
    job, skipped = training(compressor), []
    for step in range(3):
        before = copy.deepcopy(compressor.inner.state_dict()["states"])
        averages = job.step(step, scaler, "w" if step == 1 and overflows else None)
        now = compressor.inner.state_dict()["states"]
        same = before.keys() == now.keys() and all(
            torch.equal(value, now[name][field]) if isinstance(value, torch.Tensor) else value == now[name][field]
            for name, fields in before.items()
            for field, value in fields.items()
        )
        skipped.append(same and not averages["w"].isfinite().any().item())
    return skipped


@on_request
def process_set(rank):
    """Nodes of one rank on a process set: the error without process sets for them; with them, means in both scopes."""
    import horovod.torch as hvd

    from gradzip.engines.horovod import HorovodEngine

    members, error, means = hvd.add_process_set([0, 3]), "", []
    if members.included():
        error = message(HorovodEngine(members, gradzip.Traffic()).set_nodes, 1)
    for ranks in ([0], [3]):
        hvd.add_process_set(ranks)
    if members.included():
        engine = HorovodEngine(members, gradzip.Traffic())
        engine.set_nodes(1)
        own = torch.tensor([float(rank)])
        means = [engine.run(among(scope, Mean(own)), "mean").item() for scope in ("node", "peers")]
    return error, *means


@on_request
def unknown_place(rank):
    """The error of the first step, if the launcher has told one rank nothing."""
    if rank == 1:
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    return error()


@scenario
def error():
    """The error of the first step."""
    return message(training(gradzip.parse(SPECS[1])).step, 0)


if __name__ == "__main__":
    main()
