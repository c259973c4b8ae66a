"""What FFTRange and DCTRange have in common: errors, payloads, replicas, error feedback, schedules and ranges."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch

import gradzip
from gradzip import DCTRange, FFTRange, LocalGroup, StepSchedule, roundtrip, simulate
from gradzip.engines.local import drive
from gradzip.memory.state import Key
from gradzip.methods.base.group import averaged
from reference import (
    FLT_MAX,
    Basis,
    CodecPayload,
    U,
    correlated,
    dct_basis,
    encode_bitmap,
    fft_basis,
    padded,
    read_dct_payload,
    read_fft_payload,
    resnet20_gradients,
    same_everywhere,
)
from single import decode

DCT10 = functools.partial(DCTRange, bits=10)
# By name: a method, and a shape of about 4096 elements.
METHODS = {
    "fft 64": (FFTRange, (64, 64)),
    "fft 1024": (functools.partial(FFTRange, block=1024), (64, 64)),
    "fft 4096": (functools.partial(FFTRange, block=4096), (64, 64)),
    "fft None": (functools.partial(FFTRange, block=None), (64, 64)),
    "dct 3x3": (DCT10, (16, 28, 3, 3)),
    "dct none": (DCT10, (64, 64)),
    "dct 32": (functools.partial(DCT10, block=32), (64, 64)),
}
every_method = pytest.mark.parametrize("make, shape", METHODS.values(), ids=METHODS.keys())
both_methods = pytest.mark.parametrize(
    "make, shape", [METHODS["fft 64"], METHODS["dct 3x3"]], ids=["FFTRange", "DCTRange"]
)
KEY = Key(0, 0, "", 0)


def norm(x) -> float:
    return float(torch.as_tensor(x).double().norm())


def basis(codec, shape) -> Basis:
    numel = math.prod(shape)
    if isinstance(codec, FFTRange):
        return fft_basis(numel, codec.block)
    kernel = [n for n in shape[2:] if n > 1]
    return dct_basis(numel, *(kernel or ([codec.block] if codec.block else [])))


def read(codec, payload: torch.Tensor) -> CodecPayload:
    return read_fft_payload(payload, codec.block) if isinstance(codec, FFTRange) else read_dct_payload(payload)


def encoded(codec, grad: torch.Tensor) -> CodecPayload:
    return read(codec, codec.encode(grad, KEY))


def documented_nbytes(codec, grad: torch.Tensor, theta: float | None = None) -> int:
    """Header; N-bit numbers of k groups; coded bitmap; padded to 16."""
    of = basis(codec, grad.shape)
    k = of.num_kept(codec.theta if theta is None else theta)
    codes = -(-k * of.blocks.group * codec.bits // 8)
    index = len(encode_bitmap(of.largest(of.coefficients(grad.numpy()), k), of.segment))
    return padded(48 + codes + index)


# --- approximation error


@pytest.mark.parametrize("theta", [0.5, 0.85, 0.95])
@every_method
def test_error_on_real_gradients_is_near_optimal(make, shape, theta):
    """The error is that of the best k groups plus quantization: less than 0.1 % more at 10 bits."""
    for name, grad in list(resnet20_gradients().items())[::3]:
        grad = grad.flatten(1) if len(shape) == 2 else grad
        of, x = basis(make(), grad.shape), grad.double().numpy()
        best = norm(x - of.best(x, of.num_kept(theta)))
        for bits, least, most in ((16, -1e-6, 1e-5), (10, 1e-8, 1e-3), (6, 1e-6, 0.07)):
            error = norm(grad - roundtrip(make(theta=theta, bits=bits), grad)[0])
            assert least <= error / best - 1 <= most, (name, bits, error / best)


@every_method
def test_error_is_that_of_dropping_plus_rounding(make, shape):
    """Dropping and rounding affect different coefficients, so their squared errors add up (Parseval)."""
    grad, codec = correlated(*shape), make(theta=0.8, bits=8)
    of = basis(codec, shape)
    coefficients, payload = of.coefficients(grad.numpy()), encoded(codec, grad)
    mask = of.largest(coefficients, payload.k)
    assert np.array_equal(payload.mask, mask)
    kept = of.put(mask, of.take(coefficients, mask))
    dropped, rounded = norm(coefficients - kept), norm(payload.coefficients - kept)
    assert 0.001 < rounded / dropped < 0.2
    assert norm(grad - roundtrip(codec, grad)[0]) == pytest.approx(math.hypot(dropped, rounded), rel=1e-5)


@pytest.mark.parametrize("error_feedback", [False, True])
@every_method
def test_payload_layout_is_as_documented(make, shape, error_feedback):
    for grad in (correlated(*shape), correlated(37, 41), correlated(20, 7, 5, 3), correlated(300, 91)):
        codec = make(error_feedback=error_feedback)
        sent = codec.encode(grad, KEY)
        payload, of = read(codec, sent), basis(codec, grad.shape)
        assert payload[:3] == (b"gz", 2, codec.number) and payload.flags == 0
        assert (payload.digest, payload.numel, payload.nbytes) == (codec.digest, grad.numel(), sent.numel())
        assert payload.basis == of and payload.k == of.num_kept(0.85) == payload.mask.sum()
        assert payload.nbytes == documented_nbytes(codec, grad)
        decoded = decode(codec, [sent], (grad.numel(),))
        rounding = 4 * U * math.log2(of.rows[1] if of.rows else max(2, of.blocks.length))
        assert norm(decoded.double() - torch.from_numpy(payload.elements)) <= rounding * norm(payload.elements)


@every_method
def test_theta_0_with_16_bits_is_nearly_lossless(make, shape):
    """Only rounding remains. It is uniform in steps of a relative 2^-m to 2^-(m+1): 0.29 to 0.58 of 2^-(m+1)."""
    codec = make(theta=0.0, bits=16)
    for grad in (correlated(*shape), correlated(317, 33), *list(resnet20_gradients().values())[:3]):
        mantissa = encoded(codec, grad).format.mantissa
        error = norm(grad - roundtrip(codec, grad)[0]) / norm(grad)
        assert 0.29 * 2.0 ** -(mantissa + 1) < error < 0.58 * 2.0 ** -(mantissa + 1)
        assert mantissa >= 11  # the exponent covers at least 16 octaves


@both_methods
def test_error_falls_with_more_bits_and_coefficients(make, shape):
    grad = correlated(*shape)
    by_bits = [norm(grad - roundtrip(make(theta=0.0, bits=bits), grad)[0]) for bits in range(3, 17)]
    assert all(fine < coarse for coarse, fine in itertools.pairwise(by_bits))
    by_theta = [norm(grad - roundtrip(make(theta=theta), grad)[0]) for theta in (0.99, 0.9, 0.8, 0.5, 0.2)]
    assert all(fine < coarse for coarse, fine in itertools.pairwise(by_theta))


@every_method
def test_zeros(make, shape):
    for zero in (0.0, -0.0):
        grad = torch.full(shape, zero)
        approximation, nbytes = roundtrip(make(), grad)
        assert not approximation.any() and nbytes == documented_nbytes(make(), grad)


@pytest.mark.parametrize("bits", [4, 10, 16])
@pytest.mark.parametrize("constant", [1.0, 0.3, -0.3, 1e-5, -1e-5, 1e-30, 1e30])
@every_method
def test_constant_gradients(make, shape, constant, bits):
    """A row of a constant has one coefficient, all of the same sign, so all codes serve that sign."""
    grad = torch.full(shape, constant)
    codec = make(bits=bits, theta=0.85 if basis(make(), shape).blocks.length > 1 else 0.0)
    approximation, _ = roundtrip(codec, grad)
    error = ((approximation.double() - grad.double()) / grad.double()).abs().max().item()
    assert error <= 2.0 ** -(bits - 2)


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e-10, 1e10, 1e30])
@both_methods
def test_relative_error_is_independent_of_scale(make, shape, scale):
    grad = correlated(*shape) * 1000
    expected = norm(grad - roundtrip(make(), grad)[0]) / norm(grad)
    scaled = (grad.double() * scale).float()
    error = norm(scaled.double() - roundtrip(make(), scaled)[0].double()) / norm(scaled)
    assert error == pytest.approx(expected, rel=0.05 if scale > 1e-38 else 0.2)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@every_method
def test_bits_are_independent_of_threads_and_simd(make, shape, rounding):
    """Ranks may have other processors. Payloads of a single row of torch's FFT depend on the number of threads."""
    codec = make(rounding=rounding)
    for grad in (correlated(*shape), correlated(111, 1300)):

        def encode(grad=grad):
            return codec.encode(grad, Key(0, 3, "w", 1))

        sent = (
            encode() if getattr(codec, "block", 0) is None and isinstance(codec, FFTRange) else same_everywhere(encode)
        )
        same_everywhere(lambda: decode(codec, [sent, sent], (grad.numel(),)).clone())  # noqa: B023


@pytest.mark.parametrize("theta, bits", [(0.0, 16), (0.5, 7), (0.85, 10), (0.999, 2)])
@every_method
def test_bytes_equal_the_documented_formula(make, shape, theta, bits):
    for dims in ((32, 32), (33, 63), (1, 5000), (13, 7, 3, 5)):
        grad = correlated(*dims)
        codec = make(theta=theta, bits=bits)
        group = LocalGroup(codec, 2)
        group.average([grad, grad], "w")
        assert group.bytes_sent == documented_nbytes(codec, grad)
        assert group.compressors[0].traffic.bytes_dense == 4 * grad.numel()


# --- averages of several ranks


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@every_method
def test_average(make, shape, size):
    """The average is bit-identical on all ranks, and equals the mean of the ranks' decoded gradients.

    Coefficients are added before the inverse transform. This changes rounding by a few u log2(n) of the norm.
    """
    shape = (shape[0], shape[1] + 1, *shape[2:])
    grads = [correlated(*shape, seed=seed) * (1 + seed) for seed in range(size)]
    averages = simulate(make(), grads)
    for average in averages:
        assert torch.equal(average, averages[0])
    alone = torch.stack([roundtrip(make(), grad)[0].double() for grad in grads])
    assert norm(averages[0] - alone.mean(0)) <= 4 * U * 12 * float(alone.flatten(1).norm(dim=1).mean())
    assert norm(averages[0] - torch.stack(grads).double().mean(0)) > 0.05 * norm(averages[0])  # compression is on


@pytest.mark.parametrize("size", [2, 3])
@both_methods
def test_stochastic_rounding_is_unbiased_and_keyed(make, shape, size):
    grad = correlated(*shape)
    # A fitted range may end below the largest value, by half a step at most. This one does not.
    make = functools.partial(make, theta=0.0, bits=5, value_range=norm(grad), error_feedback=False)
    codec = make(rounding="stochastic", seed=3)
    group = LocalGroup(codec, size)
    first = group.average([grad] * size, "a")
    assert all(torch.equal(first[0], other) for other in first)
    sent = [c.encode(grad, Key(3, 0, "a", rank)) for rank, c in enumerate(group.compressors)]
    assert not torch.equal(sent[0], sent[1])
    again = LocalGroup(codec, size).average([grad] * size, "a")[0]
    assert torch.equal(first[0], again)
    others = [group.average([grad] * size, "a")[0], LocalGroup(codec, size).average([grad] * size, "b")[0]]
    others.append(simulate(make(rounding="stochastic", seed=4), [grad] * size, "a")[0])
    for other in others:
        assert not torch.equal(first[0], other)

    def error(rounding: str, steps: int) -> float:
        group = LocalGroup(make(rounding=rounding), 1)
        return norm(sum(group.average([grad], "a")[0].double() for _ in range(steps)) / steps - grad)

    # The mean of n draws has 1/sqrt(n) of the error of one. Rounding to nearest has the same error each time.
    assert error("stochastic", 64) == pytest.approx(error("stochastic", 1) / 8, rel=0.15)
    assert error("nearest", 64) == pytest.approx(error("nearest", 1), rel=1e-6)


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LAYOUTS = {
    "contiguous": lambda: torch.empty(16, 12, 5, 5),
    "channels_last": lambda: torch.empty(16, 12, 5, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.empty(80, 60).t(),
    "permuted": lambda: torch.empty(5, 16, 12, 5).permute(2, 0, 3, 1),
    "every other column": lambda: torch.empty(60, 160)[:, ::2],
    "offset": lambda: torch.empty(4801)[1:].view(60, 80),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@both_methods
def test_dtype_shape_and_strides_are_kept(make, shape, layout, dtype):
    empty = LAYOUTS[layout]()
    values = [(correlated(*empty.shape, seed=seed) * 1000).to(dtype) for seed in range(2)]
    plain = simulate(make(), [v.float() for v in values])[0]
    grads = []
    for value in values:
        storage = torch.full((empty.untyped_storage().nbytes() // 4,), 7.0, dtype=dtype)
        grads.append(storage.as_strided(empty.shape, empty.stride(), empty.storage_offset()).copy_(value))
    before = [(g.shape, g.stride(), g.data_ptr()) for g in grads]
    codecs = [make(), make()]
    averages = drive([averaged(codec, g, "w", rank) for rank, (codec, g) in enumerate(zip(codecs, grads))])
    for average, previous in zip(averages, before):
        assert (average.shape, average.stride(), average.data_ptr()) == previous  # in the memory of the gradient
        assert average.dtype == dtype
        assert torch.equal(average, plain.to(dtype))
    if layout == "every other column":
        assert bool((averages[0].as_strided((60, 80), (160, 1), 1)[:, ::2] == 7.0).all())  # other columns
    simulated = simulate(make(), [g.clone() for g in values])[0]
    assert simulated.dtype == dtype and torch.equal(simulated, plain.to(dtype))


@pytest.mark.parametrize("exchange", ["gather", "scatter_reduce"])
@pytest.mark.parametrize(
    "tiny", [(1, 1), (2, 1), (1, 3), (7, 9), (0, 5), (3, 0), (2, 1, 3), (1, 1, 3, 3), (3, 0, 3, 3)]
)
@every_method
def test_tiny_tensors_with_min_numel_0(make, shape, tiny, exchange):
    """min_numel=0 compresses any matrix."""
    grads = [correlated(*tiny, seed=seed) for seed in range(2)]
    averages = simulate(make(theta=0.0, bits=16, min_numel=0, exchange=exchange), grads)
    expected = (grads[0] + grads[1]) / 2
    assert averages[0].shape == tiny and torch.equal(averages[0], averages[1])
    assert norm(averages[0] - expected) <= 2e-3 * (norm(grads[0]) + norm(grads[1]))


# --- gradients that are not finite


@both_methods
def test_overflow_of_the_transform_is_non_finite(make, shape):
    grad = torch.full(shape, FLT_MAX / 2)
    group = LocalGroup(make(error_feedback=True), 2)
    averages = group.average([grad, torch.ones(shape)], "w")
    assert all(not a.isfinite().any() for a in averages)
    assert all(c.states["w"].step == 0 and c.states["w"].residual is None for c in group.compressors)


@every_method
def test_overflow_of_the_average_in_half_precision(make, shape):
    """The average of finite float16 gradients may round to infinity. The step is then undone, too."""
    grad = torch.full(shape, 65504.0, dtype=torch.float16)
    group = LocalGroup(make(bits=6, mantissa=2, theta=0.0, error_feedback=True), 2)  # rounds it to 65536
    for average in group.average([grad, grad], "w"):
        assert not average.isfinite().any()
    assert all(c.states["w"].step == 0 and c.states["w"].residual is None for c in group.compressors)


# --- error feedback


@pytest.mark.parametrize(
    "exchange, size, dtype",
    [
        ("gather", 1, torch.float64),
        ("gather", 3, torch.float32),
        ("scatter_reduce", 3, torch.float64),
        ("scatter_reduce", 20, torch.float32),
    ],
)
@both_methods
def test_error_feedback_conserves_the_sum(make, shape, exchange, size, dtype):
    """Sum of averages + mean residual + owners' residuals = sum of mean gradients. 20 ranks' partitions cut kernels.

    A step rounds the corrected gradient and the residual once (u of each), and transforms the mean instead of taking
    the mean of transforms (a few u log2(n)); with scatter-reduce, twice.
    """
    group = LocalGroup(make(theta=0.95, bits=6, error_feedback=True, exchange=exchange), size)
    averages = gradients = torch.zeros(shape, dtype=torch.float64)
    bound = 0.0
    for step in range(20 if size < 20 else 3):
        grads = [correlated(*shape, seed=100 * step + rank).to(dtype) for rank in range(size)]
        before = [c.states["w"].residual for c in group.compressors if c.states]
        corrected = max(norm(g) + (norm(before[i]) if before else 0.0) for i, g in enumerate(grads))
        average = group.average(grads, "w")[0]
        assert average.dtype == dtype
        averages = averages + average.double()
        gradients = gradients + sum(g.double() for g in grads) / size
        bound += 2 * (2 + 8 * 6) * U * corrected
    states = [c.states["w"] for c in group.compressors]
    residual = sum(s.residual.double() for s in states).view(shape) / size
    if exchange == "scatter_reduce":
        residual = residual + torch.cat([s.owner_residual.double().view(-1) for s in states]).view(shape)
    assert norm(averages + residual - gradients) <= bound
    assert norm(residual) > 300 * bound  # the residual is not just rounding
    assert norm(averages - gradients) == pytest.approx(norm(residual), rel=1e-3)


@every_method
def test_residual_is_the_corrected_gradient_less_what_is_decoded(make, shape):
    """Bit for bit: what is subtracted is what the peers add."""
    group, residual = LocalGroup(make(error_feedback=True), 1), torch.zeros(shape)
    for step in range(3):
        corrected = correlated(*shape, seed=step) + residual
        average = group.average([correlated(*shape, seed=step)], "w")[0]
        residual = group.compressors[0].states["w"].residual.view(shape).clone()
        assert torch.equal(residual, corrected - average)


@both_methods
def test_no_residual_without_error_feedback(make, shape):
    group = LocalGroup(make(error_feedback=False), 1)
    for _ in range(3):
        group.average([correlated(*shape)], "w")
    assert group.compressors[0].states["w"].residual is None
    assert group.compressors[0].states["w"].step == 3


@both_methods
def test_error_feedback_converges_for_a_fixed_gradient(make, shape):
    """For a fixed gradient, the error of the mean average decreases as 1 / steps."""
    grad = correlated(*shape)
    group = LocalGroup(make(theta=0.9, error_feedback=True), 2)
    total = torch.zeros(shape, dtype=torch.float64)
    errors = {}
    for step in range(1, 81):
        total += group.average([grad, grad], "w")[0].double()
        errors[step] = norm(total / step - grad)
    assert errors[80] < errors[20] / 3 and errors[20] < errors[1] / 3


# --- schedules, fixed range, mantissa


def bytes_of_steps(group, grad, steps, name="w"):
    sent = []
    for _ in range(steps):
        before = group.bytes_sent
        group.average([grad] * len(group.compressors), name)
        sent.append(group.bytes_sent - before)
    return sent


@both_methods
def test_step_schedule_changes_the_payload(make, shape):
    grad = correlated(*shape)
    codec = make(theta=StepSchedule({0: 0.95, 2: 0.85, 3: 0.5}), error_feedback=False)
    group = LocalGroup(codec, 2)
    expected = [documented_nbytes(make(error_feedback=False), grad, theta) for theta in (0.95, 0.95, 0.85, 0.5, 0.5)]
    assert bytes_of_steps(group, grad, 5) == expected


@both_methods
def test_steps_are_counted_per_parameter(make, shape):
    grad, group = correlated(*shape), LocalGroup(make(theta=StepSchedule({0: 0.9, 1: 0.5}), error_feedback=False), 1)
    for name, theta in (("a", 0.9), ("a", 0.5), ("b", 0.9)):
        assert bytes_of_steps(group, grad, 1, name) == [documented_nbytes(make(), grad, theta)]


@both_methods
def test_diminishing_theta_changes_the_payload(make, shape):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    grad = correlated(*shape)
    theta = gradzip.DiminishingTheta(optimizer, lipschitz=0.9**2 / 0.1)
    group = LocalGroup(make(theta=theta, error_feedback=False), 1)
    for rate in (0.1, 0.05, 0.01, 0.0):
        optimizer.param_groups[0]["lr"] = rate
        assert bytes_of_steps(group, grad, 1) == [documented_nbytes(make(), grad, 0.9 * math.sqrt(rate / 0.1))]


@both_methods
def test_invalid_schedule_value_names_the_step(make, shape):
    group = LocalGroup(make(theta=lambda step: 0.5 + step), 1)
    group.average([correlated(*shape)], "w")
    with pytest.raises(ValueError, match="got theta = 1.5 at step 1, expected a number in"):
        group.average([correlated(*shape)], "w")


@pytest.mark.parametrize("limit", [0.002, (-0.001, 0.004), (0.0, 0.003), (-0.002, 0.0)])
@both_methods
def test_fixed_range_clamps_and_counts(make, shape, limit):
    grad = correlated(*shape)
    low, high = limit if isinstance(limit, tuple) else (-limit, limit)
    codec = make(theta=0.8, mantissa=6, value_range=limit)
    of = basis(codec, shape)
    coefficients = of.coefficients(grad.numpy())
    values = of.take(coefficients, of.largest(coefficients, of.num_kept(0.8)))
    outside = int(((values < low) | (values > high)).sum())
    assert np.abs(values - low).min() > 1e-8 and np.abs(values - high).min() > 1e-8 and outside > 10
    payload = encoded(codec, grad)
    assert codec.clamped == outside
    step = 2.0**-payload.format.mantissa
    sent = payload.coefficients
    assert low * (1 + step) <= sent.min() and sent.max() <= high * (1 + step)
    assert sent.min() <= low * (1 - step) and sent.max() >= high * (1 - step)
    codec.encode(grad, KEY)
    assert codec.clamped == 2 * outside


@both_methods
def test_wide_and_fitted_ranges_clamp_nothing(make, shape):
    for codec in (make(value_range=1e6), make()):
        codec.encode(correlated(*shape), KEY)
        assert codec.clamped == 0


@both_methods
def test_mantissa_argument(make, shape):
    for mantissa in (1, 5, 10):
        assert encoded(make(mantissa=mantissa), correlated(*shape)).format.mantissa == mantissa


# --- invalid arguments


@pytest.mark.parametrize(
    "arguments",
    [
        *({"theta": theta} for theta in (-0.1, 1.0, 1, 85, math.nan, "0.85", None, [0.85])),
        *({"bits": bits} for bits in (-1, 0, 1, 17, 32, 10.0, "10", None)),
        *({"mantissa": mantissa} for mantissa in (-1, 0, 11, 23, 5.0, "5")),
        *({"block": block} for block in (-4096, 0, 1, 4096.0, "4096", True)),
        *({"value_range": limit} for limit in (0, 0.0, -1.0, math.inf, math.nan, (1.0, 2.0), (1.0, -1.0))),
        *({"value_range": limit} for limit in ((0.0, 0.0), (-math.inf, 1.0), (-1.0, math.nan), (-1.0, 0.0, 1.0))),
        *({"value_range": limit} for limit in ("auto", [-1.0, 1.0], ("a", "b"), 1e39, 1e-60, (-1.0, 1e39), (1.0,))),
        *({"rounding": rounding} for rounding in ("down", None, "Nearest", 1)),
        *({"exchange": exchange} for exchange in ("ring", None, True)),
        *({"min_numel": numel} for numel in (-1, 1.5, None)),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", [FFTRange, DCTRange])
def test_invalid_arguments(method, arguments):
    with pytest.raises(ValueError, match="got .*, expected") as error:
        method(**arguments)
    assert "\n" not in str(error.value)
