"""benchmarks/rotation.py: its quantizers, and what a rotation does to vectors whose errors are known."""

import itertools

import pytest
import torch

from benchmarks import rotation
from gradzip import ops


@pytest.mark.parametrize("bits, block", list(itertools.product((4, 8), rotation.BLOCKS)))
def test_nearest_is_block_float(bits, block):
    """But for elements so close to the middle of two codes that 1 / step decides."""
    x = torch.randn(5 * block - 3, generator=torch.Generator().manual_seed(0))
    decoded = torch.empty_like(x)
    ops.block_float_decode([ops.block_float_encode(x, bits, block)], decoded, bits, block)
    mine = rotation.nearest(rotation.in_blocks(x, block), bits).flatten()[: len(x)]
    assert (mine - decoded).abs().max() <= x.abs().max() / (2 ** (bits - 1) - 1) * 1.001
    assert ((mine - decoded).abs() > 1e-6).double().mean() < 0.01


def errors(x, block, bits, rule):
    (row,) = (r for r in rotation.errors(x) if (r["block"], r["bits"], r["rule"]) == (block, bits, rule))
    return row["plain"], row["rotated"]


@pytest.mark.parametrize("bits, variance", [(2, 0.1188), (3, 0.03744), (4, 0.01154)])
def test_normal_elements_have_the_error_of_the_best_uniform_quantizer(bits, variance):
    """Max, Quantizing for Minimum Distortion, 1960, table II. Rotated normal elements are normal."""
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    for error in errors(x, 1024, bits, "normal, nearest"):
        assert error**2 == pytest.approx(variance, rel=0.02)


@pytest.mark.parametrize("bits", rotation.BITS)
def test_steps_of_normal_are_best(bits):
    x = torch.linspace(-8, 8, 1 << 18, dtype=torch.float64)
    density, half = torch.exp(-(x**2) / 2), 2 ** (bits - 1)

    def error(step):
        decoded = ((x / step).floor().clamp(-half, half - 1) + 0.5) * step
        return float((density * (decoded - x) ** 2).sum())

    step = rotation.STEPS_OF_NORMAL[bits]
    assert error(step) < min(error(0.99 * step), error(1.01 * step))


def test_a_rotation_spreads_an_outlier():
    """One element of each block is 100 times the others: as it is, 4 bits lose all others; rotated, a share of each."""
    x = torch.full((64, 256), 0.01)
    x[:, 7] = 1.0
    plain, rotated = errors(x.flatten(), 256, 4, "largest, nearest")
    assert plain == pytest.approx((255e-4 / (1 + 255e-4)) ** 0.5, rel=1e-4)
    # Elements are 1/16 of the outlier, and the sum of 255 others with signs, standard deviation 0.01. The largest is
    # within five of those, the error uniform within half a step.
    assert 0.01 < rotated < 0.5 / 7 * (1 / 16 + 0.05) / (1 / 16)
