"""Residuals added to gradients of any type, compared with NumPy."""

import numpy as np
import pytest
import torch

from gradzip.ops import add_residual
from gradzip.ops import groups as of_groups
from reference import LARGE, SIZES, Guarded, arrays, same_everywhere, sliced

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def summed(x: torch.Tensor, residual: np.ndarray) -> np.ndarray:
    """The sum in float64, which is exact for float32 numbers of similar magnitude, rounded once."""
    with np.errstate(all="ignore"):
        return (x.float().numpy().astype(np.float64) + residual).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [*SIZES, LARGE])
def test_sums_are_rounded_once(n, dtype):
    """At every SIMD level and number of threads; memory of exactly n elements, at an odd address."""
    residual = arrays(n, 1)["laplace"]
    for name, array in arrays(n).items() if n < 2000 else [("heavy-tailed", arrays(n)["heavy-tailed"])]:
        x = torch.empty(n + 1, dtype=dtype)[1:].copy_(torch.from_numpy(array))
        out = Guarded(n, torch.float32)
        got = same_everywhere(lambda x=x, out=out: add_residual(x, sliced(residual), out.out).clone())
        assert out.intact() and np.array_equal(got.numpy(), summed(x, residual), equal_nan=True), name


def test_sums_keep_the_signs_of_zeros_and_subnormal_numbers():
    x, residual = torch.tensor([-0.0, -0.0, 1e-40, -1e-45]), torch.tensor([-0.0, 0.0, 1e-41, 1e-45])
    got = add_residual(x, residual)
    assert torch.equal(got.view(torch.int32), (x.double() + residual.double()).float().view(torch.int32))


def test_in_place_and_of_any_shape():
    x, residual = torch.randn(30, 40), torch.randn(40, 30).T
    expected = (x + residual).view(-1)
    assert torch.equal(add_residual(x, residual), expected)
    flat = x.view(-1)
    assert add_residual(x, residual, out=flat) is flat and torch.equal(flat, expected)


def test_parts_of_several_groups():
    """Each with its own type; parts are anywhere, residuals and sums one after the other."""
    sums, expected = [], []
    for i, dtype in enumerate(DTYPES):
        parts = [torch.randn(5, n + i).to(dtype) for n in (0, 1, 7, 40000)]
        residual = torch.randn(sum(map(torch.Tensor.numel, parts)))
        outs = (
            [torch.empty_like(residual)] if i else [torch.empty(part.shape) for part in parts]
        )  # one for all, or each
        sums.append((parts, residual, outs))
        expected.append(torch.cat([part.float().view(-1) for part in parts]) + residual)
    assert of_groups.add_residual(sums) == [None] * len(sums)
    for (_, _, outs), wanted in zip(sums, expected):
        assert torch.equal(torch.cat([out.view(-1) for out in outs]), wanted)


@pytest.mark.parametrize(
    ("x", "residual", "out", "message"),
    [
        (torch.ones(3).double(), torch.ones(3), None, "x: got torch.float64"),
        (torch.ones(3), torch.ones(3).half(), None, "residual: got torch.float16"),
        (torch.ones(3), torch.ones(4), None, "residual: got 4 elements, expected 3"),
        (torch.ones(3), torch.ones(3), torch.ones(2), "out: got 2 elements, expected 3"),
        (torch.ones(3).half(), torch.ones(3), torch.ones(3).half(), "out: got torch.float16"),
    ],
)
def test_wrong_arguments(x, residual, out, message):
    with pytest.raises(ValueError, match=message):
        add_residual(x, residual, out)
