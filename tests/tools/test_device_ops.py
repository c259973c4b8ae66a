"""What methods queue on a device, and how often the host waits for it, counted on a stand-in device."""

import contextlib
import dataclasses
import functools
import math
import shutil
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import gradzip
import gradzip.ddp
import gradzip.fsdp
import gradzip.horovod
import kinds
from benchmarks.device_ops import __main__ as device_ops
from benchmarks.device_ops import memory
from benchmarks.device_ops.__main__ import COUNTED as STEPS
from benchmarks.device_ops.__main__ import (
    FRONT_ENDS,
    SHARDS,
    SMALLEST,
    Sharded,
    compresses,
    count,
    fake_group,
    fsdp_steps,
    horovod_steps,
    shapes_of,
    stored,
)
from benchmarks.device_ops.stand_in import DEVICE, stand_in
from gradzip import ops
from gradzip.advice import auto
from gradzip.averaging.session import Session
from gradzip.collectives import cost
from gradzip.memory.state import Key
from gradzip.memory.verdict import read_all
from gradzip.methods.base.gather import GatherCompressor
from gradzip.methods.low_rank import LowRank
from gradzip.methods.spec import unparse
from gradzip.ops import groups, tensors

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")

SHAPES = shapes_of(SMALLEST)
NETWORKS = ("resnet50",)


def codec(compressor):
    """The method that compresses: `Momentum` has one for its momenta."""
    return compressor if compressor.averaged_momentum is None else compressor.inner


def counts_alike(compressor):
    """Whether a method queues as much for all gradients, and never random numbers of the host."""
    own = codec(compressor)
    gathers = not isinstance(own, GatherCompressor) or own.fixed_nbytes
    keeps_factors = getattr(own, "warm_start", True) and getattr(own, "reuse", True)
    return compressor.parts == [compressor] and not compressor.adapts and gathers and keeps_factors


EXAMPLES = kinds.examples(counts_alike)  # with one rank, both exchanges are the same
SPECS = list(dict.fromkeys(kinds.with_other_exchanges(EXAMPLES)))


def most_syncs(spec):
    """None if the device undoes steps. Otherwise, for all payloads' headers, and to know if averages are finite."""
    compressor = gradzip.parse(spec)
    if compressor.undone_on_device:
        return 0
    compresses_some = any(map(functools.partial(compresses, compressor), SHAPES.values()))
    return 1 + (compresses_some and isinstance(codec(compressor), GatherCompressor))


def stored_ops(model):
    """The stored operations of a step with 8 ranks under DDP, by method: ceilings."""
    return {c.method: c.ops for c in stored() if (c.model, c.ranks, c.front_end) == (model, 8, "ddp")}


def networks():
    """Networks with one stored method of each kind that counts alike. `SMALLEST` has all methods."""
    for model in NETWORKS:
        of_kind = {}
        for spec in filter(lambda spec: counts_alike(gradzip.parse(spec)), stored_ops(model)):
            of_kind.setdefault(kinds.kind(spec), spec)
        for spec in of_kind.values():
            yield spec, model


def check_syncs(counts, most):
    """Fail if a step waits more often than `most` times, or in a backward hook."""
    assert counts.syncs <= most * STEPS and counts.in_hook == 0, (counts.syncs / STEPS, counts.waits)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("spec", kinds.params(SPECS, [*kinds.FIRST, "onebit:exchange=scatter_reduce"]))
def test_a_step_does_not_wait_for_the_device_unless_the_host_has_to_undo_it(spec, front_end):
    ranks = 4 if front_end == "fsdp" else 8  # all partitions are alike: on the stand-in, all ranks send the first
    counts = count(gradzip.parse(spec), SHAPES, ranks, front_end)
    check_syncs(counts, most_syncs(spec))
    # A known bound of the average saves one.
    assert counts.syncs >= STEPS * min(1, most_syncs(spec))


@pytest.mark.parametrize("spec", kinds.params(SPECS, kinds.FIRST))
def test_ddp_that_finds_unused_parameters_waits_only_where_there_are_some(spec):
    counts = count(gradzip.parse(spec), SHAPES, 8, "ddp that finds unused parameters")
    check_syncs(counts, most_syncs(spec))
    # A flag for each parameter is all that it queues more: ones, which the ranks average.
    others = count(gradzip.parse(spec), SHAPES, 8, "ddp")
    assert 0 < counts.ops - others.ops <= 2 * STEPS, counts.names - others.names


@pytest.mark.parametrize("spec", stored_ops(SMALLEST))
def test_operations_of_two_matrices_and_a_bias(spec):
    counts = count(gradzip.parse(spec), SHAPES, 8, "ddp")
    assert counts.ops / STEPS <= stored_ops(SMALLEST)[spec], counts.names


SCATTERED = [spec for spec in kinds.exchanged() if "scatter_reduce" in spec and counts_alike(gradzip.parse(spec))]


SELECTIONS = [
    f"topk:theta=0.9,{more},exchange=scatter_reduce" for more in ("bits=2,chunk=256", "bits=8", "select=sampled")
]


@pytest.mark.parametrize("spec", [*SCATTERED, *SELECTIONS])
def test_more_partitions_queue_no_more(spec):
    """Nor do the payloads of more ranks. Those of samples differ in length: each is copied to be sent."""
    few, many = (count(gradzip.parse(spec), SHAPES, ranks, "ddp", compute=False).names for ranks in (4, 8))
    assert few["payload_seal"] == many["payload_seal"] > 0
    copied = "copy_" if "sampled" in spec else ""
    assert {name: n for name, n in few.items() if name != copied} == {n: c for n, c in many.items() if n != copied}


class Arranged(gradzip.QSGD):
    """QSGD whose payloads of partitions are elsewhere in memory."""

    arrange = None

    def encode_lists(self, lists, keys):
        payloads = super().encode_lists(lists, keys)
        return payloads if self.arrange is None else self.arrange(payloads)


def in_another_order(payloads):
    """In one piece of memory, the first one first, and the others the other way round."""
    first, *others = one_after_the_other([payloads[0], *payloads[:0:-1]])
    return [first, *others[::-1]]


def one_after_the_other(payloads):
    return list(torch.cat(payloads).split_with_sizes([payload.numel() for payload in payloads]))


def each_alone(payloads):
    return [payload.clone() for payload in payloads]


@pytest.mark.parametrize("arrange", [in_another_order, one_after_the_other, each_alone])
@pytest.mark.parametrize("shape", [(3, 2000), (35, 37)])
def test_payloads_of_partitions_may_be_anywhere_in_memory(arrange, shape, monkeypatch):
    """Of equal lengths, and of others: those of `new_payloads` are sent from where they are, others are copied."""
    grads = [device_ops.noise(math.prod(shape), rank).view(shape) for rank in range(3)]

    def averages():
        with stand_in() as device:
            group = gradzip.LocalGroup(Arranged(exchange="scatter_reduce", bucket=40), 3)
            return [x.host for x in group.average([device.tensor(grad.clone()) for grad in grads], "w")]

    expected = averages()
    monkeypatch.setattr(Arranged, "arrange", staticmethod(arrange))
    assert all(map(torch.equal, averages(), expected))


def test_norms_of_large_buckets_take_one_launch():
    compressor = gradzip.QSGD(bucket=5000, exchange="scatter_reduce")
    few, many = (count(compressor.clone(), SHAPES, ranks, "ddp", compute=False).names for ranks in (2, 4))
    usual = count(gradzip.QSGD(exchange="scatter_reduce"), SHAPES, 4, "ddp", compute=False).names
    groups = usual["quantize_packed"] // 4  # each is encoded twice: largest magnitudes are cleared, levels packed
    assert few["quantize_packed"] == many["quantize_packed"] == 6 * groups


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_loss_scale_takes_a_wait_more(front_end):
    """For the scale, which a GradScaler keeps on the device."""
    compressor = gradzip.parse("topk")
    with stand_in() as device:
        scaler = torch.amp.GradScaler("cpu")
        scaler._scale = device.tensor(torch.tensor(1024.0))
        counts = count(compressor.follow(scaler), SHAPES, 8, front_end)
    assert (counts.syncs, counts.in_hook) == (STEPS, STEPS), counts.waits


@pytest.mark.parametrize(("spec", "model"), list(networks()))
def test_operations_of_large_networks(spec, model):
    counts = count(gradzip.parse(spec), shapes_of(model), 8, "ddp", compute=False)
    check_syncs(counts, 2)
    assert counts.ops / STEPS <= stored_ops(model)[spec], counts.names


def test_the_published_syncs_are_within_the_goals():
    for c in stored():
        if counts_alike(gradzip.parse(c.method)):
            assert c.syncs <= most_syncs(c.method) and c.in_hook == 0, c


def ddp_averages(compressor, shapes, dtype=torch.float32, steps=1):
    """The averages of the last step under DDP, by its buckets, how many of those were started together, its counts.

    dtype: of the gradients, which are numbers of bfloat16.
    """
    found = []
    complete = gradzip.ddp.HookState._complete

    def keep(state, *arguments):
        found.extend([average.host.clone() for average in joined.averages] for joined in state._joined)
        complete(state, *arguments)

    patched = mock.patch.object(gradzip.ddp.HookState, "_complete", keep)
    with fake_group(2), mock.patch("gradzip.ddp.Future", device_ops.future), stand_in() as device, patched:
        run = device_ops.ddp_steps(compressor, shapes, 2, device, dtype)
        for step in range(steps):
            found.clear()
            noise = {name: device_ops.noise(s.numel(), len(name) + step).view(s) for name, s in shapes.items()}
            gradients = {name: device.tensor(x.bfloat16().to(dtype)) for name, x in noise.items()}
            with device.counting() as counts:
                run(gradients, counts)
        read_all()
    return [average for joined in found for average in joined], len(found), counts


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("spec", ["acpsgd", "signsgd", "none"])
def test_buckets_of_ddp_are_joined_on_a_device(spec, large, monkeypatch):
    """Averages are those of DDP's own buckets, large or not, and a model has eight at most."""
    monkeypatch.setattr(device_ops, "BUCKET", 30_000)
    monkeypatch.setattr(cost, "ALONE_NBYTES", 30_000 if large else 1 << 20)
    shapes = {f"layer{i}" * (i % 3 + 1): torch.Size((40 + i, 60)) for i in range(30)}
    own, count_of_own, _ = ddp_averages(gradzip.horovod.bucketed(gradzip.parse(spec), 0), shapes)
    joined, count_of_joined, _ = ddp_averages(gradzip.parse(spec), shapes)
    assert count_of_own == len(device_ops.buckets_of(shapes)) > 8 >= count_of_joined > 4
    assert all(map(torch.equal, own, joined))


HALF = kinds.examples(lambda c: c.writes_half and getattr(c, "exchange", "gather") == "gather")


def saved_by_half(compressor, apart):
    """Bytes of memory that a step reads and writes less for each element, if gradients have 16 bits.

    4 where it is decided whether averages are finite, 2 where they are written, 2 where gradients are read; 8 where
    they are copied to one piece of memory, and back. Lists whose method reads float32 alone are copied, which takes 6
    more, unless a residual is added.

    Errors that float32 gradients hold are made in place, and an array counts once: 4 less. They are copied to the
    gradients, 8, and averages to them, 8. With 16 bits, errors are made again: 10 more, and with blocks, a payload, and
    4 where gradients are copied to one piece of memory again.
    """
    if isinstance(compressor, LowRank):  # what shows if averages are finite does not read them, but may restore them
        passes = 1 + isinstance(compressor, gradzip.PowerSGD)  # each of which makes the sum with the residual again
        return -10 * passes - 6 if compressor.keeps_residual else 2 + 2 + 2 * passes
    if isinstance(compressor, gradzip.TernGrad):
        return 8 + 2 + 2 * (compressor.clip is not None)  # it looks for the largest magnitude first, and for the norm
    if not compressor.vectors:
        return 4 - 10 if compressor.keeps_residual else 8
    if compressor.keeps_residual:
        payload = compressor.bits / 8 + 4 / compressor.block
        return (20 - 4 if apart else 4) - 10 - payload
    return 16 if apart else 8


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("spec", kinds.params(HALF, ["block-float", "natural", "signsgd"]))
def test_gradients_of_16_bits_are_read_and_written_where_they_are(spec, apart):
    """Averages are those in float32, rounded once."""
    shapes = {"a": torch.Size((129, 200)), "bias": torch.Size((8,)), "c": torch.Size((61, 201))}
    if not apart:
        del shapes["bias"]
    numel = sum(map(torch.Size.numel, shapes.values()))
    half, _, counts = ddp_averages(gradzip.parse(spec), shapes, torch.bfloat16, steps=3)
    wide, _, of_wide = ddp_averages(gradzip.parse(spec), shapes, steps=3)
    assert all(torch.equal(got, expected.bfloat16()) for got, expected in zip(half, wide, strict=True))
    # For the numbers by which it is decided, of other types; Power-SGD makes the sum with the residual once more.
    assert counts.ops <= of_wide.ops + 2 + spec.startswith("powersgd")
    saved = of_wide.read + of_wide.written - counts.read - counts.written
    # Factors of float32 are joined with a bias of that type.
    assert saved / numel == pytest.approx(saved_by_half(gradzip.parse(spec), apart), abs=0.2)


READERS = kinds.without_residuals(lambda c: c.reads_half and counts_alike(c))


def times_read(compressor):
    """How many operations read what is compressed."""
    if isinstance(compressor, gradzip.TernGrad):
        return 2 + (compressor.clip is not None)  # for the largest magnitude first, and for the norm
    return 1 + isinstance(compressor, (gradzip.PowerSGD, gradzip.RandomK))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("spec", kinds.params(READERS, ["signsgd:error_feedback=False", "topk"]))
def test_without_a_residual_no_float32_copy_is_made(spec, apart):
    """Else, it is written and read. As one vector, gradients that are apart are copied anyway."""
    compressor = gradzip.parse(spec)
    shapes = {"a": torch.Size((129, 200)), "bias": torch.Size((8,)), "c": torch.Size((61, 201))}
    if not apart:
        del shapes["bias"]
    averages, _, counts = ddp_averages(compressor.clone(), shapes, torch.bfloat16, steps=3)
    with mock.patch.object(type(compressor), "reads_half", False):
        expected, _, of_copy = ddp_averages(compressor.clone(), shapes, torch.bfloat16, steps=3)
    assert all(map(torch.equal, averages, expected))
    copied = compressor.vectors and apart
    assert counts.ops <= of_copy.ops - (not copied) + isinstance(compressor, gradzip.RandomK)  # converts what it chose
    bytes_saved = of_copy.read + of_copy.written - counts.read - counts.written
    saved = (2 if copied else 6) + 2 * times_read(compressor)
    assert bytes_saved / sum(map(torch.Size.numel, shapes.values())) == pytest.approx(saved, abs=0.5)


@pytest.mark.parametrize("spec", ["signsgd", "acpsgd", "fft-range", "fp16"])
def test_without_a_residual_no_memory_is_taken_for_a_float32_copy(spec):
    """Of one of eight buckets."""
    compressor = gradzip.parse(spec)
    if spec != "fp16":
        compressor = dataclasses.replace(compressor, error_feedback=False)
    found = memory.count(compressor.clone(), torch.bfloat16)
    with mock.patch.object(type(compressor), "reads_half", False):
        of_copy = memory.count(compressor.clone(), torch.bfloat16)
    assert found.kept == of_copy.kept
    assert of_copy.in_step - found.in_step >= 0.2


@pytest.mark.parametrize("spec", kinds.params(SPECS, kinds.FIRST))
def test_counts_do_not_depend_on_values(spec):
    """Counts are the same if large tensors are not computed."""
    computed, not_computed = (
        count(gradzip.parse(spec), SHAPES, 4, "horovod", compute=compute, small=10_000) for compute in (True, False)
    )
    assert computed.names == not_computed.names and computed.waits == not_computed.waits
    assert computed.written == not_computed.written
    assert 0.98 * computed.read <= not_computed.read <= computed.read  # what is used of a payload depends on values


def test_the_stand_in_computes_what_the_cpu_does():
    """Averages and residuals, so what is counted is a step that works."""
    for spec in EXAMPLES:
        compressor, group = gradzip.parse(spec), gradzip.LocalGroup(gradzip.parse(spec), 1)
        with stand_in() as device:
            run = horovod_steps(compressor, {"w": torch.Size((30, 50))}, 1, device)
            for step in range(4):
                gradient = (step != 1) * device_ops.noise(1500, step).view(
                    30, 50
                )  # zeros give low-rank factors of zeros
                on_device = device.tensor(gradient.clone())
                with device.counting() as counts:
                    run({"w": on_device}, counts)
                assert torch.equal(on_device.host, group.average([gradient], "w")[0]), spec
        theirs = group.compressors[0].states["w"].residual if "w" in group.compressors[0].states else None
        if theirs is not None:
            assert torch.equal(compressor.states["w"].residual.host, theirs), spec


def in_nodes(specs):
    """The methods that `Hierarchical` takes."""
    for spec in specs:
        with contextlib.suppress(ValueError):
            gradzip.Hierarchical(gradzip.parse(spec))
            yield spec


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", kinds.params(list(in_nodes(kinds.FIRST)), ["acpsgd", "fp16", "natural", "qsgd"]))
def test_nodes_on_the_stand_in_have_the_averages_of_the_cpu(spec, dtype):
    """The host waits for the largest magnitudes of averages there, also of those that `fp16` has in 16 bits."""
    shapes = {"w": (64, 64), "v": (16, 8, 3, 3)}
    grads = [
        {name: device_ops.noise(math.prod(s), rank).view(s).to(dtype) for name, s in shapes.items()}
        for rank in range(4)
    ]
    theirs = gradzip.LocalGroup(gradzip.Hierarchical(gradzip.parse(spec)), (2, 2)).step(grads)
    with stand_in() as device:
        group = gradzip.LocalGroup(gradzip.Hierarchical(gradzip.parse(spec)), (2, 2))
        averages = group.step([{name: device.tensor(x.clone()) for name, x in of.items()} for of in grads])
    for of_rank, expected in zip(averages, theirs, strict=True):
        assert all(torch.equal(of_rank[name].host, expected[name]) for name in shapes)


# --- FSDP2

LAYERS = {f"{i}.{name}": shape for i in range(3) for name, shape in SHAPES.items()}  # three modules


def with_each_error_feedback(specs):
    """The variants of methods that undo steps on the device and have error feedback to choose."""
    for spec in specs:
        compressor = gradzip.parse(spec)
        choices = {True, False, "owner"} if "error_feedback" in {f.name for f in dataclasses.fields(compressor)} else ()
        for choice in sorted(choices, key=str):
            with contextlib.suppress(ValueError):
                variant = dataclasses.replace(compressor, error_feedback=choice)
                if variant.undone_on_device and counts_alike(variant):
                    yield unparse(variant)


VARIANTS = list(dict.fromkeys(with_each_error_feedback(kinds.FIRST)))


@pytest.mark.parametrize("spec", kinds.params(VARIANTS, [v for v in VARIANTS if v.startswith(("block-float", "topk"))]))
def test_no_error_feedback_of_shards_waits(spec):
    check_syncs(count(gradzip.parse(spec), LAYERS, 3, "fsdp"), 0)


@pytest.mark.parametrize("spec", ["none", "acpsgd", "topk"])
def test_small_modules_are_averaged_together(spec):
    """At most eight and the last one start a step; methods of matrices have the same bits."""
    layers = {f"{i}.{name}": shape for i in range(20) for name, shape in SHAPES.items()}
    noise = {name: device_ops.noise(shape.numel(), i).view(shape) for i, (name, shape) in enumerate(layers.items())}
    runs = []
    for least in (None, 0.0):
        compressor = gradzip.parse(spec)
        if least is not None:
            compressor.bucket_cap_mb = least
        with (
            fake_group(2 * SHARDS),
            stand_in() as device,
            mock.patch.object(Session, "start", autospec=True, side_effect=Session.start) as start,
        ):
            run = fsdp_steps(compressor, layers, 2, device)
            for _ in range(3):
                gradients = {name: device.tensor(gradient.clone()) for name, gradient in noise.items()}
                with device.counting() as counts:
                    run(gradients, counts)
            runs.append((start.call_count / 3, [gradient.host.clone() for gradient in gradients.values()]))
            read_all()
    (together, averages), (alone, others) = runs
    assert together <= 9 and alone == 20, (together, alone)
    assert spec == "topk" or all(map(torch.equal, averages, others))


@pytest.mark.parametrize("in_hook", [True, False])
def test_a_hidden_sync_with_shards_is_noticed(in_hook):
    counts = count(with_hidden_sync(gradzip.TopK, HIDDEN["item"], in_hook), LAYERS, 2, "fsdp")
    with pytest.raises(AssertionError):
        check_syncs(counts, 0)


def test_shards_on_the_stand_in_have_the_averages_of_the_cpu():
    shape = torch.Size((60, 50))
    for spec in EXAMPLES:
        compressor, group = gradzip.parse(spec), gradzip.LocalGroup(gradzip.parse(spec), 1)
        with fake_group(SHARDS), stand_in() as device:
            run = fsdp_steps(compressor, {"w": shape}, 1, device)
            for step in range(4):
                gradient = (step != 1) * device_ops.noise(shape.numel(), step).view(shape)
                gradients = {"w": device.tensor(gradient.clone())}
                with device.counting() as counts:
                    run(gradients, counts)
                shard = gradient[:30].clone()
                assert torch.equal(gradients["w"].host, group.average([shard], f"shard0of{SHARDS}.w")[0]), spec
            read_all()


OPTIONS = {
    "as they are": {},
    "reduced in bfloat16": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
    "computed in bfloat16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "reduced in 8 bits": {},
}


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("spec", ["none", "acpsgd", "topk"])
def test_nothing_of_a_pass_of_fsdp_waits(spec, options, adds):
    """Neither what FSDP itself does, nor where it copies the averages, or where they are added to others."""
    with fake_group(2 * SHARDS), stand_in() as device:
        mesh = init_device_mesh("cuda", (2, SHARDS), mesh_dim_names=("replicate", "shard"))
        model = Sharded(LAYERS, mesh["shard"], device, **OPTIONS[options])
        if options == "reduced in 8 bits":
            model.reduce_with(gradzip.fsdp.reduce_scatter(gradzip.BlockFloat(bits=8)))
        compressor = gradzip.parse(spec)
        gradzip.fsdp.compress(model, compressor, mesh["replicate"].get_group())
        for step in range(4):
            noise = {name: device_ops.noise(shape.numel(), step).view(shape) for name, shape in LAYERS.items()}
            gradients = {name: device.tensor(gradient) for name, gradient in noise.items()}
            with device.counting() as counts:
                model.backward(gradients, adds)
            assert step < 2 or counts.syncs == 0, counts.waits
        assert all(average.host.any() for average in model.averages().values())
        assert not compressor.last_step_skipped
        read_all()


REDUCED = [
    "block-float", "block-float:bits=4,rounding=nearest", "block-float:bits=2,rounding=nearest", "qsgd:coding=packed",
    "qsgd:coding=packed,bits=8,norm=max",
]  # fmt: skip


@pytest.mark.parametrize("spec", REDUCED)
def test_a_quantized_reduce_scatter_does_not_wait(spec):
    counts = count(gradzip.parse(spec), LAYERS, 8, "reduce-scatter")
    check_syncs(counts, 0)
    assert 0 < counts.ops <= STEPS * 3 * 8  # for each module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", REDUCED)
def test_a_quantized_reduce_scatter_has_the_sums_of_the_cpu(spec, dtype):
    numel = 3000
    with fake_group(4), stand_in() as device:
        on_device, on_cpu, in_float32 = (gradzip.fsdp.reduce_scatter(gradzip.parse(spec)) for _ in range(3))
        for step in range(3):
            gradient, total = device_ops.noise(4 * numel, step).to(dtype), torch.empty(numel, dtype=dtype)
            of_device = device.tensor(torch.empty(numel, dtype=dtype))
            on_device(of_device, device.tensor(gradient), dist.group.WORLD, dist.ReduceOp.AVG)
            on_cpu(total, gradient, dist.group.WORLD, dist.ReduceOp.AVG)
            assert total.any() and torch.equal(of_device.host, total)
            if dtype != torch.float32:
                expected = torch.empty(numel)
                in_float32(expected, gradient.float(), dist.group.WORLD, dist.ReduceOp.AVG)
                assert torch.equal(total, expected.to(dtype))


NEAREST = "block-float:rounding=nearest"
# Of `gradzip.fsdp.quantize`: options, and the operations of a module in a step, and of a step.
QUANTIZED = {
    "gather": ({"gather": NEAREST}, 2 * 6, 0),  # join, encode, join with exact ones, decode, copy those and others
    "keep": ({"gather": NEAREST, "keep": True}, 6 + 3, 0),
    "delta": ({"gather": NEAREST, "reference": "delta"}, 11, 0),
    "reduce": ({"reduce": "block-float"}, 2, 0),
    "feedback": ({"reduce": "block-float", "error_feedback": True}, 4, 7),  # is a step finite on all ranks? undo it
    "all": ({"gather": NEAREST, "reference": "delta", "reduce": "block-float", "error_feedback": True}, 15, 7),
}


def quantized_model(device, **options):
    """A model of three modules on the stand-in that gathers its weights in each pass."""
    model = Sharded(LAYERS, init_device_mesh("cuda", (4,)), device)
    model.set_reshard_after_forward(True)
    model.set_reshard_after_backward(True)
    specs = {name: gradzip.parse(value) if name in ("gather", "reduce") else value for name, value in options.items()}
    return model, gradzip.fsdp.quantize(model, **specs) if options else None


def quantized_step(model, device, step, bad=None):
    """A step whose gradients are noise; one element of the parameter `bad` is infinite. Returns the counts."""
    noise = {name: device_ops.noise(shape.numel(), step).view(shape).clone() for name, shape in LAYERS.items()}
    if bad is not None:
        noise[bad].view(-1)[7] = torch.inf
    gradients = {name: device.tensor(gradient) for name, gradient in noise.items()}
    with device.counting() as counts:
        model.backward(gradients)
    with torch.no_grad():
        for parameter in model.named.values():
            parameter.to_local().mul_(0.9)
    return counts


@pytest.mark.parametrize("case", QUANTIZED)
def test_a_step_of_quantized_shards_does_not_wait(case):
    options, of_module, of_step = QUANTIZED[case]
    with fake_group(4), stand_in() as device:
        alone, (model, _) = quantized_model(device)[0], quantized_model(device, **options)
        for step in range(3):
            plain, counts = quantized_step(alone, device, step), quantized_step(model, device, step)
            assert step == 0 or counts.syncs == 0, counts.waits  # ranks meet in the first one
        assert counts.ops - plain.ops <= 3 * of_module + of_step, counts.names - plain.names


def test_passes_that_may_find_nothing_new_wait_once():
    with fake_group(4), stand_in() as device:
        model, _ = quantized_model(device, gather=NEAREST, reference="delta")
        quantized_step(model, device, 0)
        gradients = {name: device.tensor(torch.ones(shape)) for name, shape in LAYERS.items()}
        waits = []
        for _ in range(3):
            with device.counting() as counts, torch.no_grad():
                model(model.start, gradients)
            waits.append(counts.syncs)
        assert waits[0] == 0 and waits[1:] == [waits[1]] * 2 and 0 < waits[1] <= 2  # flags to the device, and back


def test_a_reference_recovers_from_a_weight_that_was_not_finite():
    with fake_group(4), stand_in() as device:
        model, set_up = quantized_model(device, gather=NEAREST, reference="delta")
        weight = next(iter(model.named.values())).to_local()
        finite = []
        for step in range(4):
            quantized_step(model, device, step)
            references = [one._reference.host for one in set_up._parts["references"].values() if one.engine]
            finite.append(all(bool(reference.isfinite().all()) for reference in references))
            with torch.no_grad():
                weight.fill_(torch.nan if step == 0 else 1.0)
        assert finite == [True, False, True, True]


def test_residuals_of_a_step_that_is_not_finite_are_restored_on_the_device():
    name, *_ = LAYERS
    with fake_group(4), stand_in() as device:
        model, set_up = quantized_model(device, reduce="block-float", error_feedback=True)
        saved = []
        for step, bad in enumerate((None, name, None)):
            counts = quantized_step(model, device, step, bad)
            assert step == 0 or counts.syncs == 0, counts.waits
            saved.append([one.residual.host.clone() for one in set_up._parts["reductions"].values() if one._calls])
        before, skipped, after = saved
        set_up.load_state_dict(set_up.state_dict())
        quantized_step(model, device, 3)
        assert all(one.residual.is_cuda for one in set_up._parts["reductions"].values() if one._calls)
        assert len(before) == 3 and all(residual.any() for residual in before)
        assert all(map(torch.equal, before, skipped)) and not any(map(torch.equal, before, after))


def test_quantized_weights_of_a_device_are_those_of_the_cpu():
    numel = 3000
    with fake_group(4), stand_in() as device:
        on_device, on_cpu = (gradzip.fsdp.all_gather(gradzip.parse(NEAREST)) for _ in range(2))
        weights, gathered = device_ops.noise(numel, 0), torch.empty(4 * numel)
        of_device = device.tensor(torch.empty(4 * numel))
        on_device(of_device, device.tensor(weights.clone()), dist.group.WORLD)
        on_cpu(gathered, weights, dist.group.WORLD)
        assert gathered.any() and torch.equal(of_device.host, gathered)


# --- Auto


def searched(times):
    """The counts of each step until Auto has chosen, under DDP, with the method that it has used.

    times: how often a network has each of some parameters.
    """
    found, shapes = [], {f"{i}.{name}": shape for i in range(times) for name, shape in SHAPES.items()}
    with (
        mock.patch.object(auto, "TURNS", 1),
        fake_group(2),
        mock.patch("gradzip.ddp.Future", device_ops.future),
        stand_in() as device,
    ):
        compressor = gradzip.Auto(["fp16", "block-float", "acpsgd"], max_error=10.0, every=0, steps=3)
        run = device_ops.ddp_steps(compressor, shapes, 2, device)
        while not compressor.decided:
            used = compressor.specs[compressor.current]
            gradients = {n: device.tensor(device_ops.noise(s.numel(), 0).view(s).clone()) for n, s in shapes.items()}
            with device.counting() as counts:
                run(gradients, counts)
            found.append((used, counts))
        read_all()
    return shapes, found


def test_auto_waits_no_more_often_for_more_gradients():
    """It waits for the events that steps are timed by once in a turn, and for the errors of a method together."""
    (_, few), (_, many) = searched(1), searched(5)
    waits = [counts.syncs for _, counts in few]
    assert waits == [counts.syncs for _, counts in many]
    assert sorted(waits)[len(waits) // 2] == 1 and waits[-1] >= auto.TIMED


def test_auto_times_the_buckets_of_each_method(monkeypatch):
    """A step of a trial queues what a step of the method alone does, but for the number that it waits for."""
    monkeypatch.setattr(device_ops, "BUCKET", 60_000)
    monkeypatch.setattr(cost, "ALONE_NBYTES", 30_000)
    shapes, found = searched(4)
    assert len(device_ops.buckets_of(shapes)) > 2
    for spec in ("none", "fp16", "block-float", "acpsgd"):
        alone = count(gradzip.parse(spec), shapes, 2, "ddp").ops / STEPS
        steps = [counts.ops for used, counts in found[:-1] if used == spec][-2:]
        assert abs(sum(steps) / 2 - alone) <= 1, (spec, steps, alone)


# --- groups


@pytest.mark.parametrize("spec", ["signsgd", "signsgd:majority=False", "onebit", "terngrad"])
def test_gradients_that_are_joined_do_not_mix(spec, monkeypatch):
    """A group gives each gradient the average and the residual that it has alone, with the same random draws.

    If one of them is not finite, no average is, and no state changes.
    """
    shapes = {"a": torch.Size((30, 50)), "b": torch.Size((8, 20, 3, 3)), "c": torch.Size((9001, 3))}
    together, alone = gradzip.parse(spec), gradzip.parse(spec).skip_nonfinite(False)
    keys_of, drawn = groups.keys_of, []

    def recorded(keys, counts):
        drawn.append(keys_of(keys, counts))
        return drawn[-1]

    def residuals():
        return {name: together.memory.piece(name, "residual") for name in shapes if together.error_feedback}

    with stand_in() as device:
        run = horovod_steps(together, shapes, 3, device)
        run_alone = {name: horovod_steps(alone, {name: shape}, 3, device) for name, shape in shapes.items()}
        for step in range(3):
            gradients = {name: device_ops.noise(s.numel(), step).view(s) for name, s in shapes.items()}
            if step == 1:
                gradients["b"][3, 4, 1, 1] = torch.nan
            joined = {name: device.tensor(gradient.clone()) for name, gradient in gradients.items()}
            drawn.clear()
            monkeypatch.setattr(groups, "keys_of", recorded)
            before = {name: residual.host.clone() for name, residual in residuals().items()} if step else {}
            told = pytest.warns(UserWarning, match="not finite") if step == 2 else contextlib.nullcontext()
            with device.counting() as counts, told:
                run(joined, counts)
            (state,) = together.states.values()
            if step == 1:
                assert all(average.host.isnan().all() for average in joined.values()) and state.step == 2
                assert all(torch.equal(residual.host, before[name]) for name, residual in residuals().items())
                continue
            for i, name in enumerate(state.shapes):
                single, keys = device.tensor(gradients[name].clone()), iter(drawn)
                monkeypatch.setattr(groups, "keys_of", lambda *_, i=i, keys=keys: next(keys)[i : i + 1])
                with device.counting() as counts:
                    run_alone[name]({name: single}, counts)
                assert torch.equal(joined[name].host, single.host) and single.host.isfinite().all(), (name, step)
                assert next(keys, None) is None
        assert state.step == 3 and all(state.step == 2 for state in alone.states.values())
        assert len(residuals()) == len(shapes) * together.error_feedback
        for name, residual in residuals().items():
            assert torch.equal(residual.host.view(-1), alone.states[name].residual.host), name


# --- hidden syncs

HIDDEN = {
    "item": lambda x: x.sum().item(),
    "truth value": lambda x: bool(x.any()),
    "cpu": lambda x: x.cpu(),
    "pageable copy": lambda x: torch.ones(4).to(x.device, non_blocking=True),
    "flag and device": lambda x: x.isnan().any() and x.device.type == "cpu",
}


def with_hidden_sync(method, wait, in_hook):
    """The method, with a wait before its first collective or after its last."""

    class Mutant(method):
        def reduce(self, group):
            if in_hook:
                wait(group.gradients[0])
            average = yield from super().reduce(group)
            if not in_hook:
                wait(group.gradients[0])
            return average

    return Mutant()


@pytest.mark.parametrize("in_hook", [True, False])
@pytest.mark.parametrize("wait", HIDDEN)
def test_a_hidden_sync_exceeds_the_ceiling(wait, in_hook):
    for method in (gradzip.TopK, gradzip.ACPSGD):
        check_syncs(count(method(), SHAPES, 2, "ddp"), 0)
        counts = count(with_hidden_sync(method, HIDDEN[wait], in_hook), SHAPES, 2, "ddp")
        with pytest.raises(AssertionError):
            check_syncs(counts, 0)


def waiting(x):
    yield "a truth value", lambda: bool(x[0] > 0)
    yield "a number", lambda: x.sum().item()
    yield "a list", lambda: x.tolist()
    yield "a copy to the CPU", lambda: x.cpu()
    yield "a copy into CPU memory", lambda: torch.empty(4).copy_(x)
    yield "a copy from pageable memory", lambda: torch.ones(4).to(x.device, non_blocking=True)
    yield "a copy of a number", lambda: torch.tensor(1.0).to(x.device)
    yield "a copy into device memory", lambda: x.copy_(torch.ones(4))
    yield "a shape that depends on values", lambda: x[x > 0]
    yield "a native function that waits", lambda: ops.abs_max(x)
    yield "a number that a native function checks", lambda: ops.compact(x, 0.5)


@pytest.mark.parametrize("index", range(11))
def test_every_way_to_wait_is_counted(index):
    with stand_in() as device:
        x = device.tensor(torch.tensor([1.0, -2.0, 0.0, 3.0]))
        name, wait = list(waiting(x))[index]
        with device.counting() as counts, counts.hook():
            wait()
        assert counts.syncs >= 1 and counts.in_hook == counts.syncs, name


def test_what_does_not_wait():
    with stand_in() as device:
        x = device.tensor(torch.arange(12.0))
        with device.counting() as counts:
            view = x.view(3, 4)[:, 1:].t()
            empty = torch.empty(5, device=x.device)
            assert (view.device, empty.device, x.to(x.device) is x) == (DEVICE, DEVICE, True)
            assert counts.ops == 0
            y = view + 1
            assert (counts.ops, counts.read, counts.written) == (1, 36, 36)
            y.mul_(2)
            assert (counts.ops, counts.read, counts.written) == (2, 72, 72)
            torch.zeros(5, device=x.device)
            assert (counts.ops, counts.read, counts.written) == (3, 72, 92)
            ops.abs_max_tensor(x)
            assert counts.read == 72 + 48 and counts.written == 92 + 4
            torch.cat([x, x], out=torch.empty(24, device=x.device))
            assert counts.read == 120 + 96 and counts.written == 96 + 96
            old = [torch.full((4,), float(i), device=x.device) for i in range(200)]
            new = [torch.empty(4, device=x.device) for _ in old]
            before = counts.ops
            ops.restore_unless_finite(x[:1] * torch.nan, [ops.Restoration(y, z) for y, z in zip(new, old)])
            assert counts.ops == before + 1 + 3, "a launch takes 96"
            assert all(torch.equal(y.host, z.host) for y, z in zip(new, old))
            payloads = [ops.new_payload(100, x.device) for _ in range(100)]
            ops.seal_payloads([ops.Seal(payload, 12) for payload in payloads], method=7, digest=5)
            expected = [
                ops.ExpectedPayloads(payloads, [12] * 100, 7, 5),
                ops.ExpectedPayloads(payloads[:50], [13] * 50, 7, 5),
            ]
            before = counts.ops
            (_, right), (_, wrong) = ops.verify_payloads(expected)
            assert counts.ops == before + 1 + 3, "a launch takes 70"
            assert not right.host.any() and wrong.host.isnan().all()
        assert counts.syncs == 0


def test_tensors_of_two_devices_are_refused():
    with stand_in() as device, pytest.raises(RuntimeError, match="got tensors on cuda:0 and on the CPU"):
        device.tensor(torch.ones(3)) + torch.ones(3)


def test_a_sync_in_a_kernel_function_is_noticed(monkeypatch):
    """One truth value in a decoder, as in `if failed and ...`."""
    decode = groups.decode_sums

    def with_a_truth_value(kernel, outs, *arguments):
        failed = decode(kernel, outs, *arguments)
        first = outs[0].view(-1)[0]
        if first != first:
            raise gradzip.PayloadError("corrupt")
        return failed

    monkeypatch.setattr(groups, "decode_sums", with_a_truth_value)
    with pytest.raises(AssertionError):
        check_syncs(count(gradzip.TopK(), SHAPES, 2, "horovod"), 0)


def test_a_sync_in_a_hook_is_noticed(monkeypatch):
    seal = tensors.seal_payloads

    def looking(seals, **options):
        return seal([one for one in seals if one.magnitudes.isfinite()], **options)

    monkeypatch.setattr(tensors, "seal_payloads", looking)
    counts = count(gradzip.parse("qsgd"), {"w": torch.Size((64, 64))}, 2, "horovod")
    assert counts.in_hook == STEPS


def test_elias_codes_on_a_device_wait_for_their_length():
    counts = count(gradzip.parse("qsgd:coding=always_elias"), SHAPES, 2, "horovod")
    assert counts.in_hook >= STEPS and counts.syncs - counts.in_hook == STEPS  # for headers, which say the lengths


def test_qsgd_packs_levels_on_a_device():
    """By default; peers on a CPU send Elias codes of the same levels, and both decode either."""
    x, key, payloads = device_ops.noise(5000, 0).view(50, 100), Key(0, 0, "w", 0), {}
    for spec in ("qsgd", "qsgd:coding=packed", "qsgd:coding=always_elias"):
        with stand_in() as device:
            payloads[spec] = gradzip.parse(spec).encode(device.tensor(x), key).host
    body = slice(ops.HEADER_NBYTES, None)
    assert torch.equal(payloads["qsgd"][body], payloads["qsgd:coding=packed"][body])
    qsgd = gradzip.parse("qsgd")
    on_cpu = qsgd.encode(x, key)
    assert torch.equal(payloads["qsgd:coding=always_elias"][body], on_cpu[body])
    assert len(on_cpu) < 0.6 * len(payloads["qsgd"])
    wanted = qsgd.decode([on_cpu], [x.shape])[0].clone()
    assert torch.equal(qsgd.decode([payloads["qsgd"]], [x.shape])[0], wanted)


def test_bypassed_gradients_are_counted_too():
    counts = count(gradzip.parse("none").skip_nonfinite(False), shapes_of("charlm"), 2, "ddp", compute=False)
    assert counts.syncs == 0 and counts.ops > 0


WITHOUT_HEADERS = ["fp16", "block-float", "block-float:bits=4,rounding=nearest,error_feedback=False", "randomk"]


@pytest.mark.parametrize("spec", WITHOUT_HEADERS)
def test_averages_that_nobody_looks_at_may_be_nan(spec):
    """A NaN reaches the average of its gradient, and the residual. On a CPU it does not: looking costs little there."""
    compressor, on_cpu = (gradzip.parse(spec).skip_nonfinite(False) for _ in range(2))
    group = gradzip.LocalGroup(on_cpu, size=1)
    shape = torch.Size((64, 64))
    with stand_in() as device:
        run = horovod_steps(compressor, {"a": shape}, 1, device)
        for step in range(4):
            gradient = device_ops.noise(shape.numel(), step).view(shape).clone()
            if step == 2:
                gradient[:, 4] = torch.nan
            theirs = group.average([gradient.clone()], "a")
            gradient = device.tensor(gradient)
            with device.counting() as counts:
                run({"a": gradient}, counts)
            if step == 2:
                assert gradient.host.isnan().any() and theirs[0].isnan().all()
    state, kept = compressor.states["a"], group.compressors[0].states["a"]
    if compressor.error_feedback:
        assert state.residual.host.isnan().any() and kept.residual.isfinite().all()


@pytest.mark.parametrize("spec", ["powersgd", "acpsgd", "acpsgd:rank=2,error_feedback=False"])
def test_factors_that_the_host_does_not_look_at(spec):
    """They have the bits of the CPU's. After columns of zeros, the rank is what it was, as where the host looks."""
    shapes = {"a": torch.Size((48, 64)), "b": torch.Size((32, 8, 3, 3)), "c": torch.Size((80, 20))}
    compressor, group = gradzip.parse(spec), gradzip.LocalGroup(gradzip.parse(spec), 1)
    with stand_in() as device:
        run = horovod_steps(compressor, shapes, 1, device)
        for step in range(9):
            noise = {name: device_ops.noise(shape.numel(), step).view(shape).clone() for name, shape in shapes.items()}
            if step in (4, 5):
                noise["a"].zero_()
            gradients = {name: device.tensor(one.clone()) for name, one in noise.items()}
            with device.counting() as counts:
                run(gradients, counts)
            assert not counts.syncs or step < 2  # the first steps draw random factors on the host
            expected = group.step([noise])[0]
            for name, gradient in gradients.items():
                if step < 6 or name != "a":
                    assert torch.equal(gradient.host, expected[name]), (step, name)
                else:
                    ranks = [torch.linalg.matrix_rank(one).item() for one in (gradient.host, expected[name])]
                    assert ranks == [compressor.rank] * 2


@pytest.mark.parametrize("spec", ["none", "powersgd", "signsgd"])
def test_to_know_whether_averages_are_finite_takes_few_operations(spec):
    shapes = {f"{i}.bias": torch.Size((64,)) for i in range(40)} | SHAPES
    for front_end in FRONT_ENDS:
        checked, unchecked = (
            count(gradzip.parse(spec).skip_nonfinite(on), shapes, 8, front_end) for on in (True, False)
        )
        assert checked.syncs == 0
        # The numbers; to join them, twice; their maximum, the verdict and its copy; NaN, and former states. Gradients
        # that hold errors: the numbers of others, to join them, their maximum, its inverse, errors. Numbers of
        # factors are multiplied by a bound: at two ends of modules.
        more = {"powersgd": 2, "signsgd": 6 if front_end != "fsdp" else 0}.get(spec, 0)
        assert checked.ops - unchecked.ops <= (8 + more) * STEPS, checked.names - unchecked.names


# --- memory

FACTORS = 0.13  # bytes an element: those of step 0, which replace columns of zeros, and the numbers of their matrices


@pytest.mark.parametrize("spec", kinds.params(memory.specs(), ["block-float", "topk", "acpsgd"]))
def test_a_method_keeps_its_states_alone(spec):
    """No copy of gradients, no scratch memory. With error feedback, a residual of 4 bytes; no method more than 8."""
    found = memory.count(gradzip.parse(spec))
    compressor = gradzip.parse(spec)
    factors = FACTORS if hasattr(codec(compressor), "rank") else 0.0
    assert found.of_states <= found.kept <= found.of_states + factors + 4e-3
    assert found.of_states == gradzip.memory_bytes(compressor, memory.SHAPES, memory.RANKS) / memory.NUMEL
    least = 4 * codec(compressor).keeps_residual + 4 * (compressor.averaged_momentum is not None)
    assert least <= found.of_states <= max(8.0, least) + 0.6
    assert 0 <= found.in_step / 4 <= 3


GROUP = 1 / 8  # of the elements: where gradients are apart, averages are made in one vector for one group at a time
IN_STEP = {  # bytes an element
    "none": 0.0,  # averaged where they are
    "natural": (memory.RANKS + 1) * 9 / 8 + GROUP * 4,  # payloads: received, and this rank's
}


HELD_IN_STEP = {  # where gradients hold the errors, no second residual
    "signsgd": (memory.RANKS + 1) / 8 + 1 / 8,  # payloads; the signs of the majority
    "signsgd:majority=False": (memory.RANKS + 1) / 8,
    "onebit": (memory.RANKS + 1) * (1 / 8 + 8 / memory.SIDE),
    "randomk": 0.01 * (4 + 4) + GROUP * (4 + 0.01 * 8),  # indices, numbers; an average, wide indices
    "momentum:inner=signsgd(majority=False)": memory.RANKS / 8 + GROUP * 4,  # payloads; averages while they replace m
    "momentum:inner=natural": (memory.RANKS + 1) * 9 / 8,
    "momentum:inner=qsgd(coding=packed)": (memory.RANKS + 1) * (1 / 2 + 4 / 512),
}


@pytest.mark.parametrize(("spec", "nbytes"), [*IN_STEP.items(), *HELD_IN_STEP.items()])
def test_what_a_step_takes(spec, nbytes):
    assert memory.count(gradzip.parse(spec)).in_step == pytest.approx(nbytes, abs=5e-3)


@pytest.mark.parametrize("rank", [4, 8])
@pytest.mark.parametrize("name", ["powersgd", "acpsgd"])
def test_a_step_of_low_rank_methods_takes_factors_alone(name, rank):
    """Each has rank / SIDE numbers for an element of the gradients. Also without error feedback."""
    factor = 4 * rank / memory.SIDE
    for feedback in (True, False):
        found = memory.count(gradzip.parse(f"{name}:rank={rank},error_feedback={feedback}")).in_step
        assert 4 * factor <= found <= 6 * factor  # P and Q, and those that the next step starts from, as they are made


def remakes(compressor):
    """Whether errors of 16-bit gradients are made again."""
    return compressor.keeps_residual and compressor.remakes


@pytest.mark.parametrize("spec", ["block-float", "topk", "fft-range", "dct-range"])
def test_error_feedback_takes_no_memory_in_a_step(spec):
    """It takes what a step takes in which the rank's own error is thrown away; with blocks, no more than that."""
    without = "owner" if spec == "block-float" else "False"
    found = memory.count(gradzip.parse(spec)).in_step
    expected = memory.count(gradzip.parse(f"{spec}:error_feedback={without}")).in_step
    assert found == pytest.approx(expected, abs=5e-3) or (spec == "block-float" and found < expected)


@pytest.mark.parametrize("spec", [spec for spec in memory.specs() if remakes(gradzip.parse(spec))])
def test_16_bit_gradients_take_no_second_residual(spec):
    """In a step they take what float32 takes, and a bucket's error, which is made again."""
    half, single = [memory.count(gradzip.parse(spec), dtype).in_step for dtype in (torch.bfloat16, torch.float32)]
    assert half <= single + GROUP * 4 + 1e-3  # numbers of groups


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", ["natural", "qsgd:coding=packed", "block-float:bits=4,error_feedback=owner"])
def test_momenta_of_methods_without_residuals_take_no_second_momentum(inner, dtype):
    """A step takes what the method takes, and of 16-bit gradients two vectors of a bucket."""
    method = gradzip.parse(inner)
    alone, found = (memory.count(one, dtype) for one in (method.clone(), gradzip.Momentum(method)))
    assert found.in_step <= alone.in_step + (0.0 if dtype == torch.float32 else GROUP * 8) + 1e-3
    assert found.of_states == 4 + alone.of_states


def test_dgc_takes_no_second_states():
    """It takes a bucket's velocity and residual, and what the encoder takes."""
    encoder = memory.count(gradzip.parse("topk:theta=0.999,error_feedback=False")).in_step
    assert 0 < memory.count(gradzip.parse("dgc")).in_step - GROUP * 8 <= encoder


def test_memory_that_is_kept_is_noticed(monkeypatch):
    class Hoarder(gradzip.TopK):
        def reduce(self, group):
            vars(self).setdefault("hoard", {})[group.name] = group.vector.half()
            return super().reduce(group)

    found = memory.count(Hoarder())
    assert found.kept >= found.of_states + 1.9


def test_a_peak_is_noticed():
    class Copying(gradzip.TopK):
        def reduce(self, group):
            copy = group.vector.clone()
            average = yield from super().reduce(group)
            return average if copy.numel() else None

    assert memory.count(Copying()).in_step > memory.count(gradzip.TopK()).in_step + 3
