"""Sign-SGD and 1-bit SGD: votes, means, error feedback and sizes."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import gradzip
from gradzip.state import Key
from reference import resnet20_gradients

N = 64 * 64


def padded(nbytes):
    return -(-nbytes // 16) * 16


def vote(grads):
    return sum(g.sign() for g in grads)


# --- Sign-SGD


@pytest.mark.parametrize("error_feedback", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_majority_vote(size, error_feedback):
    grads = [(rank + 1) * torch.randn(64, 64) for rank in range(size)]
    averages = gradzip.simulate(gradzip.SignSGD(error_feedback=error_feedback), grads)
    scale = sum(g.abs().double().mean().item() for g in grads) / size if error_feedback else 1.0
    assert (averages[0].abs() - scale).abs().max() <= 1e-6 * scale
    decided = vote(grads) != 0
    assert decided.all() == bool(size % 2)
    assert torch.equal(averages[0].sign()[decided], vote(grads).sign()[decided])
    assert all(torch.equal(a, averages[0]) for a in averages)


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
    bodies = {codec.encode(zeros, Key(0, 0, "w", rank))[48:].numpy().tobytes() for rank in range(4)}
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
                assert gradzip.roundtrip(gradzip.parse(spec), grad)[1] == padded(48 + -(-grad.numel() // 8))
    assert 8 * gradzip.roundtrip(gradzip.SignSGD(), torch.randn(512, 512))[1] < 1.002 * 512 * 512


def test_residual_is_what_this_rank_did_not_send():
    """Sum of what a rank sent + residual = sum of its gradients, for any vote."""

    @dataclass
    class Recorded(gradzip.SignSGD):
        def transmitted(self, state):
            sent = super().transmitted(state)
            self.total = getattr(self, "total", 0) + sent.double().view(64, 64)
            return sent

    group, wanted = gradzip.LocalGroup(Recorded(), 3), [torch.zeros(64, 64, dtype=torch.float64)] * 3
    for _ in range(50):
        grads = [(rank + 1) * torch.randn(64, 64) for rank in range(3)]
        group.average(grads, "w")
        wanted = [w + g.double() for w, g in zip(wanted, grads)]
    for compressor, gradient in zip(group.compressors, wanted):
        residual = compressor.states["w"].residual
        bound = 50 * 4 * 2**-24 * 2 * residual.abs().max()
        assert (compressor.total + residual - gradient).abs().max() < bound < 1e-3 * residual.abs().max()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("compressor", [gradzip.SignSGD(majority=False), gradzip.OneBitSGD()], ids=repr)
def test_error_feedback_conserves_the_sum(compressor, size):
    group, steps = gradzip.LocalGroup(compressor, size), 50
    total = torch.zeros(64, 64, dtype=torch.float64)
    largest = 0.0
    for _ in range(steps):
        grads = [(rank + 1) * torch.randn(64, 64) for rank in range(size)]
        total += group.average(grads, "w")[0].double() - sum(g.double() for g in grads) / size
        largest = max(largest, *(c.states["w"].residual.abs().max().item() for c in group.compressors))
    residual = sum(c.states["w"].residual.double() for c in group.compressors) / size
    # A step adds the residual, averages over the ranks and subtracts; each rounds numbers below 2 * largest.
    bound = steps * (2 + size) * 2**-24 * 2 * largest
    assert (total + residual).abs().max() < bound < 1e-3 * residual.abs().max()


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
    assert nbytes == padded(48 + 8 * shape[0] + -(-grad.numel() // 8))
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


def test_scatter_reduce():
    """A vote has elements of one magnitude, so the second compression is exact. Each shard has its own scale."""
    grads = [(rank + 1) * torch.randn(60, 64) for rank in range(3)]
    average = gradzip.simulate(gradzip.SignSGD(exchange="scatter_reduce"), grads)[0]
    assert torch.equal(average.sign(), vote(grads).sign())
    rows = [g[:20].abs().mean() for g in grads]
    torch.testing.assert_close(average[:20].abs(), (sum(rows) / 3).expand(20, 64))
    # A piece of a row counts as a row, and has its own means.
    grads = [torch.randn(1, 4096) for _ in range(4)]
    group = gradzip.LocalGroup(gradzip.OneBitSGD(exchange="scatter_reduce"), 4)
    group.average(grads, "w")
    assert group.bytes_sent == 5 * padded(48 + 8 + 1024 // 8)


# --- both


@pytest.mark.parametrize("spec", ["signsgd", "signsgd:majority=False", "onebit"])
def test_corrupt_payloads_are_refused(spec):
    codec, grad = gradzip.parse(spec), torch.randn(64, 64)
    payload = codec.encode(grad, Key(0, 0, "w", 0))
    fields = bytes(payload[32:48].tolist())
    shorter = codec.seal(payload[:-16].clone(), N, True, fields)
    for others in ([], [payload]):
        with pytest.raises(gradzip.PayloadError, match="from rank .* corrupt payload: got .* after the header"):
            codec.decode([*others, shorter], N)
        for wrong in (b"\xff" * 16, b"\x03" * 16 if spec == "onebit" else b"\x00\x00\xc0\x7f" * 4):
            with pytest.raises(gradzip.PayloadError, match="from rank .* corrupt payload: (its scale|it claims)"):
                codec.decode([*others, codec.seal(payload.clone(), N, True, wrong)], N)


def test_invalid_arguments():
    with pytest.raises(ValueError, match="SignSGD: got majority = 2, expected True or False"):
        gradzip.SignSGD(majority=2)
    with pytest.raises(ValueError, match="SignSGD: got error_feedback = 'no', expected True or False"):
        gradzip.SignSGD(error_feedback="no")
    with pytest.raises(ValueError, match="unknown argument 'error_feedback', expected one of: "):
        gradzip.parse("onebit:error_feedback=False")
