"""Kernels of block-scaled integers, compared with NumPy."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import philox
from gradzip.ops import (
    PayloadError,
    block_float_decode,
    block_float_decode_sum,
    block_float_encode,
    block_float_encode_all,
    block_float_max_step,
    block_float_nbytes,
)
from reference import FLT_MAX, LARGE, SIZES, Guarded, U, arrays, as_tensor, examples, same_everywhere, sliced

KEY = 0x0123_4567_89AB_CDEF
FORMATS = [(8, 256), (4, 256), (8, 32), (4, 96), (8, 4096), (4, 1056)]


def records(payload, bits, block):
    """Steps (float32) and codes (blocks x block) of a payload."""
    table = payload.numpy().reshape(-1, 4 + block * bits // 8)
    steps = table[:, :4].copy().view("<f4").reshape(-1)
    packed = table[:, 4:]
    if bits == 8:
        return steps, packed.view(np.int8).astype(np.int64)
    nibbles = np.stack((packed & 15, packed >> 4), -1).reshape(len(table), block).astype(np.int64)
    return steps, np.where(nibbles > 7, nibbles - 16, nibbles)


def in_blocks(x, block):
    padded = np.zeros(-(-x.size // block) * block, x.dtype)
    padded[: x.size] = x
    return padded.reshape(-1, block)


def draws(key, count):
    return philox.words(key, -(-count // 2)).astype("<u4").view("<u2")[:count] * 2.0**-16


def decode(payloads, n, bits, block):
    out = torch.empty(n)
    block_float_decode(payloads, out, bits, block)
    return out


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("bits, block", FORMATS)
def test_steps_and_codes(bits, block, stochastic):
    top = 2 ** (bits - 1) - 1
    for n in (0, 1, 31, 33, 256, 1000, 4097):
        for name, array in arrays(n).items():
            payload = block_float_encode(sliced(array), bits, block, KEY if stochastic else None)
            steps, codes = records(payload, bits, block)
            rows = in_blocks(array, block)
            with np.errstate(all="ignore"):
                largest = np.abs(rows).max(1, initial=0)
                finite = np.isfinite(rows).all(1)
                expected = np.maximum(largest, np.float32(2.0**-100)) / np.float32(top)
                expected = np.where(
                    np.isinf(expected * np.float32(top)), np.nextafter(expected, np.float32(0)), expected
                )
            assert np.array_equal(steps, np.where(finite, expected, np.float32(np.nan)), equal_nan=True), (name, n)
            assert np.abs(codes).max(initial=0) <= top and not codes[~finite].any()
            # Exact quotients. The kernel rounds 1 / step, and the product: 3 half units in all.
            t = rows[finite].astype(np.float64) / steps[finite, None].astype(np.float64)
            off = 3 * U * np.abs(t)
            if stochastic:
                u = in_blocks(draws(KEY, n), block)[finite]
                cut = np.trunc(t * 65536) / 65536
                assert (codes[finite] >= np.floor(cut - off - 2**-16 + u)).all(), name
                assert (codes[finite] <= np.floor(cut + off + 2**-16 + u)).all(), name
                sure = np.abs(t * 65536 - np.round(t * 65536)) > 65536 * off
                assert np.array_equal(codes[finite][sure], np.floor(cut + u)[sure]), name
                assert (np.abs(codes[finite] - t) < 1 + off).all()
            else:
                assert (np.abs(codes[finite] - t) <= 0.5 + off).all(), name
                sure = np.abs(np.abs(t - np.floor(t)) - 0.5) > off
                assert np.array_equal(codes[finite][sure], np.round(t)[sure])


def two_bit_records(payload, block):
    """Steps (float32) and values in steps, -3/2 to 3/2 (blocks x block), of a payload with 2 bits."""
    table = payload.numpy().reshape(-1, 4 + block // 4)
    codes = (table[:, 4:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(len(table), block).astype(np.int64)
    return table[:, :4].copy().view("<f4").reshape(-1), np.where(codes > 1, codes - 4, codes) + 0.5


@pytest.mark.parametrize("block", [32, 96, 256, 4096])
def test_two_bits(block):
    for n in (*SIZES, 1000, 4097):
        for name, array in arrays(n).items():
            x, residual = sliced(array), sliced(array[::-1] * np.float32(0.3))
            blocks = -(-n // block) + 1
            out, error = Guarded(block_float_nbytes(blocks, 2, block), torch.uint8), Guarded(n, torch.float32)

            def run(x=x, residual=residual, out=out, error=error, blocks=blocks):
                alone = block_float_encode(x, 2, block)
                payload = block_float_encode(
                    x, 2, block, blocks=blocks, residual=residual, error=error.out, out=out.out
                )
                total = torch.empty(x.numel())
                block_float_decode_sum([payload, payload], total, 2, block, 0.3, residual)
                return alone, payload.clone(), error.out.clone(), total

            alone, payload, left, total = same_everywhere(run)
            assert out.intact() and error.intact()
            steps, values = two_bit_records(alone, block)
            rows = in_blocks(array, block)
            finite = np.isfinite(rows).all(1)
            with np.errstate(all="ignore"):
                expected = np.maximum(np.abs(rows).max(1, initial=0), np.float32(2.0**-100)) / np.float32(3)
                t = rows[finite].astype(np.float64) / steps[finite, None].astype(np.float64)
            assert np.array_equal(np.isnan(steps), ~finite), name
            np.testing.assert_allclose(steps[finite], expected[finite], rtol=2 * U)
            nearest = np.clip(np.floor(t), -2, 1) + 0.5
            nearest[:, 1::2] = np.where(t[:, 1::2] == 0, -0.5, nearest[:, 1::2])  # zero is not biased
            got = values[finite]
            inside = np.arange(finite.sum() * block).reshape(-1, block) >= 0
            inside[-1:, n % block or block :] &= not finite[-1:].all()  # what follows the last element has code 0
            sure = inside & ((np.abs(t - np.round(t)) > 3 * U * np.abs(t)) | (t == 0))
            assert np.array_equal(got[sure], nearest[sure]), (name, n)
            assert (np.abs(got - t)[inside] <= np.maximum(0.5, np.abs(t[inside]) - 1.5) + 3 * U * 3).all()
            steps, values = two_bit_records(payload, block)
            with np.errstate(all="ignore"):
                corrected = array + array[::-1] * np.float32(0.3)
                decoded = (values.astype(np.float32) * steps[:, None]).reshape(-1)[:n]
                added = (values.astype(np.float32) * (np.float32(0.3) * steps)[:, None]).reshape(-1)[:n]
                assert np.array_equal(decode([payload], n, 2, block).numpy(), decoded, equal_nan=True)
                assert np.array_equal(
                    left.numpy(), np.where(np.isnan(decoded), decoded, corrected - decoded), equal_nan=True
                )
                assert np.array_equal(total.numpy(), (residual.numpy() + added) + added, equal_nan=True)
            if np.isfinite(steps).all() and n:
                assert np.abs(decoded).max() <= block_float_max_step([payload], 2, block).item() * 2


def test_the_error_of_two_bits_is_a_fraction():
    """Of normal numbers, below the 0.19 that the best three levels leave. With error feedback, all arrives."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((100, 256)).astype(np.float32))
    left = x.clone()
    block_float_encode(left, 2, 256, error=left)
    assert 0.1175 < (left.square().sum() / x.square().sum()).item() < 0.16  # 0.1175: the best four levels
    residual, sent = torch.zeros_like(x), torch.zeros_like(x)
    for _ in range(200):
        payload = block_float_encode(x, 2, 256, residual=residual, error=residual)
        sent += decode([payload], x.numel(), 2, 256).view_as(x)
    assert ((sent / 200 - x).norm() / x.norm()).item() < 0.02


def test_no_code_is_beyond_the_largest():
    """x / step of the largest element is rounded several times. Every mantissa, at both ends of a draw."""
    mantissas = (np.arange(1 << 23, dtype=np.uint32)[::5] | np.uint32(0x3F800000)).view(np.float32)
    for top in (7, 127):
        limit = np.float32(top * 65536)
        inverse = limit / mantissas
        lower = (inverse.view(np.uint32) - np.uint32(1)).view(np.float32)
        inverse = np.where(mantissas * inverse > limit, lower, inverse)
        assert (mantissas * inverse <= limit).all()
        assert (np.floor((np.trunc(mantissas * inverse) + 65535) / 65536) == top).all()  # the largest draw
    x = torch.from_numpy(mantissas[: 1 << 16]).repeat_interleave(32)  # blocks of equal elements
    for sign in (1, -1):
        _, codes = records(block_float_encode(x * sign, 8, 32, KEY), 8, 32)
        assert np.isin(codes, (126 * sign, 127 * sign)).all() and (codes == 127 * sign).mean() > 0.9999


@pytest.mark.parametrize("bits, block", FORMATS)
def test_awkward_sizes_are_the_same_at_every_simd_level(bits, block):
    for n in (*SIZES, LARGE) if (bits, block) == (8, 256) else SIZES[::3]:
        array = arrays(n)["heavy-tailed"]
        x, residual = sliced(array), sliced(array[::-1] * np.float32(0.3))
        blocks = -(-n // block) + 2
        out, error, sums = (
            Guarded(block_float_nbytes(blocks, bits, block), torch.uint8),
            Guarded(n, torch.float32),
            Guarded(n, torch.float32),
        )

        def run(x=x, residual=residual, out=out, error=error, sums=sums, blocks=blocks):
            nearest = block_float_encode(x, bits, block, blocks=blocks, residual=residual, error=error.out)
            in_place = x.clone()
            payload = block_float_encode(
                in_place, bits, block, KEY, blocks=blocks, residual=residual, error=in_place, out=out.out
            )
            block_float_decode_sum([nearest, payload, payload], sums.out, bits, block, 0.3, residual)
            return nearest, error.out.clone(), payload.clone(), in_place, sums.out.clone()

        nearest, nearest_error, payload, error_of, total = same_everywhere(run)
        assert out.intact() and error.intact() and sums.intact()
        corrected = x.numpy() + residual.numpy()
        values = []
        for coded, left in ((nearest, nearest_error), (payload, error_of)):
            steps, codes = records(coded, bits, block)
            assert steps.size == blocks and not codes.reshape(-1)[n:].any()
            value = (codes.astype(np.float32) * steps[:, None]).reshape(-1)[:n]
            assert np.array_equal(decode([coded], n, bits, block).numpy(), value)
            assert np.array_equal(left.numpy(), corrected - value)
            values.append((codes.astype(np.float32) * (np.float32(0.3) * steps)[:, None]).reshape(-1)[:n])
        expected = residual.numpy() + values[0]
        expected = expected + values[1]
        assert np.array_equal(total.numpy(), expected + values[1])


@pytest.mark.parametrize("bits, block", [*FORMATS, (2, 256)])
def test_rows(bits, block):
    """The bits of a loop of block_float_encode."""
    for rows, n in ((0, 9), (1, 1000), (3, 0), (3, 33), (4, 5001), (300, 5)):
        x = sliced(arrays(rows * n)["heavy-tailed"].reshape(rows, n))
        out = Guarded(rows * block_float_nbytes(-(-n // block), bits, block), torch.uint8)
        for keys in (None, [KEY ^ row << 40 for row in range(rows)])[: 1 if bits == 2 else 2]:

            def run(x=x, keys=keys, out=out):
                return block_float_encode_all(x, bits, block, keys, out.out).clone()

            payloads = same_everywhere(run)
            assert out.intact() and torch.equal(payloads, block_float_encode_all(x, bits, block, keys))
            for row, payload in enumerate(payloads):
                assert torch.equal(payload, block_float_encode(x[row], bits, block, keys and keys[row]))
            residual, errors = torch.randn(rows, n), torch.empty(rows, n)
            payloads = block_float_encode_all(x, bits, block, keys, residual=residual, error=errors)
            for row, payload in enumerate(payloads):
                error = torch.empty(n)
                options = {"residual": residual[row], "error": error}
                assert torch.equal(payload, block_float_encode(x[row], bits, block, keys and keys[row], **options))
                assert torch.equal(errors[row], error)


@pytest.mark.parametrize("bits", [4, 8])
def test_sum_of_partitions_equals_decoded_partitions(bits):
    blocks = 2
    parts = [torch.randn(64) for _ in range(4)]
    payloads = [block_float_encode(p, bits, 32, blocks=blocks) for p in parts]
    together = decode(payloads, 200, bits, 32)  # the last partition has 8 elements
    alone = [decode([p], 64, bits, 32) for p in payloads]
    assert torch.equal(together, torch.cat(alone)[:200])
    total = torch.full((64,), 7.0)
    block_float_decode_sum(payloads, total, bits, 32, 0.25)
    assert torch.allclose(total, sum(alone) / 4, rtol=0, atol=8 * U * 4)
    start = torch.randn(64)
    expected = start.clone()
    for p in alone:
        expected += 1.0 * p
    block_float_decode_sum(payloads, start, bits, 32, residual=start)  # in place
    assert torch.equal(start, expected)


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1.0, 1e30])
@pytest.mark.parametrize("bits", [4, 8])
def test_unbiased(bits, scale):
    """The mean of many draws within five standard errors of x and the cut, and the variance of a fair choice."""
    many, block = 20000, 32
    x = torch.from_numpy(np.random.default_rng(1).uniform(-1, 1, block).astype(np.float32)) * scale
    payload = block_float_encode(x.repeat(many), bits, block, 5)
    steps, codes = records(payload, bits, block)
    t = x.double().numpy() / np.float64(steps[0])
    fraction = t - np.floor(t)
    variance = fraction * (1 - fraction)
    deviation = np.sqrt((variance + 2.0**-16) / many)  # the cut changes the fraction, and so the variance
    assert (np.abs(codes.mean(0) - t) <= 5 * deviation + 2.0**-16 + 3 * U * np.abs(t)).all()
    assert np.abs(codes.var(0) - variance).max() <= 5 * 0.5 / np.sqrt(many) + 2.0**-15
    assert abs(codes.var(0).mean() / variance.mean() - 1) < 0.05


def test_draws_are_even_and_independent_of_neighbours():
    """Blocks with x / step = 1/2 except for one element: each code is 0 or 1 with probability 1/2."""
    x = torch.full((4096, 256), 0.5)
    x[:, 0] = 127.0
    _, codes = records(block_float_encode(x, 8, 256, KEY), 8, 256)
    ones = codes[:, 1:]
    assert abs(ones.mean() - 0.5) < 5 * 0.5 / np.sqrt(ones.size)
    for lag in (1, 2, 3, 4, 8):
        agree = (ones[:, lag:] == ones[:, :-lag]).mean()
        assert abs(agree - 0.5) < 5 * 0.5 / np.sqrt(ones[:, lag:].size)
    other = records(block_float_encode(x, 8, 256, KEY + 1), 8, 256)[1][:, 1:]
    assert abs((ones == other).mean() - 0.5) < 5 * 0.5 / np.sqrt(ones.size)
    # Draws belong to elements: those of a prefix are the same.
    assert np.array_equal(records(block_float_encode(x[:7], 8, 256, KEY), 8, 256)[1][:, 1:], ones[:7])


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("bits", [4, 8])
def test_not_finite_blocks_decode_to_nan(bits, key):
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = torch.randn(1000)
        x[300] = bad
        got = decode([block_float_encode(x, bits, 256, key)], 1000, bits, 256)
        assert got[256:512].isnan().all() and got[:256].isfinite().all() and got[512:].isfinite().all()
        assert not block_float_max_step([block_float_encode(x, bits, 256, key)], bits).isfinite()


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_and_the_smallest_floats(bits):
    for value in (FLT_MAX, float(np.nextafter(np.float32(FLT_MAX), np.float32(0))), 3e38, 2.0**-99, 2.0**-100):
        x = torch.zeros(100)
        x[37] = -value
        got = decode([block_float_encode(x, bits)], 100, bits, 256)
        assert got.isfinite().all() and abs(got[37].item() + value) <= 2 * U * value
    tiny = torch.full((100,), 1e-40)
    assert decode([block_float_encode(tiny, bits, key=3)], 100, bits, 256).abs().max() <= 2.0**-100 / 7


@pytest.mark.parametrize("bits", [4, 8])
def test_bound_of_the_magnitudes(bits):
    """At least the largest magnitude; more only by the code -2^(bits - 1), which encoders do not write."""
    payloads = [block_float_encode(torch.randn(512) * i, bits, 256, i) for i in (1, 3)]
    largest = decode(payloads, 1024, bits, 256).abs().max()
    bound = block_float_max_step(payloads, bits) * 2 ** (bits - 1)
    top = 2 ** (bits - 1) - 1
    assert bound.shape == (1,) and largest <= bound <= largest * (top + 1) / (top - 1) * (1 + 4 * U)


@examples
@given(data=st.binary(max_size=120), bits=st.sampled_from([2, 4, 8]), n=st.integers(0, 130), each=st.integers(1, 3))
def test_any_bytes_decode_or_are_refused(data, bits, n, each):
    out = Guarded(n, torch.float32)
    payload = as_tensor(data)
    record = 4 + 4 * bits
    if len(data) % record == 0 and len(data) // record * 32 >= n:
        block_float_decode_sum([payload] * each, out.out, bits, 32)
    else:
        with pytest.raises(PayloadError, match=r"got payloads of \[\d+\] bytes, expected equally long ones"):
            block_float_decode_sum([payload] * each, out.out, bits, 32)
    assert out.intact()


def test_errors():
    x = torch.randn(100)
    for arguments, message in [
        ((x, 5), "got bits = 5, expected 2, 4 or 8"),
        ((x, 2, 256, KEY), "got a key with bits = 2, whose codes are rounded to nearest, expected None"),
        ((x, 8, 48), "got block = 48, expected a multiple of 32 from 32 to 4096"),
        ((x, 8, 8192), "got block = 8192"),
        ((x, 8, 256, -1), "got key = -1"),
        ((x.double(), 8), "got torch.float64, expected torch.float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            block_float_encode(*arguments)
    for options, message in [
        ({"blocks": 3}, "got blocks = 3, expected at least 4 for 100 elements"),
        ({"residual": x}, "got a residual and no tensor for the error"),
        ({"residual": x[:9], "error": x}, "residual: got 9 elements, expected 100"),
        ({"error": torch.empty(200)[::2]}, "error: got strides"),
        ({"out": torch.empty(3, dtype=torch.uint8)}, "out: got 3 elements, expected 144"),
    ]:
        with pytest.raises(ValueError, match=message):
            block_float_encode(x, 8, 32, **options)
    for arguments, message in [
        ((x, 8), r"got shape \(100,\), expected a tensor of shape \(rows, n\)"),
        ((x.view(4, 25), 8, 32, [1]), "got 1 keys, expected one for each of 4 rows"),
        ((x.view(2, 50), 2, 32, [1, 2]), "got keys with bits = 2"),
        ((x.view(2, 50), 8, 32, None, torch.empty(3, dtype=torch.uint8)), "out: got 3 elements, expected 144"),
    ]:
        with pytest.raises(ValueError, match=message):
            block_float_encode_all(*arguments)
    with pytest.raises(ValueError, match="block_float_encode_all: got a residual and no tensor for the error"):
        block_float_encode_all(x.view(4, 25), 8, 32, residual=x)
    payload = block_float_encode(x, 8, 32)
    for payloads in ([payload[:-1]], [payload, payload[:36]], [payload[:108]], []):
        with pytest.raises(PayloadError, match="expected equally long ones of blocks of 36 bytes, for 100 elements"):
            block_float_decode(payloads, torch.empty(100), 8, 32)
