"""Scenarios for tests/front_ends/test_fsdp_gather.py, run by torchrun: FSDP2 that gathers rounded weights."""

import contextlib
import functools
import itertools

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import gradzip
from harness import main, message, on_request, scenario

SPECS = ["block-float:rounding=nearest", "block-float:rounding=nearest,bits=4,block=64"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FLOAT8 = torch.float8_e4m3fn
NUMEL = 1000
STEPS, RATE = 3, 0.1


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 3 * width), torch.nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(torch.nn.Module):
    """33 rows do not divide among the ranks."""

    def __init__(self, checkpoints=False, ties=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(33, 40)
        self.blocks = torch.nn.ModuleList(Block(40) for _ in range(2))
        self.head = torch.nn.Linear(40, 33)
        if ties:
            self.head.weight = self.embedding.weight
        self.checkpoints, self.runs = checkpoints, 1

    def forward(self, tokens):
        x = self.embedding(tokens)
        for _ in range(self.runs):
            x = checkpoint(self.run, x, use_reentrant=False) if self.runs > 1 else self.run(x)
        return self.head(x)

    def run(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x

    def generate(self, tokens):
        return Net.forward(self, tokens)


class Encoded(torch.Tensor):
    """As the parameters of float8 training."""

    @staticmethod
    def __new__(cls, inner):
        encoded = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        encoded.inner = inner
        return encoded

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        arguments, options = tree_map_only(cls, lambda encoded: encoded.inner, (arguments, options or {}))
        return tree_map_only(torch.Tensor, cls, function(*arguments, **options))

    def fsdp_pre_all_gather(self, *arguments):
        raise NotImplementedError

    fsdp_post_all_gather = fsdp_pre_all_gather


def batch(rank, step):
    return torch.randint(33, (2, 16), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model, rank, step):
    tokens = batch(rank, step)
    return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def mesh(shards=None):
    size = dist.get_world_size()
    shards = shards or size
    return init_device_mesh("cpu", (size // shards, shards), mesh_dim_names=("replicate", "shard"))


def sharded(mesh, checkpoints=False, ties=False, weights=None, **options):
    model = Net(checkpoints, ties)
    if weights:
        model.load_state_dict(weights)
    of_root = {name: value for name, value in options.items() if name != "reshard_after_forward"}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    if ties:
        fully_shard([model.embedding, model.head], mesh=mesh, **of_root)
    return fully_shard(model, mesh=mesh, **of_root)


def prefetch(model):
    first, second = model.blocks
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])


def freeze(model):
    model.blocks[0].requires_grad_(False)


def compile_all(model):
    model.compile(backend="aot_eager")


def unshard_asynchronously(model):
    for module in (model, *model.blocks):
        module._set_unshard_async_op(True)


@scenario
def calls():
    """The gather alone, called as FSDP does: the input is a part of the output."""
    rank, size = dist.get_rank(), dist.get_world_size()
    results = {}
    for spec in SPECS:
        for dtype in DTYPES:
            gather = gradzip.fsdp.all_gather(gradzip.parse(spec))
            out = gather.allocate((size * NUMEL,), dtype=dtype, device=torch.device("cpu"))
            mine = out[rank * NUMEL : (rank + 1) * NUMEL]
            mine.copy_(torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)))
            if dtype == torch.float16 and rank == 1:
                mine[700] = torch.inf
            given = mine.clone()
            gather(output_tensor=torch.empty_like(out), input_tensor=given, group=dist.group.WORLD)  # ranks meet
            traffic = gather.traffic
            sent, dense = traffic.bytes_sent, traffic.bytes_dense
            assert gather(output_tensor=out, input_tensor=mine, group=dist.group.WORLD) is None
            results[spec, str(dtype)] = given, out, traffic.bytes_sent - sent, traffic.bytes_dense - dense
    return results


def watch(model):
    """Return a list that gets the weights of each linear layer, in forward and backward passes."""
    seen = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):

            def forward(module, _, name=name):
                seen.append(("forward", name, module.weight.detach().clone()))

            def backward(module, _, name=name):
                if not isinstance(module.weight, DTensor):  # FSDP has not gathered what its own module has
                    seen.append(("backward", name, module.weight.detach().clone()))

            module.register_forward_pre_hook(forward)
            module.register_full_backward_pre_hook(backward)
    return seen


def gathers_of(model):
    """What gathers the parameters of each module."""
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return [state._fsdp_param_group._all_gather_comm for state in states if state._fsdp_param_group]


def trained(
    spec, exempt=(), keep=False, reference=None, mesh=None, evaluates=False, resumes=False, prepare=None, infers=False,
    **options,
):  # fmt: skip
    """Train for some steps. Returns weights that were seen in the last one, parameters after each, and bytes sent.

    evaluates: after each step. resumes: before the last step, in another model. prepare: is called with the model.
    infers: before the last step, in inference mode, with a state that has just been loaded.
    """
    model = sharded(mesh, **options)
    if prepare:
        prepare(model)
    method = gradzip.parse(spec)
    if exempt:
        method.exempt_modules(model, *exempt)
    set_up = gradzip.fsdp.quantize(model, gather=method, keep=keep, reference=reference)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    seen = watch(model)
    parameters, sent, kept = [], [0], []
    gathers = gathers_of(model)
    for step in range(STEPS):
        if infers and step == STEPS - 1:
            set_up.load_state_dict(set_up.state_dict())
            with torch.inference_mode():
                model(batch(0, 0)[:, :-1])
        if resumes and step == STEPS - 1:
            saved = set_up.state_dict(), {name: p.detach().clone() for name, p in model.state_dict().items()}
            model = sharded(mesh, **options)
            set_up = gradzip.fsdp.quantize(model, gather=method, reference=reference)
            set_up.load_state_dict(saved[0])
            model.load_state_dict(saved[1])
            optimizer, seen = torch.optim.SGD(model.parameters(), lr=RATE), watch(model)
        seen.clear()
        optimizer.zero_grad()
        loss = loss_of(model, dist.get_rank(), step)
        kept.append(sum(payload.nbytes for gather in gathers for payload in gather._kept or ()))
        loss.backward()
        optimizer.step()
        parameters.append({name: p.full_tensor().detach().clone() for name, p in model.named_parameters()})
        sent.append(method.traffic.bytes_sent)
        if evaluates:
            with torch.no_grad():
                model(batch(0, 0)[:, :-1])
    with torch.no_grad():
        model(batch(0, 0)[:, :-1])
    return {
        "modules": set_up.modules, "rounded": set_up.rounded, "exact": set_up.exact, "seen": list(seen),
        "parameters": parameters, "sent": [after - before for before, after in itertools.pairwise(sent)],
        "kept": [gather._kept is not None for gather in gathers], "kept nbytes": kept,
        "numels": {gather._gathered.name: gather._gathered.numels for gather in gathers},
    }  # fmt: skip


@scenario
def training():
    whole = mesh()["shard"]
    cast = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=False)
    return {
        **{spec: trained(spec, mesh=whole) for spec in SPECS},
        "exempt": trained(SPECS[0], ("embedding", "head"), mesh=whole),
        "keep": trained(SPECS[0], keep=True, mesh=whole),
        "checkpoints": trained(SPECS[0], checkpoints=True, mesh=whole),
        "keep and checkpoints": trained(SPECS[0], keep=True, checkpoints=True, mesh=whole),
        "keep and no reshard": trained(SPECS[0], keep=True, mesh=whole, reshard_after_forward=False),
        "delta": trained(SPECS[1], reference="delta", mesh=whole),
        "delta, evaluated": trained(SPECS[1], reference="delta", mesh=whole, evaluates=True),
        "delta, resumed": trained(SPECS[1], reference="delta", mesh=whole, resumes=True),
        "delta, evaluated and resumed": trained(SPECS[1], reference="delta", mesh=whole, evaluates=True, resumes=True),
        "delta, bf16": trained(SPECS[1], reference="delta", mesh=whole, mp_policy=cast),
        "bf16": trained(SPECS[0], mesh=whole, mp_policy=cast),
        "tied": trained(SPECS[0], mesh=whole, ties=True),
        "delta, tied": trained(SPECS[1], reference="delta", mesh=whole, ties=True),
        "frozen": trained(SPECS[0], mesh=whole, prepare=freeze),
        "keep, frozen": trained(SPECS[0], keep=True, mesh=whole, prepare=freeze),
        "replicas": trained(SPECS[0], mesh=mesh(2)),
        "offload": trained(SPECS[0], mesh=whole, offload_policy=offload),
        "delta, offload": trained(SPECS[1], reference="delta", mesh=whole, offload_policy=offload),
        "prefetch": trained(SPECS[0], mesh=whole, prepare=prefetch),
        "keep, prefetch": trained(SPECS[0], keep=True, mesh=whole, prepare=prefetch),
        "delta, prefetch": trained(SPECS[1], reference="delta", mesh=whole, prepare=prefetch),
        "asynchronous": trained(SPECS[0], mesh=whole, prepare=unshard_asynchronously),
        "keep, asynchronous": trained(SPECS[0], keep=True, mesh=whole, prepare=unshard_asynchronously),
        "delta, asynchronous": trained(SPECS[1], reference="delta", mesh=whole, prepare=unshard_asynchronously),
        "number": trained(SPECS[0], mesh=whole, reshard_after_forward=2),
        "keep, number": trained(SPECS[0], keep=True, mesh=whole, reshard_after_forward=2),
        "delta, number": trained(SPECS[1], reference="delta", mesh=whole, reshard_after_forward=2),
        "delta, inferred": trained(SPECS[1], reference="delta", mesh=whole, infers=True),
    }


FEW, FIRST_STEPS = 3, 2  # ranks before or after an elastic change, and steps before it
ELASTIC = {"keep": (SPECS[0], {"keep": True}), "delta": (SPECS[1], {"reference": "delta"})}


class Elastic:
    """A model that is made anew on another mesh, with the weights that the former one had."""

    def __init__(self, method, mesh, weights=None, **options):
        self.method, self.model = method, sharded(mesh, weights=weights)
        self.set_up = gradzip.fsdp.quantize(self.model, gather=method, **options)

    def weights(self):
        return {name: p.full_tensor().detach().clone() for name, p in self.model.named_parameters()}

    def steps(self, numbers):
        """Returns the weights that the first forward pass sees, those after each step, and the bytes of each."""
        seen, weights, sent = watch(self.model), [], []
        optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        for step in numbers:
            before = self.method.traffic.bytes_sent
            optimizer.zero_grad()
            loss_of(self.model, dist.get_rank(), step).backward()
            optimizer.step()
            sent.append(self.method.traffic.bytes_sent - before)
            weights.append(self.weights())
        first = {name: weight for _, name, weight in reversed(seen)}
        numels = {gather._gathered.name: gather._gathered.numels for gather in gathers_of(self.model)}
        return {"seen": first, "weights": weights, "sent": sent, "exact": self.set_up.exact, "numels": numels}


@scenario
def elastic():
    """A rank joins in the middle, in the same processes and with the same method."""
    meshes = [DeviceMesh("cpu", list(range(ranks))) for ranks in (FEW, dist.get_world_size())]
    results = {}
    for name, (spec, options) in ELASTIC.items():
        method, weights, results[name] = gradzip.parse(spec), [None], []
        for mesh, numbers in zip(meshes, (range(FIRST_STEPS), range(FIRST_STEPS, 2 * FIRST_STEPS))):
            if mesh.get_coordinate() is not None:
                job = Elastic(method, mesh, weights[0], **options)
                results[name].append(job.steps(numbers))
                weights = [job.weights()]
            dist.broadcast_object_list(weights, 0)
    return results


@scenario
def saved(folder):
    """Steps of all ranks, and a checkpoint of the model and of what `quantize` has set."""
    results = {}
    for name, (spec, options) in ELASTIC.items():
        job = Elastic(gradzip.parse(spec), mesh()["shard"], **options)
        results[name] = job.steps(range(FIRST_STEPS))
        dcp.save({"model": job.model.state_dict(), "quantized": job.set_up}, checkpoint_id=str(folder / name))
    return results


@on_request
def restarted(folder):
    """Steps of fewer ranks from that checkpoint, and what DCP says where it is to load all of it."""
    results = {}
    for name, (spec, options) in ELASTIC.items():
        job, path, refused = Elastic(gradzip.parse(spec), mesh()["shard"], **options), str(folder / name), ""
        try:
            dcp.load({"quantized": job.set_up}, checkpoint_id=path)
        except CheckpointException as error:  # no Exception
            refused = str(error)
        model, partial = job.model.state_dict(), DefaultLoadPlanner(allow_partial_load=True)
        dcp.load({"model": model, "quantized": job.set_up}, checkpoint_id=path, planner=partial)
        job.model.load_state_dict(model)
        results[name] = job.steps(range(FIRST_STEPS, 2 * FIRST_STEPS)), refused
    return results


@scenario
def one_shard():
    """Without another rank, nothing is sent or rounded: weights are those of plain FSDP2, and there is a state."""
    alone, results = mesh(1)["shard"], {}
    options = {"keep": True}, {"reference": "delta"}, {"reduce": gradzip.BlockFloat(bits=4), "error_feedback": True}
    for given in ({}, *options):
        model = sharded(alone)
        method = gradzip.parse(SPECS[1])
        set_up = gradzip.fsdp.quantize(model, gather=method, **given) if given else None
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, 0, step).backward()
            optimizer.step()
            if set_up:
                set_up.load_state_dict(set_up.state_dict())
        sent = method.traffic.bytes_sent + (given["reduce"].traffic.bytes_sent if "reduce" in given else 0)
        results[", ".join(given)] = sent, {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    return results


@on_request
def compiled():
    whole = mesh()["shard"]
    return {
        "": trained(SPECS[0], mesh=whole, prepare=compile_all),
        "keep": trained(SPECS[0], keep=True, mesh=whole, prepare=compile_all),
        "delta": trained(SPECS[1], reference="delta", mesh=whole, evaluates=True, prepare=compile_all),
    }


@scenario
def agreement():
    """Forward passes of all kinds with differences: weights that they use, parameters, and bytes that they send.

    evaluates: without a backward pass, which otherwise follows.
    """
    rank, model = dist.get_rank(), sharded(mesh()["shard"])
    method = gradzip.parse(SPECS[1])
    gradzip.fsdp.quantize(model, gather=method, reference="delta")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    seen, results = watch(model), {}

    def forward(name, evaluates=False, call=model):
        seen.clear()
        model.reshard()  # FSDP leaves the root's parameters whole after a forward pass
        parameters, sent = {}, method.traffic.bytes_sent
        for parameter, p in model.named_parameters():
            parameters[parameter] = p.full_tensor().detach().clone()
        with torch.set_grad_enabled(not evaluates):
            loss = loss_of(call, rank, 0)
        weights = {layer: weight for _, layer, weight in seen}
        results[name] = {"sent": method.traffic.bytes_sent - sent, "seen": weights, "parameters": parameters}
        if evaluates:
            model.reshard()
        return loss

    @torch.no_grad()
    def scale(factor, parameters):
        for p in parameters:
            p.to_local().mul_(factor)

    block = model.blocks[0].up.weight, model.blocks[0].norm.bias
    forward("first").backward()
    optimizer.step()
    forward("step").backward()
    optimizer.step()
    forward("evaluation", evaluates=True)
    forward("evaluation again", evaluates=True)
    scale(1.1 if rank == 2 else 1.0, block if rank == 2 else ())
    forward("one rank alone", evaluates=True)
    scale(0.5, model.parameters())
    forward("swapped", evaluates=True)
    scale(2.0, model.parameters())
    forward("swapped back", evaluates=True)
    model.set_requires_gradient_sync(False)
    forward("accumulates").backward()
    forward("accumulates again").backward()
    model.set_requires_gradient_sync(True)
    forward("accumulates to the end").backward()
    (forward("one of two") + forward("two of two")).backward()
    optimizer.step()
    model.blocks[1].requires_grad_(False)
    forward("frozen").backward()
    forward("frozen again").backward()
    scale(1.1 if rank == 0 else 1.0, model.blocks[1].parameters() if rank == 0 else ())
    forward("frozen, written by one rank").backward()
    register_fsdp_forward_method(model, "generate")
    for name in ("method", "method again"):
        scale(0.9, model.parameters())
        forward(name, evaluates=True, call=model.generate)
    forward("method once more", evaluates=True, call=model.generate)

    def unsharded(tokens, **options):
        for module in (model, *model.blocks):
            module.unshard(**options)
        return model(tokens)

    for name, options in {"unsharded": {}, "unsharded again": {"async_op": True}}.items():
        scale(0.9, model.parameters())
        forward(name, evaluates=True, call=functools.partial(unsharded, **options))

    def fail(*_):
        raise ValueError

    handle = model.head.register_forward_hook(fail if rank == 0 else lambda *_: None)
    with contextlib.suppress(ValueError):
        forward("fails on one rank", evaluates=True)
    handle.remove()
    with torch.no_grad():
        model(batch(0, 0)[:, :-1])  # FSDP ends the pass that has failed
    forward("after that", evaluates=True)
    return results


@scenario
def loaded():
    """Weights of an evaluation: those of a checkpoint, and others that were loaded after the references."""
    whole, tokens = mesh()["shard"], batch(0, 0)[:, :-1]
    results, saved = {}, None
    for name, factor in [("saved", 1.0), ("same", 1.0), ("others", 0.5)]:
        model = sharded(whole)
        set_up = gradzip.fsdp.quantize(model, gather=gradzip.parse(SPECS[1]), reference="delta")
        if saved:
            set_up.load_state_dict(saved[0])
            model.load_state_dict({name: factor * p for name, p in saved[1].items()})
        else:
            loss_of(model, dist.get_rank(), 0).backward()
            torch.optim.SGD(model.parameters(), lr=RATE).step()
            with torch.no_grad():
                model(tokens)
            saved = set_up.state_dict(), {name: p.detach().clone() for name, p in model.state_dict().items()}
        seen = watch(model)
        with torch.no_grad():
            model.reshard()
            model(tokens)
        parameters = {name: p.full_tensor().detach() for name, p in saved[1].items()}
        results[name] = {layer: weight for _, layer, weight in seen}, parameters
    return results


@scenario
def checkpoints_twice():
    """Blocks that run twice in a forward pass, and again, checkpointed, in the backward pass: weights of a step."""
    results = {}
    for name, options in [("", {}), ("keep", {"keep": True}), ("delta", {"reference": "delta"})]:
        model = sharded(mesh()["shard"])
        gradzip.fsdp.quantize(model, gather=gradzip.parse(SPECS[1]), **options)
        model.runs = 2
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=RATE), watch(model)
        for step in range(2):
            seen.clear()
            optimizer.zero_grad()
            loss_of(model, dist.get_rank(), step).backward()
            optimizer.step()
        results[name] = list(seen)
    return results


@scenario
def local_steps():
    """Sites of two shards, whose differences are exchanged after each second step: weights of evaluations, parameters.

    Exchanges write parameters, also where no gradients have been reduced since.
    """
    sites, results = mesh(2), []
    model = sharded(sites["shard"])
    gradzip.fsdp.quantize(model, gather=gradzip.parse(SPECS[0]), reduce=gradzip.BlockFloat(bits=8), reference="delta")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    outer = gradzip.outer.LocalSteps(model, optimizer, gradzip.BlockFloat(), every=2, group=sites["replicate"])
    seen = watch(model)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        model.reshard()
        seen.clear()
        with torch.no_grad():
            model(batch(0, 0)[:, :-1])
        model.reshard()
        parameters = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
        results.append(({layer: weight for _, layer, weight in seen}, parameters))
    return results, outer.exchanges


@scenario
def both_directions():
    """Gradients are rounded, too: at most by a step of 8 bits."""
    model = sharded(mesh()["shard"])
    gather, reduce = gradzip.parse(SPECS[0]), gradzip.BlockFloat(bits=8)
    set_up = gradzip.fsdp.quantize(model, gather=gather, reduce=reduce)
    loss_of(model, dist.get_rank(), 0).backward()
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    alone = sharded(mesh()["shard"])
    gradzip.fsdp.quantize(alone, reduce=gradzip.BlockFloat(bits=8))
    return [set_up.modules], grads, gather.traffic.bytes_sent, reduce.traffic.bytes_sent


@scenario
def errors():
    whole, rank = mesh()["shard"], dist.get_rank()
    nearest = gradzip.parse(SPECS[0])
    gather, flat = gradzip.fsdp.all_gather(nearest), torch.zeros(8, dtype=torch.int32)
    mixed = Net()
    mixed.head.bfloat16()
    fully_shard(mixed, mesh=whole)
    integers, encoded, twice = Net(), Net(), sharded(whole)
    integers.table = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.int64), requires_grad=False)
    encoded.head.weight = torch.nn.Parameter(Encoded(encoded.head.weight.detach()))
    float8 = Net().to(FLOAT8)
    for model in (integers, encoded, float8):
        fully_shard(model, mesh=whole)
    pairs, several = FSDPMeshInfo(mesh(2)["shard"], shard_mesh_dim=0), Net()
    fully_shard(
        several, mesh=whole, shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), pairs) if p.dim() > 1 else None
    )
    gradzip.fsdp.quantize(twice, gather=nearest)
    different = sharded(whole)
    gradzip.fsdp.quantize(different, gather=gradzip.BlockFloat(rounding="nearest", bits=4 + 4 * (rank % 2)))
    delta, plain = (gradzip.fsdp.quantize(sharded(whole), gather=nearest, reference=r) for r in ("delta", None))
    return {
        "other modules": message(lambda: plain.load_state_dict(delta.state_dict())),
        "stochastic": message(lambda: gradzip.fsdp.all_gather(gradzip.BlockFloat())),
        "topk": message(lambda: gradzip.fsdp.quantize(sharded(whole), gather=gradzip.TopK())),
        "exempt": message(lambda: gradzip.fsdp.all_gather(gradzip.parse(SPECS[0]).exempt_modules(Net(), "embedding"))),
        "owner": message(
            lambda: gradzip.fsdp.all_gather(gradzip.BlockFloat(rounding="nearest", error_feedback="owner"))
        ),
        "owner, quantized": message(
            lambda: gradzip.fsdp.quantize(
                sharded(whole), gather=gradzip.BlockFloat(rounding="nearest", error_feedback="owner")
            )
        ),
        "exempt from reduction": message(
            lambda: gradzip.fsdp.quantize(
                sharded(whole), gather=nearest, reduce=gradzip.BlockFloat().exempt_modules(Net(), "embedding")
            )
        ),
        "integers": message(lambda: gather(flat.repeat(dist.get_world_size()), flat, dist.group.WORLD)),
        "gathered float8": message(
            lambda: gather(flat.repeat(dist.get_world_size()).to(FLOAT8), flat.to(FLOAT8), dist.group.WORLD)
        ),
        "mixed": message(lambda: gradzip.fsdp.quantize(mixed, gather=nearest)),
        "parameters of integers": message(lambda: gradzip.fsdp.quantize(integers, gather=nearest)),
        "parameters of float8": message(lambda: gradzip.fsdp.quantize(float8, gather=nearest)),
        "encoded": message(lambda: gradzip.fsdp.quantize(encoded, gather=nearest)),
        "several meshes": message(lambda: gradzip.fsdp.quantize(several, gather=nearest)),
        "twice": message(lambda: gradzip.fsdp.quantize(twice, gather=nearest)),
        "sharded twice": message(lambda: fully_shard(twice.blocks[0], mesh=whole)),
        "unsharded": message(lambda: gradzip.fsdp.quantize(Net(), gather=nearest)),
        "nothing": message(lambda: gradzip.fsdp.quantize(sharded(whole))),
        "keep": message(lambda: gradzip.fsdp.quantize(sharded(whole), reduce=gradzip.BlockFloat(), keep=True)),
        "reference": message(lambda: gradzip.fsdp.quantize(sharded(whole), gather=nearest, reference="sum")),
        "delta and keep": message(
            lambda: gradzip.fsdp.quantize(sharded(whole), gather=nearest, reference="delta", keep=True)
        ),
        "foreign": message(
            lambda: gradzip.fsdp.quantize(sharded(whole), gather=nearest, reference="delta").load_state_dict({"x": b""})
        ),
        "different": message(lambda: loss_of(different, rank, 0)),
    }


if __name__ == "__main__":
    main()
