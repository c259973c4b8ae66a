"""Natural compression, against a reference in NumPy that rounds by the definition of the paper."""

import numpy as np
import pytest
import torch

import gradzip
import philox
import single
from gradzip import ops
from gradzip.memory.state import Key
from reference import padded
from unbiased import assert_unbiased, gradients

KEY = Key(0, 3, "w", 1)


def decode(codec, x, key=KEY):
    return single.decode(codec, [single.encode(codec, x, key)], x.shape).clone()


def neighbours(x):
    """The powers of two below and above each magnitude, and the probability of the upper one."""
    magnitude = np.abs(x.astype(np.float64))
    lower = np.where(magnitude < 2.0**-126, 0.0, 2.0 ** np.floor(np.log2(np.maximum(magnitude, 2.0**-126))))
    upper = np.where(magnitude < 2.0**-126, 2.0**-126, 2 * lower)
    return lower, upper, (magnitude - lower) / (upper - lower)


def reference(x, key):
    lower, upper, p = neighbours(x)
    up = philox.words(key.bits, x.size) < p * 2.0**32
    return (np.where(up, upper, lower) * np.where(np.signbit(x), -1.0, 1.0)).astype(np.float32)


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 1000, 100_003])
def test_elements_are_those_of_the_definition(n):
    generator = np.random.default_rng(n)
    x = (generator.standard_normal(n) * 2.0 ** generator.integers(-140, 100, n)).astype(np.float32)
    x[::5] = 0
    assert np.array_equal(decode(gradzip.Natural(), torch.from_numpy(x)).numpy(), reference(x, KEY))


def test_powers_of_two_are_exact():
    x = torch.tensor([2.0**e * s for e in range(-126, 128) for s in (-1, 1)] + [0.0, -0.0])
    assert torch.equal(decode(gradzip.Natural(), x), x)


def test_smallest_and_largest_numbers():
    """A number below 2^-126 becomes 0 or 2^-126; one above 2^127 counts as infinite."""
    x = torch.tensor([1e-45, -1e-40, 2.0**127, -(2.0**127)]).repeat(500)
    decoded = decode(gradzip.Natural(), x).view(-1, 4)
    assert set(decoded[:, 1].tolist()) <= {-(2.0**-126), -0.0} and set(decoded[:, 0].tolist()) <= {2.0**-126, 0.0}
    assert set(decoded[:, 2].tolist()) == {2.0**127} and set(decoded[:, 3].tolist()) == {-(2.0**127)}
    assert (
        decode(gradzip.Natural(), torch.full((9,), float(np.nextafter(np.float32(2.0**127), np.float32(3e38)))))
        .isnan()
        .all()
    )


@pytest.mark.parametrize("name", gradients())
def test_unbiased_with_the_papers_variance(name):
    x = gradients()[name]
    lower, upper, p = neighbours(x.numpy().reshape(-1))
    assert_unbiased(gradzip.Natural(), x, x, upper - lower, p)
    # Theorem 1. The bound is reached at 4/3 of a power of two.
    assert ((upper - lower) ** 2 * p * (1 - p)).sum() <= (x.double() ** 2).sum() / 8 * (1 + 1e-12)
    error = decode(gradzip.Natural(), torch.full((100_000,), 4 / 3)).sub(4 / 3).square().mean()
    assert float(error) == pytest.approx((4 / 3) ** 2 / 8, rel=0.02)


@pytest.mark.parametrize("n", [1, 7, 8, 1000])
def test_nine_bits_an_element(n):
    nbytes = gradzip.Natural().encode(torch.ones(n), KEY).numel()
    assert nbytes == padded(48 + -(-9 * n // 8))


@pytest.mark.parametrize("exchange", ["gather", "scatter_reduce"])
def test_average_of_ranks(exchange):
    grads = [torch.randn(64, 48, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    averages = gradzip.simulate(gradzip.Natural(exchange=exchange), grads)
    mean = sum(grads) / 3
    assert all(torch.equal(average, averages[0]) for average in averages)
    # The mean of 3 elements has at most a third of their mean variance; a second rounding adds an eighth of its square.
    bound = sum(g.square().sum() for g in grads) / 8 / 9
    if exchange == "scatter_reduce":
        bound += (mean.square().sum() + bound) / 8
    error = float((averages[0] - mean).square().sum())
    assert 0.5 * float(bound) < error < float(bound)


@pytest.mark.parametrize("code", [0xFF, 0x1FF])
def test_an_exponent_of_inf_is_refused(code):
    codec = gradzip.Natural()
    payload = codec.encode(torch.ones(16), KEY)
    body = payload[ops.HEADER_NBYTES :]
    ops.pack_bits(torch.tensor([127] * 15 + [code], dtype=torch.int32), 9, out=body[:18])
    sealed = codec.seal(ops.Seal(payload, 16, bytes(16)))
    with pytest.raises(gradzip.PayloadError, match="the exponent of infinity, expected powers of two"):
        single.decode(codec, [sealed], (16,))
