"""Scenarios for tests/front_ends/test_buckets.py, run by horovodrun.

Buckets are small, so that there are several. Hooks are called in a different order on each rank.
"""

import weakref
from unittest import mock

import horovod.torch as hvd
import torch

import gradzip
from contract import gradient
from gradzip.collectives import AllToAll, Gather, Mean
from gradzip.engines import horovod as horovod_engine
from gradzip.engines.horovod import HorovodEngine
from gradzip.horovod import front_end
from gradzip.methods.base import group
from harness import backward, main, message, on_request, parameters, residuals, scenario

SHAPES = {"a": (40, 60), "b": (48,), "c": (30, 40), "d": (12, 10, 3, 3), "e": (64, 32), "f": (50, 50), "g": (30, 50)}
CAP_MB = 0.015
STEPS = 6
FROZEN = {"d": (2, 3)}  # the steps in which a parameter is frozen
UNUSED = {"e": (1, 4)}  # the steps in which rank 0 does not use a parameter
SPECS = [
    "topk:theta=0.9",
    "powersgd:rank=2",
    "per-layer:c=qsgd,d|e|f=topk(theta=0.9,exchange=scatter_reduce),default=acpsgd(rank=2)",
]
MORE_SPECS = ["qsgd", "dgc:theta=0.9", "acpsgd:rank=2", "none", "block-float:bits=4,block=32"]
OPTIONS = [{"backward_passes_per_step": 2}, {"groups": 2}, {"op": "Sum"}, {"gradient_predivide_factor": 4.0}]
OPTIONS_SPECS = ["topk:theta=0.9", "acpsgd:rank=2"]
DIVIDED = "topk:theta=0.9", 4500  # a method, and how many elements a group may have


def optimizer(named, compressor, reverse=False, **arguments):
    tensors = list(named.values())
    sgd = torch.optim.SGD(tensors[::-1] if reverse else tensors, lr=0.5)
    return hvd.DistributedOptimizer(sgd, named_parameters=named.items(), compression=compressor, **arguments)


class Launches:
    """Counts the collectives that gradzip starts beside Horovod's own."""

    def __enter__(self):
        self.count, self._launch = 0, HorovodEngine.launch
        HorovodEngine.launch = lambda engine, *arguments: self.counted(engine, *arguments)
        return self

    def counted(self, engine, *arguments):
        self.count += 1
        return self._launch(engine, *arguments)

    def __exit__(self, *_):
        HorovodEngine.launch = self._launch


def train(rank, specs):
    """Parameters that are frozen or unused in some steps, and ranks that list the parameters in different orders.

    Returns for each method: the averages of each step, its number of collectives, and the residuals.
    """
    results = {}
    for spec in specs:
        # Rank 0's size of the buckets counts.
        named, compressor = parameters(SHAPES), gradzip.horovod.bucketed(gradzip.parse(spec), 7 * rank or CAP_MB)
        opt = optimizer(named, compressor, reverse=rank > 0)
        steps, launches = [], []
        for step in range(STEPS):
            opt.zero_grad()
            for name, frozen in FROZEN.items():
                named[name].requires_grad = step not in frozen
            with Launches() as counted:
                backward(named, rank, step, unused=[n for n, those in UNUSED.items() if rank == 0 and step in those])
                opt.synchronize()
            launches.append(counted.count)
            steps.append({name: p.grad.clone() for name, p in named.items() if p.requires_grad})
        assert front_end._contexts[weakref.ref(opt)].engine.bucket_nbytes == CAP_MB * 2**20
        results[spec] = steps, launches, residuals(compressor)
    return results


@scenario
def trained(rank):
    return train(rank, SPECS)


@on_request
def trained_more(rank):
    return train(rank, MORE_SPECS)


@scenario
def divided(rank):
    """All gradients in one bucket, and groups that are smaller. Averages, and the names of the states."""
    spec, limit = DIVIDED
    named, compressor, steps = parameters(SHAPES), gradzip.horovod.bucketed(gradzip.parse(spec), float("inf")), []
    opt = optimizer(named, compressor)
    with mock.patch.object(group, "MOST_NUMEL", limit):
        for step in range(3):
            opt.zero_grad()
            backward(named, rank, step)
            opt.synchronize()
            steps.append({name: p.grad.clone() for name, p in named.items()})
    return steps, sorted(compressor.states)


@scenario
def refused(rank, size):
    """What engines say of collectives that are larger than Horovod can count, and the result of one that is not."""
    engine = HorovodEngine(hvd.global_process_set, gradzip.Traffic())
    payload = torch.zeros(1000, dtype=torch.uint8)
    with mock.patch.object(horovod_engine, "_MOST_COUNT", 1500):
        collectives = (
            Gather(payload),
            AllToAll(torch.zeros(1601, dtype=torch.uint8), (1600, 1)),
            Mean(torch.zeros(1501)),
        )
        errors = [message(engine.launch, collective, "refused") for collective in collectives]
        return errors, engine.traffic.bytes_sent, engine.run(AllToAll(payload, (500, 500), same_length=True), "counted")


@scenario
def options(rank):
    """The averages of three steps with each option of the optimizer and each method."""
    results = []
    for given in OPTIONS:
        for spec in OPTIONS_SPECS:
            named, compressor = parameters(SHAPES), gradzip.horovod.bucketed(gradzip.parse(spec), CAP_MB)
            known = {name: hvd.Sum if value == "Sum" else value for name, value in given.items()}
            opt = optimizer(named, compressor, reverse=rank > 0 and "groups" not in given, **known)
            steps = []
            for step in range(3):
                opt.zero_grad()
                for i in range(given.get("backward_passes_per_step", 1)):
                    backward(named, rank, 10 * step + i)
                opt.synchronize()
                steps.append({name: p.grad.clone() for name, p in named.items()})
            results.append(steps)
    return results


@scenario
def two_optimizers(rank):
    """Two optimizers with the names of all parameters, whose first gradients come in another order on each rank."""
    halves = [parameters({f"{half}{name}": shape for name, shape in SHAPES.items()}) for half in "xy"]
    compressor = gradzip.horovod.bucketed(gradzip.parse("topk:theta=0.9"), CAP_MB)
    everything, steps = halves[0] | halves[1], []
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(list(named.values())[::-1], lr=0.5), named_parameters=everything.items(),
            compression=compressor,
        )
        for named in halves
    ]  # fmt: skip
    for step in range(3):
        for opt in optimizers:
            opt.zero_grad()
        for named in halves[:: 1 if rank == 0 else -1]:
            backward(named, rank, step)
        for opt in optimizers:
            opt.synchronize()
        steps.append({name: p.grad.clone() for name, p in everything.items()})
    return steps


@scenario
def resized(rank):
    """A job that is resumed from a checkpoint with buckets of other sizes. Returns averages and residuals."""
    steps, compressor = [], gradzip.parse("topk:theta=0.9")
    for first, cap in ((0, CAP_MB), (2, 0), (4, 25), (6, float("inf"))):
        saved = compressor.state_dict()
        named, compressor = parameters(SHAPES), gradzip.horovod.bucketed(gradzip.parse("topk:theta=0.9"), cap)
        compressor.load_state_dict(saved)
        opt = optimizer(named, compressor)
        for step in range(first, first + 2):
            opt.zero_grad()
            backward(named, rank, step)
            opt.synchronize()
            steps.append({name: p.grad.clone() for name, p in named.items()})
    return steps, residuals(compressor)


@scenario
def unfrozen_between_backward_passes(rank):
    """One optimizer for both networks of a GAN, of which one is frozen in the first backward pass of each step."""
    named, steps = parameters({"g": (40, 50), "d": (50, 40)}), []
    compressor = gradzip.parse("topk:theta=0.9")
    opt = optimizer(named, compressor)
    for step in range(3):
        opt.zero_grad()
        for name in ("g", "d"):
            named["d"].requires_grad = name == "d"
            backward({name: named[name]}, rank, step)
        opt.synchronize()
        steps.append({name: p.grad.clone() for name, p in named.items()})
    return steps, residuals(compressor)


@scenario
def frozen_before_the_step(rank):
    """Freeze an unused parameter after the backward pass: the rest of its bucket is averaged without it."""
    named, steps = parameters({"g": (40, 50), "d": (50, 40), "h": (40, 40)}), []
    opt = optimizer(named, gradzip.parse("topk:theta=0.9"))
    for step in range(3):
        opt.zero_grad()
        named["d"].requires_grad = True
        backward(named, rank, step, unused=["d"] if step == 1 else [])
        named["d"].requires_grad = step != 1
        opt.synchronize()
        steps.append({name: p.grad.clone() for name, p in named.items() if p.requires_grad})
    return steps


@scenario
def overlap(rank):
    """The number of collectives that were started when the gradient of the first layer was computed, in each step.

    The second model has an embedding with sparse gradients, which Horovod gathers itself.
    """
    started = []
    for table in (False, True):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(40, 40) for _ in range(4)]
        rows = torch.nn.Embedding(50, 40, sparse=True)
        named = dict(torch.nn.Sequential(*layers[:3], *[rows] * table, layers[3]).named_parameters())
        opt = optimizer(named, gradzip.horovod.bucketed(gradzip.QSGD(), 0.01))
        with Launches() as counted:
            named["0.weight"].register_hook(lambda grad, counted=counted: started.append(counted.count))
            for _ in range(3):
                opt.zero_grad()
                counted.count = 0
                x = torch.ones(8, 40)
                for layer in layers:
                    x = torch.tanh(layer(x))
                if table:
                    x = x + rows(torch.tensor([rank, 7, 7, 3, 2, 1, 0, 5]))
                x.square().sum().backward()
                opt.step()
    return started


@scenario
def dropped(rank):
    """Drop steps in which a bucket waits for a gradient. Returns the averages of the step after each of them."""
    named, compressor = parameters(SHAPES), gradzip.parse("topk:theta=0.9")
    opt = optimizer(named, compressor)
    steps = []
    for drop in (lambda: opt.load_state_dict(opt.state_dict()), lambda: front_end.drop_in_flight(compressor)):
        opt.zero_grad()
        (named["c"] * gradient("c", rank, 0, SHAPES["c"])).sum().backward()
        for handle, _ in opt._handles.values():
            hvd.synchronize(handle)  # the operation's name can be used again
        drop()
        opt.load_state_dict(opt.state_dict())
        named["c"].grad = None
        backward(named, rank, 1)
        opt.synchronize()
        steps.append({name: p.grad.clone() for name, p in named.items()})
    return steps


if __name__ == "__main__":
    main()
