"""Scenarios for tests/front_ends/test_fsdp.py, run by torchrun.

Ranks are numbered as in the mesh: rank = replica * shards + shard.
"""

import contextlib
import functools
import io
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import gradzip
from contract import gradient
from gradzip.fsdp import shards as private
from gradzip.fsdp.reduce_scatter import Feedback, ReduceScatter
from gradzip.methods.base import group as groups_of_buckets
from gradzip.methods.base.registry import registered
from harness import main, message, scenario

# By module, "" for the root: 33, 7 and 1 rows do not divide among the shards.
SHAPES = {
    "first": {"a": (64, 48), "b": (300,), "c": (33, 40), "k": (32, 8, 3, 3)},
    "second": {"d": (48, 24), "e": (7,), "f": (6, 500)},
    "": {"g": (1, 2000), "h": (50, 40)},
}
STEPS = 3
BASE = "acpsgd:rank=4,min_numel=256"
EXAMPLES = [method.examples[0] for name, method in registered().items() if name != "auto"]
ROUNDS = "powersgd:rank=4,min_numel=256"  # which needs a second all-reduce
METHODS = [BASE, "topk:theta=0.9,min_numel=256", "block-float:min_numel=256", "acpsgd:rank=24"]
DIVIDED = "topk:theta=0.9,min_numel=256", 2500  # a method, and how many elements a group may have
INNER = "topk:theta=0.9,min_numel=128"
UNCOMPRESSED = "acpsgd:min_numel=1000000"
NEAREST = "block-float:rounding=nearest"
AMP = [("", None), ("overflow", 1), ("after", None)]  # names of steps, and the rank whose gradient is not finite


class Block(torch.nn.Module):
    """Adds the products of its parameters and their gradients, which are arguments."""

    def __init__(self, shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, x, grads):
        for name, parameter in self.named_parameters(recurse=False):
            if name in grads:
                x = x + (parameter * grads[name]).sum()
        return x


class Model(Block):
    def __init__(self, dtype=torch.float32):
        super().__init__(SHAPES[""])
        self.first, self.second = Block(SHAPES["first"]), Block(SHAPES["second"])
        self.runs = 1  # of the second block
        self.run_second = lambda x, grads: self.second(x, grads)
        self.between = lambda x: x
        self.to(dtype)

    def forward(self, grads):
        x = self.between(self.first(torch.zeros(()), grads))
        for _ in range(self.runs):
            x = self.run_second(x, grads)
        return super().forward(x, grads)


@functools.cache
def mesh(shards=2):
    shape = (dist.get_world_size() // shards, shards)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


class Job:
    """A model with FSDP, and with a compressor between replicas."""

    def __init__(self, method=BASE, shards=2, frozen=(), dtype=torch.float32, root=True, **options):
        self.model = Model(dtype)
        for name in frozen:
            self.model.get_parameter(name).requires_grad_(False)
        for module in (self.model.first, self.model.second, *([self.model] if root else [])):
            fully_shard(module, mesh=mesh(shards)["shard"], **options)
        self.compressor = gradzip.parse(method) if isinstance(method, str) else method
        if self.compressor is not None:
            group = mesh(shards)["replicate"].get_group()
            self.state = gradzip.fsdp.compress(self.model, self.compressor, group)

    def backward(self, step=0, skip=(), scale=1.0, change=None):
        rank = dist.get_rank()
        grads = {
            name: scale * gradient(name, rank, step, shape)
            for shapes in SHAPES.values()
            for name, shape in shapes.items()
            if name not in skip
        }
        if change:
            change(grads)
        self.model(grads).backward()

    def averages(self):
        return {
            name.rpartition(".")[2]: p.grad.to_local().clone()
            for name, p in self.model.named_parameters()
            if p.grad is not None and p.grad.to_local().numel()
        }

    def step(self, step=0, **arguments):
        self.model.zero_grad()
        self.backward(step, **arguments)
        return self.averages()

    def run(self, steps=STEPS):
        averages, sent, dense = [], [], []
        for step in range(steps):
            averages.append(self.step(step))
            sent.append(self.state.traffic.bytes_sent)
            dense.append(self.state.traffic.bytes_dense)
        return {"averages": averages, "sent": sent, "dense": dense}


@scenario
def methods():
    return {spec: Job(spec).run() for spec in [*METHODS, UNCOMPRESSED]}


@scenario
def divided():
    """Groups that are smaller than the gradients of a module."""
    spec, limit = DIVIDED
    with mock.patch.object(groups_of_buckets, "MOST_NUMEL", limit):
        return Job(spec).run()["averages"]


def exempting(compressor, *names):
    compressor.exempted = frozenset(names)
    return compressor


LARGE = [
    f"{module}.{name}".lstrip(".") for module, of in SHAPES.items() for name, shape in of.items() if len(shape) > 1
]


@scenario
def exempted():
    """All but a parameter that only the first shard has."""
    return Job(exempting(gradzip.parse(METHODS[1]), *(name for name in LARGE if name != "g"))).run()["averages"]


@scenario
def nodes():
    """Replicas on two nodes, on which `Hierarchical` compresses between nodes alone."""
    return Job(gradzip.Hierarchical(gradzip.parse(INNER), local_size=2), shards=1).run()


@scenario
def all_methods():
    return {spec: Job(spec).run() for spec in EXAMPLES}


@scenario
def replicas_only():
    """Each rank has the whole model: data parallelism, as with DDP."""
    return Job(shards=1).run()


@scenario
def shards_only():
    """One replica: nothing to average."""
    return Job(shards=dist.get_world_size()).run()


@scenario
def native():
    """FSDP's own all-reduce over replicas, uncompressed."""
    job = Job(None)
    model = Model()
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh())
    job.model = model
    return [job.step(step) for step in range(STEPS)]


def accumulated(step, job):
    """Two backward passes, the first without synchronization."""
    job.model.zero_grad()
    job.model.set_requires_gradient_sync(False)
    job.backward(step)
    job.model.set_requires_gradient_sync(True)
    job.backward(step)
    return job.averages()


def log_gradients(model):
    """Return a dict to which hooks copy the gradients, by name."""
    logged = {}

    def log(name, parameter):
        if parameter.grad.to_local().numel():
            logged[name] = parameter.grad.to_local().clone()

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(functools.partial(log, name.rpartition(".")[2]))
    return logged


@scenario
def options():
    """Averages of two steps, with options of FSDP."""
    cast = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    results = {
        "default": Job().run(2)["averages"],
        "offload": Job(offload_policy=CPUOffloadPolicy(pin_memory=False)).run(2)["averages"],
        "cast_bf16": Job(mp_policy=cast).run(2)["averages"],
    }
    job = Job()
    results["accumulated"] = [accumulated(step, job) for step in range(2)]

    job = Job()
    job.model.set_reduce_scatter_unused_params(True)
    results["unused"] = [job.step(step, skip=("e", "b")) for step in range(2)]

    job = Job()
    discarding, results["discarded"] = job.compressor.discarding(), []
    for step in range(2):
        with discarding:
            job.step(100 + step)
        results["discarded"].append(job.step(step))

    job = Job()
    results["frozen_later"] = [job.step(0)]
    job.model.get_parameter("first.a").requires_grad_(False)
    results["frozen_later"].append(job.step(1))
    return results


@scenario
def more_options():
    reduced = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    results = {
        "no_reshard": Job(reshard_after_forward=False).run(2)["averages"],
        "frozen": Job(frozen=["first.a", "g"]).run(2)["averages"],
        "reduced_bf16": Job(UNCOMPRESSED, mp_policy=reduced).run(2)["averages"],
        "float16": Job(UNCOMPRESSED, dtype=torch.float16).run(2)["averages"],
        "hooks": [],
    }
    job = Job()
    logged = log_gradients(job.model)
    for step in range(2):
        job.step(step)
        results["hooks"].append(dict(logged))

    job = Job()
    for module in job.model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    results["sums"] = job.run(2)["averages"]

    job = Job()
    job.backward(0)
    job.backward(1)
    results["added"] = [job.averages()]

    job = Job()
    job.model.runs = 2
    results["run_twice"] = job.run(1)["averages"]
    return results


@scenario
def roots():
    """Blocks without a root: each is one. FSDP reduces the first one's gradients in a callback."""
    job = Job(ROUNDS, frozen=SHAPES[""], root=False)
    results = {"averages": job.run()["averages"], "steps": {s.step for s in job.compressor.states.values()}}
    job.model.get_parameter("h").requires_grad_(True)
    return results | {"unfrozen": message(job.step)}


@scenario
def one_rank():
    """What one rank alone has: hooks that log gradients, or gradients to add to."""
    results = {}
    for case in ("hooks", "gradients", "both"):
        job = Job(ROUNDS)
        job.step(0)
        alone = dist.get_rank() == 0
        logged = log_gradients(job.model) if alone and case != "gradients" else {}
        job.model.zero_grad(set_to_none=not (alone and case != "hooks"))
        job.backward(1)
        results[case] = job.averages(), dict(logged)
    return results


def failing(x):
    """Let the backward pass fail when it gets here."""

    def fail(grad):
        raise ArithmeticError("between the blocks")

    x.register_hook(fail)
    return x


@scenario
def interrupted():
    """A backward pass that fails between the blocks, with averages in progress, gradients to add to, and a hook."""
    job, calls = Job(ROUNDS), []
    job.model.first.a.register_post_accumulate_grad_hook(lambda p: calls.append("a"))
    job.model.second.d.register_post_accumulate_grad_hook(lambda p: calls.append("d"))
    results = {"averages": [job.step(0)]}

    job.model.between = failing
    results["error"] = message(functools.partial(job.backward, 1, skip=SHAPES[""]))
    job.model.between = lambda x: x
    job.model.reset_iter_state()
    results["averages"].append(job.step(1))
    return results | {"calls": calls}


@scenario
def checkpointing():
    """Activation checkpointing of the second block."""

    def checkpointed(job, reentrant):
        job.model.run_second = functools.partial(checkpoint, job.model.second, use_reentrant=reentrant)
        return job

    results = {"averages": checkpointed(Job(), False).run(2)["averages"]}
    job = Job()
    job.step(0)
    results["error"] = message(functools.partial(checkpointed(job, True).step, 1, skip=SHAPES[""]))
    job.model.reset_iter_state()
    results["after"] = checkpointed(job, False).step(1)
    # A block whose forward pass is checkpointed within is reduced outside of the nested backward pass.
    job = Job()
    forward = job.model.second.forward
    job.model.second.forward = lambda x, grads: checkpoint(forward, x, grads, use_reentrant=True)
    results["within"] = job.run(2)["averages"]
    return results


@scenario
def overlap():
    """How often routines are run to their end in a backward pass: once, if the transfers run beside it."""
    runs = {}
    policies = {"default": {}, "added": {}, "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}}
    for name, policy in policies.items():
        job = Job(**policy)
        job.step()
        run, runs[name] = job.state._run, 0

        def counted(name=name, run=run):
            runs[name] += 1
            run()

        job.state._run = counted
        if name == "added":
            job.backward(1)
        else:
            job.step(1)
    return runs


@scenario
def clipping():
    job = Job()
    job.step()
    norm = torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
    return {"norm": norm.full_tensor(), "clipped": job.averages()}


class Scaler:
    """A loss scale that the test sets."""

    def __init__(self):
        self.scale = 4.0

    def get_scale(self):
        return self.scale


def overflow(grads):
    grads["d"][0, 0] = torch.inf


@scenario
def loss_scale():
    """One element of one rank's gradient overflows in the second step, and the loss scale is halved."""
    scaler, results = Scaler(), {}
    job = Job(gradzip.parse(BASE).follow(scaler))

    for step, (name, rank) in enumerate(AMP):
        averages = job.step(step, scale=scaler.scale, change=overflow if rank == dist.get_rank() else None)
        results[name] = averages, {state: s.step for state, s in job.compressor.states.items()}
        if rank is not None:
            scaler.scale /= 2
    return results


@scenario
def distributed_checkpoint(folder):
    """A run that continues from a checkpoint, and the run that it continues."""
    job = Job()
    job.run(2)
    path = str(Path(folder, "checkpoint"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"compressor": job.state, "model": job.model.state_dict()}, checkpoint_id=path)
        resumed = Job()
        dcp.load({"compressor": resumed.state}, checkpoint_id=path)
    torch.save(job.state.state_dict(), Path(folder, f"plain{dist.get_rank()}.pt"))
    plain = Job()
    plain.state.load_state_dict(torch.load(Path(folder, f"plain{dist.get_rank()}.pt"), weights_only=True))
    jobs = {"original": job, "resumed": resumed, "plain": plain}
    return {
        **{name: [one.step(step) for step in (2, 3)] for name, one in jobs.items()},
        "states": sorted(job.compressor.memory.by_parameter()),
        "none": message(plain.state.load_state_dict, None),
        "other": message(lambda: plain.state.load_state_dict({"shard9of9": b""})),
    }


@scenario
def shared_compressor():
    """Two models with one compressor, and a model that is compressed again."""
    first = Job()
    second = Job(first.compressor)
    averages = [job.step(0) for job in (first, second)]
    first.state = gradzip.fsdp.compress(first.model, first.compressor, mesh()["replicate"].get_group())
    averages.append(first.step(1))
    return {"averages": averages, "states": sorted(first.compressor.memory.by_parameter())}


@scenario
def auto():
    """A method that measures the job, and changes while it runs."""
    job = Job("auto:steps=3,every=0,allow=[fp16,acpsgd]")
    averages = [job.step(step % STEPS) for step in range(130)]  # the longest search takes 124
    return {"averages": averages, "chosen": job.compressor.decided, "choice": dict(job.compressor.choice)}


@scenario
def momentum():
    """DGC's momentum, and that of the weight decay, on sharded parameters: the parameters after three steps."""
    job = Job("dgc:theta=0.5,min_numel=256")
    with torch.no_grad():
        for p in job.model.parameters():
            p.fill_(1.0)
    optimizer = gradzip.optim.DGCSGD(job.model.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(STEPS):
        job.step(step)
        optimizer.step()
    return {
        "parameters": {
            name.rpartition(".")[2]: p.to_local().detach().clone() for name, p in job.model.named_parameters()
        },
    }


@scenario
def errors():
    rank, group, sharded = dist.get_rank(), mesh()["replicate"].get_group(), mesh()["shard"]
    results = {
        "unsharded": message(lambda: gradzip.fsdp.compress(Model(), gradzip.TopK(), group)),
        "no_group": message(lambda: gradzip.fsdp.compress(Model(), gradzip.TopK(), None)),
        "no_method": message(lambda: gradzip.fsdp.compress(Model(), "topk", group)),
        "replicated": message(lambda: gradzip.fsdp.compress(fully_shard(Model(), mesh=mesh()), gradzip.TopK(), group)),
        "no_codec": message(lambda: gradzip.fsdp.reduce_scatter(gradzip.TopK())),
        "elias": message(lambda: gradzip.fsdp.reduce_scatter(gradzip.QSGD())),
        "exempt": message(lambda: gradzip.fsdp.reduce_scatter(exempting(gradzip.BlockFloat(), "first.a"))),
        "exempt within": message(
            lambda: gradzip.fsdp.reduce_scatter(gradzip.Hierarchical(exempting(gradzip.BlockFloat(), "first.a")))
        ),
        "exempt, quantized": message(lambda: QuantizedJob(exempting(gradzip.BlockFloat(), "first.a"))),
        "owner": message(lambda: gradzip.fsdp.reduce_scatter(gradzip.BlockFloat(error_feedback="owner"))),
        "exempt everything": message(Job(exempting(gradzip.parse(BASE), *LARGE)).step),
        "methods": message(Job(gradzip.TopK(theta=0.9 if rank < 2 else 0.8)).step),
        "policies": message(Job(mp_policy=MixedPrecisionPolicy(reduce_dtype=(None, torch.bfloat16)[rank // 2])).step),
        "modules": message(Job(frozen=SHAPES[""], root=rank < 2).step),
        "node_size": message(Job(gradzip.Hierarchical(gradzip.parse(INNER), local_size=7), shards=4).step),
        "uncovered": message(lambda: Job(root=False)),
        "unused": message(lambda: Job().step(skip=("e",))),
    }
    job = Job()
    discarding = job.compressor.discarding()
    job.step()
    with discarding if rank == 1 else contextlib.nullcontext():  # the other rank of its group, and other shards do not
        results["announced"] = message(job.step)
    job = Job()
    results["bytes"] = message(job.state.load_state_dict, {job.state._key: b"no state"})
    job.model.set_requires_gradient_sync(False)
    job.backward()
    job.model.set_requires_gradient_sync(True)
    (group_of_shards,) = job.model.second._get_fsdp_state()._fsdp_param_groups
    results["no_pass"] = message(group_of_shards.post_backward)  # as torch's pipeline schedules do
    decaying = Job(gradzip.DGC())
    decaying.step()
    results["weight_decay"] = message(torch.optim.SGD(decaying.model.parameters(), lr=0.1, weight_decay=0.5).step)
    meshes = Model()
    fully_shard(meshes.first, mesh=mesh(1)["shard"])
    fully_shard(meshes, mesh=sharded)
    results["meshes"] = message(lambda: gradzip.fsdp.compress(meshes, gradzip.TopK(), group))
    fields = private._FIELDS
    private._FIELDS = (*fields, "renamed")  # as with a torch that has another FSDP2
    results["torch"] = message(Job)
    private._FIELDS = fields
    job = Job(None)
    gradzip.fsdp.compress(job.model, gradzip.TopK(), sharded.get_group())
    results["wrong_group"] = message(job.step)
    model = fully_shard(Model(), mesh=sharded)
    model.set_custom_reduce_scatter(gradzip.fsdp.reduce_scatter(gradzip.BlockFloat(seed=rank)))
    job.model = model
    results["codecs"] = message(job.step)
    model = fully_shard(Model(), mesh=sharded)
    model.set_custom_reduce_scatter(gradzip.fsdp.reduce_scatter(gradzip.BlockFloat()))
    model.set_gradient_divide_factor(3.0)
    job.model = model
    results["factor"] = message(job.step)
    exact = ReduceScatter(gradzip.BlockFloat(), feedback=Feedback(gradzip.BlockFloat()))
    flat = torch.ones(8)
    results["outside"] = message(lambda: exact(flat[:2].clone(), flat, dist.group.WORLD, dist.ReduceOp.AVG))
    model = fully_shard(Model(), mesh=sharded)
    results["no contraction"] = message(
        lambda: gradzip.fsdp.quantize(model, reduce=gradzip.QSGD(coding="packed"), error_feedback=True)
    )
    results["nothing to feed back"] = message(
        lambda: gradzip.fsdp.quantize(model, gather=gradzip.parse(NEAREST), error_feedback=True)
    )
    results["unused, feedback"] = message(lambda: QuantizedJob().step(skip=("e",)))
    return results


CODECS = [
    "block-float",
    "block-float:bits=4,block=64",
    "block-float:rounding=nearest",
    "qsgd:coding=packed,bits=8",
    "qsgd:coding=packed,norm=max,bucket=100",
]
DRAWS = 64


@scenario
def quantized():
    """Quantized reduce-scatters of one gradient, called as FSDP does."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    results = {}
    x = torch.cat([gradient("x", rank, i, (1000,)) for i in range(size)])  # 1000 elements in each shard

    def call(reduce_scatter, x, op=dist.ReduceOp.AVG):
        out = reduce_scatter.allocate((x.numel() // size,), dtype=x.dtype, device=x.device)
        assert reduce_scatter(output_tensor=out, input_tensor=x.clone(), group=group, op=op) is None
        return out

    for spec in CODECS:
        reduce_scatter = gradzip.fsdp.reduce_scatter(gradzip.parse(spec))
        first = call(reduce_scatter, x)
        sent, dense = reduce_scatter.traffic.bytes_sent, reduce_scatter.traffic.bytes_dense
        draws = torch.stack([call(reduce_scatter, x) for _ in range(DRAWS)])
        bad = x.clone()
        if rank == 1:
            bad[1500] = torch.inf  # in the shard of rank 1
        results[spec] = {
            "first": first,
            "again": call(gradzip.fsdp.reduce_scatter(gradzip.parse(spec)), x),
            "mean": draws.double().mean(0),
            "sent": (reduce_scatter.traffic.bytes_sent - sent) / DRAWS,
            "dense": (reduce_scatter.traffic.bytes_dense - dense) / DRAWS,
            "sum": call(gradzip.fsdp.reduce_scatter(gradzip.parse(spec)), x, dist.ReduceOp.SUM),
            "bf16": call(gradzip.fsdp.reduce_scatter(gradzip.parse(spec)), x.bfloat16()),
            "bad": call(reduce_scatter, bad),
            "after_bad": call(reduce_scatter, x),
        }
    return results


FEEDBACK = "block-float:bits=4,rounding=nearest"


class QuantizedJob(Job):
    """A model whose reduce-scatters are quantized, with error feedback."""

    def __init__(self, method=FEEDBACK, replicas=1, error_feedback=True, among=None):
        super().__init__(None, shards=dist.get_world_size())
        if replicas > 1:  # over which FSDP averages
            among = mesh(dist.get_world_size() // replicas)
        if among is not None:
            self.model = Model()
            for module in (self.model.first, self.model.second, self.model):
                fully_shard(module, mesh=among)
        self.method = gradzip.parse(method) if isinstance(method, str) else method
        self.set_up = gradzip.fsdp.quantize(self.model, reduce=self.method, error_feedback=error_feedback)

    def residuals(self):
        (saved,) = self.set_up.state_dict().values()
        state = torch.load(io.BytesIO(saved), weights_only=True)
        return {name: of_module["residual"] for name, of_module in state["reductions"].items()}


@scenario
def feedback(folder):
    """Averages and residuals, in steps that succeed, overflow on a rank or fail."""
    rank, job = dist.get_rank(), QuantizedJob()
    results = {"averages": [job.step(step) for step in range(STEPS)], "residuals": job.residuals()}
    job.step(9, change=overflow if rank == 1 else None)
    results["overflow"] = job.residuals()
    job.model.between = failing
    results["error"] = message(functools.partial(job.backward, 9, skip=SHAPES[""]))
    job.model.between = lambda x: x
    job.model.reset_iter_state()
    results["failure"] = job.residuals()
    stochastic = QuantizedJob("block-float:bits=4")
    results["stochastic"] = [stochastic.step(step) for step in range(STEPS)]
    results["stochastic residuals"] = stochastic.residuals()
    path = str(Path(folder, "feedback"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"quantized": stochastic.set_up}, checkpoint_id=path)
        resumed = QuantizedJob("block-float:bits=4")
        resumed.model.between = failing
        message(functools.partial(resumed.backward, 9, skip=SHAPES[""]))
        resumed.model.between = lambda x: x
        resumed.model.reset_iter_state()
        dcp.load({"quantized": resumed.set_up}, checkpoint_id=path)
    results["resumed"] = [one.step(STEPS) for one in (stochastic, resumed)]
    scaler = Scaler()
    scaled = QuantizedJob(gradzip.parse(FEEDBACK).follow(scaler))
    results["scaled"] = []
    for step in range(STEPS):
        results["scaled"].append({n: g / scaler.scale for n, g in scaled.step(step, scale=scaler.scale).items()})
        scaler.scale /= 2
    job = QuantizedJob(replicas=2)
    job.step(0)
    results["replicas"] = job.residuals()
    job.step(1, change=overflow if rank == 3 else None)  # another replica than that of rank 0
    results["replicas, overflow"] = job.residuals()
    twice = QuantizedJob()
    twice.model.runs = 2
    results["twice"], results["twice residuals"] = [twice.step(0)], twice.residuals()
    job = QuantizedJob()
    results["thawed"] = []
    for step, trains in enumerate((True, False, True)):
        job.model.get_parameter("first.a").requires_grad_(trains)
        results["thawed"].append(job.step(step))
    results["thawed residuals"] = job.residuals()
    return results


FEW = {3: gradzip.parse(FEEDBACK), 2: gradzip.Hierarchical(gradzip.parse(FEEDBACK), local_size=2)}


@scenario
def elastic():
    """Averages of few ranks, then of all, in the same processes and with the same method, on a new mesh."""
    results, ranks = {}, dist.get_world_size()
    mesh(ranks)
    meshes = {few: [DeviceMesh("cpu", list(range(size))) for size in (few, ranks)] for few in FEW}
    for few, method in FEW.items():
        results[few] = []
        for among, steps in zip(meshes[few], (range(2), range(2, 4))):
            if among.get_coordinate() is not None:
                job = QuantizedJob(method, among=among)
                results[few].append([job.step(step) for step in steps])
    return results


@scenario
def nodes_of_shards():
    """Quantized reduce-scatters between nodes: averages, and what a later step sends between nodes and within one."""
    results = {}
    for local_size in (2, 4):
        for error_feedback in (False, True):
            method = gradzip.Hierarchical(gradzip.parse(FEEDBACK), local_size=local_size)
            job = QuantizedJob(method, error_feedback=error_feedback)
            averages = [job.step(step) for step in range(STEPS)]
            traffic = method.traffic
            sent, in_node = traffic.bytes_sent, traffic.bytes_in_node
            job.step(STEPS)
            sent = traffic.bytes_sent - sent, traffic.bytes_in_node - in_node
            results[local_size, error_feedback] = averages, sent
    return results


@scenario
def quantized_training():
    """FSDP with a quantized reduce-scatter, alone and with compression between replicas."""
    results = {}
    for name, shards, method in [("alone", dist.get_world_size(), None), ("both", 2, UNCOMPRESSED)]:
        job = Job(method, shards=shards)
        reduce_scatter = gradzip.fsdp.reduce_scatter(gradzip.BlockFloat(bits=8))
        for module in job.model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(reduce_scatter)
        results[name] = [job.step(step) for step in range(2)]
        results[f"{name}_ratio"] = reduce_scatter.traffic.ratio
    return results


if __name__ == "__main__":
    main()
