"""Sign-SGD and 1-bit SGD: votes, means, error feedback and sizes."""

import dataclasses

import numpy as np
import pytest
import torch

import gradzip
from contract import check_conservation
from gradzip.memory.state import Key
from reference import padded, resnet20_gradients
from single import decode, encode

N = 64 * 64


def vote(grads):
    return sum(g.sign() for g in grads)


# --- Sign-SGD


def sent(grad):
    """What a rank sends: mean |g| times sign(g), in float64."""
    return grad.double().abs().mean() * grad.double().sign()


@pytest.mark.parametrize("error_feedback", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_majority_vote(size, error_feedback):
    """With error feedback, the vote is scaled to be as near as possible to the mean of what the ranks sent."""
    grads = [(rank + 1) * torch.randn(64, 64) for rank in range(size)]
    averages = gradzip.simulate(gradzip.SignSGD(error_feedback=error_feedback), grads)
    signs, mean = averages[0].double().sign(), sum(map(sent, grads)) / size
    scale = (signs * mean).mean() if error_feedback else 1.0
    assert (averages[0].abs() - scale).abs().max() <= 1e-6 * scale
    decided = vote(grads) != 0
    assert decided.all() == bool(size % 2)
    assert torch.equal(averages[0].sign()[decided], vote(grads).sign()[decided])
    assert all(torch.equal(a, averages[0]) for a in averages)
    if error_feedback:
        lost = ((averages[0].double() - mean) ** 2).mean()
        torch.testing.assert_close(lost, (mean**2).mean() - scale**2, rtol=1e-5, atol=1e-12)


def test_without_majority():
    grads = [(rank + 1) * torch.randn(64, 64) for rank in range(3)]
    for error_feedback in (False, True):
        average = gradzip.simulate(gradzip.SignSGD(majority=False, error_feedback=error_feedback), grads)[0]
        torch.testing.assert_close(average, sum(g.abs().mean() * g.sign() for g in grads) / 3, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ties_and_zeros_are_unbiased(size):
    """Ties and zeros average to 0 over the elements of a step, and over steps for each element."""
    x = torch.randn(64, 64)
    cases = [[torch.zeros(64, 64)] * size]
    if size > 1:
        cases.append([x, -x] * (size // 2))
    for grads in cases:
        group = gradzip.LocalGroup(gradzip.SignSGD(error_feedback=False), size)
        steps = torch.stack([group.average(grads, "w")[0] for _ in range(200)])
        assert (steps.abs() == 1).all()
        assert abs(steps.mean().item()) < 5 / np.sqrt(steps.numel())
        assert steps.mean(0).abs().max() < 5.5 / np.sqrt(200)  # of 4096 elements
        # Coins differ between steps: consecutive steps agree in half of the elements.
        assert abs((steps[1:] * steps[:-1]).mean().item()) < 5 / np.sqrt(steps.numel())


def test_signs_of_zeros_differ_between_ranks():
    zeros = torch.zeros(64, 64)
    codec = gradzip.SignSGD()
    bodies = {encode(codec, zeros, Key(0, 0, "w", rank))[48:].numpy().tobytes() for rank in range(4)}
    assert len(bodies) == 4
    assert torch.equal(gradzip.simulate(codec, [zeros] * 3)[0], zeros)  # scaled by mean |g| = 0


@pytest.mark.parametrize("majority", [False, True])
def test_overflow_of_the_scale_is_non_finite(majority):
    """The sum of 64 x 64 equal numbers is 4096 times that number."""
    for size, finite in ((2.0**115, True), (2.0**116, False)):
        group = gradzip.LocalGroup(gradzip.SignSGD(majority=majority), 2)
        grad = torch.full((64, 64), size)
        for average in group.average([grad, grad], "w"):
            assert torch.equal(average, grad) if finite else average.isnan().all()
        assert [c.states["w"].step for c in group.compressors] == [finite] * 2


def test_signsgd_bytes():
    for shape in ((32, 32), (31, 37), (512, 512)):
        grad = torch.randn(shape)
        for spec in ("signsgd:min_numel=0", "signsgd:min_numel=0,majority=False", "signsgd:error_feedback=False"):
            if grad.numel() >= 1024 or "min_numel" in spec:
                assert gradzip.roundtrip(gradzip.parse(spec), grad)[1] == 48 + padded(4) + padded(-(-grad.numel() // 8))
    assert 8 * gradzip.roundtrip(gradzip.SignSGD(), torch.randn(512, 512))[1] < 1.002 * 512 * 512


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_residual_is_what_a_rank_did_not_send_and_what_the_vote_lost(size):
    grads = [(rank + 1) * torch.randn(64, 64) for rank in range(size)]
    group = gradzip.LocalGroup(gradzip.SignSGD(), size)
    average = group.average(grads, "w")[0].double()
    lost = sum(map(sent, grads)) / size - average
    assert size == 1 or lost.abs().max() > 0.1
    for compressor, grad in zip(group.compressors, grads):
        wanted = grad.double() - sent(grad) + lost
        torch.testing.assert_close(compressor.states["w"].residual.view(64, 64).double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exchange", ["gather", "scatter_reduce"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("spec", ["signsgd", "signsgd:majority=False", "onebit"])
def test_error_feedback_conserves_the_sum(spec, size, exchange):
    """A step rounds the sum of gradient and residual, what is subtracted for each rank, the vote and the average."""
    group = gradzip.LocalGroup(dataclasses.replace(gradzip.parse(spec), exchange=exchange), size)
    gradients = lambda step: [(rank + 1) * torch.randn(64, 64) for rank in range(size)]  # noqa: E731
    check_conservation(group, gradients, 50, roundings=2 * (4 + size), above=1e3)


long = pytest.mark.long


# An odd and an even number of votes, by both exchanges.
@pytest.mark.parametrize("size, exchange", [(3, "gather"), pytest.param(4, "scatter_reduce", marks=long)])
def test_residuals_are_as_large_as_without_a_vote(size, exchange):
    """Ranks differ by constants, whose mean is 0, and by noise: votes often disagree with the mean."""
    constants = [torch.randn(32, 32) for _ in range(size)]
    constants = [c - sum(constants) / size for c in constants]
    largest = []
    for majority in (True, False):
        group, norms = gradzip.LocalGroup(gradzip.SignSGD(majority=majority, exchange=exchange), size), []
        for _ in range(200):
            group.average([c + torch.randn(32, 32) for c in constants], "w")
            norms += [compressor.states["w"].residual.norm().item() for compressor in group.compressors]
        largest.append(max(norms))
    assert 0.5 < largest[0] / largest[1] < 1.5


@pytest.mark.parametrize(
    "spec",
    ["signsgd", *(pytest.param(f"signsgd:{o}", marks=long) for o in ("exchange=scatter_reduce", "majority=False"))],
)
def test_the_mean_of_different_quadratics_is_minimised(spec):
    """Three ranks minimise sum_i a_i |x - c_i|^2 / 2, each with its own a_i and c_i, at a falling learning rate."""
    curvatures = [torch.rand(32, 32) + 0.2 for _ in range(3)]
    centres = [torch.randn(32, 32) for _ in range(3)]
    optimum = sum(a * c for a, c in zip(curvatures, centres)) / sum(curvatures)
    group, x = gradzip.LocalGroup(gradzip.parse(spec), 3), torch.zeros(32, 32)
    for step in range(400):
        grads = [a * (x - c) for a, c in zip(curvatures, centres)]
        x -= 0.5 / (1 + step / 20) * group.average(grads, "x")[0]
    assert (x - optimum).norm() < 0.1 * optimum.norm()


# --- 1-bit SGD


@pytest.mark.parametrize("shape", [(32, 64), (16, 8, 3, 3), (7, 300)])
def test_onebit_decodes_to_row_means(shape):
    grad = torch.randn(shape)
    x = grad.double().reshape(shape[0], -1)
    expected = torch.empty_like(x)
    for row, out in zip(x, expected):
        out[row > 0], out[row < 0] = row[row > 0].mean(), row[row < 0].mean()
    approximation, nbytes = gradzip.roundtrip(gradzip.OneBitSGD(), grad)
    torch.testing.assert_close(approximation.double().view_as(x), expected, rtol=1e-6, atol=0)
    assert nbytes == 48 + padded(8 * shape[0]) + padded(-(-grad.numel() // 8))
    # Exact for rows of two values.
    two = torch.where(grad.reshape(shape[0], -1) > 0, 2.0, -0.5).view(shape)
    torch.testing.assert_close(gradzip.roundtrip(gradzip.OneBitSGD(), two)[0], two)


def test_onebit_bytes_of_real_gradients():
    """1 bit for each element, 64 for each filter, and the header."""
    grads = resnet20_gradients()
    numel, filters = sum(g.numel() for g in grads.values()), sum(g.shape[0] for g in grads.values())
    nbytes = sum(gradzip.roundtrip(gradzip.OneBitSGD(), g)[1] for g in grads.values())
    least = numel / 8 + 8 * filters + 48 * len(grads)
    assert least <= nbytes < least + 16 * len(grads)


def test_onebit_bypasses_short_rows():
    """The means of a row would take as many bytes as its two elements."""
    for shape, fits in (((1024, 1), False), ((1024, 2), False), ((1024, 3), True), ((1024, 1, 3, 3), True)):
        grad = torch.randn(shape)
        approximation, nbytes = gradzip.roundtrip(gradzip.OneBitSGD(), grad)
        assert torch.equal(approximation, grad) == (not fits)
        assert (nbytes < 4 * grad.numel()) == fits


@pytest.mark.parametrize("error_feedback", [False, True])
def test_scatter_reduce(error_feedback):
    """Each partition has its own scale. With error feedback, the owner sends the signs of the mean, else the vote."""
    grads = [(rank + 1) * torch.randn(60, 64) for rank in range(3)]
    method = gradzip.SignSGD(exchange="scatter_reduce", error_feedback=error_feedback)
    average = gradzip.simulate(method, grads)[0]
    if not error_feedback:
        assert torch.equal(average, vote(grads).sign())
        return
    for rows in (slice(0, 20), slice(20, 40), slice(40, 60)):
        mean = sum(sent(g[rows]) for g in grads) / 3
        torch.testing.assert_close(average[rows].double(), sent(mean), rtol=1e-5, atol=1e-6)


def test_a_piece_of_a_row_counts_as_a_row():
    """It has its own means."""
    grads = [torch.randn(1, 4096) for _ in range(4)]
    group = gradzip.LocalGroup(gradzip.OneBitSGD(exchange="scatter_reduce"), 4)
    group.average(grads, "w")
    assert group.bytes_sent == 5 * (48 + padded(8) + 1024 // 8)


# --- both


@pytest.mark.parametrize("spec", ["signsgd", "signsgd:majority=False", "onebit"])
def test_corrupt_payloads_are_refused(spec):
    codec, grad = gradzip.parse(spec), torch.randn(64, 64)
    payload = encode(codec, grad, Key(0, 0, "w", 0))
    fields = bytes(payload[32:48].tolist())
    shorter = codec.seal(gradzip.ops.Seal(payload[:-16].clone(), N, fields))
    for others in ([], [payload]):
        with pytest.raises(gradzip.PayloadError, match="from rank .* corrupt payload: got .* after the header"):
            decode(codec, [*others, shorter], (64, 64))
        for wrong in (0xFFFFFFFF, 0x7F800000):  # NaN and inf, as the first number of the body
            corrupt = payload.clone()
            corrupt[48:52] = torch.tensor([*wrong.to_bytes(4, "little")], dtype=torch.uint8)
            message = (
                f"from rank {len(others)} of {1 + len(others)}: corrupt payload: (its scales are|the mean of a row)"
            )
            with pytest.raises(gradzip.PayloadError, match=message):
                decode(codec, [*others, codec.seal(gradzip.ops.Seal(corrupt, N, fields))], (64, 64))


def test_invalid_arguments():
    with pytest.raises(ValueError, match="SignSGD: got majority = 2, expected True or False"):
        gradzip.SignSGD(majority=2)
    with pytest.raises(ValueError, match="SignSGD: got error_feedback = 'no', expected True or False"):
        gradzip.SignSGD(error_feedback="no")
    with pytest.raises(ValueError, match="unknown argument 'error_feedback', expected one of: "):
        gradzip.parse("onebit:error_feedback=False")
