"""The arithmetic of benchmarks/transforms.py: orthonormal transforms, sizes of index codes, interpolation."""

import math

import numpy as np
import pytest
import torch

from benchmarks import transforms
from benchmarks.common import gradients
from gradzip import ops
from gradzip.methods.base.threads import one_thread

SHAPES = {"kernels": (20, 7, 3, 3), "matrix": (70, 65), "AlexNet's": (9, 4096)}


@pytest.mark.parametrize("transform", list(transforms.transforms()), ids=lambda transform: transform.name)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_energy_is_kept(transform, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if transform.fits(x.shape):
        values = transforms.lay_out(transform.panels(x)).values
        assert values.is_complex() or values.numel() == x.numel()
        assert values.abs().double().square().sum().item() == pytest.approx(x.double().square().sum().item(), rel=1e-5)


@pytest.mark.parametrize("n", [2, 9, 64, 65, 256])
def test_dct_is_the_textbook_sum(n):
    x = np.random.default_rng(0).standard_normal((3, n))
    k, i = np.arange(n)[:, None], np.arange(n)
    matrix = np.sqrt(np.where(k == 0, 1, 2) / n) * np.cos(np.pi * k * (2 * i + 1) / (2 * n))
    np.testing.assert_allclose(transforms.dct(torch.from_numpy(x).float()), x @ matrix.T, atol=2e-6 * n)


def test_coefficients_are_in_planes():
    panels = [torch.arange(12.0).view(4, 3), torch.tensor([[12.0], [13.0]])]
    coefficients = transforms.lay_out(panels)
    assert coefficients.values.tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11, 12, 13]
    assert coefficients.planes.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [0, 0]


def rice_code(marks, parameter):
    """A stream of bits: for each mark, its gap in unary and `parameter` low bits."""
    bits, gap = "", 0
    for mark in marks:
        if mark:
            bits += "0" * (gap >> parameter) + "1" + (f"{gap:016b}"[-parameter:] if parameter else "")
            gap = 0
        else:
            gap += 1
    return bits


@pytest.mark.parametrize("density", [0.0, 0.02, 0.3, 0.7, 1.0])
def test_rice_nbytes_is_a_code_s_size(density):
    marks = np.random.default_rng(1).random(1000) < density
    size = transforms.rice_nbytes(np.flatnonzero(marks), 1000, 128)
    smallest = 0
    for begin in range(0, 1000, 128):
        part = marks[begin : begin + 128]
        choices = [part, ~part] if part.sum() > 64 else [part]
        best = min(len(rice_code(choice, parameter)) for choice in choices for parameter in range(8))
        smallest += 2 + (1 + math.ceil(best / 8) if part.any() else 0)
    assert smallest <= size <= 1.02 * smallest  # three parameters are tried, not all


def test_errors_are_those_of_decoded_coefficients():
    x = torch.randn(64, 16, 3, 3, generator=torch.Generator().manual_seed(2))
    coefficients = transforms.lay_out(transforms.dct_kernels()(x))
    curve = transforms.measure(coefficients, x.numel(), ("bitmap",), (6,))
    theta = transforms.THETAS.index(0.85)
    values = coefficients.values
    k = round(0.15 * values.numel())
    kept = torch.where(values.abs() >= values.abs().topk(k).values[-1], values, 0)
    number = ops.RangeFloat.fit(kept[kept != 0], 6)
    error = (number.decode(number.encode(kept)) - values).norm() / x.norm()
    assert curve.error[6][theta] == pytest.approx(error.item(), rel=1e-4)
    rate = 1 + 6 * k / x.numel()
    assert curve.at(rate, 6, "bitmap") == pytest.approx(error.item(), rel=1e-4)
    assert math.isnan(curve.at(0.9, 6, "bitmap"))  # the bitmap alone takes a bit


@pytest.mark.long
def test_an_interrupted_capture_ends_with_the_same_gradients(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(gradients, "CHECKPOINT_STEPS", 2)
    run = gradients.Capture("cnn", 8, 9, (1, 6))
    dataset = gradients.load_data(run, None, None)

    def interrupt(share):
        if share > 0.7:
            raise KeyboardInterrupt

    shares = []
    with one_thread():
        with pytest.raises(KeyboardInterrupt):
            gradients.gradient_files(run, dataset, tmp_path / "a", interrupt)
        resumed = gradients.gradient_files(run, dataset, tmp_path / "a", shares.append)
        direct = gradients.gradient_files(run, dataset, tmp_path / "b", lambda share: None)
    assert len(shares) < 7  # it did not start again
    for step in run.captured:
        one, other = torch.load(resumed[step]), torch.load(direct[step])
        assert list(one) == list(other)
        assert all(torch.equal(one[name], other[name]) for name in one)
