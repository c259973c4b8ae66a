import math

import numpy as np
import pytest
import torch

from gradzip import ops
from reference import (
    Guarded,
    U,
    bin_weights,
    bitmap,
    pack_bits,
    range_format,
    same_everywhere,
    signal,
    sliced,
    spectrum,
)

SHAPES = [
    (1, 1), (1, 2), (1, 3), (2, 2), (3, 7), (5, 31), (5, 32), (33, 64), (7, 65), (3, 1000), (25, 4050), (1, 100002),
]  # fmt: skip


def bins_of(rows: int, length: int, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng([rows, length, seed]).standard_t(3, size=rows * length)
    return spectrum(x, rows, length).astype(np.complex64)


# --- spectrum_power


@pytest.mark.parametrize("rows, length", SHAPES)
def test_power_equals_numpy(rows, length):
    """Scaling by a power of two is exact; two squares and a sum round at most twice: within (1 + u)^2."""
    bins = bins_of(rows, length)
    for amax in (1.0, 1.999, 2.0, 0.37, 1e-30, 1e30):
        scaled = (bins * np.float32(amax)).astype(np.complex64)
        fenced, tensor = Guarded(bins.size, torch.float32), sliced(scaled)

        def power(tensor=tensor, amax=amax, fenced=fenced):
            assert ops.spectrum_power(tensor, length, amax, out=fenced.out) is fenced.out
            assert fenced.intact()
            return fenced.out.clone()

        got = same_everywhere(power).numpy().astype(np.float64)
        s = 2.0 ** -math.floor(math.log2(np.float32(amax)))
        expected = (np.abs(scaled.astype(np.complex128) * s) ** 2 * bin_weights(length)).reshape(-1)
        assert np.all(np.abs(got - expected) <= 2.001 * U * expected)


@pytest.mark.parametrize("length", [64, 63, 4096, 4050, 1])
@pytest.mark.parametrize("amax", [1e-42, 1e-38, 1e-30, 1e-3, 1.0, 1e30, 2e38])
def test_power_stays_in_range_at_any_scale(length, amax):
    """No overflow, and no underflow of bins within 1e-18 of the largest: selection is independent of the scale."""
    rng = np.random.default_rng(length)
    x = (rng.uniform(-1, 1, (4, length)) * amax / math.sqrt(length)).astype(np.float32)
    x[0, 0] = amax
    bins = np.fft.rfft(x.astype(np.float64), norm="ortho").astype(np.complex64)
    power = ops.spectrum_power(torch.from_numpy(bins), length, float(np.float32(amax)))
    assert power.isfinite().all()
    energy = (np.abs(bins.astype(np.complex128)) ** 2 * bin_weights(length)).reshape(-1)
    visible = energy > 1e-36 * energy.max()
    scale = (power.double().numpy()[visible] / energy[visible]).astype(np.float64)
    assert np.all(power.numpy()[visible] > 0)
    assert scale.max() <= scale.min() * (1 + 5 * U)  # one factor s^2 for all


def test_power_of_an_empty_spectrum():
    assert not ops.spectrum_power(torch.zeros(3, 5, dtype=torch.complex64), 8, 0.0).any()
    assert ops.spectrum_power(torch.zeros(0, 5, dtype=torch.complex64), 8, 0.0).numel() == 0


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_power_of_non_finite_bins_is_largest(special):
    """So that they are selected, and detected."""
    bins = torch.zeros(2, 33, dtype=torch.complex64)
    bins[1, 7] = complex(0.0, special)
    for amax in (1.0, math.inf, math.nan):
        power = same_everywhere(lambda amax=amax: ops.spectrum_power(bins, 64, amax))
        assert not power[33 + 7].isfinite()
        assert ops.bitmap(power, ops.select(power, 1)).tolist() == bitmap(np.arange(66) == 40).tolist()


@pytest.mark.parametrize("rows, length", [(1, 64), (3, 63), (25, 4050), (1, 30000)])
@pytest.mark.parametrize("amax", [1e-30, 1.0, 1e30])
def test_dropping_bins_costs_their_power(rows, length, amax):
    """Parseval: the total energy is that of the signal, and the dropped energy is the squared error."""
    x = np.random.default_rng(length).standard_normal(rows * length).astype(np.float32)
    x *= np.float32(amax) / np.abs(x).max()
    most = ops.abs_max(torch.from_numpy(x))
    bins = torch.fft.rfft(torch.from_numpy(x).view(rows, length), norm="ortho")
    power = ops.spectrum_power(bins, length, most)
    s = 2.0 ** -math.floor(math.log2(most))
    scaled = x.astype(np.float64) * s
    # A float32 transform of length n is off by a few u log2(n), relative to the norm.
    off = 4 * U * math.log2(length)
    assert power.double().sum().item() == pytest.approx((scaled**2).sum(), rel=2 * off)
    for k in (1, bins.numel() // 7, bins.numel() - 2):
        marked = np.unpackbits(ops.bitmap(power, ops.select(power, k)).numpy(), bitorder="little")[: power.numel()]
        kept = np.where(marked.reshape(bins.shape), bins.numpy().astype(np.complex128), 0)
        error = scaled - signal(kept, length, x.size) * s
        dropped = power.double().numpy()[marked == 0].sum()
        assert abs(math.sqrt((error**2).sum()) - math.sqrt(dropped)) <= off * math.sqrt((scaled**2).sum())


@pytest.mark.parametrize("shape, length", [((5,), 8), ((2, 5), 7), ((2, 5), 10), ((1, 2, 5), 8), ((2, 0), 8)])
def test_wrong_shape(shape, length):
    with pytest.raises(ValueError, match=rf"spectrum_power: got .*, expected \(rows, {length // 2 + 1}\)"):
        ops.spectrum_power(torch.zeros(shape, dtype=torch.complex64), length, 1.0)


@pytest.mark.parametrize("length", [0, -1, -2])  # -1 // 2 + 1 is 0 in Python and 1 in C++
def test_wrong_length(length):
    with pytest.raises(ValueError, match=f"got .*{length}.*, expected"):
        ops.spectrum_power(torch.zeros((0, length // 2 + 1), dtype=torch.complex64), length, 1.0)


@pytest.mark.parametrize("bins", [None, [[1j]], torch.zeros(2, 5), torch.zeros(2, 5, dtype=torch.complex128)])
def test_wrong_spectrum(bins):
    with pytest.raises(ValueError, match="spectrum_power: spectrum: got .*, expected"):
        ops.spectrum_power(bins, 8, 1.0)
    with pytest.raises(ValueError, match="spectrum_decode_add: spectrum: got .*, expected"):
        ops.spectrum_decode_add(bins, zeros(2), zeros(0), 0, ops.RangeFloat(8, 3, -1.0, 1.0), 1.0)


def test_wrong_output():
    bins = torch.zeros(2, 5, dtype=torch.complex64)
    for out in (torch.zeros(9), torch.zeros(10, dtype=torch.float64), torch.zeros(20)[::2]):
        with pytest.raises(ValueError, match="spectrum_power: out: got .*, expected"):
            ops.spectrum_power(bins, 8, 1.0, out=out)


# --- spectrum_decode_add


def zeros(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 63, 64, 65, 129, 1000, 32767, 32768, 32769, 100003])
@pytest.mark.parametrize("bits, mantissa", [(2, 1), (9, 4), (10, 5), (16, 12)])
def test_decode_add_equals_numpy(n, bits, mantissa):
    rng = np.random.default_rng([n, bits])
    number, reference = ops.RangeFloat(bits, mantissa, -2.0, 1.0), range_format(bits, mantissa, -2.0, 1.0)
    book = reference.codebook.astype(np.float32)
    for share in (0.0, 0.15, 1.0):
        mask = rng.random(n) < share
        count = int(mask.sum())
        codes = rng.integers(0, book.size, size=2 * count)
        before = (rng.standard_normal(n) + 1j * rng.standard_normal(n)).astype(np.complex64)
        bits_, packed = sliced(bitmap(mask)), sliced(pack_bits(codes, bits))

        def add(before=before, bits_=bits_, packed=packed, count=count):
            fenced = Guarded(n, torch.complex64)
            fenced.out.copy_(torch.from_numpy(before))
            ops.spectrum_decode_add(fenced.out, bits_, packed, count, number, 1 / 3)
            assert fenced.intact()
            return fenced.out

        expected = before.copy()
        values = np.float32(1 / 3) * book[codes]
        expected.real[mask] += values[0::2]
        expected.imag[mask] += values[1::2]
        assert np.array_equal(same_everywhere(add).numpy(), expected)


@pytest.mark.parametrize("count", [0, 3, 5, 8])
def test_a_wrong_count_leaves_the_spectrum_unchanged(count):
    number, bins = ops.RangeFloat(8, 3, -1.0, 1.0), torch.ones(8, dtype=torch.complex64)
    codes = torch.full((2 * count,), 9, dtype=torch.uint8)
    with pytest.raises(ops.PayloadError, match=f"its bitmap does not mark the {count} coefficients"):
        ops.spectrum_decode_add(bins, torch.tensor([0b10110100], dtype=torch.uint8), codes, count, number, 1.0)
    assert torch.equal(bins, torch.ones(8, dtype=torch.complex64))


def test_bits_past_the_end_are_refused():
    """Encoders write 0 there."""
    number, bins = ops.RangeFloat(8, 3, -1.0, 1.0), torch.ones(3, dtype=torch.complex64)
    with pytest.raises(ops.PayloadError, match="bitmap"):
        ops.spectrum_decode_add(bins, torch.tensor([0b00001001], dtype=torch.uint8), zeros(2), 1, number, 1.0)
    assert torch.equal(bins, torch.ones(3, dtype=torch.complex64))


@pytest.mark.parametrize("nbytes, count", [(1, 1), (3, 1), (0, 1), (2, 2), (2, -1)])
def test_truncated_codes(nbytes, count):
    with pytest.raises(ValueError, match=f"spectrum_decode_add: packed: got {nbytes} elements, expected {2 * count}"):
        ops.spectrum_decode_add(
            torch.ones(8, dtype=torch.complex64), torch.tensor([1], dtype=torch.uint8), zeros(nbytes), count,
            ops.RangeFloat(8, 3, -1.0, 1.0), 1.0,
        )  # fmt: skip


def test_wrong_bitmap():
    number, bins = ops.RangeFloat(8, 3, -1.0, 1.0), torch.ones(8, dtype=torch.complex64)
    for bits in (None, zeros(0), zeros(2), torch.zeros(1)):
        with pytest.raises(ValueError, match="spectrum_decode_add: bitmap: got .*, expected"):
            ops.spectrum_decode_add(bins, bits, zeros(0), 0, number, 1.0)
