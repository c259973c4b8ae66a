"""Which CUDA stream gets which tensor, what orders that, and what keeps the tensor alive, on a stand-in device."""

import contextlib
import copy
import shutil
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Parameter

import gradzip
import gradzip.ddp
import gradzip.fsdp
from benchmarks.device_ops.__main__ import Sharded, noise
from benchmarks.device_ops.stand_in import DEVICE, stand_in
from gradzip.collectives import AllToAll, Broadcast, Gather, Mean, RingSum, ToHost
from gradzip.collectives.traffic import Traffic
from gradzip.engines.ring import Ring, _Wire
from gradzip.engines.torch import TorchEngine
from gradzip.fsdp import AllGather
from gradzip.memory.state import Key
from gradzip.memory.streams import HomeStreams
from gradzip.methods.base.registry import registered
from stream_recorder import Future, Horovod, ProcessGroup, Recorder, Stream

pytest.importorskip("horovod.torch")

import gradzip.engines.horovod
from gradzip.engines.horovod import HorovodEngine

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")

SHAPES = {
    "a.weight": torch.Size((40, 32)), "a.bias": torch.Size((40,)), "b.weight": torch.Size((8, 20, 3, 3)),
    "c.weight": torch.Size((48, 40)),
}  # fmt: skip
BUCKETS = (("c.weight", "b.weight"), ("a.bias", "a.weight"))
SIZE = 4  # divides the rows of all matrices: shards are alike

# Streams of the backward hooks, and of `backward()` and `step()`. DDP calls the last hook on the latter here.
STREAMS = {"side": ("side", "side"), "two": ("default", "side")}


@contextlib.contextmanager
def recorded():
    with stand_in() as device, Recorder(device) as recorder:
        yield recorder


def streams_of(recorder, which):
    streams = {"default": recorder.default, "side": Stream(recorder, "side")}
    return [streams[name] for name in STREAMS[which]]


class GradBucket:
    """What DDP gives its hook."""

    def __init__(self, index, parameters, buffer):
        self._index, self._parameters, self._buffer = index, parameters, buffer

    def index(self):
        return self._index

    def parameters(self):
        return self._parameters

    def buffer(self):
        return self._buffer

    def gradients(self):
        pieces = self._buffer.split([p.numel() for p in self._parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self._parameters, strict=True)]

    def is_last(self):
        return self._index == len(BUCKETS) - 1


def ddp_steps(compressor, recorder, which, steps=3):
    """Steps under DDP."""
    hooks, caller = streams_of(recorder, which)
    named = {name: Parameter(torch.empty(shape, device="meta")) for name, shape in SHAPES.items()}
    group = ProcessGroup(recorder, SIZE)
    with group.installed(), mock.patch("gradzip.ddp.Future", Future):
        state = gradzip.ddp.HookState(compressor, dist.group.WORLD, named.items(), find_unused_parameters=False)
        with recorder.on(hooks):  # DDP allocates its buckets when it is made
            buffers = [torch.zeros(sum(SHAPES[n].numel() for n in names), device=DEVICE) for names in BUCKETS]
        for step in range(steps):
            futures = []
            hooks.wait_stream(caller)  # autograd: gradients are computed on the streams of the forward pass
            for i, (names, buffer) in enumerate(zip(BUCKETS, buffers, strict=True)):
                with recorder.on((hooks, caller)[i]):
                    buffer.copy_(recorder.device.tensor(noise(buffer.numel(), step)))
                    futures.append(gradzip.ddp.hook(state, GradBucket(i, [named[n] for n in names], buffer)))
                caller.wait_stream(hooks)  # autograd, before DDP waits for the futures
            with recorder.on(caller):
                for future in futures:
                    assert future.wait().mul(2).isfinite().all()
        del state, futures
        compressor.streams = HomeStreams()


class Optimizer:
    """What Horovod's optimizer does with a compressor."""

    def __init__(self, named, compressor, size):
        import horovod.torch as hvd

        self.op = hvd.Average
        self.process_set = ProcessSet(size)
        self.param_groups = [{"params": list(named.values())}]
        self._parameter_names = {parameter: name for name, parameter in named.items()}
        self._requires_update = set(named.values())
        self._compression = compressor
        self._handles = {}

    def hook(self, p):
        import horovod.torch as hvd

        tensor, context = self._compression.compress(p.grad)
        self._handles[p] = hvd.allreduce_async_(tensor, name=self._parameter_names[p]), context

    def synchronize(self):
        import horovod.torch as hvd

        for p, (handle, context) in self._handles.items():
            assert self._compression.decompress(hvd.synchronize(handle), context) is p.grad
        self._handles.clear()


class ProcessSet:
    process_set_id = 0

    def __init__(self, size):
        self._size = size
        self.ranks = list(range(size))

    def rank(self):
        return 0

    def size(self):
        return self._size


def horovod_steps(compressor, recorder, which, steps=3):
    """Steps under Horovod."""
    hooks, caller = streams_of(recorder, which)
    with Horovod(recorder, SIZE).installed(), recorder.on(caller):
        named = {name: torch.empty(shape, device=DEVICE).requires_grad_() for name, shape in SHAPES.items()}
        optimizer = Optimizer(named, compressor, SIZE)
        gradients = {name: torch.empty(shape, device=DEVICE) for name, shape in SHAPES.items()}
        for step in range(steps):
            for name, p in reversed(named.items()):
                p.grad = gradients[name].copy_(recorder.device.tensor(noise(p.numel(), step).view(p.shape)))
                hooks.wait_stream(caller)
                with recorder.on(hooks):
                    optimizer.hook(p)
            caller.wait_stream(hooks)
            optimizer.synchronize()
            for p in named.values():
                assert p.grad.mul(2).isfinite().all()
        del optimizer, p
        compressor.streams = HomeStreams()


FRONT_ENDS = {"ddp": ddp_steps, "horovod": horovod_steps}
GRADIVEQ = "gradiveq:warmup_steps=0,sample_steps=2,compress_steps=2"
RING = f"{GRADIVEQ},exchange=ring"
# Gathers of one length and of several, all-to-all, low rank, a ring, uncompressed.
KINDS = ("topk", "qsgd:coding=elias", "qsgd:coding=packed,exchange=scatter_reduce", "acpsgd", RING, "none")
OTHERS = (
    "qsgd:coding=packed", "topk:exchange=scatter_reduce", "topk:select=sampled", "signsgd:majority=False",
    "atomo:atoms=entry,budget=1000", GRADIVEQ, *(method.examples[0] for method in registered().values()),
)  # fmt: skip


def check(spec, front_end, which, steps=3):
    with recorded() as recorder:
        FRONT_ENDS[front_end](gradzip.parse(spec), recorder, which, steps)
    assert recorder.violations == []
    assert recorder.used["nccl" if front_end == "ddp" else "horovod"]
    return recorder


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("spec", KINDS)
def test_every_tensor_is_handed_over_in_order(spec, front_end):
    recorder = check(spec, front_end, "two", steps=3 if spec == RING else 2)
    if spec == RING and front_end == "ddp":
        assert "isend" in recorder.used["nccl"]


@pytest.mark.long
@pytest.mark.parametrize("which", ["side", "two"])
@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("spec", (*KINDS, *OTHERS))
def test_with_every_method(spec, front_end, which):
    check(spec, front_end, which)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_with_a_loss_scale(front_end):
    """Snapshots of states are made and freed, and averages are read at the end of the step."""
    compressor = gradzip.parse("acpsgd")
    compressor.follow(types.SimpleNamespace(get_scale=lambda: 2.0**16))
    with recorded() as recorder:
        FRONT_ENDS[front_end](compressor, recorder, "two")
    assert recorder.violations == []


# --- FSDP2, on the streams of torch's own

LAYERS = {f"{i}.{name}": shape for i in range(2) for name, shape in SHAPES.items()}  # two modules
NEAREST = "block-float:rounding=nearest"
# Arguments of `gradzip.fsdp.quantize`.
QUANTIZED = {
    "gather": {"gather": NEAREST},
    "keep": {"gather": NEAREST, "keep": True},
    "delta": {"gather": NEAREST, "reference": "delta"},
    "reduce": {"reduce": "block-float", "error_feedback": True},
}


def fsdp_steps(recorder, case, unshards, steps=4):
    """Steps under FSDP2.

    unshards: forward passes unshard a block ahead of its turn, on the current stream. Backward passes do not.
    """
    with ProcessGroup(recorder, SIZE).installed():
        model = Sharded(LAYERS, init_device_mesh("cuda", (SIZE,)), recorder.device)
        model.set_reshard_after_forward(True)
        model.set_reshard_after_backward(True)
        given = {name: gradzip.parse(value) if name in ("gather", "reduce") else value
                 for name, value in QUANTIZED[case].items()}  # fmt: skip
        set_up = gradzip.fsdp.quantize(model, **given)
        first, second = model.blocks
        if unshards:
            first.register_forward_pre_hook(lambda *_, block=second: block.unshard(async_op=True) and None)
        for step in range(steps):
            gradients = {
                name: recorder.device.tensor(noise(shape.numel(), step).view(shape).clone())
                for name, shape in LAYERS.items()
            }
            model.backward(gradients)
            with torch.no_grad():
                for parameter in model.named.values():
                    parameter.to_local().mul_(0.9)
        del model, first, second, set_up


@pytest.mark.parametrize("unshards", [False, True])
@pytest.mark.parametrize("case", QUANTIZED)
def test_shards_are_handed_over_in_order(case, unshards):
    with recorded() as recorder:
        fsdp_steps(recorder, case, unshards)
    assert recorder.violations == [] and len(recorder.used) > 2


def test_a_gather_on_a_stream_of_its_own_is_noticed(monkeypatch):
    gather = AllGather._gather

    def aside(*arguments):
        with torch.cuda.stream(torch.cuda.Stream()):
            gather(*arguments)

    monkeypatch.setattr(AllGather, "_gather", aside)
    with recorded() as recorder:
        fsdp_steps(recorder, "gather", unshards=False, steps=1)
    assert any("on default reads what _foreach_copy_" in found for found in recorder.violations)


# --- what is safe here, and what is not


@contextlib.contextmanager
def torch_engine():
    with recorded() as recorder, ProcessGroup(recorder, SIZE).installed():
        yield recorder, TorchEngine(dist.group.WORLD, Traffic(), DEVICE)


@contextlib.contextmanager
def horovod_engine():
    with recorded() as recorder, Horovod(recorder, SIZE).installed():
        yield recorder, HorovodEngine(ProcessSet(SIZE), Traffic())


ENGINES = {"torch": torch_engine, "horovod": horovod_engine}


def payload():
    return gradzip.QSGD(coding="packed").encode(torch.ones(64, device=DEVICE), Key(0, 0, "a", 0))


def collective(kind):
    if kind == "gather":
        return Gather(payload(), same_length=True)
    if kind == "gather of several lengths":
        return Gather(payload())
    if kind == "all-to-all":
        return AllToAll(torch.cat([payload()] * SIZE), (payload().numel(),) * SIZE)
    return {"mean": Mean, "broadcast": Broadcast, "to host": ToHost}[kind](torch.ones(64, device=DEVICE))


COLLECTIVES = ("mean", "broadcast", "gather", "gather of several lengths", "all-to-all", "to host")


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("name", ENGINES)
def test_a_collective_keeps_what_it_sends(name, kind):
    """Nobody else has to, until its result is used."""
    with ENGINES[name]() as (recorder, engine), recorder.on(Stream(recorder, "side")):
        pending = engine.launch(collective(kind), "a")
        torch.zeros(64, device=DEVICE)
        pending.send_overflow()
        result = pending.result()
        del pending
        for tensor in result if isinstance(result, list) else [result]:
            tensor.sum()
        del result, tensor
        torch.zeros(64, device=DEVICE)
    assert recorder.violations == []


def ring_sum():
    """A sum of two segments for each rank."""
    return RingSum(
        (64,) * 2 * SIZE,
        encode=lambda i: torch.ones(64, device=DEVICE),
        decode=lambda i, total: total.mul(2),
        device=DEVICE,
    )


def test_a_ring_keeps_what_it_sends():
    with torch_engine() as (recorder, _), recorder.on(Stream(recorder, "side")):
        ring = Ring(dist.group.WORLD)
        for _ in range(2):  # the second one reuses the memory of the first
            ring.run(ring_sum())
    assert recorder.violations == [] and {"isend", "zero_.default"} <= recorder.used["nccl"]


# Mutations: each breaks one rule, and the recorder has to notice.


def drop_what_is_sent(recorder, engine):
    """The sender's own memory is freed while it is on the wire."""
    pending = engine.launch(Gather(payload(), same_length=True), "a")
    del pending._sent
    torch.zeros(64, device=DEVICE)
    pending.send_overflow()


def drop_a_message(recorder, engine):
    pending = engine.launch(Gather(payload()), "a")
    del pending._sent
    torch.zeros(64, device=DEVICE)
    pending.send_overflow()


def drop_the_result(recorder, engine):
    pending = engine.launch(Gather(payload(), same_length=True), "a")
    del pending._received
    torch.zeros(64, device=DEVICE)
    pending.send_overflow()


def write_before_the_wait(recorder, engine):
    gradient = torch.ones(64, device=DEVICE)
    pending = engine.launch(Mean(gradient), "a")
    gradient.add_(1)
    pending.send_overflow()


def write_to_a_view_before_the_wait(recorder, engine):
    bucket = torch.ones(64, device=DEVICE)
    pending = engine.launch(Mean(bucket[:32]), "a")
    bucket[30:].add_(1)
    pending.send_overflow()


def kernel_writes_before_the_wait(recorder, engine):
    gradient = torch.ones(8, 8, device=DEVICE)
    pending = engine.launch(Mean(gradient), "a")
    gradzip.ops.orthogonalize_(gradient)
    pending.send_overflow()


def use_before_the_wait(recorder, engine):
    engine.launch(Mean(torch.ones(64, device=DEVICE)), "a").result()


def read_before_the_wait(recorder, engine):
    for received in engine.launch(Gather(payload(), same_length=True), "a").result():
        received.sum()


def wait_on_another_stream(recorder, engine):
    pending = engine.launch(Mean(torch.ones(64, device=DEVICE)), "a")
    with recorder.on(Stream(recorder, "another")):
        pending.send_overflow()
    pending.result()


def copy_without_waiting(recorder, engine):
    engine.launch(ToHost(torch.ones(64, device=DEVICE)), "a")._tensor.to("cpu", non_blocking=True)


def ring_that_does_not_wait(recorder, engine):
    with mock.patch.object(_Wire, "wait", lambda *_: None):
        Ring(dist.group.WORLD).run(ring_sum())


def ring_that_drops_what_it_sends(recorder, engine):
    exchange = _Wire.exchange

    def forgetful(wire, *arguments):
        exchange(wire, *arguments)
        wire.sent.clear()

    with mock.patch.object(_Wire, "exchange", forgetful):
        Ring(dist.group.WORLD).run(ring_sum())


TORCH_MUTATIONS = (
    drop_what_is_sent, drop_a_message, drop_the_result, write_before_the_wait, write_to_a_view_before_the_wait,
    kernel_writes_before_the_wait, use_before_the_wait, read_before_the_wait, wait_on_another_stream,
    copy_without_waiting, ring_that_does_not_wait, ring_that_drops_what_it_sends,
)  # fmt: skip


@pytest.mark.parametrize("mutation", TORCH_MUTATIONS)
def test_mutations_of_what_a_process_group_gets(mutation):
    with torch_engine() as (recorder, engine):
        mutation(recorder, engine)
    assert recorder.violations


@pytest.mark.parametrize("kind", ["mean", "gather"])
def test_a_write_before_horovod_is_done_is_noticed(kind):
    with horovod_engine() as (recorder, engine):
        sent = collective(kind)
        pending = engine.launch(sent, "a")
        sent.tensor.zero_()
        pending.result()
    assert recorder.violations


@pytest.mark.parametrize(("spec", "front_end"), [("topk", "ddp"), ("acpsgd", "ddp"), ("acpsgd", "horovod")])
def test_work_on_two_streams_is_noticed(spec, front_end):
    """Without home streams, memory of the hooks' stream is freed while the caller's may still use it."""
    nothing = contextlib.nullcontext()
    same = mock.patch.multiple(HomeStreams, on=lambda *_: nothing, on_all=lambda *_: nothing)
    with same, recorded() as recorder:
        FRONT_ENDS[front_end](gradzip.parse(spec), recorder, "two", steps=2)
    assert any("is freed" in violation for violation in recorder.violations)


def test_memory_that_horovod_allocates_is_noticed():
    """What it has received is freed by another stream than it was allocated on."""
    unrecorded = mock.patch.object(gradzip.engines.horovod, "use_on_current_stream", lambda received: received)
    with unrecorded, recorded() as recorder:
        horovod_steps(gradzip.TopK(), recorder, "side", steps=2)
    assert any("memory of default is freed" in violation for violation in recorder.violations)


def test_gradients_of_a_bucket_may_come_on_several_streams():
    """As the gradients of layers that run on streams of their own."""
    with recorded() as recorder:
        streams = HomeStreams()
        gradients, doubled = [], []
        caller = Stream(recorder, "caller")
        for name in ("one", "two", "three"):
            layer = Stream(recorder, name)
            with recorder.on(layer):
                gradients.append(torch.ones(8, device=DEVICE))
                with streams.on(gradients[-1]):
                    assert str(recorder.current) == "one"
                    doubled.append(gradients[-1].mul(2))
                doubled[-1].sum()
            caller.wait_stream(layer)
        with recorder.on(caller):
            with streams.on_all(DEVICE):
                torch._foreach_add_(doubled, gradients)
            gradients.clear()
            doubled[-1].sum()
    assert recorder.violations == []


def test_a_loaded_state_may_be_on_another_stream():
    """As that of `load_state_dict`, which copies it."""
    with recorded() as recorder:
        memory = gradzip.TopK().memory
        caller = Stream(recorder, "caller")
        with recorder.on(caller):
            residual = torch.ones(8, device=DEVICE)
            memory.parked["w"] = {"step": 1, "rank": 0, "size": 1, "residual": residual}
            del residual
        recorder.default.wait_stream(caller)
        gradient = torch.ones(8, device=DEVICE)
        state = memory.begin_step({"w": gradient.shape}, gradzip.TopK().state_shapes, gradient.device, 0, 1)
        gradient.add_(state.residual)
        state.residual = None
        gradient.add_(1)
    assert recorder.violations == []


def test_home_streams_are_those_of_a_compressor():
    compressor = gradzip.TopK()
    streams = compressor.streams
    assert gradzip.TopK().streams is not streams
    assert copy.deepcopy(compressor).streams is not streams
    with torch.no_grad():
        assert isinstance(streams.on(torch.ones(3)), contextlib.nullcontext)  # nothing to order on a CPU
    with streams.on_all(DEVICE):
        assert not streams.homes
