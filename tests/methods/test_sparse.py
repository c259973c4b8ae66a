"""TopK, RandomK and DGC: elements kept, payload sizes, and error feedback."""

import contextlib
import dataclasses
import math
import shutil

import numpy as np
import pytest
import torch

import gradzip
import kinds
from benchmarks.device_ops.stand_in import stand_in
from contract import check_conservation
from gradzip import DGC, LocalGroup, RandomK, TopK, roundtrip, simulate
from gradzip.memory.state import Key
from gradzip.memory.verdict import read_all
from gradzip.methods.base.gather import CodedSum
from observed import observed
from reference import by_magnitude, padded, resnet20_gradients

KEY = Key(0, 0, "w", 0)


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients():
    """Real gradients and edge cases."""
    yield from resnet20_gradients().values()
    yield gaussian(100, 130)
    yield torch.zeros(64, 64)
    yield torch.full((64, 64), -0.25)  # ties only
    yield gaussian(1000, 101) ** 3
    yield torch.where(gaussian(64, 64, seed=1) > 2.5, gaussian(64, 64), torch.zeros(64, 64))


def num_kept(numel, theta):
    return max(1, round((1 - theta) * numel))


# --- elements kept


@pytest.mark.parametrize("theta", [0.0, 0.5, 0.9, 0.99, 0.999])
def test_topk_error_is_the_energy_of_the_tail(theta):
    """The error is that of the best approximation by k elements, at most (1 - k / n) |g|^2. Kept values are exact."""
    for grad in gradients():
        k = num_kept(grad.numel(), theta)
        approximation, _ = roundtrip(TopK(theta=theta), grad)
        order = by_magnitude(grad.numpy().reshape(-1))
        expected = np.zeros(grad.numel(), np.float32)
        expected[order[:k]] = grad.numpy().reshape(-1)[order[:k]]
        assert np.array_equal(approximation.numpy().reshape(-1), expected)
        tail = (grad.numpy().reshape(-1)[order[k:]].astype(np.float64) ** 2).sum()
        energy = (grad.double() ** 2).sum().item()
        assert ((grad.double() - approximation.double()) ** 2).sum().item() == pytest.approx(tail, rel=1e-12)
        assert tail <= (1 - k / grad.numel()) * energy * (1 + 1e-12)


@pytest.mark.parametrize("bits", [2, 6, 8, 10, 16])
def test_range_floats_add_only_rounding(bits):
    """Rounding changes kept elements only. With 2 bits, all kept elements of a sign have the same magnitude."""
    least, most = {2: (0.1, 1.0), 6: (3e-3, 0.1), 8: (1e-3, 0.03), 10: (3e-4, 0.01), 16: (3e-6, 2e-4)}[bits]
    for grad in resnet20_gradients().values():
        exact, _ = roundtrip(TopK(theta=0.9), grad)
        rounded, _ = roundtrip(TopK(theta=0.9, bits=bits), grad)
        assert torch.equal((rounded != 0) & (exact == 0), torch.zeros_like(exact, dtype=torch.bool))
        relative = ((rounded - exact).norm() / exact.norm()).item()
        assert least < relative < most, (bits, relative)


@pytest.mark.parametrize("theta", [0.85, 0.99, 0.999])
def test_sampled_selection_keeps_about_k(theta):
    cases = [gaussian(1000, 1003), torch.distributions.Laplace(0.0, 1.0).sample((1000, 1003))]
    cases.append(torch.where(torch.rand(1000, 1003) < 2 * (1 - theta), gaussian(1000, 1003), torch.zeros(())))
    cases += resnet20_gradients().values()
    inexact = 0
    for grad in cases:
        k = num_kept(grad.numel(), theta)
        approximation, _ = roundtrip(TopK(theta=theta, select="sampled"), grad)
        count = approximation.count_nonzero().item()
        assert 0.9 * k <= count <= 1.1 * k
        dropped = grad[approximation == 0].abs().max() if count < grad.numel() else 0
        assert approximation[approximation != 0].abs().min() >= dropped  # the selection is by some threshold
        inexact += count != k
    assert inexact >= 3  # large gradients are sampled


def test_sampled_selection_of_mostly_zeros():
    grad = torch.zeros(1000, 1003)
    grad[::100, ::100] = gaussian(10, 11)
    approximation, nbytes = roundtrip(TopK(theta=0.9, select="sampled"), grad)
    assert torch.equal(approximation, grad) and nbytes < 1200  # 110 of 100300
    approximation, nbytes = roundtrip(TopK(select="sampled"), torch.zeros(64, 64))
    assert not approximation.any() and nbytes == 64
    approximation, nbytes = roundtrip(TopK(select="sampled", bits=8), torch.zeros(64, 64))
    assert not approximation.any() and nbytes == 64


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_randomk_averages_the_same_elements_on_all_ranks(size):
    grads = [gaussian(64, 65, seed=r) for r in range(size)]
    mean = sum(grads) / size
    group = LocalGroup(RandomK(theta=0.9), size)
    average, *others = group.average(grads, "w")
    chosen = average != 0
    assert chosen.sum() == 416 and group.bytes_sent == 4 * 416
    torch.testing.assert_close(average[chosen], mean[chosen])
    assert all(torch.equal(average, other) for other in others)
    another = group.average(grads, "w")[0] != 0
    assert 0 < (another & chosen).sum() < 120  # 41.6 on average
    elsewhere = LocalGroup(RandomK(theta=0.9), size).average(grads, "v")[0] != 0
    assert 0 < (elsewhere & chosen).sum() < 120


def test_randomk_contracts_with_error_feedback_and_is_unbiased_without():
    grad = gaussian(32, 33)
    n, k, draws = grad.numel(), num_kept(grad.numel(), 0.9), 1000
    energy, errors = (grad.double() ** 2).sum(), []
    total = torch.zeros(32, 33, dtype=torch.float64)
    for seed in range(draws):
        contracted, _ = roundtrip(RandomK(theta=0.9, seed=seed), grad)
        errors.append((((grad - contracted).double() ** 2).sum() / energy).item())
        unbiased, _ = roundtrip(RandomK(theta=0.9, seed=seed, error_feedback=False), grad)
        torch.testing.assert_close(unbiased, contracted * (n / k))
        total += unbiased
    # E|x - C(x)|^2 = (1 - k / n) |x|^2, within 4.5 standard errors.
    error, spread = np.mean(errors), np.std(errors) / math.sqrt(draws)
    assert abs(error - (1 - k / n)) < 4.5 * spread and spread < 0.004
    # An element is sent as n / k times its value, with probability k / n.
    z = (total / draws - grad) / (grad.double().abs() * math.sqrt((n / k - 1) / draws))
    assert z.abs().max() < 4.5 and 0.85 < z.std() < 1.15


def test_randomk_detects_infinity_in_unchosen_elements():
    grads = [gaussian(64, 64, seed=r) for r in range(2)]
    unchosen = (simulate(RandomK(), grads)[0] == 0).nonzero()[0].tolist()
    grads[1][unchosen[0], unchosen[1]] = math.inf
    for average in simulate(RandomK(), grads):
        assert not average.isfinite().all()


# --- DGC


@pytest.mark.parametrize("exchange", ["gather", "scatter_reduce"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_dgc_without_momentum_is_topk_with_error_feedback(size, exchange):
    groups = [
        LocalGroup(DGC(theta=0.97, momentum=0.0, exchange=exchange), size),
        LocalGroup(TopK(theta=0.97, exchange=exchange), size),
    ]
    for step in range(20):
        grads = [gaussian(40, 50, seed=100 * step + r) for r in range(size)]
        a, b = (group.average(grads, "w") for group in groups)
        assert all(torch.equal(x, y) for x, y in zip(a, b))
        for x, y in zip(groups[0].compressors, groups[1].compressors):
            assert torch.equal(x.states["w"].residual, y.states["w"].residual)


@pytest.mark.parametrize("clip_norm", [None, 20.0])
def test_dgc_equals_algorithm_1(clip_norm):
    """Compare velocity, residual and averages of two ranks with Algorithm 1 in NumPy."""
    theta, momentum, size = 0.95, 0.9, 2
    group = LocalGroup(DGC(theta=theta, momentum=momentum, clip_norm=clip_norm), size)
    u, v = np.zeros((size, 2000), np.float32), np.zeros((size, 2000), np.float32)
    clipped = 0
    for step in range(30):
        grads = [gaussian(40, 50, seed=100 * step + r) for r in range(size)]
        expected = np.zeros(2000)
        for r, grad in enumerate(grads):
            g = grad.numpy().reshape(-1).copy()
            if clip_norm is not None:
                scale = clip_norm / math.sqrt(size) / np.linalg.norm(g.astype(np.float64))
                clipped += scale < 1
                g *= np.float32(min(1.0, scale))
            u[r] = np.float32(momentum) * u[r] + g
            v[r] += u[r]
            sent = by_magnitude(v[r])[: num_kept(2000, theta)]
            expected[sent] += v[r][sent].astype(np.float64) / size
            u[r][sent] = v[r][sent] = 0
        average = group.average(grads, "w")[0]
        np.testing.assert_allclose(average.numpy().reshape(-1), expected, rtol=1e-4, atol=1e-5)
    assert clipped == (0 if clip_norm is None else 60)
    state = group.compressors[1].states["w"]
    np.testing.assert_allclose(state.velocity.numpy().reshape(-1), u[1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.residual.numpy().reshape(-1), v[1], rtol=1e-4, atol=1e-5)


def test_dgc_applies_momentum_to_uncompressed_gradients():
    parameter = torch.nn.Parameter(torch.zeros(300))
    sgd = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
    group, moved = LocalGroup(DGC(momentum=0.9), 2), torch.zeros(300)
    for step in range(10):
        grads = [gaussian(300, seed=10 * step + r) for r in range(2)]
        parameter.grad = (grads[0] + grads[1]) / 2
        sgd.step()
        if step == 5:  # a non-finite step changes no state
            non_finite = group.average([grads[0], torch.full((300,), math.inf)], "b")[0]
            assert not non_finite.isfinite().any()
        moved -= group.average(grads, "b")[0]
    torch.testing.assert_close(moved, parameter.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 3e4), (torch.float32, 1.5e38)])
def test_overflow_of_the_velocity_changes_no_state(dtype, size):
    """The velocity after two steps, 1.9 grad, is finite; after three, 2.71 grad, it is not."""
    grad = torch.full((300,), size, dtype=dtype)
    group = LocalGroup(DGC(momentum=0.9), 1)
    once, twice, thrice = [group.average([grad], "b")[0] for _ in range(3)]
    assert torch.equal(once, grad) and twice.isfinite().all() and not thrice.isfinite().any()
    after = group.average([torch.zeros_like(grad)], "b")[0]
    torch.testing.assert_close(after, 0.9 * twice, rtol=torch.finfo(dtype).eps, atol=0)


WHERE = ["cpu", pytest.param("device", marks=pytest.mark.skipif(not shutil.which("g++"), reason="no g++"))]


@contextlib.contextmanager
def placed(where):
    """What puts a tensor on the device, and what gets its values back."""
    if where == "cpu":
        yield lambda x: x
        return
    with stand_in() as device:
        yield device.tensor
        read_all()


def values_of(x):
    return getattr(x, "host", x)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_velocities_of_16_bit_averages_do_not_drift(dtype, where):
    """They are those of the same numbers in float32, which averages are rounded to. In bfloat16, 9.98 would be 9.56."""
    with placed(where) as put:
        group, velocity = LocalGroup(DGC(momentum=0.9), 2), 0.0
        for step in range(60):
            if step == 30:  # changes no state
                average = group.average([put(torch.full((300,), math.nan, dtype=dtype)) for _ in range(2)], "b")[0]
                assert values_of(average).isnan().all()
            average = group.average([put(torch.ones(300, dtype=dtype)) for _ in range(2)], "b")[0]
            velocity = torch.add(torch.ones((), dtype=torch.promote_types(dtype, torch.float32)), velocity, alpha=0.9)
            assert torch.equal(values_of(average), velocity.to(dtype).expand(300))
        state = group.compressors[0].states["b"]
        assert torch.equal(values_of(state.average_velocity), velocity.expand(300))
    assert float(velocity) == pytest.approx(10 * (1 - 0.9**60), rel=1e-5)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float64])
def test_velocities_of_another_type_load(saved, where):
    """As they were saved before, for gradients of 16 bits; and of gradients that had another type."""
    first, grads = LocalGroup(DGC(momentum=0.9), 1), [gaussian(300, seed=step).bfloat16() for step in range(4)]
    first.average([grads[0]], "b")
    state_dict = first.compressors[0].state_dict()
    velocity = state_dict["states"]["b"]["average_velocity"]
    assert velocity.dtype == torch.float32 and torch.equal(velocity, grads[0].float())
    state_dict["states"]["b"]["average_velocity"] = velocity.to(saved)
    with placed(where) as put:
        group = LocalGroup(DGC(momentum=0.9), 1)
        group.compressors[0].load_state_dict(state_dict)
        # A step that is skipped restores the velocity of before.
        assert not values_of(group.average([put(torch.full_like(grads[0], math.inf))], "b")[0]).isfinite().any()
        for grad in grads[1:]:
            velocity = torch.add(grad.float(), velocity, alpha=0.9)
            average = group.average([put(grad.clone())], "b")[0]
            assert torch.equal(values_of(average), velocity.bfloat16())
        assert torch.equal(values_of(group.compressors[0].states["b"].average_velocity), velocity)


def test_dgc_warmup():
    compressor = DGC(theta=0.999, warmup_steps=8)
    thetas = [0.75, 0.75, 0.9375, 0.9375, 0.984375, 0.984375, 0.99609375, 0.99609375, 0.999, 0.999]
    assert [compressor.theta_at(step) for step in range(10)] == thetas
    assert [DGC(theta=0.98, warmup_steps=4).theta_at(step) for step in range(5)] == [0.75, 0.9375, 0.98, 0.98, 0.98]
    assert DGC().theta_at(0) == 0.999
    group = LocalGroup(compressor, 1)
    for theta in thetas:
        assert group.average([gaussian(64, 64)], "w")[0].count_nonzero() == num_kept(4096, theta)


# --- error feedback, sizes, errors


def sends_parts_of_gradients(spec):
    """Whether a method sends some elements and keeps the others. One that clips gradients loses what it clips."""
    compressor = gradzip.parse(spec)
    clips = getattr(compressor, "clip_norm", None) is not None
    return hasattr(compressor, "theta") and "residual" in observed(spec).fields and not clips


@pytest.mark.parametrize("exchange", ["gather", "scatter_reduce"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("spec", kinds.params([*filter(sends_parts_of_gradients, kinds.ALL)], kinds.FIRST))
def test_error_feedback_conserves_the_sum(spec, size, exchange):
    method = dataclasses.replace(gradzip.parse(spec), theta=0.95)
    if hasattr(method, "exchange"):
        method = dataclasses.replace(method, exchange=exchange)
    elif exchange != "gather":
        pytest.skip("the method has no exchange")
    if hasattr(method, "momentum"):
        method = dataclasses.replace(method, momentum=0.0)
    gradients = lambda step: [gaussian(64, 66, seed=10 * step + r) for r in range(size)]  # noqa: E731
    check_conservation(LocalGroup(method, size), gradients, 50, roundings=160, above=1e2)


@pytest.mark.parametrize("bits", [32, 10, 7, 2])
@pytest.mark.parametrize("theta", [0.5, 0.9, 0.99, 0.999])
def test_bytes_equal_the_documented_formula(theta, bits):
    for grad in gradients():
        n, k = grad.numel(), num_kept(grad.numel(), theta)
        flat = grad.reshape(-1)
        indices, _ = gradzip.ops.topk_abs(flat, k)
        coded = gradzip.ops.index_code_encode(indices, n).numel()
        assert coded <= 12 + -(-n // 8)
        nbytes = padded(48 + -(-k * bits // 8) + coded)
        assert roundtrip(TopK(theta=theta, bits=bits), grad)[1] == nbytes
        if bits == 32:
            assert roundtrip(DGC(theta=theta), grad)[1] == nbytes


def test_bytes_per_element():
    """At theta = 0.99 the entropy of an index is 1.01 bytes. 60 bytes of headers matter below 1000 elements."""
    for shape in [(320, 320), (1000, 1000), (512, 512, 3, 3)]:
        grad = gaussian(*shape)
        for select in ("exact", "sampled"):
            approximation, nbytes = roundtrip(TopK(theta=0.99, select=select), grad)
            assert 5.0 < nbytes / approximation.count_nonzero().item() <= 5.1
    assert roundtrip(TopK(theta=0.99, bits=8), grad)[1] / num_kept(grad.numel(), 0.99) < 2.03


# --- chunks


def chunk_sent(x, theta, chunk):
    """What `TopK(theta, bits=2, chunk=chunk)` sends of a flat float32 array, up to the rounding of levels."""
    sent = np.zeros_like(x)
    for begin in range(0, x.size, chunk):
        part = x[begin : begin + chunk]
        kept = by_magnitude(part)[: math.ceil(num_kept(chunk, theta) * part.size / chunk)]
        magnitudes = np.abs(part[kept]).astype(np.float64)
        above = magnitudes > magnitudes.mean()
        for of in (above, ~above):
            if of.any():
                sent[begin + kept[of]] = np.copysign(magnitudes[of].mean(), part[kept[of]])
    return sent


@pytest.mark.parametrize("theta, chunk", [(0.985, 4096), (0.9, 256), (0.5, 96), (0.0, 32), (0.9999, 4096)])
def test_chunks_send_their_largest_elements_with_two_levels(theta, chunk):
    for grad in gradients():
        approximation, _ = roundtrip(TopK(theta=theta, bits=2, chunk=chunk), grad)
        got, wanted = approximation.numpy().reshape(-1), chunk_sent(grad.numpy().reshape(-1), theta, chunk)
        assert np.array_equal(got != 0, wanted != 0)
        other = np.flatnonzero(np.abs(got - wanted) > np.abs(wanted) * 2.0**-8 * 1.01)
        # Rounding may put an element that is nearly the mean on its other side, which changes both levels of its chunk.
        assert len(set(other // chunk)) <= 1 + got.size / chunk / 100


def test_chunks_take_a_fiftieth_of_a_byte_for_each_element():
    """61 of each 4096, with 7.7 bits for an index, whose entropy is 7.5, and 20 bytes for values and levels."""
    for grad in (gaussian(1000, 1000), gaussian(512, 512, 3, 3), gaussian(2000, 700) ** 3):
        nbytes = roundtrip(TopK(theta=0.985, bits=2, chunk=4096), grad)[1]
        assert 0.0185 < nbytes / grad.numel() < 0.0197


@pytest.mark.parametrize("decay", [1.0, 0.95])
def test_chunks_with_error_feedback_follow_their_reference(decay):
    """The mean of what two ranks send, in NumPy. Elements whose level or rank is a matter of rounding may differ."""
    group = LocalGroup(TopK(theta=0.9, bits=2, chunk=256, residual_decay=decay), 2)
    residuals = [np.zeros(64 * 66, np.float32) for _ in range(2)]
    for step in range(6):
        grads = [gaussian(64, 66, seed=2 * step + r) for r in range(2)]
        corrected = [decay * e + g.numpy().reshape(-1) for e, g in zip(residuals, grads)]
        sent = [chunk_sent(x.astype(np.float32), 0.9, 256) for x in corrected]
        average = group.average(grads, "w")[0].numpy().reshape(-1)
        assert np.linalg.norm(average - sum(sent) / 2) < 0.02 * np.linalg.norm(average)
        states = [c.states["w"] for c in group.compressors]
        residuals = [s.residual.numpy().reshape(-1) / np.float32(decay) for s in states]
        for e, x, part in zip(residuals, corrected, sent):
            assert np.linalg.norm(e - (x - part)) < 0.02 * np.linalg.norm(e)


def test_levels_that_are_not_finite_are_refused():
    method = TopK(theta=0.9, bits=2, chunk=256)
    payload = method.encode(gaussian(64, 64), KEY)
    (opened,) = method.open_all([payload], [4096], 1)
    opened.body[:2] = torch.tensor([0xC0, 0x7F], dtype=torch.uint8)
    with pytest.raises(gradzip.PayloadError, match="the levels of a chunk are not those of finite numbers"):
        method.sum_all([CodedSum([torch.zeros(4096)], [opened], 1.0)])
    for k in (0, 257):
        with pytest.raises(gradzip.PayloadError, match=f"it claims {k} values of each 256 elements"):
            claims = opened._replace(fields=k.to_bytes(8, "little") + bytes(8))
            method.sum_all([CodedSum([torch.zeros(4096)], [claims], 1.0)])


def test_schedule_of_theta():
    for make in (TopK, RandomK, DGC):
        group = LocalGroup(make(theta=gradzip.StepSchedule({0: 0.5, 1: 0.9})), 1)
        counts = [group.average([gaussian(40, 50)], "w")[0].count_nonzero().item() for _ in range(2)]
        assert counts == [1000, 200]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: TopK(theta=1.0), r"got theta = 1.0, expected a number in \[0, 1\)"),
        (lambda: TopK(theta=-0.1), "got theta = -0.1"),
        (lambda: TopK(select="random"), "got select = 'random', expected 'exact' or 'sampled'"),
        (lambda: TopK(bits=17), "got bits = 17, expected 32"),
        (lambda: TopK(bits=1), "got bits = 1, expected 32"),
        (lambda: TopK(bits=8.0), "got bits = 8.0, expected 32"),
        (lambda: TopK(bits=2, chunk=100), "got chunk = 100, expected a multiple of 32 from 32 to 4096"),
        (lambda: TopK(bits=2, chunk=8192), "got chunk = 8192"),
        (lambda: TopK(bits=2, chunk=True), "got chunk = True"),
        (lambda: TopK(chunk=64), "got bits = 32 and select = 'exact' with chunk = 64, expected bits = 2 and"),
        (lambda: TopK(bits=2, select="sampled", chunk=64), "got bits = 2 and select = 'sampled' with chunk = 64"),
        (lambda: TopK(exchange="ring"), "TopK: got exchange = 'ring', expected 'gather', 'scatter_reduce' or 'auto'"),
        (lambda: RandomK(theta=2), "got theta = 2"),
        (lambda: DGC(theta="much"), "got theta = 'much'"),
        (lambda: DGC(momentum=1.0), r"got momentum = 1.0, expected a number in \[0, 1\)"),
        (lambda: DGC(clip_norm=0), "got clip_norm = 0, expected None or a number > 0"),
        (lambda: DGC(warmup_steps=-1), "got warmup_steps = -1, expected an integer >= 0"),
    ],
)
def test_invalid_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
