import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from gradzip.ops import atom_probabilities
from reference import LARGE, SIZES, arrays, examples, same_everywhere, sliced


def algorithm_1(atoms: np.ndarray, budget: float) -> np.ndarray:
    """The paper's algorithm, on atoms sorted by descending magnitude, in long double."""
    order = np.argsort(-np.abs(atoms.astype(np.float64)), kind="stable")
    a = np.abs(atoms.astype(np.longdouble))[order]
    tails = np.concatenate([np.cumsum(a[::-1])[::-1], [0]])
    p, s = np.zeros(a.size, np.longdouble), np.longdouble(budget)
    for i in range(a.size):
        if a[i] > 0 and a[i] * s > tails[i]:
            p[i], s = 1, s - 1
        else:
            if tails[i] > 0:
                p[i:] = a[i:] * max(s, 0) / tails[i]
            break
    found = np.empty(a.size)
    found[order] = p
    return found


def check(atoms: torch.Tensor, budget: float) -> torch.Tensor:
    p = same_everywhere(lambda: atom_probabilities(atoms, budget))
    assert p.dtype == atoms.dtype and p.shape == atoms.shape
    values = atoms.numpy()
    np.testing.assert_allclose(p.numpy(), algorithm_1(values.reshape(-1), budget).reshape(values.shape), rtol=3e-7)
    nonzero = np.count_nonzero(values)
    assert ((p >= 0) & (p <= 1)).all() and not p[atoms == 0].any()
    np.testing.assert_allclose(p.double().sum().item(), min(budget, nonzero), rtol=1e-6)
    return p


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("budget", [0.5, 1, 3, 10.5, 1000])
def test_equals_algorithm_1(budget, dtype):
    for n in SIZES[:-3]:
        for name, array in arrays(n).items():
            if name not in ("infinite", "NaN", "denormal"):
                check(sliced(array).to(dtype), budget)


def test_extremes():
    check(2.0 ** -torch.arange(100, dtype=torch.float64), 50)
    check(2.0 ** -torch.arange(1000, dtype=torch.float64), 900)  # needs more rounds than Newton's method has: bisection
    check(1.5 ** -torch.arange(200, dtype=torch.float32), 150.5)
    check(torch.full((100,), 1e308, dtype=torch.float64), 3)
    check(torch.tensor([3e38, 1e38, -1e38, 1e30]), 2)
    check(torch.tensor([1e-44, 5e-45]), 1)
    check(torch.tensor([5e-324, 5e-324], dtype=torch.float64), 1)
    check(torch.tensor([1.0, 1.0, 1.0]), 3)
    check(torch.tensor([5.0]), 0.25)
    check(torch.zeros(10), 3)
    assert torch.equal(check(torch.tensor([0.0, 1e-30, -5.0]), 2), torch.tensor([0.0, 1.0, 1.0]))
    check(torch.randn(4, 5, 6), 7)


def test_large():
    values = arrays(LARGE)["heavy-tailed"]
    check(sliced(values), 10000)


@examples
@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=30), st.floats(0.01, 40))
def test_any_atoms(values, budget):
    atoms = torch.tensor(values, dtype=torch.float64)
    p = atom_probabilities(atoms, budget).numpy()
    np.testing.assert_allclose(p, algorithm_1(atoms.numpy(), budget), rtol=1e-9, atol=1e-300)


def test_errors():
    for atoms, budget, message in [
        (torch.ones(3), 0, "got budget = 0, expected a finite number > 0"),
        (torch.ones(3), float("nan"), "got budget = nan"),
        (torch.tensor([1.0, float("inf")]), 1, "got an atom that is inf or NaN"),
        (torch.tensor([1.0, float("nan")]), 1, "got an atom that is inf or NaN"),
        (torch.ones(3).half(), 1, "got torch.float16, expected torch.float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            atom_probabilities(atoms, budget)
