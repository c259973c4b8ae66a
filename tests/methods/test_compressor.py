"""Behaviour that all methods inherit from the base classes, tested on methods of every kind."""

import copy
import dataclasses
import pickle

import pytest
import torch

import gradzip
import kinds
from contract import check_conservation
from gradzip.memory.state import Key
from gradzip.methods.base.registry import registered
from observed import SHAPE, STEPS, observed


@pytest.fixture(params=kinds.params())
def compressor(request):
    return gradzip.parse(request.param)


GRADIENTS = {
    "empty": torch.zeros(0),
    "empty_2d": torch.zeros(0, 7),
    "scalar": torch.tensor(3.0),
    "one": torch.tensor([[2.0]]),
    "vector": torch.randn(5000),
    "small": torch.randn(5, 7),
    "matrix": torch.randn(60, 70),
    "transposed": torch.randn(70, 60).t(),
    "channels_last": torch.randn(16, 8, 5, 5).to(memory_format=torch.channels_last),
    "sliced": torch.randn(80, 90)[3:70, 5:80],
    "half": torch.randn(60, 70).half(),
    "bfloat16": torch.randn(60, 70).bfloat16(),
    "double": torch.randn(60, 70).double(),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_shape_dtype_and_strides_are_kept_on_all_ranks(compressor, kind):
    for size in (1, 2, 3, 4):
        grads = [GRADIENTS[kind] * (rank + 1) for rank in range(size)]
        grads = [torch.empty_like(GRADIENTS[kind]).copy_(g) for g in grads]
        before = [g.clone() for g in grads]
        averages = gradzip.simulate(compressor, grads)
        for grad, was, average in zip(grads, before, averages):
            assert average.shape == grad.shape and average.dtype == grad.dtype and average.stride() == grad.stride()
            assert torch.equal(grad, was)  # simulate() does not change its arguments
            assert torch.equal(average, averages[0])  # replicas are bit-identical


@pytest.mark.parametrize("shape", [(5000,), (5, 7), (), (31, 33)])
def test_small_and_1d_gradients_are_averaged_exactly(compressor, shape):
    a, b = torch.randn(shape), torch.randn(shape)
    group = gradzip.LocalGroup(compressor, 2)
    assert torch.equal(group.average([a, b], "w")[0], (a + b) / 2)
    assert group.bytes_sent == 4 * a.numel()
    # No state is kept, except by methods that change them (DGC applies momentum).
    assert not group.compressors[0].states or any(part.changes_uncompressed for part in compressor.parts)


def test_min_numel():
    x = torch.randn(32, 32)
    assert gradzip.roundtrip(gradzip.FFTRange(min_numel=1024), x)[1] < x.numel() * 4
    assert gradzip.roundtrip(gradzip.FFTRange(min_numel=1025), x)[1] == x.numel() * 4


@pytest.mark.parametrize("size, bad", [(1, float("-inf")), (2, float("nan")), (3, float("inf")), (3, float("nan"))])
def test_non_finite_gradient_reaches_all_ranks_and_changes_no_state(compressor, bad, size):
    def finite(step):
        return [torch.randn(16, 16, 4, 4, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(size)]

    group, spared = gradzip.LocalGroup(compressor, size), gradzip.LocalGroup(compressor, size)
    spoilt = finite(7)
    spoilt[-1][3, 4] = bad
    for step in range(3):
        expected = spared.average(finite(step), "w")
        if step < 2:
            for average in group.average(spoilt, "w"):
                assert not average.isfinite().all()
        assert torch.equal(group.average(finite(step), "w")[0], expected[0])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_error_feedback_conserves_the_sum(size):
    """A step rounds a handful of times: it adds the residual, transforms twice, averages, and subtracts."""
    group = gradzip.LocalGroup(gradzip.FFTRange(theta=0.95, bits=6, error_feedback=True), size)
    check_conservation(group, lambda step: [torch.randn(64, 64) for _ in range(size)], 50, roundings=80, above=1e3)


def test_clone_shares_hyper_parameters_only():
    a = gradzip.FFTRange(theta=0.7)
    b = a.clone()
    assert a == b and a.digest == b.digest and a.states is not b.states and a.traffic is not b.traffic


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
@pytest.mark.parametrize("spec", kinds.ALL)
def test_copies_continue_with_the_state(spec, copied):
    group = gradzip.LocalGroup(gradzip.parse(spec), 2)

    def average(step):
        generator = torch.Generator().manual_seed(step)
        return group.average([torch.randn(SHAPE, generator=generator) for _ in range(2)], "w")[0]

    for step in range(STEPS):
        average(step)
    original, group.compressors = group.compressors, [copied(c) for c in group.compressors]
    assert group.compressors == original
    for of_copy, part in zip(group.compressors[0].parts, original[0].parts, strict=True):
        assert of_copy.memory is not part.memory and of_copy.traffic is group.compressors[0].traffic
        assert not of_copy.workspace._buffers  # they are as large as gradients
    average_of_copies = average(STEPS)
    group.compressors = original
    assert torch.equal(average_of_copies, average(STEPS))


def test_digest_covers_hyper_parameters_and_schedule_classes():
    base = gradzip.FFTRange()
    others = [gradzip.FFTRange(theta=0.9), gradzip.FFTRange(bits=8), gradzip.FFTRange(block=None), gradzip.Cast()]
    assert len({c.digest for c in [base, *others]}) == 5
    one, two = (gradzip.FFTRange(theta=gradzip.StepSchedule({0: t})) for t in (0.5, 0.5))
    assert one.digest == two.digest != base.digest


def test_traffic_counts_compressed_and_dense_bytes():
    group = gradzip.LocalGroup(gradzip.FFTRange(), 2)
    x = torch.randn(512, 512)
    group.average([x, x], "w")
    group.average([x[0], x[0]], "b")
    traffic = group.compressors[0].traffic
    assert traffic.bytes_dense == 4 * (512 * 512 + 512)
    assert traffic.bytes_sent == group.bytes_sent == gradzip.roundtrip(gradzip.FFTRange(), x)[1] + 4 * 512
    assert traffic.ratio == traffic.bytes_dense / traffic.bytes_sent
    assert gradzip.Traffic().ratio == gradzip.Traffic().wire_ratio(2) == 1.0


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
def test_bytes_on_the_wire_are_what_other_ranks_get(size):
    """A gathered payload goes to all others; an average takes as many bytes as its parts to and from their owners."""
    x = torch.randn(64, 64)

    def on_the_wire(method):
        group = gradzip.LocalGroup(method, size)
        group.average([x] * size, "w")
        return group.bytes_wire, group

    reduced = 2 * (size - 1) / size
    dense, group = on_the_wire(gradzip.NoCompression())
    assert dense == reduced * x.nbytes and group.compressors[0].traffic.wire_ratio(size) == 1
    assert on_the_wire(gradzip.ACPSGD(rank=2))[0] == reduced * 4 * 2 * 64
    payload = gradzip.roundtrip(gradzip.SignSGD(), x)[1]
    assert on_the_wire(gradzip.SignSGD())[0] == (size - 1) * payload
    partition = -(-4096 // 32 // size) * (32 + 4)  # blocks of 32 integers and a step; a rank gets and sends its own
    assert on_the_wire(gradzip.BlockFloat(bits=8, block=32))[0] == pytest.approx(2 * (size - 1) * partition)


def test_bytes_on_the_wire_between_nodes():
    """Two nodes of three ranks: a rank sends its chunk to one peer, and the rest within the node."""
    group = gradzip.LocalGroup(gradzip.Hierarchical(gradzip.SignSGD()), (2, 3))
    group.average([torch.randn(96, 64)] * 6, "w")
    assert group.bytes_wire == group.bytes_sent > 96 * 64 / 3 / 8


def test_random_keys_are_unique_and_reproducible():
    keys = [Key(s, t, n, r) for s in (0, 1) for t in (0, 1) for n in ("a", "b") for r in (0, 1, "shared")]
    assert len({k.bits for k in keys}) == len(keys)
    assert Key(0, 0, "conv1.weight", 0).bits == Key(0, 0, "conv1.weight", 0).bits


def test_torchs_generator_is_not_used(compressor):
    group, grads = gradzip.LocalGroup(compressor, 2), [torch.randn(SHAPE) for _ in range(2)]
    before = torch.get_rng_state()
    for _ in range(STEPS):
        group.average(grads, "w")
    assert torch.equal(torch.get_rng_state(), before)


def test_invalid_gradients_and_arguments_are_refused():
    with pytest.raises(ValueError, match="torch.int64, expected a floating-point or complex type"):
        gradzip.roundtrip(gradzip.FFTRange(), torch.ones(64, 64, dtype=torch.int64))
    with pytest.raises(ValueError, match="sparse_coo"):
        gradzip.roundtrip(gradzip.FFTRange(), torch.ones(64, 64).to_sparse())
    with pytest.raises(ValueError, match="got min_numel = -1"):
        gradzip.NoCompression(min_numel=-1)
    with pytest.raises(ValueError, match="expected torch.float16 or torch.bfloat16"):
        gradzip.Cast(dtype=torch.int8)


def test_local_group_refuses_mismatched_gradients():
    group = gradzip.LocalGroup(gradzip.NoCompression(), 2)
    with pytest.raises(ValueError, match="got 1 gradients, expected 2"):
        group.average([torch.ones(3)], "w")
    with pytest.raises(ValueError, match=r"float32 \(3,\), torch.float32 \(4,\), expected equal types and shapes"):
        group.average([torch.ones(3), torch.ones(4)], "w")
    with pytest.raises(ValueError, match=r"float32 \(3,\), torch.float16 \(3,\), expected equal types and shapes"):
        group.average([torch.ones(3), torch.ones(3).half()], "w")
    with pytest.raises(TypeError, match="got a gradient of type list, expected tensors"):
        group.average([torch.ones(3), [1.0]], "w")
    with pytest.raises(ValueError, match=r"got gradients 'v' of none, torch.float32 \(3,\), expected equal types"):
        group.step([{"w": torch.ones(3)}, {"w": torch.ones(3), "v": torch.ones(3)}])
    for size in (0, "2"):
        with pytest.raises(ValueError, match=f"got size = {size!r}, expected an integer >= 1"):
            gradzip.LocalGroup(gradzip.NoCompression(), size)
    for compressor in (gradzip.TopK, "topk"):
        with pytest.raises(TypeError, match="expected a compressor, such as gradzip.TopK()"):
            gradzip.roundtrip(compressor, torch.ones(3))


def test_bool_and_seed_arguments_reject_strings():
    for method in registered().values():
        for f in dataclasses.fields(method):
            if isinstance(f.default, bool):
                with pytest.raises(ValueError, match=f"got {f.name} = 'no', expected True(,| or) False"):
                    method(**{f.name: "no"})
            elif f.name == "seed":
                with pytest.raises(ValueError, match="got seed = '1', expected an integer"):
                    method(seed="1")


def test_shape_change_of_a_parameter_is_refused():
    group = gradzip.LocalGroup(gradzip.TopK(theta=0.9), 1)
    group.average([torch.randn(64, 48)], "w")
    words = r"TopK, parameter 'w': got a gradient of shape \(48, 64\), expected \(64, 48\) as in the step before"
    with pytest.raises(ValueError, match=words):
        group.average([torch.randn(48, 64)], "w")


@pytest.mark.parametrize("setting", ["dtype", "device"])
def test_torch_default_dtype_and_device_do_not_matter(compressor, setting):
    """Tensors are created with explicit dtype and device."""
    own = [[torch.randn(64, 48), torch.randn(64, 16, 3, 3)] for _ in range(3)]

    def averages():
        group = gradzip.LocalGroup(compressor, 2)
        return [group.average([g.clone(), g / 2], f"g{i}")[0] for grads in own for i, g in enumerate(grads)]

    expected = averages()
    (torch.set_default_dtype if setting == "dtype" else torch.set_default_device)(
        torch.float64 if setting == "dtype" else "meta"
    )
    try:
        got = averages()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


def grad_scaler(value):
    scaler = torch.amp.GradScaler("cpu", init_scale=value)
    scaler.scale(torch.zeros(()))  # initializes the scale lazily
    return scaler


def keeps_scaled_state(spec):
    fields = observed(spec).fields
    return any(fields & {*part.loss_scaled} for part in gradzip.parse(spec).parts)


@pytest.mark.parametrize("spec", kinds.params([*filter(keeps_scaled_state, kinds.ALL)]))
def test_states_follow_the_loss_scale(spec):
    """Powers of two multiply exactly, so averages have the same bits as without a loss scale."""
    group, plain = (gradzip.LocalGroup(gradzip.parse(spec), 3) for _ in range(2))
    scaler = grad_scaler(2.0**16)
    for compressor in group.compressors:
        assert compressor.follow(scaler) is compressor
    unaware = gradzip.LocalGroup(gradzip.parse(spec), 3)
    differs = False
    for step, value in enumerate([2.0**16, 2.0**16, 2.0**15, 2.0**17, 2.0**17, 2.0**10]):
        scaler.update(value)
        for name, shape in (("w", (64, 64)), ("conv", (16, 8, 3, 3)), ("bias", (64,))):
            grads = [torch.randn(shape, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(3)]
            expected = plain.average(grads, name)[0]
            assert torch.equal(group.average([g * value for g in grads], name)[0] / value, expected)
            differs |= not torch.equal(unaware.average([g * value for g in grads], name)[0] / value, expected)
    assert differs  # without `follow`, residuals of several scales are mixed


def test_loss_scale_survives_a_checkpoint():
    scaler = grad_scaler(2.0**16)
    group, resumed = (gradzip.LocalGroup(gradzip.TopK(theta=0.9), 1) for _ in range(2))
    for of in (group, resumed):
        of.compressors[0].follow(scaler)
    group.average([torch.randn(64, 64)], "w")
    resumed.compressors[0].load_state_dict(group.compressors[0].state_dict())
    scaler.update(2.0**15)
    grad = torch.randn(64, 64)
    assert torch.equal(resumed.average([grad], "w")[0], group.average([grad], "w")[0])


def test_checkpoint_with_loss_scale_resumes_without_one():
    scaler = grad_scaler(2.0**10)
    grads = [torch.randn(64, 64) for _ in range(4)]
    group, plain, resumed = (gradzip.LocalGroup(gradzip.TopK(theta=0.9), 1) for _ in range(3))
    group.compressors[0].follow(scaler)
    group.average([grads[0] * 2.0**10], "w")
    plain.average([grads[0]], "w")
    resumed.compressors[0].load_state_dict(group.compressors[0].state_dict())
    for grad in grads[1:]:
        assert torch.equal(resumed.average([grad], "w")[0], plain.average([grad], "w")[0])


def test_follow_accepts_grad_scalers_only():
    for scaler in (3, torch.amp.GradScaler):
        with pytest.raises(
            ValueError, match=r"follow: got .*, expected a torch.amp.GradScaler, as in follow\(scaler\)"
        ):
            gradzip.TopK().follow(scaler)
