"""Scenarios for tests/front_ends/test_ddp.py, run by torchrun."""

import contextlib
import copy
import functools
import gc
import itertools
import logging
import os
import pickle
import signal
import time
import warnings
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradzip
import harness
import kinds
from contract import kept_residual
from gradzip.engines.torch import TorchEngine
from gradzip.methods.base import group as groups_of_buckets
from gradzip.methods.base.group import averaged
from harness import main, message, on_request, residuals, scenario

SHAPES = [(64, 64), (300,), (40, 3, 3, 3), (33, 129), (7,), (50, 40), (48, 48), (3, 500)]
STEPS = 4
DIVIDED = "topk:theta=0.9", 4500  # a method, and how many elements a group may have
CAP_MB = 0.012  # one bucket in the first step, three after DDP has rebuilt its buckets


def gradient(rank, step, index, *shape, dtype=torch.float32):
    """The gradient of a rank, in every scenario and in tests/front_ends/test_ddp.py."""
    generator = torch.Generator().manual_seed(10000 * step + 100 * index + rank)
    return torch.randn(shape, generator=generator).to(dtype)


class Layers(torch.nn.Module):
    """Parameters whose gradients are the arguments of `forward`. Parameters with None are not used."""

    def __init__(self, tensors):
        super().__init__()
        self.layers = torch.nn.ParameterList([torch.nn.Parameter(t) for t in tensors])
        self.order = list(range(len(tensors)))  # in which `forward` uses the parameters

    def forward(self, grads):
        return sum((self.layers[i] * grads[i]).sum() for i in self.order if grads[i] is not None)


class Job:
    """A DDP model with gradzip's hook. Records which parameters share a bucket."""

    def __init__(self, compressor, tensors=None, names=True, group=None, frozen=(), state=None, **arguments):
        arguments = {"bucket_cap_mb": CAP_MB} | arguments
        self.model = tensors if isinstance(tensors, Layers) else Layers(tensors or [torch.zeros(s) for s in SHAPES])
        for i in frozen:
            self.model.layers[i].requires_grad_(False)
        named = list(self.model.named_parameters())
        self.ddp = DistributedDataParallel(self.model, process_group=group, **arguments)
        finds_unused = self.ddp.find_unused_parameters or self.ddp.static_graph
        self.state = state or gradzip.ddp.HookState(compressor, group, named if names else None, finds_unused)
        numbers = {p: i for i, (_, p) in enumerate(named)}
        # For each step, the parameters of each bucket. The hook must not refer to the job: DDP would never be freed.
        buckets = self.buckets = []

        def recording_hook(state, bucket):
            if bucket.index() == 0:
                buckets.append([])
            buckets[-1].append([numbers[p] for p in bucket.parameters()])
            return gradzip.ddp.hook(state, bucket)

        self.ddp.register_comm_hook(self.state, recording_hook)

    def loss(self, rank, step, skip=(), change=None):
        grads = [
            None if i in skip else gradient(rank, step, i, *p.shape, dtype=p.dtype).to(p.device)
            for i, p in enumerate(self.model.layers)
        ]
        if change:
            change(grads)
        return self.ddp(grads)

    def step(self, rank, step, **arguments):
        """Run one step; return its averages."""
        self.ddp.zero_grad()
        self.loss(rank, step, **arguments).backward()
        return self.averages()

    def averages(self):
        return [None if p.grad is None else p.grad.clone() for p in self.model.layers]

    def run(self, rank, steps=STEPS):
        averages = [self.step(rank, step) for step in range(steps)]
        traffic = self.state.traffic
        return {
            "averages": averages,
            "buckets": self.buckets,
            "sent": traffic.bytes_sent,
            "dense": traffic.bytes_dense,
        }


@scenario
def methods(rank, size):
    return {spec: Job(gradzip.parse(spec)).run(rank) for spec in kinds.SAMPLE}


@scenario
def divided(rank, size):
    """Groups that are smaller than the bucket of the first step, and than some of the later ones."""
    spec, limit = DIVIDED
    with mock.patch.object(groups_of_buckets, "MOST_NUMEL", limit):
        return Job(gradzip.parse(spec)).run(rank)


@scenario
def switch(rank, size):
    """The bytes of each step of a large gradient, with an exchange and with one that is chosen after the first step."""
    sent = {}
    for exchange in ("scatter_reduce", "auto"):
        job = Job(gradzip.parse(f"topk:theta=0.9,exchange={exchange}"), [torch.zeros(1024, 512)])
        totals = [job.run(rank, 1)["sent"] for _ in range(4)]
        sent[exchange] = [after - before for before, after in itertools.pairwise(totals)]
    return sent


@scenario
def order(rank, size):
    """The kinds of collectives in the order in which they start, in the last step."""
    kinds = {}
    for spec in ("block-float", "topk:theta=0.9,exchange=scatter_reduce"):
        job = Job(gradzip.parse(spec), [torch.zeros(40, 40) for _ in range(5)])
        job.run(rank)
        kinds[spec], launch = [], job.state._session.engine.launch

        def recording(collective, slot, kinds=kinds[spec], launch=launch):
            kinds.append(type(collective).__name__)
            return launch(collective, slot)

        job.state._session.engine.launch = recording
        job.step(rank, STEPS)
    return kinds


# Gathers and rings add in a fixed order, so the results equal those of a LocalGroup bit for bit.
CONVOLUTIONS = [(40, 3, 3, 3), (16, 12, 3, 3), (64, 64), (8, 8, 5, 5), (300,)]
RING = (
    "gradiveq:warmup_steps=0,sample_steps=3,compress_steps={},sampling=qsgd(bits=8),stop=None,slice_size=200,"
    "exchange=ring"
)
RINGS = [
    RING.format(3),
    f"per-layer:layers.1={RING.replace(':', '(').format(1)}),default={RING.replace(':', '(').format(9)})",
]


@scenario
def rings(rank, size):
    """Odd ranks use layers in a different order. Step 4 continues from a checkpoint."""
    results = {}
    for spec in RINGS:
        job = Job(gradzip.parse(spec), [torch.zeros(s) for s in CONVOLUTIONS])
        averages, buckets = [], []
        for step in range(8):
            if step == 4:
                saved = job.state.state_dict()
                job = Job(gradzip.parse(spec), [torch.zeros(s) for s in CONVOLUTIONS])
                job.state.load_state_dict(saved)
            if rank % 2:
                job.model.order.reverse()
            averages.append(job.step(rank, step))
            buckets.append(job.buckets[-1])
        results[spec] = {"averages": averages, "buckets": buckets}
    return results


OPTIONS = [{"static_graph": True}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}]


@scenario
def options(rank, size):
    """A method with two rounds beside one that compresses buckets, under DDP's options."""
    compressor = gradzip.PerLayer([("2|3", gradzip.TopK(theta=0.9))], gradzip.TernGrad())
    return [Job(compressor.clone(), **option).run(rank) for option in OPTIONS]


@scenario
def feedback(rank, size):
    """Error feedback of buckets, with rebuilt buckets, shards and checkpoints: averages and residuals."""
    results = {}
    for spec in ("topk:theta=0.9,exchange=scatter_reduce", "fft-range:theta=0.8,error_feedback=True", "topk:theta=0.9"):
        job = Job(gradzip.parse(spec))
        averages = job.run(rank)["averages"]
        saved = job.state.state_dict()
        again = Job(gradzip.parse(spec))
        again.state.load_state_dict(saved)
        averages += [again.step(rank, STEPS + step) for step in range(STEPS)]
        states = again.state.state_dict()["states"]
        results[spec] = averages, {name: kept_residual(s) for name, s in states.items()}, len(again.buckets[-1])
    return results


@scenario
def resumed(rank, size):
    """The next step, without and with a checkpoint before it; parameters without names, in one bucket."""
    job = Job(gradzip.DGC(theta=0.9), names=False, bucket_cap_mb=25)
    for step in range(2):
        job.step(rank, step)
    again = Job(gradzip.DGC(theta=0.9), names=False, bucket_cap_mb=25)
    again.state.load_state_dict(job.state.state_dict())
    return job.step(rank, 2), again.step(rank, 2), sorted(again.state.state_dict()["states"])


@scenario
def other_names(rank, size):
    """By the prefix of loaded states' names: the error and the warnings of a step, and its averages."""
    job = Job(gradzip.TopK(theta=0.9))
    job.step(rank, 0)
    saved = job.state.state_dict()
    found, ways = {}, {"own": lambda key: key}
    ways |= {name: (lambda key, name=name: f"{name}.{key}") for name in ("_orig_mod", "module", "model.net")}
    ways["one"] = lambda key: key if key == "layers.0" else f"net.{key}"
    ways["none"] = lambda key: f"{key}.weight"
    for how, rename in ways.items():
        again = Job(gradzip.TopK(theta=0.9))
        again.state.load_state_dict({**saved, "states": {rename(key): of for key, of in saved["states"].items()}})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            error = message(again.step, rank, 1)
        texts = [str(warning.message) for warning in caught if "HookState" in str(warning.message)]
        found[how] = error, texts, again.averages()
    return found


# Methods whose averages depend on the names of states.
NAMED = [spec for spec in kinds.SAMPLE if (of := gradzip.parse(spec)).unbiased or of.rounds > 1 or of.parts != [of]]


@scenario
def one_after_another(rank, size):
    """Averages of models that one compressor serves one after the other. Each is resumed after two steps."""

    def run(first, second=None, wrap=lambda model: model):
        averages, saved = [], None
        for compressor, steps in ((first, (0, 1)), (second or first, (2, 3))):
            if steps[0]:
                compressor.load_state_dict(saved)
            ddp = DistributedDataParallel(wrap(Layers([torch.zeros(s) for s in SHAPES])))
            gradzip.ddp.register(ddp, compressor)
            averages += [gradients_of(ddp, rank, step) for step in steps]
            saved = copy.deepcopy(compressor.state_dict())
            del ddp
        return averages

    results = {}
    for spec in NAMED:
        compressor = gradzip.parse(spec)
        results[spec] = {
            "first": run(compressor, gradzip.parse(spec)),
            "second": run(compressor),
            "compiled": run(compressor, wrap=functools.partial(torch.compile, backend="eager")),
        }
        other = Layers([torch.zeros(s) for s in SHAPES])
        if rank == 1:
            gradzip.ddp.HookState(compressor, named_parameters=other.named_parameters())
        results[spec]["other"] = run(compressor)
    return results


@scenario
def copied(rank, size):
    """The next step of copies of a DDP model with their hooks, and of the model itself."""
    results = {}
    for named in (False, True):
        model = Layers([torch.zeros(s) for s in SHAPES])
        ddp = DistributedDataParallel(model)
        names = model.named_parameters() if named else None
        ddp.register_comm_hook(gradzip.ddp.HookState(gradzip.DGC(theta=0.9), named_parameters=names), gradzip.ddp.hook)
        for step in range(2):
            gradients_of(ddp, rank, step)
        copies = [copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp)), torch.optim.swa_utils.AveragedModel(ddp).module]
        for copied in copies:
            ((hook, state),) = copied._comm_hooks
            if named:
                state = gradzip.ddp.HookState(state.compressor, named_parameters=copied.module.named_parameters())
            copied.register_comm_hook(state, hook)
        results[named] = [gradients_of(each, rank, 2) for each in (ddp, *copies)]
    unnamed = copy.deepcopy(ddp)
    unnamed.register_comm_hook(unnamed._comm_hooks[0][1], gradzip.ddp.hook)
    results["error"] = message(gradients_of, unnamed, rank, 0)
    return results


def gradients_of(ddp, rank, step):
    ddp.zero_grad()
    ddp([gradient(rank, step, i, *p.shape) for i, p in enumerate(ddp.module.layers)]).backward()
    return [p.grad.clone() for p in ddp.module.layers]


@scenario
def rewrapped(rank, size):
    """The same parameters in a second DDP model with a second HookState."""
    compressor, averages, buckets = gradzip.DGC(theta=0.9), [], []
    job = Job(compressor, names=False)
    for step in range(4):
        if step == 2:
            job = Job(compressor, job.model, names=False)
        averages.append(job.step(rank, step))
        buckets.append(job.buckets[-1])
    return averages, buckets, sorted(compressor.state_dict()["states"])


def fail(grad):
    raise ArithmeticError("at the end")


def step_that_fails(job, rank, step):
    """A backward pass that fails when DDP has called all hooks."""
    x = torch.zeros((), requires_grad=True) * 1  # the oldest node comes last
    x.register_hook(fail)
    job.ddp.zero_grad()
    return message(lambda: (x + job.loss(rank, step)).backward())


@scenario
def failed_at_the_end(rank, size):
    """Backward passes that fail when all averages are done, on all ranks or on the last one. Then DDP wraps again."""
    results = {}
    for how in ("not", "new state", "same state"):
        compressor = gradzip.parse("topk:theta=0.9")
        job = Job(compressor)
        averages = [job.step(rank, 0)]
        failed = "" if how == "not" else step_that_fails(job, rank, 1)
        saved = compressor.state_dict()["states"]
        for fields in saved.values():  # a part of the bucket's, which DDP has rebuilt
            fields.pop("payload_nbytes", None)
        saved = copy.deepcopy(saved)
        model, state = job.model, job.state if how == "same state" else None
        del job  # removes the hooks of the old DDP model, which still waits for gradients
        gc.collect()
        job = Job(compressor, model, state=state)
        averages += [job.step(rank, step) for step in (1, 2)]
        results[how] = {"failed": failed, "saved": saved, "averages": averages, "residuals": residuals(compressor)}
    compressor = gradzip.parse("topk:theta=0.9")
    job = Job(compressor)
    job.step(rank, 0)
    failed = step_that_fails(job, rank, 1) if rank == size - 1 else message(job.step, rank, 1)
    model = job.model
    del job
    gc.collect()
    results["one rank"] = failed, message(Job(compressor, model).step, rank, 2)
    return results


def table_gradient(rank, step):
    """(rows, their gradients)"""
    return torch.tensor([rank, 5, 199, 5]), gradient(rank, step, 50, 4, 16)


class Table(torch.nn.Module):
    """An embedding with a sparse gradient, and a matrix."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(200, 16, sparse=True)
        self.matrix = torch.nn.Parameter(torch.zeros(40, 40))

    def forward(self, rows, factors, grad):
        return (self.table(rows) * factors).sum() + (self.matrix * grad).sum()


@scenario
def sparse(rank, size):
    model, compressor, averages = Table(), gradzip.TopK(theta=0.9), []
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(gradzip.ddp.HookState(compressor), gradzip.ddp.hook)
    for step in range(3):
        ddp.zero_grad()
        ddp(*table_gradient(rank, step), gradient(rank, step, 0, 40, 40)).backward()
        assert model.table.weight.grad.is_sparse
        averages.append(model.table.weight.grad.to_dense())
    return averages, compressor.traffic.bytes_dense


@scenario
def memory_between_steps(rank, size):
    """Bytes of all tensors that a job leaves between two steps, without and with a loss scale."""
    results = []
    for follows in (False, True):
        earlier = storages()  # holds them, so that no new storage takes the address of an earlier one
        compressor = gradzip.TopK(theta=0.9)
        if follows:
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            scaler.scale(torch.zeros(()))
            compressor.follow(scaler)
        job = Job(compressor)
        for step in range(3):
            job.step(rank, step)
        job.ddp.zero_grad()
        kept = []
        for _ in range(5):  # other threads may hold the last collectives' tensors a little longer
            kept.append(sum(s.nbytes() for address, s in storages().items() if address not in earlier))
            time.sleep(0.1)
        results.append(min(kept))
    return results


def storages():
    """The storages of all tensors of this process, by address."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    return {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors if x.layout == torch.strided}


@scenario
def unused(rank, size):
    """A layer that rank 0 does not use, and one that no rank uses before the last step."""
    job = Job(gradzip.QSGD(), find_unused_parameters=True)
    skipped = [(3, 5) if rank == 0 else (5,), (3, 5) if rank == 0 else (5,), (3, 5) if rank == 0 else ()]
    averages = [job.step(rank, step, skip=skip) for step, skip in enumerate(skipped)]
    return {"averages": averages, "buckets": job.buckets}


TAKEN_BACK = [
    "topk:theta=0.9",
    "topk:theta=0.9,exchange=scatter_reduce",
    "acpsgd",
    "onebit",
    "phases:0=topk(theta=0.9),2=none",
]
ZEROING = {"none": {}, "zeros": {"set_to_none": False}, "never": None}  # arguments of `zero_grad`, if it is called


@scenario
def taken_back(rank, size):
    """No rank uses layers 3 and 5 from step 2 on. Sums of what each step has added to gradients; the last residuals."""
    results = {}
    for spec in TAKEN_BACK:
        for views in (False, True):
            for zeroing, arguments in ZEROING.items():
                job = Job(gradzip.parse(spec), find_unused_parameters=True, gradient_as_bucket_view=views)
                sums = [torch.zeros(s) for s in SHAPES]
                for step in range(STEPS):
                    if arguments is not None:
                        job.ddp.zero_grad(**arguments)
                    before = job.averages()
                    job.loss(rank, step, skip=(3, 5) if step > 1 else ()).backward()
                    for total, average, old in zip(sums, job.averages(), before):
                        if average is not None:
                            total += average if old is None else average - old
                results[f"{spec} {views} {zeroing}"] = sums, residuals(job.state.compressor)
    return results


@scenario
def toggled(rank, size):
    return {key: found for spec in kinds.SAMPLE for key, found in toggle(spec, rank).items()}


@on_request
def toggled_others(rank, size):
    others = [spec for spec in kinds.FIRST if spec not in kinds.SAMPLE]
    return {key: found for spec in others for key, found in toggle(spec, rank).items()}


def toggle(spec, rank):
    """A second backward pass that does not use layers 3 and 5, whose gradients are those of the first one.

    What it has changed of them: the gradients, and by name the tensors with a number for each element.
    """
    results = {}
    for views in (False, True):
        job = Job(gradzip.parse(spec), find_unused_parameters=True, gradient_as_bucket_view=views)
        for step in range(3):  # methods with phases compress
            job.step(rank, step)
        before, kept = job.averages(), of_elements(job)
        for i in set(range(len(SHAPES))) - {3, 5}:
            job.model.layers[i].grad = None
        job.loss(rank, 3, skip=(3, 5)).backward()
        after = of_elements(job)
        found = [f"grad {i}" for i in (3, 5) if not torch.equal(before[i], job.model.layers[i].grad)]
        found += [key for key in {*kept, *after} if not torch.equal(kept.get(key, NOTHING), after.get(key, NOTHING))]
        moved = any(not torch.equal(before[i], job.averages()[i]) for i in (0, 1))
        results[f"{spec} {views}"] = found, moved
    return results


NOTHING = torch.zeros(0)


def of_elements(job):
    """What states have for each element of layers 3 and 5, and the residuals of owners, which are not 0."""
    found = {}
    for part in job.state.compressor.parts:
        for name, fields in part.memory.by_parameter().items():
            if name in ("layers.3", "layers.5"):
                shape = SHAPES[int(name[-1])]
                tensors = {key: t for key, t in fields.items() if isinstance(t, torch.Tensor) and t.shape == shape}
                tensors["kept"] = kept_residual(fields)
                found |= {f"{name} {key}": t.clone() for key, t in tensors.items() if t is not None and t.any()}
    return found


@scenario
def frozen(rank, size):
    job = Job(gradzip.TopK(theta=0.9), frozen=(0, 4))
    return job.run(rank)


class Mixed(torch.nn.Module):
    """Parameters of two dtypes, and a sparse gradient: several buckets in the first pass."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 40, sparse=True)
        self.first = torch.nn.Linear(40, 48, dtype=torch.bfloat16)
        self.second = torch.nn.Linear(48, 30)

    def forward(self, ids):
        return self.second(self.first(self.embedding(ids).bfloat16()).float())


@scenario
def static_graphs(rank, size):
    """The averages of three steps without and with `static_graph`."""
    results = []
    for static in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(Mixed(), static_graph=static)
        gradzip.ddp.register(model, gradzip.TopK(theta=0.9))
        for step in range(3):
            model.zero_grad()
            model((torch.arange(20) * (step + 1 + rank)) % 50).square().mean().backward()
            results.append([p.grad.to_dense().clone() for p in model.parameters()])
    return results


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64] * 2


@scenario
def mixed(rank, size):
    return Job(gradzip.QSGD(), [torch.zeros(s, dtype=t) for s, t in zip(SHAPES, DTYPES)]).run(rank)


@scenario
def large_halves(rank, size):
    """Averages in float16 whose sums overflow: a cast gradient, and gradients that are not compressed."""

    def fill(grads):
        for i, grad in enumerate(grads):
            grad.fill_(60000 - 1000 * i)

    tensors = [torch.zeros(64, 64), torch.zeros(64, 64).half(), torch.zeros(300).half()]
    return Job(gradzip.Cast(), tensors).step(rank, 0, change=fill)


@scenario
def strides(rank, size):
    tensors = [
        torch.zeros(32, 16, 3, 3).to(memory_format=torch.channels_last),
        torch.zeros(60, 50).t(),
        torch.zeros(64, 64),
    ]
    results = []
    for compressor in (gradzip.FFTRange(theta=0.5, error_feedback=False), gradzip.NoCompression()):
        job = Job(compressor, tensors)
        results.append(job.run(rank))
        results[-1]["strides"] = [list(p.grad.stride()) == list(p.stride()) for p in job.model.layers]
    return results


@scenario
def alone(rank, size):
    """A group of one."""
    group = [dist.new_group([r]) for r in range(size)][rank]
    return {
        spec: Job(gradzip.parse(spec), group=group).run(rank)
        for spec in ("topk:theta=0.9,exchange=scatter_reduce", "terngrad", "none")
    }


@scenario
def subset(rank, size):
    """A group of all ranks but the first."""
    group = dist.new_group(range(1, size))
    return Job(gradzip.QSGD(exchange="scatter_reduce"), group=group).run(rank) if rank else None


@scenario
def two_models(rank, size):
    """One compressor, two models in one backward pass, whose buckets alternate."""
    compressor = gradzip.TernGrad()
    jobs = [Job(compressor, names=False) for _ in range(2)]
    averages = []
    for step in range(STEPS):
        for job in jobs:
            job.ddp.zero_grad()
        (jobs[0].loss(rank, step) + jobs[1].loss(rank, step)).backward()
        averages.append([job.averages() for job in jobs])
    return averages, [job.buckets for job in jobs]


@scenario
def joined(rank, size):
    """Ranks with different numbers of batches. With `find_unused_parameters`, DDP has a collective of its own."""
    results = {}
    for unused in (False, True):
        compressor = gradzip.TopK(theta=0.0, error_feedback=False, exchange="scatter_reduce")
        job, averages = Job(compressor, find_unused_parameters=unused), []
        with job.ddp.join():
            for step in range(3 + rank):
                averages.append(job.step(rank, step))
        results[unused] = averages
    return results


THETAS = {0: 0.99, 2: 0.3, 4: 0.95}


@scenario
def growing(rank, size):
    """Payloads that are longer or shorter than in the step before."""
    return Job(gradzip.TopK(theta=gradzip.StepSchedule(THETAS))).run(rank, steps=8)


@scenario
def non_finite(rank, size):
    """An inf in one layer on the last rank, in the second of three steps."""

    def add_inf(grads):
        grads[3][0, 0] = float("inf")

    results = {}
    for spec in ("signsgd:majority=False", "topk:theta=0.9", "terngrad"):
        job = Job(gradzip.parse(spec))
        results[spec] = []
        for step in range(3):
            averages = job.step(rank, step, change=add_inf if (step, rank) == (1, size - 1) else None)
            states = job.state.state_dict()["states"]
            results[spec].append(
                {
                    "finite": [bool(a.isfinite().all()) for a in averages],
                    "steps": {name: s["step"] for name, s in states.items()},
                    "residuals": {name: s["residual"].clone() for name, s in states.items() if "residual" in s},
                }
            )
    return results


@scenario
def outside(rank, size):
    """Warnings of steps under a GradScaler with an overflow: in a parameter of no optimizer, and in one of the SGD."""
    found = {}
    for i in (3, 0):
        job = Job(gradzip.NoCompression())
        sgd = torch.optim.SGD([job.model.layers[0]], lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        job.state.compressor.follow(scaler)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                job.ddp.zero_grad()
                scaler.scale(job.loss(rank, step, change=lambda grads: grads[i].fill_(torch.inf))).backward()  # noqa: B023
                scaler.step(sgd)
                scaler.update()
        found[i] = [str(warning.message) for warning in caught if "average" in str(warning.message)]
    return found


@scenario
def announcements(rank, size):
    """Errors of passes within `discarding`, by what is wrong, and the averages of a step afterwards."""

    def announced(job, announces=True, step=1):
        with job.state.compressor.discarding() if announces else contextlib.nullcontext():
            return message(lambda: job.step(rank, step))

    late, early, one = (Job(gradzip.PowerSGD()) for _ in range(3))
    late.step(rank, 0)
    one.state.compressor.discarding()
    one.step(rank, 0)
    shared = gradzip.PowerSGD()
    shared.discarding()
    both = [Job(shared), Job(shared)]
    for job in both:
        job.step(rank, 0)
    found = {
        "late": announced(late),
        "not everywhere": announced(early, rank == 0),
        "some": announced(one, rank == 0),
        "shared": announced(both[0]),
    }
    model, compressor = one.model, one.state.compressor
    one = None  # DDP has to be made again
    return found, Job(compressor, model).step(rank, 1)


@scenario
def exempted(rank, size):
    """This rank's gradients and the averages, by name, with an exempt last layer; errors; what is logged."""
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("gradzip").addHandler(handler)
    logging.getLogger("gradzip").setLevel(logging.INFO)

    def step(exempt):
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Linear(48, 32)))
        compressor = gradzip.TopK(theta=0.9)
        gradzip.ddp.register(model, exempt(compressor, model))
        loss = model(torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))).square().sum()
        own = torch.autograd.grad(loss, [*model.module.parameters()], retain_graph=True)
        error = message(loss.backward)
        averages = {name: p.grad for name, p in model.module.named_parameters()}
        return dict(zip(averages, own)), averages, error, sorted(compressor.memory.by_parameter())

    *result, error, kept = step(lambda compressor, model: compressor.exempt_modules(model, "head"))
    lines = list(logged)
    logging.getLogger("gradzip").removeHandler(handler)
    alone = step(lambda c, model: c.exempt_modules(model, "head") if rank == 0 else c)
    other = step(lambda c, _: c.exempt_modules(Layers([torch.zeros(2, 2), torch.zeros(3)]), "1d"))
    everything = step(exempt_everything)
    return result, error, kept, lines, alone[2], other[2], everything[2]


def exempt_everything(compressor, model):
    """By names of another model, which has one parameter more."""
    more = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Linear(48, 32), torch.nn.Conv2d(8, 8, 5))
    return compressor.exempt_modules(more, torch.nn.Linear)


# Compression, and how a step is taken. Parameters have weight decays of their own.
DECAYS = [0.1, 0.02]
DECAY_STEPS = 10
DECAYED = {
    "bypassed": ("dgc:min_numel=10000", "plain"),
    "compressed": ("dgc:theta=0", "plain"),
    "per layer": ("per-layer:0=dgc(theta=0)", "plain"),
    "accumulated": ("dgc:min_numel=10000", "accumulated"),
    "closure": ("dgc:min_numel=10000", "closure"),
    "loss scaled": ("dgc:min_numel=10000", "loss scaled"),
}
OVERFLOWS = 3  # the step in which one gradient of the last rank is infinite, under a GradScaler


@scenario
def weight_decay(rank, size):
    """Parameters after steps of DGCSGD with weight decay."""
    return {name: decayed(rank, size, *case) for name, case in DECAYED.items()}


def decayed(rank, size, spec, how):
    job = Job(gradzip.parse(spec), [gradient(99, 0, i, *shape) for i, shape in enumerate([(40, 40), (30,)])])
    parameters = list(job.model.layers)
    methods = [job.state.compressor.method_for(name, p.shape) for name, p in job.model.named_parameters()]
    momenta = [method.optimizer_momentum for method in methods]
    groups = [{"params": [p], "momentum": m, "weight_decay": w} for p, m, w in zip(parameters, momenta, DECAYS)]
    sgd = gradzip.optim.DGCSGD(groups, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4, enabled=how == "loss scaled")
    if scaler.is_enabled():
        job.state.compressor.follow(scaler)

    def backward(step):
        def overflow(grads):
            if (how, step, rank) == ("loss scaled", OVERFLOWS, size - 1):
                grads[1][0] = float("inf")

        sgd.zero_grad()
        if how == "accumulated":
            with job.ddp.no_sync():
                job.loss(rank, step).backward()
        scaler.scale(job.loss(rank, step, change=overflow)).backward()
        return 1.5

    for step in range(DECAY_STEPS):
        if how == "closure":
            assert sgd.step(lambda step=step: backward(step)) == 1.5
        else:
            backward(step)
            scaler.step(sgd)
            scaler.update()
    return [p.detach().clone() for p in parameters]


@dataclass
class Damaging(gradzip.QSGD):
    """Damages rank 1's payload of one layer in the third step."""

    def groups_by(self, shape):
        return None  # each layer has a payload

    def encode_lists(self, lists, keys):
        payloads = super().encode_lists(lists, keys)
        for payload, key in zip(payloads, keys):
            if (key.rank, key.step, key.name) == (1, 2, "layers.3"):
                payload[60] ^= 1
        return payloads


@scenario
def errors(rank, size):
    """Errors that the backward pass raises."""
    results = {}
    job = Job(Damaging())
    results["damaged"] = [message(job.step, rank, step) for step in range(3)]
    for name, mine, other in (
        ("methods", gradzip.QSGD(), gradzip.TopK()),
        ("arguments", gradzip.TopK(theta=0.9), gradzip.TopK(theta=0.8)),
        ("exchanges", gradzip.QSGD(), gradzip.QSGD(exchange="scatter_reduce")),
    ):
        results[name] = message(Job(other if rank == 1 else mine).step, rank, 0)
    results["names"] = message(Job(gradzip.QSGD(), names=rank != 1).step, rank, 0)
    compressor = gradzip.QSGD()
    if rank == 1:
        compressor.follow(torch.amp.GradScaler("cpu"))
    results["scalers"] = message(Job(compressor).step, rank, 0)
    for static in (False, True):
        job = Job(Damaging(), static_graph=static)
        job.state.load_state_dict({"method": "Damaging", "states": {"layers.3": {"step": 2}}})
        results[f"first step, static_graph={static}"] = message(job.step, rank, 0)

    first, second = Job(gradzip.QSGD(), names=False), Layers([torch.zeros(40, 30)])
    ddp = DistributedDataParallel(second)
    ddp.register_comm_hook(first.state, gradzip.ddp.hook)
    first.step(rank, 0)
    results["shared"] = message(lambda: ddp([torch.ones(40, 30)]).backward())

    for how in ("after backward", "closure"):
        job = Job(gradzip.DGC())
        sgd = torch.optim.SGD(job.model.parameters(), lr=0.1, weight_decay=0.5)
        if how == "after backward":
            job.step(rank, 0)
        closure = None if how == "after backward" else lambda job=job: job.step(rank, 0)
        results[f"weight decay, {how}"] = message(sgd.step, closure)

    job = Job(gradzip.DGC())
    job.state.load_state_dict({"method": "DGC", "states": {"layers.0": {"step": 1, "residual": torch.zeros(5, 5)}}})
    results["foreign state"] = message(job.step, rank, 0)

    ddp = DistributedDataParallel(torch.nn.Linear(40, 30))
    ddp.register_comm_hook(gradzip.TopK(), gradzip.ddp.hook)
    results["no hook state"] = message(lambda: ddp(torch.ones(2, 40)).sum().backward())
    return results


@scenario
def claims(rank, size):
    """Errors of a method on rank 0 when its peers claim to have far more bytes than it could send."""
    results = []
    for exchange in ("gather", "scatter_reduce"):
        rows = size if exchange == "scatter_reduce" else 1
        if rank:
            sent = torch.tensor([[10, 1 << 50]] * rows).view(torch.uint8)
            received = sent.new_empty((size, 16))
            group = dist.group.WORLD
            if rows > 1:
                group.alltoall_base(received.view(-1), sent.view(-1), [], []).wait()
            else:
                group._allgather_base(received.view(-1), sent.view(-1)).wait()
            continue
        routine = averaged(gradzip.TopK(exchange=exchange), torch.randn(64, 64), "w", rank, size)
        engine = TorchEngine(dist.group.WORLD, gradzip.Traffic(), torch.device("cpu"))
        results.append(message(lambda engine=engine, routine=routine: engine.run(next(routine), "w")))
    return results


@scenario
def registered(rank, size):
    """`register` and the hook that is registered by hand. A group of one rank, and a model without DDP."""

    def train(register):
        model = DistributedDataParallel(Layers([torch.zeros(s) for s in SHAPES]), bucket_cap_mb=CAP_MB)
        state = register(model, gradzip.TopK(theta=0.9))
        for step in range(STEPS):
            model([gradient(rank, step, i, *shape) for i, shape in enumerate(SHAPES)]).backward()
        return [p.grad for p in model.parameters()], state.state_dict()

    def by_hand(model, compressor):
        state = gradzip.ddp.HookState(compressor, named_parameters=model.module.named_parameters())
        model.register_comm_hook(state, gradzip.ddp.hook)
        return state

    groups = [dist.new_group([r]) for r in range(size)]
    alone = DistributedDataParallel(torch.nn.Linear(64, 64), process_group=groups[rank])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = gradzip.ddp.register(torch.nn.Linear(64, 64), gradzip.TopK())
    other = DistributedDataParallel(torch.nn.Linear(64, 64), process_group=(whole := dist.new_group(range(size))))
    return {
        "register": train(gradzip.ddp.register),
        "by hand": train(by_hand),
        "alone": gradzip.ddp.register(alone, gradzip.TopK()),
        "hooks": len(alone._comm_hooks),
        "plain": plain,
        "warnings": [str(w.message) for w in caught],
        "group": gradzip.ddp.register(other, gradzip.TopK()).process_group is whole,
        "twice": message(gradzip.ddp.register, other, gradzip.TopK()),
    }


@scenario
def recreated_group(rank, size):
    """A new process group and DDP model between steps, with the same HookState."""
    job, averages, buckets = Job(gradzip.TopK(theta=0.9)), [], []
    for step in range(4):
        if step == 2:
            state, store = job.state, dist.distributed_c10d._get_default_store()
            dist.barrier()
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.PrefixStore("recreated", store), rank=rank, world_size=size)
            job = Job(state.compressor, job.model, state=state)
        averages.append(job.step(rank, step))
        buckets.append(job.buckets[-1])
    return {"averages": averages, "buckets": buckets, "is_new": job.state._session.engine.group is dist.group.WORLD}


@on_request
def killed(rank):
    """Kill rank 1 while the others wait for its gradients. Return their error and its time."""
    job = Job(gradzip.TopK(theta=0.9))
    for step in range(2):  # from here on, ranks exchange only gradients
        job.step(rank, step)

    def kill(grads):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    begin = time.monotonic()
    error = message(lambda: job.step(rank, 2, change=kill))
    return time.monotonic() - begin, error


if __name__ == "__main__":
    main(of_spec=lambda spec: Job(gradzip.parse(spec)).run(harness.job.rank))
