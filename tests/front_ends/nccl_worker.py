"""Scenarios for tests/front_ends/test_nccl.py: ranks with GPUs and NCCL, against the same steps on the CPU with gloo.

Each returns what is wrong by case, "" where nothing is. Ranks share GPUs if there are fewer (test_nccl.py says how).
Where there is no GPU, both sides are the CPU's: that tests the script alone.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import fsdp_worker
import gradzip
import kinds
import outer_worker
import test_gpu
from contract import gradient
from ddp_worker import SHAPES, Job
from harness import job, main, message, on_request, scenario
from observed import exact

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 4
HIERARCHICAL = [f"hierarchical:inner={i},local_size=2" for i in ("acpsgd(min_numel=256)", "topk(theta=0.9)")]
RING = (
    "gradiveq:warmup_steps=0,sample_steps=2,compress_steps=3,sampling=qsgd(bits=8),stop=None,slice_size=200,"
    "exchange=ring"
)
REDUCE_SCATTER = ("block-float", "block-float:bits=4,block=64", "qsgd:coding=packed,bits=8")
LOCAL = [
    *((spec, {}) for spec in outer_worker.SPECS),
    (outer_worker.SPECS[2], {"fragments": 2, "delay": 1, "blend": 0.5}),
]


def bound(spec):
    """How far averages may be from the CPU's, as a share of their norm.

    Two numbers have one sum. Of more, NCCL adds in another order than gloo: a rounding of a float32, which float16 and
    the codes of a next step can make larger.
    """
    if test_gpu.computed_by_a_library(spec) or "fp16" in spec:
        return 1e-3
    adds_none = all(exact(part) for part in gradzip.parse(spec).parts)
    return 0.0 if adds_none and job.size == 2 else 1e-5


def difference(got, expected, most):
    """What is wrong with tensors that should differ by at most `most` of their norm."""
    got, expected = (torch.cat([t.flatten().float().cpu() for t in both]) for both in (got, expected))
    share = (got - expected).norm().item() / (expected.norm().item() or 1.0)
    return "" if share <= most else f"differs from the CPU's by {share:.3g} of its norm, at most {most:g}"


def checked(cases, check):
    """What is wrong, by case. Rank 0 says each before it starts: a job that hangs shows where."""
    found = {}
    for case in cases:
        if job.rank == 0:
            print(f"nccl_worker: {case}", flush=True)
        error = []
        raised = message(lambda case=case, error=error: error.append(check(case)))
        found[str(case)] = raised or error[0]
        if found[str(case)] and job.rank == 0:
            print(f"nccl_worker: {case}: {found[str(case)]}", flush=True)
    return found


@scenario
def collectives(rank, size):
    """What gradzip uses of NCCL, called directly."""

    def right(name):
        x = torch.full((1000,), float(rank), device=DEVICE)
        outs = [torch.empty_like(x) for _ in range(size)]
        if name == "all_reduce":
            dist.all_reduce(x)
            return [x], [torch.full((1000,), sum(range(size)))]
        if name == "all_gather":
            dist.all_gather(outs, x)
            return outs, [torch.full((1000,), float(r)) for r in range(size)]
        if name == "all_to_all":
            dist.all_to_all(outs, [x + 10 * r for r in range(size)])
            return outs, [torch.full((1000,), r + 10.0 * rank) for r in range(size)]
        after, before = (rank + 1) % size, (rank - 1) % size
        ops = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, outs[0], before)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return [outs[0]], [torch.full((1000,), float(before))]

    cases = ["all_reduce", "all_gather", "batch_isend_irecv"]
    cases += ["all_to_all"] if DEVICE == "cuda" else []  # gloo has none of lists
    return checked(cases, lambda name: difference(*right(name), 0))


def ddp(spec, rank, device, steps=STEPS):
    return Job(gradzip.parse(spec), [torch.zeros(shape, device=device) for shape in SHAPES]).run(rank, steps)


def ddp_differs(spec, rank):
    got, expected = (ddp(spec, rank, device) for device in (DEVICE, "cpu"))
    pairs = zip(got["averages"], expected["averages"], strict=True)
    return next(filter(None, (difference(*pair, bound(spec)) for pair in pairs)), "")


@scenario
def methods(rank):
    return checked(kinds.ALL, lambda spec: ddp_differs(spec, rank))


@scenario
def first_methods(rank):
    """The methods of four ranks."""
    return checked(kinds.FIRST, lambda spec: ddp_differs(spec, rank))


@scenario
def others(rank, size):
    """A ring, and a hierarchy where nodes have two ranks."""
    os.environ |= {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
    specs = [RING, *(HIERARCHICAL if size == 4 else ())]
    return checked(specs, lambda spec: ddp_differs(spec, rank))


def shards(device, spec="", quantized=""):
    """The averages of each step of FSDP2, with two replicas of two shards, or all ranks in one."""
    size = dist.get_world_size()
    shape = (2, size // 2) if spec else (1, size)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
    model = fsdp_worker.Model().to(device)
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh["shard"])
    if spec:
        gradzip.fsdp.compress(model, gradzip.parse(spec), mesh["replicate"].get_group())
    else:
        exchange = gradzip.fsdp.reduce_scatter(gradzip.parse(quantized))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(exchange)
    for step in range(fsdp_worker.STEPS):
        model.zero_grad()
        grads = {
            name: gradient(name, dist.get_rank(), step, shape).to(device)
            for shapes in fsdp_worker.SHAPES.values()
            for name, shape in shapes.items()
        }
        model(grads).backward()
        yield [p.grad.to_local().clone() for p in model.parameters()]


def shards_differ(most, **arguments):
    steps = zip(*(shards(device, **arguments) for device in (DEVICE, "cpu")), strict=True)
    return next(filter(None, [difference(*pair, most) for pair in steps]), "")


@scenario
def fsdp():
    """With four ranks."""
    found = checked(kinds.FIRST, lambda spec: shards_differ(bound(spec), spec=spec))
    quantized = checked(REDUCE_SCATTER, lambda spec: shards_differ(1e-5, quantized=spec))
    return found | {f"reduce_scatter {spec}": error for spec, error in quantized.items()}


def local_steps(device, rank, spec, options):
    model = outer_worker.Model(rank).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    outer = gradzip.outer.LocalSteps(model, optimizer, gradzip.parse(spec), every=4, **options)
    for step in range(13):
        for name, parameter in model.named_parameters():
            parameter.grad = gradient(name, rank, step, parameter.shape).to(device)
        optimizer.step()
    outer.synchronize()
    outer.remove()
    return [p.detach() for p in model.parameters()]


@scenario
def local(rank):
    return checked(LOCAL, lambda case: difference(*(local_steps(d, rank, *case) for d in (DEVICE, "cpu")), 1e-3))


def captured_differs(spec, rank):
    """A graph of two steps with their collectives, replayed, against steps that are not captured."""

    def gradients(step):
        return [gradient(str(i), rank, step, shape).to(DEVICE) for i, shape in enumerate(SHAPES)]

    def job():
        return Job(gradzip.parse(spec), [torch.zeros(shape, device=DEVICE) for shape in SHAPES])

    def step(job, grads):
        job.ddp.zero_grad()
        job.ddp(grads).backward()
        return [p.grad.clone() for p in job.ddp.parameters()]

    plain = job()
    expected = [step(plain, gradients(number)) for number in range(test_gpu.WARM_UP + 4)][test_gpu.WARM_UP :]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        replayed = job()
        for number in range(test_gpu.WARM_UP):
            step(replayed, gradients(number))
        inputs = [gradients(0) for _ in range(2)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = [step(replayed, grads) for grads in inputs]
    for first in (0, 2):
        for number, grads in enumerate(inputs, test_gpu.WARM_UP + first):
            torch._foreach_copy_(grads, gradients(number))
        graph.replay()
        for got, right in zip(outputs, expected[first : first + 2]):
            if error := difference(got, right, 0):
                return error
    return ""


@on_request
def captured(rank):
    return checked(test_gpu.CAPTURABLE, lambda spec: captured_differs(spec, rank))


def horovod_steps(device, rank, spec):
    """The averages of each step under Horovod, which averages tensors of a GPU with NCCL."""
    import horovod.torch as hvd

    named = [(str(i), torch.nn.Parameter(torch.zeros(shape, device=device))) for i, shape in enumerate(SHAPES)]
    optimizer = torch.optim.SGD([p for _, p in named], lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=gradzip.parse(spec))
    for step in range(STEPS):
        optimizer.zero_grad()
        sum((p * gradient(name, rank, step, p.shape).to(device)).sum() for name, p in named).backward()
        optimizer.synchronize()
        yield torch.cat([p.grad.flatten() for _, p in named])


def horovod_differs(spec, rank):
    steps = zip(*(horovod_steps(device, rank, spec) for device in (DEVICE, "cpu")), strict=True)
    return next(filter(None, (difference([got], [right], bound(spec)) for got, right in steps)), "")


@on_request
def horovod(rank):
    """Under horovodrun."""
    return checked(kinds.FIRST, lambda spec: horovod_differs(spec, rank))


@on_request
def of_devices(rank):
    """Jobs whose only process group is NCCL's, with and without `device_id`: nothing of gradzip needs another one."""

    def finite(spec):
        averages = ddp(spec, rank, DEVICE)["averages"][-1]
        others = [torch.empty_like(averages[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(others, averages[0].contiguous())
        return "" if all(torch.equal(others[0], other) for other in others) else "replicas differ"

    return checked(kinds.SAMPLE, finite)


if __name__ == "__main__":
    backend = os.environ.get("NCCL_WORKER_BACKEND", "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    device_id = None
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        if "NCCL_WORKER_DEVICE_ID" in os.environ:
            device_id = torch.device("cuda", torch.cuda.current_device())
    main(group={"backend": backend, "device_id": device_id})
