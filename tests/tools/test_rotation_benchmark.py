"""benchmarks/rotation.py: its quantizers, and what a rotation does to vectors whose errors are known."""

import itertools

import pytest
import torch

from benchmarks import rotation
from gradzip import ops

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("bits, block", list(itertools.product((4, 8), rotation.BLOCKS)))
def test_nearest_is_block_float(bits, block):
    """But for elements so close to the middle of two codes that 1 / step decides."""
    x = torch.randn(5 * block - 3, generator=torch.Generator().manual_seed(0))
    decoded = torch.empty_like(x)
    ops.block_float_decode([ops.block_float_encode(x, bits, block)], decoded, bits, block)
    mine = rotation.nearest(rotation.in_blocks(x, block), bits).flatten()[: len(x)]
    assert (mine - decoded).abs().max() <= x.abs().max() / (2 ** (bits - 1) - 1) * 1.001
    assert ((mine - decoded).abs() > 1e-6).double().mean() < 0.01


@pytest.mark.parametrize("block", rotation.BLOCKS)
def test_rotations_go_back_and_keep_lengths(block):
    rows = torch.randn(7, block, generator=torch.Generator().manual_seed(0))
    rotate = rotation.Rotation(block)
    assert torch.allclose(rotate.back(rotate(rows)), rows, atol=1e-5)
    assert torch.allclose(rotate(rows).norm(dim=1), rows.norm(dim=1), rtol=1e-5)
    assert (rotate(rows) - rows).abs().max() > 0.1


@pytest.mark.parametrize("bits, variance", [(2, 0.1188), (3, 0.03744), (4, 0.01154)])
def test_normal_elements_have_the_error_of_the_best_uniform_quantizer(bits, variance):
    """Max, Quantizing for Minimum Distortion, 1960, table II."""
    rows = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    assert rotation.relative(rotation.normal(rows, bits) - rows, rows) ** 2 == pytest.approx(variance, rel=0.03)


@pytest.mark.parametrize("bits", rotation.BITS)
def test_steps_of_normal_are_best(bits):
    x = torch.linspace(-8, 8, 1 << 16, dtype=torch.float64)
    density, half = torch.exp(-(x**2) / 2), 2 ** (bits - 1)

    def error(step):
        decoded = ((x / step).floor().clamp(-half, half - 1) + 0.5) * step
        return float((density * (decoded - x) ** 2).sum())

    step = rotation.STEPS_OF_NORMAL[bits]
    assert error(step) < min(error(0.99 * step), error(1.01 * step))


def test_errors_of_an_outlier():
    """One element of each block is 100 times the others: as it is, 4 bits lose all others; rotated, a share of each."""
    x = torch.full((4, 256), 0.01)
    x[:, 7] = 1.0
    wanted = {"block": 256, "bits": 4, "rule": "largest, nearest"}
    (row,) = (row for row in rotation.errors(x.flatten(), x.flatten()) if wanted.items() <= row.items())
    assert row["plain"] == pytest.approx((255e-4 / (1 + 255e-4)) ** 0.5, rel=1e-3)
    # Elements are 1/16 of the outlier, and the sum of 255 others with signs, standard deviation 0.01. The largest is
    # within five of those, the error uniform within half a step.
    assert 0.01 < row["rotated"] < 0.5 / 7 * (1 / 16 + 0.05) / (1 / 16)
    # In units of themselves, all elements weigh the same, and the small ones get a share of the outlier's error.
    assert row["plain, divided"] == pytest.approx((255 / 256) ** 0.5, rel=1e-3)
    assert row["rotated, divided"] == pytest.approx(row["rotated"] * (1 + 255e-4) ** 0.5 / 16 * 100, rel=0.1)
