"""Scenarios for tests/front_ends/test_outer.py, run by horovodrun or torchrun: `gradzip.outer.LocalSteps`."""

import copy
import itertools
import sys
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import gradzip
from contract import gradient
from harness import UNDER_HOROVOD, Training, job, main, message, on_request, scenario

SHAPES = {"matrix": (64, 48), "wide": (32, 96), "bias": (48,)}
EVERY, EXCHANGES = 3, 4
START = 3  # steps of a data-parallel start
SPECS = ["none", "topk:theta=0.9", "block-float:bits=4", "acpsgd:rank=2"]
STREAMED_SPECS, STREAMED_STEPS = ["none", "topk:theta=0.9", "acpsgd:rank=2"], 20
STREAMED = [
    {"every": 6, "fragments": 3},
    {"every": 6, "delay": 4, "blend": 0.5},
    {"every": 8, "fragments": 3, "delay": 2},
]
GROUP = "horovod" if UNDER_HOROVOD else None


class Model(torch.nn.Module):
    """Parameters of these shapes, different on each rank, and a buffer."""

    def __init__(self, rank):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(gradient(name, rank, -1, shape)))
        self.register_buffer("count", torch.tensor(float(rank)))

    def forward(self, gradients):
        """A loss with these gradients, by name."""
        return sum((parameter * gradients[name]).sum() for name, parameter in self.named_parameters())


def make(rank, **options):
    model = Model(rank)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, **options)


def take_step(model, optimizer, rank, step):
    for name, parameter in model.named_parameters():
        parameter.grad = gradient(name, rank, step, parameter.shape)
    optimizer.step()


def parameters(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def run(spec, steps, **options):
    """The parameters after each step, bytes sent, exchanges, and the buffer."""
    model, optimizer = make(job.rank)
    outer = gradzip.outer.LocalSteps(model, optimizer, gradzip.parse(spec), group=GROUP, **options)
    after = []
    for step in range(steps):
        take_step(model, optimizer, job.rank, step)
        after.append(parameters(model))
    outer.synchronize()
    synchronized = parameters(model)
    outer.remove()
    return after, outer.traffic.bytes_sent, outer.exchanges, model.count.item(), synchronized


def of_spec(spec):
    return run(spec, EVERY * EXCHANGES, every=EVERY)


@scenario
def streamed():
    """`run`, of each method and schedule. Rank 1 has the global copy in host memory."""
    offload = job.rank == 1
    return [[run(spec, STREAMED_STEPS, offload=offload, **options) for options in STREAMED] for spec in STREAMED_SPECS]


@scenario
def resumed():
    """The parameters at the end, of runs and of some that were saved and loaded in the middle, between two exchanges,
    or, in the second pair, between the start of an exchange and its end. In the third pair, it is saved with the global
    copy on the device, and loaded to host memory or the other way round."""

    def run(stop, compressor, offload=None, **options):
        def local_steps():
            model, optimizer = make(job.rank + 10)
            return (
                model,
                optimizer,
                gradzip.outer.LocalSteps(model, optimizer, copy.deepcopy(compressor), group=GROUP, **options),
            )

        options |= {} if offload is None else {"offload": offload}
        model, optimizer, outer = local_steps()
        for step in range(EVERY * EXCHANGES):
            if step == stop:
                options |= {} if offload is None else {"offload": not offload}
                saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), outer.state_dict()])
                outer.remove()
                model, optimizer, outer = local_steps()
                for target, state in zip((model, optimizer, outer), saved):
                    target.load_state_dict(state)
            take_step(model, optimizer, job.rank, step)
        outer.synchronize()
        return parameters(model), outer.exchanges

    method, streaming = gradzip.TopK(theta=0.9), {"every": 4, "fragments": 2, "delay": 1, "blend": 0.25}
    adam = streaming | {"outer": lambda params: torch.optim.Adam(params, lr=0.1)}
    return (
        (run(None, method, every=EVERY), run(EVERY * 2 + 1, method, every=EVERY)),
        (run(None, method, **streaming), run(6, method, **streaming)),
        (run(None, method, **adam), run(6, method, offload=job.rank == 1, **adam)),
    )


@scenario
def merged():
    """Parameters, exchanges and warnings: of a run that goes on, of one that loads the checkpoint of both ranks, and
    with torch, of one that loads it in a group of one rank.
    """
    places = [(GROUP, job.rank, job.size)]
    if UNDER_HOROVOD:
        import horovod.torch as hvd

        gather = hvd.allgather_object
    else:
        gather = gather_objects
        places.append(([dist.new_group([rank]) for rank in range(job.size)][job.rank], 0, 1))
    method, options = gradzip.TopK(theta=0.9), {"every": 4, "fragments": 2, "delay": 1, "blend": 0.25}

    def local_steps(group):
        model, optimizer = make(job.rank)
        outer = gradzip.outer.LocalSteps(model, optimizer, copy.deepcopy(method), group=group, **options)
        return model, optimizer, outer

    model, optimizer, outer = local_steps(GROUP)
    for step in range(6):  # in the middle of an exchange
        take_step(model, optimizer, job.rank, step)
    checkpoint = gradzip.checkpoint.merge(gather(outer.state_dict()))
    own = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    for step in range(6, 12):
        take_step(model, optimizer, job.rank, step)
    outer.synchronize()
    found = [(parameters(model), outer.exchanges, [])]
    outer.remove()
    for group, rank, size in places:
        model, optimizer, outer = local_steps(group)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            shard = gradzip.checkpoint.shard(copy.deepcopy(checkpoint), rank, size)
        for target, state in zip((model, optimizer, outer), (*own, shard)):
            target.load_state_dict(copy.deepcopy(state))
        for step in range(6, 12):
            take_step(model, optimizer, job.rank, step)
        outer.synchronize()
        found.append((parameters(model), outer.exchanges, [str(w.message) for w in caught]))
        outer.remove()
    return found


def gather_objects(own):
    """The objects of all ranks."""
    gathered = [None] * job.size
    dist.all_gather_object(gathered, own)
    return gathered


@scenario
def uneven():
    """The parameters at the end, where rank 1 takes more steps than rank 0; and again where all have synchronized."""

    def run(**options):
        model, optimizer = make(job.rank)
        outer = gradzip.outer.LocalSteps(model, optimizer, gradzip.TopK(theta=0.9), every=EVERY, group=GROUP, **options)
        for step in range(2 * EVERY + 1 + 5 * job.rank):
            take_step(model, optimizer, job.rank, step)
        outer.synchronize()
        first = parameters(model), outer.exchanges
        outer.synchronize()
        return first, (parameters(model), outer.exchanges)

    return run(), run(fragments=2, delay=1, blend=0.5)


@scenario
def two():
    """The parameters of two equal models whose exchanges are in the background at the same time."""
    pairs = [make(job.rank) for _ in range(2)]
    each = [gradzip.outer.LocalSteps(*pair, gradzip.TopK(theta=0.9), every=4, delay=2, group=GROUP) for pair in pairs]
    for step in range(16):
        for pair in pairs:
            take_step(*pair, job.rank, step)
    for outer in each:
        outer.synchronize()
    return [parameters(model) for model, _ in pairs]


@scenario
def not_finite():
    """`diverge`, and again with an exchange in the background."""
    return diverge(), diverge(delay=1)


def diverge(**options):
    """The parameters before and after an exchange for which rank 1 has a NaN, the warnings, and those of a next one."""
    model, optimizer = make(job.rank)
    delay = options.get("delay", 0)
    gradzip.outer.LocalSteps(model, optimizer, gradzip.TopK(theta=0.9), every=EVERY, group=GROUP, **options)
    for step in range(EVERY + delay):
        take_step(model, optimizer, job.rank, step)
    common = parameters(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(EVERY):
            take_step(model, optimizer, job.rank, step)
            if step == 0 and job.rank == 1:
                with torch.no_grad():
                    model.wide[3, 4] = torch.nan
            if step == EVERY - 2:
                before = parameters(model)
    skipped, states = parameters(model), len(optimizer.state)
    for step in range(EVERY):
        take_step(model, optimizer, job.rank, step)
    return common, before, skipped, states, [str(w.message) for w in caught], parameters(model)


@on_request
def two_sites():
    """The parameters after each step of four ranks on two sites, with DDP in each site."""
    sites = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    model, optimizer = make(job.rank)
    replica = DistributedDataParallel(model, process_group=sites[job.rank // 2])
    method = gradzip.Hierarchical(gradzip.TopK(theta=0.9), local_size=2)
    gradzip.outer.LocalSteps(replica, optimizer, method, every=EVERY)
    after = []
    for step in range(2 * EVERY):
        optimizer.zero_grad()
        replica({name: gradient(name, job.rank, step, shape) for name, shape in SHAPES.items()}).backward()
        optimizer.step()
        after.append(parameters(model))
    return after


@on_request
def started():
    """Parameters after each step of a data-parallel start and of local steps, by hand, and of runs that synchronize in
    the start, or are saved and loaded in it and after it; warnings if a run is loaded in another order."""

    def step(call, optimizer, number):
        optimizer.zero_grad()
        call({name: gradient(name, job.rank, number, shape) for name, shape in SHAPES.items()}).backward()
        optimizer.step()

    def local_steps(start):
        model, optimizer = make(job.rank)
        replica = DistributedDataParallel(model)
        return replica, optimizer, gradzip.outer.LocalSteps(replica, optimizer, gradzip.TopK(), every=2, start=start)

    def run(stop=None, synchronize=False):
        replica, optimizer, outer = local_steps(START)
        after = []
        for number in range(2 * START):
            if number == stop:
                saved = copy.deepcopy([part.state_dict() for part in (replica, optimizer, outer)])
                outer.remove()
                replica, optimizer, outer = local_steps(START)
                for part, state in zip((replica, optimizer, outer), saved):
                    part.load_state_dict(state)
            step(replica, optimizer, number)
            if synchronize and number < START:
                outer.synchronize()
            after.append(parameters(replica))
        outer.remove()
        return after

    model, optimizer = make(job.rank)
    replica, by_hand = DistributedDataParallel(model), []
    for number in range(START):
        step(replica, optimizer, number)
        by_hand.append(parameters(model))
    outer = gradzip.outer.LocalSteps(model, optimizer, gradzip.TopK(), every=2)
    for number in range(START, 2 * START):
        step(model, optimizer, number)
        by_hand.append(parameters(model))
    outer.remove()

    replica, optimizer, outer = local_steps(0)
    step(replica, optimizer, 0)
    state = copy.deepcopy(outer.state_dict())
    outer.remove()
    outer = gradzip.outer.LocalSteps(replica, optimizer, gradzip.TopK(), every=2, start=0)  # all get those of rank 0
    outer.load_state_dict(state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(replica, optimizer, 1)
    outer.remove()
    runs = [run(), run(synchronize=True), run(START - 1), run(START + 1)]
    return by_hand, runs, [str(warning.message) for warning in caught]


@scenario
def monitored():
    """What a monitor of each rank has been told."""
    model, optimizer = make(job.rank)
    record, method = {}, gradzip.TopK(theta=0.5, error_feedback=False)
    gradzip.Monitor(lambda tag, value, step: record.update({(tag, step): value}), every=1).watch(method)
    outer = gradzip.outer.LocalSteps(model, optimizer, method, every=EVERY, fragments=3, group=GROUP)
    for step in range(2 * EVERY):
        take_step(model, optimizer, job.rank, step)
    return record, (outer.seconds.total, outer.seconds.exposed)


@on_request
def sharded():
    """What ranks of a mesh (replicate, shard) hold after each step, with FSDP2; see `run_sharded`. In the second run,
    the first replica has the global copy in host memory."""
    streaming = {"every": 6, "fragments": 3, "delay": 1, "blend": 0.5}
    offload = mesh()["replicate"].get_local_rank() == 0
    return [run_sharded({"every": EVERY}), run_sharded(streaming | {"offload": offload})]


@on_request
def sharded_errors():
    """The errors of a group of all ranks, and after a NaN in one shard, what `run_sharded` returns. Then the errors of
    a checkpoint of all ranks and of another shard, and global parameters before and after one of the same shard.
    """
    model, optimizer = fsdp_model()
    everyone = message(lambda: gradzip.outer.LocalSteps(model, optimizer))
    outer = gradzip.outer.LocalSteps(model, optimizer, group=mesh()["replicate"])  # the method has no names
    saved, place = gather_objects(outer.state_dict()), mesh()["replicate"].get_local_rank()
    merged, loaded = message(gradzip.checkpoint.merge, saved), message(outer.load_state_dict, saved[job.rank ^ 1])
    outer.load_state_dict(gradzip.checkpoint.shard(gradzip.checkpoint.merge(saved[job.rank % 2 :: 2]), place, 2))
    resumed = [list(state["global"]["parameters"].values()) for state in (saved[job.rank], outer.state_dict())]
    outer.remove()
    model, optimizer = fsdp_model()
    delays = [mesh()["shard"].get_local_rank(), int(job.rank == 2)]  # of a shard; of a rank, whose replica sees it
    delay = [
        message(lambda delay=delay: gradzip.outer.LocalSteps(model, optimizer, group=mesh()["replicate"], delay=delay))
        for delay in delays
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        after, _ = run_sharded({"every": EVERY}, diverges=2)
    return everyone, delay, after, [str(w.message) for w in caught], merged, loaded, resumed


def mesh():
    return init_device_mesh(
        "cpu", (job.size // 2, 2) if job.size > 2 else (2, 1), mesh_dim_names=("replicate", "shard")
    )


def fsdp_model():
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(Model(job.rank // mesh()["shard"].size()), mesh=mesh()["shard"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def run_sharded(options, diverges=None):
    """Local shards after each step, and those of the global parameters at the end.

    diverges: the rank that gets a NaN in the last step before the second exchange.
    """
    model, optimizer = fsdp_model()
    replica = mesh()["replicate"].get_local_rank()
    outer = gradzip.outer.LocalSteps(model, optimizer, gradzip.TopK(theta=0.9), group=mesh()["replicate"], **options)
    after = []
    for step in range(EVERY * EXCHANGES):
        optimizer.zero_grad()
        model({name: gradient(name, replica, step, shape) for name, shape in SHAPES.items()}).backward()
        if step == 2 * EVERY - 1 and job.rank == diverges:
            with torch.no_grad():
                model.wide.to_local()[0, 0] = torch.nan
        optimizer.step()
        after.append([p.to_local().detach().clone() for p in model.parameters()])
    outer.synchronize()
    outer.remove()
    return after, [p.to_local().detach().clone() for p in model.parameters()]


@scenario
def refused():
    """Errors of arguments that differ between ranks, and of what is no state dict."""
    model, optimizer = make(0)
    outer = gradzip.outer.LocalSteps(model, optimizer, group=GROUP)
    loads = [message(outer.load_state_dict, other) for other in (None, {"steps": 1})]
    outer.remove()
    lies = load_lies()
    every = message(lambda: gradzip.outer.LocalSteps(model, optimizer, every=3 + job.rank, group=GROUP))
    delay = message(lambda: gradzip.outer.LocalSteps(model, optimizer, delay=2 * job.rank, group=GROUP))
    averages = [None, gradzip.outer.nesterov][job.rank]
    outer = message(lambda: gradzip.outer.LocalSteps(model, optimizer, outer=averages, group=GROUP))
    method = gradzip.TopK(theta=0.9 + job.rank / 100)
    method = message(lambda: gradzip.outer.LocalSteps(model, optimizer, method, group=GROUP))
    exempt = gradzip.TopK()
    exempt.exempted = frozenset(name for name, _ in model.named_parameters())
    exempt = message(lambda: gradzip.outer.LocalSteps(model, optimizer, exempt, group=GROUP))
    return every, delay, outer, method, loads, lies, exempt


LIES = {
    ("steps",): 1.5,
    ("next",): 1,
    ("exchanges",): -1,
    ("start",): -1,
    ("pending",): {"fragment": 0},
    ("compressor", "states", "matrix", "residual"): torch.full(SHAPES["matrix"], torch.nan),
    ("compressor", "states", "wide", "begin"): 1,
    ("global", "parameters", "wide"): torch.ones(SHAPES["wide"], dtype=torch.float64),
    ("global", "parameters", "bias"): torch.full(SHAPES["bias"], torch.inf),
    ("global", "parameters"): None,
    ("global", "optimizer", "state", 1, "momentum_buffer"): torch.full(SHAPES["wide"], torch.nan),
    ("global", "optimizer", "param_groups"): [],
}


@on_request
def bound():
    """Local steps of ranks 0 and 1, which need a group of their own, where a new group is a split of another one.

    As with NCCL and `init_process_group(device_id=...)`: all ranks of the group that is split must take part.
    """
    ranks = [0, 1]
    group, twin = (dist.new_group(ranks, backend="cpu:gloo") for _ in range(2))

    def split(parent):
        dist.all_reduce(torch.zeros(1), group=parent, async_op=True).wait(timedelta(seconds=5))

    def split_group(parent, groups):
        split(parent)
        assert groups == [[0, 1]]
        return twin

    dist.group.WORLD.bound_device_id = torch.device("cpu:0")
    dist.new_group, dist.split_group = lambda *_, **__: split(dist.group.WORLD), split_group
    if job.rank not in ranks:
        return []
    model, optimizer = make(job.rank)
    outer = gradzip.outer.LocalSteps(model, optimizer, every=2, delay=1, group=group)
    for step in range(5):
        take_step(model, optimizer, job.rank, step)
    outer.synchronize()
    outer.remove()
    return parameters(model)


@on_request
def ends(folder):
    """Leave an exchange in progress when the process ends, without `remove`."""
    model, optimizer = make(job.rank)
    outer = gradzip.outer.LocalSteps(model, optimizer, gradzip.TopK(theta=0.9), every=4, delay=3, group=GROUP)
    exchange = outer._exchange

    def slowly(*arguments):
        time.sleep(1)
        exchanged = exchange(*arguments)
        (folder / f"{job.rank}.received").touch()
        return exchanged

    outer._exchange = slowly
    for step in range(4):
        take_step(model, optimizer, job.rank, step)
    sys.exit()  # as a script does; `main` would end at once


def load_lies():
    """Errors of state dicts with one wrong value, and whether each has left the state as it was."""
    model, optimizer = make(job.rank)
    outer = gradzip.outer.LocalSteps(model, optimizer, gradzip.TopK(theta=0.9), every=1, group=GROUP)
    for step in range(2):
        take_step(model, optimizer, job.rank, step)
    saved, found = copy.deepcopy(outer.state_dict()), []
    for path, value in LIES.items():
        lying = copy.deepcopy(saved)
        inner = lying
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        # Good values differ, too: what is loaded before the error shows.
        lying["compressor"]["states"]["matrix"]["step"] = 100
        found.append((message(outer.load_state_dict, lying), str(outer.state_dict()) == str(saved)))
    outer.remove()
    return found


@scenario
def apart():
    """Rank 1 loads another state than rank 0, or has another global copy: the errors."""
    results = {}
    for case, delay in itertools.product(("older", "none", "changed"), (0, 1)):
        model, optimizer = make(job.rank)
        outer = gradzip.outer.LocalSteps(model, optimizer, every=4, fragments=2, delay=delay, group=GROUP)
        older = outer.state_dict()
        for step in range(10):
            take_step(model, optimizer, job.rank, step)
            older = copy.deepcopy(outer.state_dict()) if step == 6 else older
        newer = outer.state_dict()
        outer.remove()
        outer = gradzip.outer.LocalSteps(model, optimizer, every=4, fragments=2, delay=delay, group=GROUP)
        if job.rank == 0 or case != "none":
            outer.load_state_dict(older if (job.rank, case) == (1, "older") else newer)
        if (job.rank, case) == (1, "changed"):
            outer._global.tensors["wide"].data[3, 5] += 1e-3
        error, step = "", 10
        while not error and step < 20:
            error, step = message(take_step, model, optimizer, job.rank, step), step + 1
        message(outer.remove)  # it may wait for an exchange that fails
        results[f"{case}, {delay}"] = error
    return results


@scenario
def by_hand():
    """Parameters after `synchronize`, if rank 0 has changed them without a step; the error of a step in its place."""
    after = []
    for options in ({}, {"fragments": 2}, {"fragments": 2, "delay": 1, "blend": 0.5}):
        for steps in (0, 4):
            model, optimizer = make(job.rank)
            outer = gradzip.outer.LocalSteps(model, optimizer, every=4, group=GROUP, **options)
            for step in range(steps):
                take_step(model, optimizer, job.rank, step)
            if job.rank == 0:
                model.matrix.data[5] += 1
            outer.synchronize()
            after.append(parameters(model))
            outer.remove()
    model, optimizer = make(job.rank)
    outer = gradzip.outer.LocalSteps(model, optimizer, every=1, group=GROUP)
    if job.rank == 0:
        model.matrix.data[5] += 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error = message(take_step, model, optimizer, job.rank, 0)
    outer.remove()
    return after, error


@scenario
def shared():
    """The errors of a compressor that exchanges in the background and serves another front end, in both orders."""
    errors = []
    for first, second in ((1, 0), (0, 1), (1, 1)):
        compressor, pairs = gradzip.TopK(theta=0.9), [make(job.rank) for _ in range(2)]
        outer = gradzip.outer.LocalSteps(*pairs[0], compressor, delay=first, group=GROUP)
        options = {"delay": second, "group": GROUP}
        errors.append(message(lambda: gradzip.outer.LocalSteps(*pairs[1], compressor, **options)))  # noqa: B023
        outer.remove()
        gradzip.outer.LocalSteps(*pairs[1], compressor, **options).remove()
    compressor, (model, optimizer) = gradzip.TopK(theta=0.9), make(job.rank)
    outer = gradzip.outer.LocalSteps(model, optimizer, compressor, delay=1, group=GROUP)
    other = Training(compressor, SHAPES)
    errors.append(message(other.step, 0))
    outer.remove()
    del other, outer
    compressor, (model, optimizer) = gradzip.TopK(theta=0.9), make(job.rank)
    other = Training(compressor, SHAPES)
    other.step(0)
    errors.append(message(lambda: gradzip.outer.LocalSteps(model, optimizer, compressor, delay=1, group=GROUP)))
    return errors


if __name__ == "__main__":
    main(of_spec=of_spec)
