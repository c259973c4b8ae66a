"""ATOMO: expectation and variance, exactness with a large budget, QSGD and TernGrad as special cases, sizes."""

import itertools

import numpy as np
import pytest
import torch

import gradzip
from gradzip import ops
from gradzip.memory.state import Key
from gradzip.methods.atomo import matrix_shape
from reference import padded, resnet20_gradients
from single import decode, encode
from unbiased import SHAPE, assert_unbiased, gradients

GRADIENTS = gradients()
N = 40 * 50
KINDS = {"svd": 3, "entry": 100, "fourier": 100}


def atoms_of(kind, grad):
    """Coefficients lambda in float64, by NumPy's transforms."""
    x = grad.double().numpy()
    if kind == "svd":
        sigma = np.linalg.svd(x, compute_uv=False)
        return np.where(sigma > sigma[0] * 50 * 2**-23, sigma, 0)
    if kind == "entry":
        return x.reshape(-1)
    bins = np.fft.rfft(x.reshape(-1), norm="ortho")
    bins[1:-1] *= np.sqrt(2)
    return np.stack([bins.real, bins.imag], -1).reshape(-1)


def optimum(atoms, budget):
    """The p that minimises sum lambda^2 / p for sum p = budget, p <= 1: min(1, c |lambda|), by bisection for c."""
    a = np.abs(atoms)
    if np.count_nonzero(a) <= budget:
        return (a > 0).astype(float)
    low, high = 0.0, 1 / a[a > 0].min()
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if np.minimum(1, c * a).sum() < budget else (low, c)
    return np.minimum(1, c * a)


# --- Algorithm 1


@pytest.mark.parametrize("budget", [0.5, 1, 3, 7.5])
@pytest.mark.parametrize("decay", ["flat", "slow", "steep"])
def test_probabilities_minimise_the_variance(decay, budget):
    """p equals a numerical optimum, and moving probability between two atoms never lowers the variance.

    sum lambda^2 / p is convex, so this local test is sufficient.
    """
    i = np.arange(12)
    atoms = {"flat": 1 + 0.1 * np.sin(i), "slow": 1 / (1 + i), "steep": 4.0**-i}[decay]
    balanced = atoms.max() * budget <= atoms.sum()
    assert balanced == (budget <= {"flat": 7.5, "slow": 3, "steep": 1}[decay])
    p = ops.atom_probabilities(torch.from_numpy(atoms), budget).numpy()
    assert (p.max() < 1) == balanced and abs(p.sum() - budget) < 1e-9
    np.testing.assert_allclose(p, optimum(atoms, budget), rtol=1e-9)
    least = (atoms**2 / p).sum()
    if balanced:
        np.testing.assert_allclose(least, atoms.sum() ** 2 / budget)  # Lemma 2
    for j, k in itertools.permutations(range(12), 2):
        for shift in (1e-2, 1e-5):
            if p[j] > shift and p[k] < 1 - shift:
                other = p.copy()
                other[j], other[k] = other[j] - shift, other[k] + shift
                assert (atoms**2 / other).sum() >= least * (1 - 1e-14)


# --- expectation and variance


@pytest.mark.parametrize(
    "name, scale", [*((name, 1) for name in GRADIENTS), *itertools.product(["normal", "mostly zero"], [0.1, 2.5])]
)
@pytest.mark.parametrize("kind", KINDS)
def test_unbiased_with_the_papers_variance(kind, name, scale):
    budget = scale * KINDS[kind]
    grad = GRADIENTS[name]
    atoms = atoms_of(kind, grad)
    atoms = np.where(np.abs(atoms) > 1e-6 * np.abs(atoms).max(), atoms, 0)
    p = optimum(atoms, budget)
    size = np.divide(np.abs(atoms), p, out=np.zeros_like(p), where=p > 0)
    codec = gradzip.ATOMO(kind, budget)
    assert_unbiased(codec, grad, grad.double().numpy(), size, p, atoms, keys=200)


@pytest.mark.parametrize("kind, budget", [("svd", 3), ("svd", 0.5), ("entry", 40), ("fourier", 7.5), ("entry", "l2")])
def test_expected_number_of_atoms_is_the_budget(kind, budget):
    """The mean number of atoms over 400 draws is within five standard errors of the budget."""
    codec, grad = gradzip.ATOMO(kind, budget), GRADIENTS["normal"]
    atoms = atoms_of(kind, grad)
    if budget == "l2":
        budget = np.abs(atoms).sum() / np.linalg.norm(atoms)
        p = np.abs(atoms) / np.linalg.norm(atoms)
    else:
        p = optimum(atoms, budget)
    assert abs(p.sum() - budget) < 1e-6
    counts = []
    for step in range(400):
        fields = codec.encode(grad, Key(0, step, "w", 0))[32:48]
        counts.append(fields.view(torch.int64)[1].item() if kind == "svd" else fields.view(torch.int32)[1:3].sum())
    assert abs(np.mean(counts) - budget) <= 5 * np.sqrt((p * (1 - p)).sum() / 400)
    assert np.std(counts) > 0


def test_empty_draws_decode_to_zero():
    """With a budget of 0.5, most draws are empty, and decode to 0."""
    codec, grad = gradzip.ATOMO("svd", 0.5), GRADIENTS["normal"]
    payloads = [codec.encode(grad, Key(0, step, "w", 0)) for step in range(100)]
    empty = [p for p in payloads if p.numel() == 48]
    assert 40 < len(empty) < 80
    assert not decode(codec, empty[:1], (N,)).any()


# --- exactness


@pytest.mark.parametrize("kind", KINDS)
def test_large_budget_is_exact(kind):
    codec = gradzip.ATOMO(kind, 10**6)
    for name, grad in GRADIENTS.items():
        decoded = decode(codec, [codec.encode(grad, Key(0, 0, "w", 0))], SHAPE)
        assert (decoded - grad).norm() <= 3e-6 * grad.norm(), name
        approximation, nbytes = gradzip.roundtrip(codec, grad)
        assert (approximation - grad).norm() <= 3e-6 * grad.norm()
        if kind == "svd":
            assert torch.equal(approximation, grad) and nbytes == 4 * N  # bypasses compression


def test_large_budget_sends_no_more_atoms_than_the_rank():
    grad = torch.randn(64, 2) @ torch.randn(2, 96)
    approximation, nbytes = gradzip.roundtrip(gradzip.ATOMO(budget=5), grad)
    torch.testing.assert_close(approximation, grad, rtol=1e-4, atol=1e-5)
    assert nbytes == 48 + 4 * 2 * (64 + 96)
    zeros = torch.zeros(64, 96)
    for kind in KINDS:
        assert gradzip.roundtrip(gradzip.ATOMO(kind), zeros)[1] == 48
        assert torch.equal(gradzip.roundtrip(gradzip.ATOMO(kind), zeros)[0], zeros)


# --- special cases (section 4)


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize(
    "norm, other",
    [("l2", gradzip.QSGD(bits=2, bucket=10**6)), ("max", gradzip.TernGrad(clip=None, shared_scale=False))],
)
def test_entry_atoms_with_norm_budgets_equal_qsgd_and_terngrad(norm, other, name):
    atomo = gradzip.ATOMO("entry", norm)
    for step in range(20):
        key = Key(0, step, "w", 0)
        ours = decode(atomo, [encode(atomo, GRADIENTS[name], key)], SHAPE)
        theirs = decode(other, [encode(other, GRADIENTS[name], key)], SHAPE)
        assert torch.equal(ours != 0, theirs != 0)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("norm, order", [("l2", 2), ("max", np.inf)])
def test_norm_budgets_give_the_probabilities_of_algorithm_1(norm, order):
    """Theorem 5: they are those of Algorithm 1 for the budget ||g||_1 / ||g||_q."""
    x = GRADIENTS["normal"].double().numpy().reshape(-1)
    p = gradzip.ATOMO("entry", norm).probabilities(GRADIENTS["normal"]).double().numpy().reshape(-1)
    budget = np.abs(x).sum() / np.linalg.norm(x, order)
    np.testing.assert_allclose(p, optimum(x, budget), rtol=1e-6)
    np.testing.assert_allclose(
        gradzip.ATOMO("entry", budget).probabilities(GRADIENTS["normal"]).reshape(-1), p, rtol=1e-6
    )


# --- sizes and shapes


@pytest.mark.parametrize(
    "shape, matrix",
    [
        ((100, 70), (100, 70)),
        ((64, 32, 3, 3), (1024, 18)),
        ((7, 9, 3, 3), (7, 81)),
        ((64, 32, 1, 1), (64, 32)),
        ((6, 5, 4), (15, 8)),
        ((5, 7, 2), (5, 14)),
        ((9,), (1, 9)),
    ],
)
def test_matrix_shape(shape, matrix):
    assert matrix_shape(torch.Size(shape)) == matrix


@pytest.mark.parametrize("shape", [(64, 96), (16, 32, 3, 3), (15, 9, 3, 3)])
def test_bytes_with_svd_atoms(shape):
    grad = torch.randn(shape)
    for step in range(20):
        payload = gradzip.ATOMO().encode(grad, Key(0, step, "w", 0))
        rows, atoms = payload[32:48].view(torch.int64).tolist()
        assert (rows, grad.numel() // rows) == matrix_shape(grad.shape)
        assert payload.numel() == padded(48 + 4 * atoms * (rows + grad.numel() // rows))


@pytest.mark.parametrize("kind", ["entry", "fourier"])
@pytest.mark.parametrize("budget", [10, 1000, "l2"])
def test_bytes_with_entry_and_fourier_atoms(kind, budget):
    grad = torch.randn(70, 90) ** 3
    codec = gradzip.ATOMO(kind, budget)
    payload = codec.encode(grad, Key(0, 0, "w", 0))
    certain, drawn = payload[36:44].view(torch.int32).tolist()
    p = codec.probabilities(grad.reshape(-1) if kind == "entry" else codec._transform(grad))
    marks = ops.bernoulli(p, Key(0, 0, "w", 0).bits)
    sure = ops.compact(p, 1.0)[1]
    streams = [ops.index_code_encode(bits, p.numel()).numel() for bits in (sure, marks ^ sure)]
    assert certain + drawn == ops.bitmap_count(marks, p.numel())
    streams = [length for length, k in zip(streams, (certain, drawn)) if k]
    assert payload.numel() == padded(48 + 4 * certain + -(-drawn // 8) + sum(streams))


def test_bytes_of_real_gradients():
    grads = resnet20_gradients()
    numel = sum(g.numel() for g in grads.values())
    nbytes = {
        spec: sum(gradzip.roundtrip(gradzip.parse(spec), g)[1] for g in grads.values())
        for spec in (
            "atomo",
            "atomo:atoms=entry,budget=l2",
            "atomo:atoms=fourier,budget=l2",
            "qsgd:bits=2,bucket=1000000",
        )
    }
    assert 3 < 4 * numel / nbytes["atomo"] < 9  # at most 18 columns, 3 atoms on average
    # Equivalent to 1-bit QSGD, which codes runs of zeros instead of indices.
    assert nbytes["atomo:atoms=entry,budget=l2"] < 1.5 * nbytes["qsgd:bits=2,bucket=1000000"]


# --- invalid arguments and payloads


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"atoms": "wavelet"}, "ATOMO: got atoms = 'wavelet', expected 'svd', 'entry' or 'fourier'"),
        ({"budget": 0}, "ATOMO: got budget = 0, expected a finite number > 0, 'l2' or 'max'"),
        ({"budget": -1.5}, "got budget = -1.5"),
        ({"budget": float("inf")}, "got budget = inf"),
        ({"budget": float("nan")}, "got budget = nan"),
        ({"budget": True}, "got budget = True"),
        ({"budget": "l1"}, "got budget = 'l1'"),
        ({"budget": None}, "got budget = None"),
    ],
)
def test_invalid_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        gradzip.ATOMO(**arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_corrupt_payloads_are_refused(kind):
    codec, grad = gradzip.ATOMO(kind, KINDS[kind]), GRADIENTS["normal"]
    payload = codec.encode(grad, Key(0, 0, "w", 0))
    fields = bytes(payload[32:48].tolist())
    for body, wrong in (
        (payload[:-16], fields),
        (payload[:48], fields),
        (payload, b"\xff" * 16),
        (payload, b"\0" * 16),
        (payload, fields[:8] + b"\xff" * 8),
        (payload, b"\0\0\xc0\x7f" + fields[4:]),
    ):
        with pytest.raises(gradzip.PayloadError, match="from rank 0 of 1: "):
            decode(codec, [codec.seal(ops.Seal(body.clone(), N, wrong))], SHAPE)


def test_overflow_of_a_singular_value_is_non_finite():
    """The singular value of 64 x 64 equal numbers is 64 times that number."""
    for size, finite in ((2.0**120, True), (2.0**122, False)):
        group = gradzip.LocalGroup(gradzip.ATOMO(), 1)
        (average,) = group.average([torch.full((64, 64), size)], "w")
        expected = torch.full((64, 64), size if finite else torch.nan)
        torch.testing.assert_close(average, expected, rtol=64 * 2**-23, atol=0, equal_nan=True)
        assert group.compressors[0].states["w"].step == finite


@pytest.mark.parametrize("kind", KINDS)
def test_overflow_of_a_scaled_atom_is_non_finite(kind):
    """An atom near the largest float with p = 0.5 is sent as twice its size, which overflows, or not at all."""
    grad, results = torch.zeros(64, 64), []
    grad[3, 3] = 3e38
    if kind == "fourier":
        grad[:] = 3e38
    for seed in range(20):
        group = gradzip.LocalGroup(gradzip.ATOMO(kind, 0.5, seed=seed), 1)
        average = group.average([grad], "w")[0]
        results.append(bool(average.isfinite().all()))
        assert group.compressors[0].states["w"].step == results[-1]
        assert not results[-1] or not average.any()
    assert any(results) == (kind != "fourier") and not all(results)
