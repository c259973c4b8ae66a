"""FFTRange: its transforms, their pairs of frequencies, and sizes. test_transform_codec.py has the rest."""

import math

import numpy as np
import pytest
import torch

from gradzip import FFTRange, roundtrip
from gradzip.memory.state import Key
from gradzip.methods.base.transform import transform_shape
from reference import (
    correlated,
    encode_bitmap,
    fft_basis,
    padded,
    read_fft_payload,
    resnet20_gradients,
    same_everywhere,
)
from single import decode

KERNELS = [8, 16, 32, 64, 128, 256, 512, 1024]
BLOCKS = [None, *KERNELS, 2, 3, 4, 7, 100, 1000, 2048, 4096]
SHAPES = [(1000, 101), (317, 333), (64, 64, 5, 5), (512, 512), (1, 100003), (100003, 1), (128, 128, 3, 3), (11, 97, 97)]
KEY = Key(0, 0, "", 0)


def norm(x) -> float:
    return float(torch.as_tensor(x).double().norm())


def documented_nbytes(k: int, index: bytes, bits: int = 10) -> int:
    """Header; two N-bit numbers for each of k frequencies; coded bitmap; padded to 16."""
    return padded(48 + -(-2 * k * bits // 8) + len(index))


# --- frequencies


@pytest.mark.parametrize("block", BLOCKS)
def test_frequencies_are_those_of_the_documented_basis(block):
    """All of them, to 16 bits; of tails, of one element, and of several tiles."""
    for numel in (1, 2, 7, 100, 1031, 8192, 20001):
        grad = correlated(numel, seed=numel)
        codec, basis = FFTRange(theta=0.0, bits=16, block=block), fft_basis(numel, block)
        sent = codec.encode(grad, KEY)
        payload = read_fft_payload(sent, block)
        assert payload.k == basis.groups and payload.mask.all()
        if block in KERNELS:
            assert basis.groups == -(-numel // 2)
        coefficients = basis.coefficients(grad.numpy())
        step = 2.0**-payload.format.mantissa
        assert norm(payload.coefficients - coefficients) <= step * norm(coefficients)
        decoded = decode(codec, [sent], (numel,)).double().numpy()
        assert norm(decoded - payload.elements) <= 1e-6 * norm(grad)
        assert norm(decoded - grad.double().numpy()) <= step * norm(grad)


@pytest.mark.parametrize("block", [4096, 1024])
def test_cosine_needs_one_frequency(block):
    """Of kernel blocks, frequency j of row r is pair j * rows + r: planes of a tile."""
    t, rows = torch.arange(4096, dtype=torch.float64), 4096 // block
    for frequency in (1, 7, 100, block // 2 - 1):
        grad = torch.cos(2 * math.pi * frequency * t / block).float().view(64, 64)
        codec = FFTRange(theta=1 - rows / 2048, bits=12, block=block)
        payload = read_fft_payload(codec.encode(grad, KEY), block)
        assert payload.k == rows
        assert np.flatnonzero(payload.mask).tolist() == [frequency * rows + row for row in range(rows)]
        assert payload.basis.take(payload.coefficients, payload.mask) == pytest.approx(
            [math.sqrt(block / 2)] * rows + [0.0] * rows, rel=2.0**-11, abs=1e-4
        )
        approximation, nbytes = roundtrip(codec, grad)
        assert nbytes == documented_nbytes(rows, encode_bitmap(payload.mask), 12)
        assert (approximation - grad).abs().max() <= 2e-3


@pytest.mark.parametrize("block", [4096, 1024, 8])
def test_first_and_last_bin_are_a_pair(block):
    """Both are real. They compete, as one frequency, with the energy of both."""
    t = np.arange(block)
    interior = np.cos(2 * np.pi * t / 4 + 0.3) * math.sqrt(2)  # of energy 1 per element
    first, last = np.ones(block), np.cos(np.pi * t)

    def sent(signal):
        payload = read_fft_payload(FFTRange(theta=0.9999, block=block).encode(torch.tensor(signal).float(), KEY), block)
        assert payload.k == 1
        return np.flatnonzero(payload.mask).tolist(), payload.basis.take(payload.coefficients, payload.mask)

    for end in (first, last, 0.6 * first - 0.8 * last):
        assert sent(interior + 0.95 * end)[0] == [block // 4]
        assert sent(0.95 * interior + end)[0] == [0]
    where, pair = sent(3 * first - 4 * last)
    assert where == [0] and pair == pytest.approx(math.sqrt(block) * np.array([3.0, -4.0]), rel=2e-3)


@pytest.mark.parametrize("block", KERNELS)
def test_payloads_of_kernels_are_independent_of_threads_and_simd(block):
    """Unlike those of an FFT library. Three tiles, and elements after the last row."""
    grad, codec = correlated(20_005), FFTRange(block=block)
    sent = same_everywhere(lambda: codec.encode(grad, KEY))
    same_everywhere(lambda: decode(codec, [sent, sent], (grad.numel(),)).clone())


@pytest.mark.parametrize(
    ("block", "shape"), [(4096, (300, 301)), (100, (300, 301)), (None, (300, 301)), (2**18, (5, 2**18))]
)
def test_decoding_is_independent_of_the_number_of_threads(block, shape):
    """Ranks may have different numbers of cores. The last of 5 rows of 2^18 elements is transformed by itself."""
    grad = correlated(*shape).view(-1)
    codec = FFTRange(block=block)
    sent = codec.encode(grad, Key(0, 0, "w", 0))
    same_everywhere(lambda: decode(codec, [sent, sent], (grad.numel(),)).clone())


# --- sizes


@pytest.mark.parametrize("block", BLOCKS)
def test_bytes_equal_the_documented_formula(block):
    """The bitmap is coded in segments of 1024 frequencies, whatever the length of the rows."""
    for shape in ((33, 63), (1, 5000)):
        grad = correlated(*shape)
        for theta, bits in ((0.0, 16), (0.5, 7), (0.85, 10), (0.999, 2)):
            codec = FFTRange(theta=theta, bits=bits, block=block)
            payload = read_fft_payload(codec.encode(grad, KEY), block)
            groups = fft_basis(grad.numel(), block).groups
            assert payload.k == max(1, round((1 - theta) * groups))
            assert payload.index == encode_bitmap(payload.mask)
            assert len(payload.index) <= -(-groups // 8) + 2 * -(-groups // 1024)
            assert payload.nbytes == documented_nbytes(payload.k, payload.index, bits)
            assert roundtrip(codec, grad)[1] == payload.nbytes


def entropy(p: float) -> float:
    return -p * math.log2(p) - (1 - p) * math.log2(1 - p)


def test_same_density_costs_the_documented_bytes():
    """0.63 C / 8 at theta = 0.85, and so 17.6 times less than float32.

    The code of a segment costs at most 5 % more than the entropy of its bits, of which white noise leaves nothing out;
    2 bytes a segment are its entry in the table.
    """
    grad = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(1))
    for block in (64, 4096):
        payload = read_fft_payload(FFTRange(block=block).encode(grad, KEY), block)
        bits_each = 8 * len(payload.index) / payload.basis.groups
        assert entropy(0.15) + 16 / 1024 - 0.003 < bits_each < 1.05 * entropy(0.15) + 16 / 1024
        assert 0.625 < bits_each < 0.635
        assert 17.55 < 4 * grad.numel() / payload.nbytes < 17.65


@pytest.mark.parametrize("shape", SHAPES)
def test_compression_ratio(shape):
    """Of tensors of more than 100,000 elements, headers and bitmaps included.

    At least as for the same density everywhere, to 1 %; at most as if bitmaps were free: 32 / (0.15 * 10).
    """
    grad = correlated(*shape)
    for block in (64, 4096, None):
        approximation, nbytes = roundtrip(FFTRange(block=block), grad)
        assert 17.4 <= 4 * grad.numel() / nbytes <= 32 / 1.5
        assert approximation.shape == grad.shape


def test_ratio_of_real_gradients_is_that_of_the_same_density_or_more():
    """A segment of several frequencies, which are not kept alike, costs no more than the same bits in random order."""
    coded = shuffled = 0
    for grad in resnet20_gradients().values():
        payload = read_fft_payload(FFTRange().encode(grad, KEY), 64)
        coded += len(payload.index)
        shuffled += len(encode_bitmap(np.random.default_rng(0).permutation(payload.mask)))
    assert 0.8 * shuffled < coded < 0.99 * shuffled


def test_most_bytes_of_large_tensors():
    """With any bitmap: one whose segments are all stored as they are."""
    for numel in (*range(100_001, 140_000, 7), *range(10**6, 10**6 + 3000), 25_600_000, 2**31 + 1):
        for block in (64, 4096, None):
            groups = fft_basis(numel, block).groups
            index = -(-groups // 8) + 2 * -(-groups // 1024)
            nbytes = 48 + -(-2 * round(0.15 * groups) * 10 // 8) + index + 16
            assert 4 * numel / nbytes >= 14.7, (numel, block)


def smooth_lengths(most: int) -> np.ndarray:
    """All even numbers up to `most` without a prime factor above 5."""
    exponents = np.arange(1, 40)
    found = [
        2**two * 3**three * 5**five
        for two in exponents.tolist()
        for three in range(25)
        for five in range(17)
        if 2**two * 3**three * 5**five <= most
    ]
    return np.array(sorted(found))


@pytest.mark.parametrize("block", [None, 2, 3, 7, 64, 100, 1000, 4096, 4099, 65536])
def test_transform_shape(block):
    """As few rows as `block` allows, of the smallest smooth length that holds the gradient."""
    smooth = smooth_lengths(2**28)
    rng = np.random.default_rng(0)
    for numel in (*range(1, 3000), *(2 ** rng.uniform(10, 27, 2000)).astype(int).tolist()):
        rows, length = transform_shape(numel, block)
        assert rows == (1 if block is None else -(-numel // block))
        shortest = -(-numel // rows)
        fast = int(smooth[np.searchsorted(smooth, shortest)])
        assert length == (fast if block is None or fast <= block else shortest)
        assert rows * length >= numel and (block is None or length <= block)
        if numel >= 1024:
            # Smooth lengths above 60 are at most 1/8 apart (64, 72), above 1000 at most 1/14.
            gap = 1 / 14 if shortest > 1000 else 1 / 8 if shortest > 60 else 1 / 2
            assert rows * length <= numel * (1 + gap) + rows, (numel, block)


def test_smooth_lengths_are_dense():
    """The bounds on padding in `test_transform_shape` depend on this."""
    smooth = smooth_lengths(2**28)
    for above, gap in ((60, 1 / 8), (1000, 1 / 14)):
        tail = smooth[smooth >= above]
        assert (tail[1:] / tail[:-1]).max() <= 1 + gap
