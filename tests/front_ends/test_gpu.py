"""Front ends on a real GPU, as one rank with NCCL: averages are those on the CPU, and captured steps replay them."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import gradzip
import gradzip.ddp
import gradzip.fsdp
import kinds
from ddp_worker import CAP_MB, SHAPES, Layers, gradient
from gradzip.memory.streams import HomeStreams
from gradzip.methods.base.transform_codec import TransformCodec
from gradzip.methods.low_rank import LowRank
from gradzip.ops import replays

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

STEPS = 4
# Uncompressed, payloads of a fixed length, low rank, and two steps in turns.
CAPTURABLE = ("none", "block-float:rounding=nearest", "powersgd:min_numel=256", "acpsgd:min_numel=256")
# Random draws decide about what is sent: by kernels that take a key, a list of keys, and a table with keys.
DRAWN = ("natural", "terngrad", "block-float:error_feedback=False", "randomk:theta=0.9,error_feedback=False")
WARM_UP = 11  # steps that torch asks for before DDP is captured


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def computed_by_a_library(spec):
    """Whether products of matrices, singular values or transforms are computed, which round differently on a device."""
    parts = gradzip.parse(spec).parts
    return any(
        isinstance(part, (LowRank, gradzip.GradiVeQ, TransformCodec)) or getattr(part, "atoms", "entry") != "entry"
        for part in [*parts, *(part.inner for part in parts if isinstance(part, gradzip.Momentum))]
    )


def gradients(step, device="cpu"):
    return [gradient(0, step, i, *shape).to(device) for i, shape in enumerate(SHAPES)]


def near(got, expected, bound):
    """Whether tensors differ by at most `bound` of their norm."""
    got, expected = (torch.cat([tensor.flatten().cpu() for tensor in both]) for both in (got, expected))
    return bool((got - expected).norm() <= bound * expected.norm())


def same(got, expected):
    """Whether all values are equal. Zeros may differ in their signs."""
    return all(torch.equal(own.cpu(), other.cpu()) for own, other in zip(got, expected, strict=True))


class Job:
    """A model under DDP with the hook."""

    def __init__(self, compressor, device):
        self.device = device
        self.ddp = DistributedDataParallel(Layers([torch.zeros(s) for s in SHAPES]).to(device), bucket_cap_mb=CAP_MB)
        # Not by `register`, which leaves a single rank alone.
        named = self.ddp.module.named_parameters()
        self.state = gradzip.ddp.HookState(compressor, None, named, find_unused_parameters=False)
        self.ddp.register_comm_hook(self.state, gradzip.ddp.hook)

    def step(self, grads):
        self.ddp.zero_grad()
        self.ddp(grads).backward()
        return [p.grad.clone() for p in self.ddp.parameters()]

    def steps(self, count=STEPS):
        return [self.step(gradients(step, self.device)) for step in range(count)]


@pytest.mark.parametrize("spec", kinds.ALL)
def test_steps_under_ddp(spec):
    on_device, on_cpu = (Job(gradzip.parse(spec), device).steps() for device in ("cuda", "cpu"))
    for got, expected in zip(on_device, on_cpu, strict=True):
        if computed_by_a_library(spec):
            assert near(got, expected, 1e-3)
        else:
            assert same(got, expected)


def test_one_rank_compresses():
    """Otherwise the other tests would show nothing."""
    steps = Job(gradzip.TopK(), "cuda").steps(1), list(shard_steps("topk", "cuda"))
    assert not any(same(of_step[0], gradients(0)) for of_step in steps)


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("spec", CAPTURABLE)
def test_captured_steps_under_ddp(spec, checks):
    """A graph of two steps, replayed with new gradients, has the bits of steps that are not captured."""
    expected = Job(gradzip.parse(spec).skip_nonfinite(checks), "cuda").steps(WARM_UP + 4)[WARM_UP:]
    _, graph, inputs, outputs = captured(gradzip.parse(spec).skip_nonfinite(checks), 2)
    got = []
    for first in (WARM_UP, WARM_UP + 2):
        for step, grads in enumerate(inputs, first):
            torch._foreach_copy_(grads, gradients(step, "cuda"))
        graph.replay()
        got += [[average.clone() for average in averages] for averages in outputs]
    assert all(map(same, got, expected))


def captured(compressor, steps):
    """A job under DDP, and a graph of steps after its first ones; their gradients and averages."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        job = Job(compressor, "cuda")
        job.steps(WARM_UP)
        inputs = [gradients(0, "cuda") for _ in range(steps)]
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = [job.step(grads) for grads in inputs]
    return job, graph, inputs, outputs


@pytest.mark.parametrize("spec", DRAWN)
def test_replays_draw_other_numbers(spec):
    """Those of the keys of the step, and of the number of the replay."""
    _, graph, _, [averages] = captured(gradzip.parse(spec), 1)
    got, expected = [], []
    for number in range(3):
        graph.replay()
        got.append([average.clone() for average in averages])
        job = Job(gradzip.parse(spec), "cuda")
        job.steps(WARM_UP)
        on_device = torch.tensor([number], device="cuda")
        with mock.patch.object(replays, "address", lambda where, draws=True, number=on_device: number.data_ptr()):
            expected.append(job.step(gradients(0, "cuda")))
    assert all(map(same, got, expected))
    assert not same(got[0], got[1]) and not same(got[1], got[2])


def shard_steps(spec, device):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (1, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Layers([torch.zeros(s) for s in SHAPES]).to(device), mesh=mesh["shard"])
    gradzip.fsdp.compress(model, gradzip.parse(spec), mesh["replicate"].get_group())
    for step in range(STEPS):
        model.zero_grad()
        model(gradients(step, device)).backward()
        yield [p.grad.to_local().clone() for p in model.parameters()]


@pytest.mark.parametrize("spec", kinds.FIRST)
def test_steps_under_fsdp(spec):
    for got, expected in zip(shard_steps(spec, "cuda"), shard_steps(spec, "cpu"), strict=True):
        assert near(got, expected, 1e-3 if computed_by_a_library(spec) else 0)


def local_steps(spec, device, **options):
    model = Layers([torch.zeros(s) for s in SHAPES]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    outer = gradzip.outer.LocalSteps(model, optimizer, gradzip.parse(spec), every=4, **options)
    for step in range(3 * 4 + 1):
        optimizer.zero_grad()
        model(gradients(step, device)).backward()
        optimizer.step()
    outer.synchronize()
    outer.remove()
    assert outer.exchanges == 4 * options.get("fragments", 1), "three by steps, one by synchronize"
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"fragments": 2, "delay": 1, "blend": 0.5}], ids=["plain", "streaming"])
@pytest.mark.parametrize(
    "spec", ["none", "block-float:bits=4,rounding=nearest", "topk:theta=0.9,chunk=4096,bits=2,residual_decay=0.95"]
)
def test_local_steps(spec, options):
    """The outer optimizer's arithmetic is the device's."""
    assert near(local_steps(spec, "cuda", **options), local_steps(spec, "cpu", **options), 1e-4)


def test_home_streams():
    streams, first, second = HomeStreams(), torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        total = torch.ones(1 << 20, device="cuda")
        with streams.on(total):
            assert torch.cuda.current_stream() == first
    with torch.cuda.stream(second):
        torch.cuda._sleep(100_000_000)  # cycles
        gradient = torch.ones(1 << 20, device="cuda")
        with streams.on(gradient):
            assert torch.cuda.current_stream() == first
            total.add_(gradient)
        del gradient
        assert torch.cuda.current_stream() == second and total.sum().item() == 2 << 20
