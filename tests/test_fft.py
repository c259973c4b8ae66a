"""FFTRange: errors, payload format, sizes, replicas, error feedback and schedules."""

import itertools
import math

import numpy as np
import pytest
import torch

import gradzip
from gradzip import FFTRange, LocalGroup, StepSchedule, roundtrip, simulate
from gradzip.averaging import averaged
from gradzip.engines.local import drive
from gradzip.methods.transform import transform_shape
from gradzip.state import Key
from reference import (
    FLT_MAX,
    U,
    fft_sparsify,
    kept_bins,
    read_fft_payload,
    resnet20_gradients,
    same_everywhere,
    signal,
    spectrum,
)

SHAPES = [(1000, 101), (317, 333), (64, 64, 5, 5), (512, 512), (1, 100003), (100003, 1), (128, 128, 3, 3), (11, 97, 97)]


def gradient(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers with correlated neighbours and heavy tails, as in real gradients."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, size=math.prod(shape) + 4) + 0.1
    x = sum(x[i : x.size - 4 + i] * w for i, w in enumerate((0.2, 0.5, 1.0, 0.5, 0.2))) * 1e-3
    return torch.tensor(x.reshape(shape), dtype=torch.float32)


def norm(x) -> float:
    return float(torch.as_tensor(x).double().norm())


def bins_and_kept(numel: int, theta: float, block: int | None) -> tuple[int, int]:
    rows, length = transform_shape(numel, block)
    total = rows * (length // 2 + 1)
    return total, max(1, round((1 - theta) * total))


def documented_nbytes(numel: int, theta: float = 0.85, bits: int = 10, block: int | None = 4096) -> int:
    """Header; bitmap of C bits; two N-bit numbers for each of k bins; padded to 16."""
    total, k = bins_and_kept(numel, theta, block)
    return -(-(48 + -(-total // 8) + -(-2 * k * bits // 8)) // 16) * 16


def ideal(grad: torch.Tensor, theta: float, block: int | None) -> torch.Tensor:
    """The best approximation by k bins of the same transform, in float64 and without quantization."""
    rows, length = transform_shape(grad.numel(), block)
    _, k = bins_and_kept(grad.numel(), theta, block)
    return torch.from_numpy(fft_sparsify(grad.double().numpy(), rows, length, k)).view(grad.shape)


# --- approximation error


@pytest.mark.parametrize("block", [None, 4096, 64])
@pytest.mark.parametrize("bits, least, most", [(16, -1e-6, 1e-5), (10, 3e-7, 1e-3), (6, 3e-5, 0.05)])
def test_error_on_real_gradients_is_near_optimal(bits, least, most, block):
    """The error is that of the best k frequencies plus quantization: less than 0.1 % more at 10 bits."""
    for theta in (0.5, 0.85, 0.95):
        for name, grad in resnet20_gradients().items():
            best = norm(grad - ideal(grad, theta, block))
            error = norm(grad - roundtrip(FFTRange(theta=theta, bits=bits, block=block), grad)[0])
            assert least <= error / best - 1 <= most, (name, theta, error / best)


@pytest.mark.parametrize("block", [None, 4096, 64])
def test_error_is_that_of_dropping_plus_rounding(block):
    """Dropping and rounding affect different bins, so their squared errors add up (Parseval)."""
    grad = gradient(64, 64)  # a multiple of every block, so there is no padding
    rows, length = transform_shape(grad.numel(), block)
    bins = spectrum(grad.double().numpy(), rows, length)
    codec = FFTRange(theta=0.8, bits=8, block=block)
    payload = read_fft_payload(codec.encode(grad.view(-1), Key(0, 0, "", 0)), bins.size)
    kept = kept_bins(bins, length, payload.k).reshape(-1)
    assert np.array_equal(payload.bins != 0, kept)
    flat = bins.reshape(-1)
    dropped = signal(np.where(kept, 0, flat).reshape(bins.shape), length, grad.numel())
    rounded = signal(np.where(kept, payload.bins - flat, 0).reshape(bins.shape), length, grad.numel())
    assert 0.001 < norm(rounded) / norm(dropped) < 0.2
    error = norm(grad - roundtrip(codec, grad)[0])
    assert error == pytest.approx(math.hypot(norm(dropped), norm(rounded)), rel=1e-5)


@pytest.mark.parametrize("block", [None, 4096, 1000, 64])
@pytest.mark.parametrize("shape", [(64, 64), (37, 41), (5, 7, 11, 13)])
def test_payload_layout_is_as_documented(shape, block):
    grad = gradient(*shape)
    codec = FFTRange(theta=0.85, bits=10, block=block)
    rows, length = transform_shape(grad.numel(), block)
    sent = codec.encode(grad.view(-1), Key(0, 0, "", 0))
    payload = read_fft_payload(sent, rows * (length // 2 + 1))
    expected = signal(payload.bins.reshape(rows, -1), length, grad.numel())
    decoded = codec.decode([sent], grad.numel())
    assert norm(decoded.double() - torch.from_numpy(expected)) <= 4 * U * math.log2(length) * norm(expected)


def test_theta_0_with_16_bits_is_nearly_lossless():
    """Only rounding remains. It is uniform in steps of a relative 2^-m to 2^-(m+1): 0.29 to 0.58 of 2^-(m+1)."""
    for grad in (gradient(64, 64), gradient(317, 333), *list(resnet20_gradients().values())[:3]):
        for block in (None, 4096, 64):
            codec = FFTRange(theta=0.0, bits=16, block=block)
            total, _ = bins_and_kept(grad.numel(), 0.0, block)
            mantissa = read_fft_payload(codec.encode(grad.reshape(-1), Key(0, 0, "", 0)), total).format.mantissa
            error = norm(grad - roundtrip(codec, grad)[0]) / norm(grad)
            assert 0.29 * 2.0 ** -(mantissa + 1) < error < 0.58 * 2.0 ** -(mantissa + 1)
            assert mantissa >= 11  # the exponent covers at least 16 octaves


def test_error_falls_with_more_bits_and_bins():
    grad = gradient(128, 130)
    by_bits = [norm(grad - roundtrip(FFTRange(theta=0.0, bits=bits), grad)[0]) for bits in range(3, 17)]
    assert all(fine < coarse for coarse, fine in itertools.pairwise(by_bits))
    by_theta = [norm(grad - roundtrip(FFTRange(theta=theta), grad)[0]) for theta in (0.99, 0.9, 0.8, 0.5, 0.2)]
    assert all(fine < coarse for coarse, fine in itertools.pairwise(by_theta))


@pytest.mark.parametrize("block", [None, 4096, 64, 100])
def test_zeros(block):
    for zero in (0.0, -0.0):
        grad = torch.full((40, 50), zero)
        approximation, nbytes = roundtrip(FFTRange(block=block), grad)
        assert not approximation.any() and nbytes == documented_nbytes(2000, block=block)


@pytest.mark.parametrize("bits", [4, 10, 16])
@pytest.mark.parametrize("constant", [1.0, 0.3, -0.3, 1e-5, -1e-5, 1e-30, 1e30])
@pytest.mark.parametrize("block", [None, 4096, 64])
def test_constant_gradients(constant, bits, block):
    """A constant has one bin, positive or negative, so all codes serve that sign."""
    grad = torch.full((64, 64), constant)
    approximation, _ = roundtrip(FFTRange(bits=bits, block=block), grad)
    error = ((approximation.double() - grad.double()) / grad.double()).abs().max().item()
    assert error <= 2.0 ** -(bits - 2)


def test_cosine_needs_one_bin():
    t = torch.arange(4096, dtype=torch.float64)
    for frequency in (1, 7, 100, 2047):
        grad = torch.cos(2 * math.pi * frequency * t / 4096).float().view(64, 64)
        codec = FFTRange(theta=0.9999, bits=12)
        payload = read_fft_payload(codec.encode(grad.view(-1), Key(0, 0, "", 0)), 2049)
        assert payload.k == 1 and np.flatnonzero(payload.bins).tolist() == [frequency]
        assert payload.bins[frequency].real == 32.0  # sqrt(4096) / 2
        approximation, nbytes = roundtrip(codec, grad)
        assert nbytes == documented_nbytes(4096, 0.9999, 12) == 320
        assert (approximation - grad).abs().max() <= 1e-6


def test_first_and_last_bin_count_once():
    """Interior bins count twice: a tone of energy 1 there outweighs 0.9 in bin 0 or the last bin, which is larger."""
    t = np.arange(4096)
    interior = np.cos(2 * np.pi * 300 * t / 4096) * math.sqrt(2)
    for end in (np.ones(4096), np.cos(np.pi * t)):
        grad = torch.tensor(interior + 0.95 * end, dtype=torch.float32)
        payload = read_fft_payload(FFTRange(theta=0.9999).encode(grad, Key(0, 0, "", 0)), 2049)
        assert np.flatnonzero(payload.bins).tolist() == [300]
        grad = torch.tensor(0.95 * interior + end, dtype=torch.float32)
        payload = read_fft_payload(FFTRange(theta=0.9999).encode(grad, Key(0, 0, "", 0)), 2049)
        assert np.flatnonzero(payload.bins).tolist() in ([0], [2048])


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e-10, 1e10, 1e30])
def test_relative_error_is_independent_of_scale(scale):
    grad = gradient(64, 65) * 1000
    expected = norm(grad - roundtrip(FFTRange(), grad)[0]) / norm(grad)
    scaled = (grad.double() * scale).float()
    error = norm(scaled.double() - roundtrip(FFTRange(), scaled)[0].double()) / norm(scaled)
    assert error == pytest.approx(expected, rel=0.05 if scale > 1e-38 else 0.2)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_bits_are_independent_of_threads_and_simd(rounding):
    grad = gradient(300, 301).view(-1)
    codec = FFTRange(rounding=rounding)

    def encode_and_decode():
        sent = codec.encode(grad, Key(0, 3, "w", 1))
        return sent, codec.decode([sent, sent], grad.numel()).clone()

    same_everywhere(encode_and_decode)


@pytest.mark.parametrize(
    ("block", "shape"), [(4096, (300, 301)), (64, (300, 301)), (None, (300, 301)), (2**18, (5, 2**18))]
)
def test_decoding_is_independent_of_the_number_of_threads(block, shape):
    """Ranks may have different numbers of cores. The last of 5 rows of 2^18 elements is transformed by itself."""
    grad = gradient(*shape).view(-1)
    codec = FFTRange(block=block)
    sent = codec.encode(grad, Key(0, 0, "w", 0))
    same_everywhere(lambda: codec.decode([sent, sent], grad.numel()).clone())


# --- sizes


@pytest.mark.parametrize("shape", SHAPES)
def test_compression_ratio(shape):
    """At least 15 for tensors of more than 100,000 elements, headers and bitmaps included."""
    grad = gradient(*shape)
    for block in (4096, None):
        approximation, nbytes = roundtrip(FFTRange(block=block), grad)
        assert nbytes == documented_nbytes(grad.numel(), block=block)
        assert 15 <= 4 * grad.numel() / nbytes <= 16.01
        assert approximation.shape == grad.shape


@pytest.mark.parametrize("block", [None, 4096, 64, 7, 2])
def test_bytes_equal_the_documented_formula(block):
    for shape in ((32, 32), (33, 63), (1, 5000), (13, 7, 3, 5)):
        grad = gradient(*shape)
        for theta, bits in ((0.0, 16), (0.5, 7), (0.85, 10), (0.999, 2)):
            group = LocalGroup(FFTRange(theta=theta, bits=bits, block=block), 2)
            group.average([grad, grad], "w")
            assert group.bytes_sent == documented_nbytes(grad.numel(), theta, bits, block)
            assert group.compressors[0].traffic.bytes_dense == 4 * grad.numel()


def test_compression_ratio_of_large_tensors():
    for numel in (*range(100_001, 140_000, 7), *range(10**6, 10**6 + 3000), 25_600_000, 2**31 + 1):
        for block in (4096, None):
            assert 4 * numel / documented_nbytes(numel, block=block) >= 15, (numel, block)


def smooth_lengths(most: int) -> np.ndarray:
    """All even numbers up to `most` without a prime factor above 5."""
    exponents = np.arange(1, 40)
    found = [
        2**two * 3**three * 5**five
        for two in exponents.tolist()
        for three in range(25)
        for five in range(17)
        if 2**two * 3**three * 5**five <= most
    ]
    return np.array(sorted(found))


@pytest.mark.parametrize("block", [None, 2, 3, 7, 64, 100, 1000, 4096, 4099, 65536])
def test_transform_shape(block):
    """As few rows as `block` allows, of the smallest smooth length that holds the gradient."""
    smooth = smooth_lengths(2**28)
    rng = np.random.default_rng(0)
    for numel in (*range(1, 3000), *(2 ** rng.uniform(10, 27, 2000)).astype(int).tolist()):
        rows, length = transform_shape(numel, block)
        assert rows == (1 if block is None else -(-numel // block))
        shortest = -(-numel // rows)
        fast = int(smooth[np.searchsorted(smooth, shortest)])
        assert length == (fast if block is None or fast <= block else shortest)
        assert rows * length >= numel and (block is None or length <= block)
        if numel >= 1024:
            # Smooth lengths above 60 are at most 1/8 apart (64, 72), above 1000 at most 1/14.
            gap = 1 / 14 if shortest > 1000 else 1 / 8 if shortest > 60 else 1 / 2
            assert rows * length <= numel * (1 + gap) + rows, (numel, block)


def test_smooth_lengths_are_dense():
    """The bounds on padding in `test_transform_shape` depend on this."""
    smooth = smooth_lengths(2**28)
    for above, gap in ((60, 1 / 8), (1000, 1 / 14)):
        tail = smooth[smooth >= above]
        assert (tail[1:] / tail[:-1]).max() <= 1 + gap


# --- averages of several ranks


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("block", [None, 4096, 64])
def test_average(size, block):
    """The average is bit-identical on all ranks, and equals the mean of the ranks' decoded gradients.

    Bins are added before the inverse transform. This changes rounding by a few u log2(n) of the norm.
    """
    grads = [gradient(64, 65, seed=seed) * (1 + seed) for seed in range(size)]
    averages = simulate(FFTRange(block=block), grads)
    for average in averages:
        assert torch.equal(average, averages[0])
    alone = torch.stack([roundtrip(FFTRange(block=block), grad)[0].double() for grad in grads])
    _, length = transform_shape(64 * 65, block)
    assert norm(averages[0] - alone.mean(0)) <= 4 * U * math.log2(length) * float(alone.flatten(1).norm(dim=1).mean())
    assert norm(averages[0] - torch.stack(grads).double().mean(0)) > 0.05 * norm(averages[0])  # compression is on


@pytest.mark.parametrize("size", [2, 3])
def test_stochastic_rounding_is_unbiased_and_keyed(size):
    grad = gradient(40, 40)
    codec = FFTRange(theta=0.0, bits=5, rounding="stochastic", seed=3)
    group = LocalGroup(codec, size)
    first = group.average([grad] * size, "a")
    assert all(torch.equal(first[0], other) for other in first)
    sent = [c.encode(grad.view(-1), Key(3, 0, "a", rank)) for rank, c in enumerate(group.compressors)]
    assert not torch.equal(sent[0], sent[1])
    again = LocalGroup(codec, size).average([grad] * size, "a")[0]
    assert torch.equal(first[0], again)
    others = [group.average([grad] * size, "a")[0], LocalGroup(codec, size).average([grad] * size, "b")[0]]
    others.append(simulate(FFTRange(theta=0.0, bits=5, rounding="stochastic", seed=4), [grad] * size, "a")[0])
    for other in others:
        assert not torch.equal(first[0], other)

    def error(rounding: str, steps: int) -> float:
        group = LocalGroup(FFTRange(theta=0.0, bits=5, rounding=rounding), 1)
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
def test_dtype_shape_and_strides_are_kept(layout, dtype):
    empty = LAYOUTS[layout]()
    values = [(gradient(*empty.shape, seed=seed) * 1000).to(dtype) for seed in range(2)]
    plain = simulate(FFTRange(), [v.float() for v in values])[0]
    grads = []
    for value in values:
        storage = torch.full((empty.untyped_storage().nbytes() // 4,), 7.0, dtype=dtype)
        grads.append(storage.as_strided(empty.shape, empty.stride(), empty.storage_offset()).copy_(value))
    before = [(g.shape, g.stride(), g.data_ptr()) for g in grads]
    codecs = [FFTRange(), FFTRange()]
    averages = drive([averaged(codec, g, "w", rank) for rank, (codec, g) in enumerate(zip(codecs, grads))])
    for average, previous in zip(averages, before):
        assert (average.shape, average.stride(), average.data_ptr()) == previous  # in the memory of the gradient
        assert average.dtype == dtype
        assert torch.equal(average, plain.to(dtype))
    if layout == "every other column":
        assert bool((averages[0].as_strided((60, 80), (160, 1), 1)[:, ::2] == 7.0).all())  # other columns
    simulated = simulate(FFTRange(), [g.clone() for g in values])[0]
    assert simulated.dtype == dtype and torch.equal(simulated, plain.to(dtype))


def test_local_group_does_not_change_gradients():
    grads = [gradient(40, 40, seed=seed) for seed in range(2)]
    copies = [g.clone() for g in grads]
    group = LocalGroup(FFTRange(error_feedback=True), 2)
    for _ in range(3):
        group.average(grads, "w")
    assert all(map(torch.equal, grads, copies))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (2000,), (0, 7), (1, 1), (31, 33)])
def test_small_and_1d_tensors_bypass_compression(shape):
    grads = [torch.full(shape, 1.25), torch.full(shape, 0.5)]
    group = LocalGroup(FFTRange(), 2)
    average = group.average(grads, "b")[0]
    assert torch.equal(average, torch.full(shape, 0.875))
    assert group.bytes_sent == 4 * grads[0].numel()


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3), (7, 9), (0, 5), (3, 0)])
@pytest.mark.parametrize("block", [None, 4096, 2, 3])
def test_tiny_tensors_with_min_numel_0(shape, block):
    """min_numel=0 compresses any matrix."""
    grads = [gradient(*shape, seed=seed) for seed in range(2)]
    averages = simulate(FFTRange(theta=0.0, bits=16, min_numel=0, block=block), grads)
    expected = (grads[0] + grads[1]) / 2
    assert averages[0].shape == shape
    assert norm(averages[0] - expected) <= 1e-3 * (norm(grads[0]) + norm(grads[1]))


# --- gradients that are not finite


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("size, rank", [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_non_finite_gradient_undoes_the_step_on_all_ranks(special, size, rank):
    """All averages are non-finite, and later averages equal those of a run without the step."""
    codec = FFTRange(error_feedback=True, rounding="stochastic")
    group, reference = LocalGroup(codec, size), LocalGroup(codec, size)
    steps = [[gradient(40, 45, seed=10 * step + r) for r in range(size)] for step in range(4)]
    for step, grads in enumerate(steps):
        expected = reference.average(grads, "w")
        if step in (0, 2):
            before = [(s.step, s.residual) for s in (c.states["w"] for c in group.compressors if c.states)]
            kept = [None if r is None else r.clone() for _, r in before]
            non_finite = [g.clone() for g in grads]
            non_finite[rank].view(-1)[step * 777] = special
            for average in group.average(non_finite, "w"):
                assert not average.isfinite().any()
            for (previous, residual), copy, c in zip(before, kept, group.compressors):
                assert c.states["w"].step == previous and c.states["w"].residual is residual
                assert residual is None or torch.equal(residual, copy)
            for c in group.compressors:
                assert c.states["w"].step == step
        for average, other in zip(group.average(grads, "w"), expected):
            assert torch.equal(average, other)


def test_overflow_of_the_transform_is_non_finite():
    grad = torch.full((64, 64), FLT_MAX / 2)
    group = LocalGroup(FFTRange(error_feedback=True), 2)
    averages = group.average([grad, torch.ones(64, 64)], "w")
    assert all(not a.isfinite().any() for a in averages)
    assert all(c.states["w"].step == 0 and c.states["w"].residual is None for c in group.compressors)


def test_overflow_of_the_average_in_half_precision():
    """The average of finite float16 gradients may round to infinity. The step is then undone, too."""
    grad = torch.full((64, 64), 65504.0, dtype=torch.float16)
    group = LocalGroup(FFTRange(bits=6, mantissa=2, error_feedback=True), 2)  # rounds it to 65536
    for average in group.average([grad, grad], "w"):
        assert not average.isfinite().any()
    assert all(c.states["w"].step == 0 and c.states["w"].residual is None for c in group.compressors)


# --- error feedback


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_error_feedback_conserves_the_sum(size, dtype):
    """Sum of averages + mean residual = sum of mean gradients.

    A step rounds the corrected gradient and the residual once (u of each), and transforms the mean instead of taking
    the mean of transforms (a few u log2(n)).
    """
    group = LocalGroup(FFTRange(theta=0.95, bits=6, error_feedback=True), size)
    averages = gradients = torch.zeros(48, 50, dtype=torch.float64)
    bound = 0.0
    for step in range(30):
        grads = [gradient(48, 50, seed=100 * step + rank).to(dtype) for rank in range(size)]
        before = [c.states["w"].residual for c in group.compressors if c.states]
        corrected = max(norm(g) + (norm(before[i]) if before else 0.0) for i, g in enumerate(grads))
        average = group.average(grads, "w")[0]
        assert average.dtype == dtype
        averages = averages + average.double()
        gradients = gradients + sum(g.double() for g in grads) / size
        bound += (2 + 8 * math.log2(2400)) * U * corrected
    residual = sum(c.states["w"].residual.double() for c in group.compressors) / size
    assert norm(averages + residual - gradients) <= bound
    assert norm(residual) > 1000 * bound  # the residual is not just rounding
    assert norm(averages - gradients) == pytest.approx(norm(residual), rel=1e-3)


def test_no_residual_without_error_feedback():
    group = LocalGroup(FFTRange(), 1)
    for _ in range(3):
        group.average([gradient(40, 40)], "w")
    assert group.compressors[0].states["w"].residual is None
    assert group.compressors[0].states["w"].step == 3


def test_error_feedback_converges_for_a_fixed_gradient():
    """For a fixed gradient, the error of the mean average decreases as 1 / steps."""
    grad = gradient(48, 50)
    group = LocalGroup(FFTRange(theta=0.9, error_feedback=True), 2)
    total = torch.zeros(48, 50, dtype=torch.float64)
    errors = {}
    for step in range(1, 81):
        total += group.average([grad, grad], "w")[0].double()
        errors[step] = norm(total / step - grad)
    assert errors[80] < errors[20] / 3 and errors[20] < errors[1] / 3


# --- schedules, fixed range, mantissa


def test_step_schedule_changes_the_payload():
    grad = gradient(100, 100)
    group = LocalGroup(FFTRange(theta=StepSchedule({0: 0.95, 2: 0.85, 3: 0.5})), 2)
    sent = []
    for _ in range(5):
        before = group.bytes_sent
        group.average([grad, grad], "w")
        sent.append(group.bytes_sent - before)
    assert sent == [documented_nbytes(10000, theta) for theta in (0.95, 0.95, 0.85, 0.5, 0.5)]


def test_steps_are_counted_per_parameter():
    group = LocalGroup(FFTRange(theta=StepSchedule({0: 0.9, 1: 0.5})), 1)
    for name, theta in (("a", 0.9), ("a", 0.5), ("b", 0.9)):
        before = group.bytes_sent
        group.average([gradient(50, 50)], name)
        assert group.bytes_sent - before == documented_nbytes(2500, theta)


def test_diminishing_theta_changes_the_payload():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    group = LocalGroup(FFTRange(theta=gradzip.DiminishingTheta(optimizer, lipschitz=0.9**2 / 0.1)), 1)
    for rate in (0.1, 0.05, 0.01, 0.0):
        optimizer.param_groups[0]["lr"] = rate
        before = group.bytes_sent
        group.average([gradient(50, 50)], "w")
        assert group.bytes_sent - before == documented_nbytes(2500, 0.9 * math.sqrt(rate / 0.1))


def test_invalid_schedule_value_names_the_step():
    group = LocalGroup(FFTRange(theta=lambda step: 0.5 + step), 1)
    group.average([gradient(50, 50)], "w")
    with pytest.raises(ValueError, match="got theta = 1.5 at step 1, expected a number in"):
        group.average([gradient(50, 50)], "w")


@pytest.mark.parametrize("limit", [0.002, (-0.001, 0.004), (0.0, 0.003), (-0.002, 0.0)])
def test_fixed_range_clamps_and_counts(limit):
    grad = gradient(64, 64)
    low, high = limit if isinstance(limit, tuple) else (-limit, limit)
    codec = FFTRange(theta=0.8, value_range=limit)
    bins = spectrum(grad.double().numpy(), 1, 4096)
    values = bins[kept_bins(bins, 4096, round(0.2 * 2049))].view(np.float64)
    outside = int(((values < low) | (values > high)).sum())
    parts = values[values != 0]
    assert np.abs(parts - low).min() > 1e-8 and np.abs(parts - high).min() > 1e-8 and outside > 10
    payload = read_fft_payload(codec.encode(grad.view(-1), Key(0, 0, "", 0)), 2049)
    assert codec.clamped == outside
    step = 2.0**-payload.format.mantissa
    parts = payload.bins.view(np.float64)
    assert low * (1 + step) <= parts.min() and parts.max() <= high * (1 + step)
    assert (parts.min() <= low * (1 - step)) and (parts.max() >= high * (1 - step))
    codec.encode(grad.view(-1), Key(0, 0, "", 0))
    assert codec.clamped == 2 * outside


def test_wide_and_fitted_ranges_clamp_nothing():
    codec = FFTRange(value_range=1e6)
    codec.encode(gradient(64 * 64), Key(0, 0, "", 0))
    assert codec.clamped == 0
    fitted = FFTRange()
    fitted.encode(gradient(64 * 64), Key(0, 0, "", 0))
    assert fitted.clamped == 0


def test_mantissa_argument():
    for mantissa in (1, 5, 10):
        codec = FFTRange(mantissa=mantissa)
        payload = read_fft_payload(codec.encode(gradient(64 * 64), Key(0, 0, "", 0)), 2049)
        assert payload.format.mantissa == mantissa


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
        *({"min_numel": numel} for numel in (-1, 1.5, None)),
    ],
    ids=str,
)
def test_invalid_arguments(arguments):
    with pytest.raises(ValueError, match="got .*, expected"):
        FFTRange(**arguments)


@pytest.mark.parametrize("grad", [torch.ones(40, 40, dtype=torch.int32), torch.ones(40, 40).to_sparse(),
                                  torch.ones(40, 40, dtype=torch.complex64)])  # fmt: skip
def test_invalid_gradients(grad):
    with pytest.raises(ValueError, match="gradient of 'w': got .*, expected a dense float tensor"):
        drive([averaged(FFTRange(), grad, "w")])
