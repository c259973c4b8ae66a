import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.kernels import matrix_shapes
from gradzip import ops
from reference import same_everywhere


def deviation(q):
    """||QᵀQ - I|| (spectral norm), in double."""
    q = q.double().numpy()
    return np.linalg.norm(q.T @ q - np.eye(q.shape[1]), 2)


def outside(a, q):
    """Largest component of a column of a outside the span of q, relative to its length."""
    a, q = a.double().numpy(), q.double().numpy()
    rest = a - q @ (q.T @ a)
    return (np.linalg.norm(rest, axis=0) / np.linalg.norm(a, axis=0)).max()


def orthogonalized(*matrices):
    """Orthogonalized copies, checked to be the same at every SIMD level and number of threads."""

    def copies():
        made = [m.clone() for m in matrices]
        ops.orthogonalize_(made)
        return made

    return same_everywhere(copies)


@pytest.mark.parametrize("r", [1, 2, 3, 4, 5, 8, 17, 32, 64])
def test_orthonormal_and_spans(r):
    for n in (r, r + 1, 511, 512, 513, 3000):
        if n < r:
            continue
        a = torch.randn(n, r)
        (q,) = orthogonalized(a)
        assert deviation(q) <= 1e-6 * r**0.5, n
        assert outside(a, q) <= 1e-6 * r**0.5, n
        # The same as Householder's up to the sign.
        reference, upper = np.linalg.qr(a.double().numpy())
        reference = reference * np.sign(np.diag(upper))
        if n >= 2 * r:  # well conditioned
            assert np.abs(q.numpy() - reference).max() <= 1e-5


def test_a_batch_has_the_bits_of_single_calls():
    matrices = [torch.randn(n, r) for n, r in ((3000, 32), (100, 5), (7, 7), (1300, 4))]
    matrices[1][:, 3] = matrices[1][:, 1]
    for together, matrix in zip(orthogonalized(*matrices), matrices):
        assert torch.equal(together, orthogonalized(matrix)[0])


@pytest.mark.parametrize("exponent", range(1, 13))
def test_badly_conditioned(exponent):
    u, _ = torch.linalg.qr(torch.randn(700, 16, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64))
    a = (u * torch.logspace(0, -exponent, 16, dtype=torch.float64) @ v.T).float()
    q = a.clone()
    ops.orthogonalize_(q)
    assert deviation(q) <= 1e-6 * 4
    assert outside(a, q) <= 1e-6 * 4


def test_any_scale():
    for scales in ([1e-30] * 4, [1e30] * 4, [1e30, 1e-30, 1.0, 1e-42], [1e37, 1e-37, 1e37, 1e-37]):
        a = torch.rand(600, 4) + torch.eye(600, 4) * 8
        a *= torch.tensor(scales)
        q = a.clone()
        ops.orthogonalize_(q)
        assert deviation(q) <= 2e-6
        assert outside(a, q) <= 2e-6


@pytest.mark.parametrize("n, r", [(1, 1), (5, 3), (600, 4), (600, 32)])
def test_zeros_become_axes(n, r):
    q = torch.zeros(n, r)
    ops.orthogonalize_(q)
    assert torch.equal(q, torch.eye(n, r))


def test_dependent_columns_are_replaced_after_the_others():
    a = torch.randn(40, 6)
    a[:, 1] = 2 * a[:, 0]
    a[:, 3] = 0
    a[:, 4] = a[:, 0] - a[:, 2]
    q = a.clone()
    ops.orthogonalize_(q)
    assert deviation(q) <= 2.5e-6
    assert outside(a[:, [0, 2, 5]], q[:, [0, 2, 5]]) <= 1e-6
    again = a.clone()
    ops.orthogonalize_(again)
    assert torch.equal(q, again)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_columns_are_replaced(value):
    a = torch.randn(600, 4)
    a[77, 2] = value
    q = a.clone()
    ops.orthogonalize_(q)
    assert deviation(q) <= 2e-6
    assert outside(a[:, [0, 1, 3]], q[:, [0, 1, 3]]) <= 1e-6


@pytest.mark.parametrize("r", [1, 2, 3, 4, 5, 9, 17])
def test_rows_beside_a_matrix_are_neither_read_nor_written(r):
    """Registers that are wider than a row reach into the next one, but not past the last."""
    n = 1030  # more than a block
    whole = torch.full((n + 40, r), float("nan"))
    whole[20:-20] = a = torch.randn(n, r)
    ops.orthogonalize_(whole[20:-20])
    assert whole[:20].isnan().all() and whole[-20:].isnan().all()
    assert torch.equal(whole[20:-20], orthogonalized(a)[0])


@pytest.mark.parametrize("n, r", [(1, 2), (3, 7), (8, 64)])
def test_more_columns_than_rows(n, r):
    a = torch.randn(n, r)
    a[:, 0] = 0
    q = a.clone()
    ops.orthogonalize_(q)
    assert torch.equal(q[:, 0], torch.zeros(n))
    assert deviation(q[:, 1 : n + 1]) <= 3e-6
    assert torch.equal(q[:, n + 1 :], torch.zeros(n, r - n - 1))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_never_nan(n, r, seed):
    """Matrices of few distinct values often have dependent columns."""
    random = np.random.default_rng(seed)
    values = random.choice(np.float32([0, 0, 1, -1, 1e-30, 1e30, 1e-45]), (n, r))
    q = torch.from_numpy(values)
    ops.orthogonalize_(q)
    rank = min(n, r)
    filled = q[:, q.abs().sum(0) > 0]
    assert filled.shape[1] == rank
    assert deviation(filled) <= 1e-6 * rank**0.5


@pytest.mark.parametrize("shapes, r", [(matrix_shapes("resnet50"), 4), (matrix_shapes("bert-base"), 32)])
def test_all_matrices_of_a_model(shapes, r):
    matrices = [torch.randn(n, r) for n, _ in shapes]
    ops.orthogonalize_(matrices)
    for q in matrices:
        filled = q[:, : q.shape[0]]
        assert deviation(filled) <= 1e-6 * r**0.5


def test_empty():
    ops.orthogonalize_([])
    ops.orthogonalize_([torch.empty(0, 4), torch.empty(4, 0), torch.ones(1, 1)])


def test_errors():
    with pytest.raises(ValueError, match="got torch.float64, expected torch.float32"):
        ops.orthogonalize_(torch.zeros(3, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"got a tensor of shape \(3,\), expected \(n, r\)"):
        ops.orthogonalize_(torch.zeros(3))
    with pytest.raises(ValueError, match="expected a contiguous tensor"):
        ops.orthogonalize_(torch.zeros(2, 3).t())
    with pytest.raises(ValueError, match="got list, expected a torch tensor"):
        ops.orthogonalize_([[1.0]])
    q = torch.randn(3, 2)
    with pytest.raises(ValueError, match="same matrix more than once"):
        ops.orthogonalize_([q, q])
