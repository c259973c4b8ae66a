import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import philox
from gradzip.ops import (
    PayloadError,
    abs_max_tensor,
    dequantize,
    packed_nbytes,
    quantize,
    quantize_decode_add,
    quantize_decode_sum,
    quantize_packed,
    quantize_packed_all,
)
from reference import FLT_MAX, LARGE, SIZES, Guarded, arrays, as_tensor, examples, pack_bits, same_everywhere, sliced

KEY = 0x0123_4567_89AB_CDEF


def reference_norms(x: np.ndarray, bucket: int, norm: str) -> np.ndarray:
    """Norms in long double, of the finite values that replace NaN and infinity."""
    finite = np.nan_to_num(x, nan=0.0, posinf=FLT_MAX, neginf=-FLT_MAX).astype(np.longdouble)
    parts = [finite[i : i + bucket] for i in range(0, x.size, bucket)]
    each = [np.sqrt((p**2).sum()) if norm == "l2" else np.abs(p).max() for p in parts]
    return np.array([min(float(v), FLT_MAX) for v in each])


def reference_levels(x: np.ndarray, norms: np.ndarray, bits: int, bucket: int, key: int):
    """s |x| / norm in float64, its integer part, and the distance of each draw from the fraction."""
    s = 2 ** (bits - 1) - 1
    finite = np.nan_to_num(x, nan=0.0, posinf=FLT_MAX, neginf=-FLT_MAX).astype(np.float64)
    norm = np.repeat(norms.astype(np.float64), bucket)[: x.size]
    t = np.divide(np.abs(finite) * s, norm, out=np.zeros(x.size), where=norm > 0)
    u = philox.uniform(key, x.size)
    level = np.floor(t) + (u < t - np.floor(t))
    return np.sign(finite) * np.minimum(level, s), np.minimum(np.abs(u - (t - np.floor(t))), np.abs(t - np.round(t)))


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("bits, bucket", [(2, 512), (4, 512), (4, 7), (8, 64), (11, 100), (16, 1)])
def test_levels_and_norms(bits, bucket, norm):
    for n in (0, 1, 31, 32, 33, 1000, 32769):
        for name, array in arrays(n).items():
            x = sliced(array)
            codes, norms = quantize(x, bits, bucket, norm, KEY)
            expected = reference_norms(array, bucket, norm)
            assert norms.shape == expected.shape and norms.dtype == torch.float32
            np.testing.assert_allclose(norms.numpy(), expected, rtol=2**-23, atol=2.0**-149, err_msg=name)
            levels, distance = reference_levels(array, norms.numpy(), bits, bucket, KEY)
            # If the draw is within a rounding error of the fraction, float32 may round the other way.
            sure = distance > 2.0**-22 * 2**bits
            assert np.array_equal(codes.numpy()[sure], levels[sure]), (name, n)
            assert np.abs(codes.numpy() - levels).max(initial=0) <= 1


@pytest.mark.parametrize("bits, bucket", [(2, 512), (3, 100003), (4, 512), (5, 33), (8, 40000), (9, 64), (16, 512)])
def test_packed_equals_the_codes_at_every_simd_level(bits, bucket):
    for n in (*SIZES, LARGE) if bits == 4 else SIZES:
        x = sliced(arrays(n)["heavy-tailed"])
        out, norm_out = Guarded(packed_nbytes(n, bits), torch.uint8), Guarded(-(-n // bucket), torch.float32)

        def run(x=x, out=out, norm_out=norm_out):
            codes, norms = quantize(x, bits, bucket, "l2", KEY)
            packed, norms_too = quantize_packed(x, bits, bucket, "l2", KEY, out.out, norm_out.out)
            total = torch.ones(x.numel())
            quantize_decode_add(packed, norms, total, bits, bucket, 0.3)
            return codes, norms, packed.clone(), norms_too.clone(), dequantize(codes, norms, bits, bucket), total

        codes, norms, packed, norms_too, values, total = same_everywhere(run)
        level = codes.numpy()
        assert np.array_equal(packed.numpy(), pack_bits(np.abs(level) | (level < 0) << (bits - 1), bits))
        assert torch.equal(norms, norms_too) and out.intact() and norm_out.intact()
        s = np.float32(2 ** (bits - 1) - 1)
        expected = level.astype(np.float32) / s * np.repeat(norms.numpy(), bucket)[:n]
        assert np.array_equal(values.numpy(), expected)
        assert np.array_equal(total.numpy(), np.float32(1) + np.float32(0.3) * expected)


@pytest.mark.parametrize("ranks", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("bits, bucket", [(2, 512), (4, 7), (5, 300), (9, 64), (16, 40000)])
def test_sum_of_ranks(bits, bucket, ranks):
    """One rounding for each product and sum, in rank order: the bits of a loop of quantize_decode_add."""
    s, weight = np.float32(2 ** (bits - 1) - 1), np.float32(1 / 3)
    for n in (*SIZES, LARGE) if (bits, ranks) == (4, 3) else SIZES[::2]:
        xs = [sliced(arrays(n, seed)["heavy-tailed"]) for seed in range(ranks)]
        coded = [quantize(x, bits, bucket, "l2", KEY + seed) for seed, x in enumerate(xs)]
        packed = [
            as_tensor(pack_bits(np.abs(level) | (level < 0) << (bits - 1), bits).tobytes())
            for level in (codes.numpy() for codes, _ in coded)
        ]
        terms = [(levels, norms) for levels, (_, norms) in zip(packed, coded)]
        out = Guarded(n, torch.float32)

        def run(terms=terms, out=out):
            quantize_decode_sum(terms, out.out.fill_(7), bits, bucket, 1 / 3)
            return out.out.clone()

        total, loop, expected = same_everywhere(run), torch.zeros(n), np.zeros(n, np.float32)
        for (levels, norms), (codes, _) in zip(terms, coded):
            quantize_decode_add(levels, norms, loop, bits, bucket, 1 / 3)
            expected += weight * (codes.numpy().astype(np.float32) / s * np.repeat(norms.numpy(), bucket)[:n])
        assert out.intact() and np.array_equal(total.numpy(), expected)
        assert torch.equal(total.view(torch.int32), loop.view(torch.int32))  # also the signs of zeros


@pytest.mark.parametrize("bits, bucket", [(2, 512), (4, 7), (5, 300), (9, 40000)])
def test_rows(bits, bucket):
    """The bits of a loop of quantize_packed; what follows the sections of a payload stays."""
    for rows, n in ((0, 9), (1, 1000), (3, 0), (3, 33), (4, 1001), (300, 5)):
        x = sliced(arrays(rows * n)["heavy-tailed"].reshape(rows, n))
        keys = [KEY ^ row << 40 for row in range(rows)]
        norms_end, nbytes = 4 * -(-n // bucket), packed_nbytes(n, bits)
        size = -(-(norms_end + nbytes) // 4) * 4 + 4
        out = Guarded(rows * size // 4, torch.int32)

        def run(x=x, keys=keys, out=out, size=size):
            payloads = out.out.view(torch.uint8).view(len(keys), size).fill_(9)
            most = torch.ones(len(keys))
            packed, norms = quantize_packed_all(x, bits, bucket, "l2", keys, payloads, most)
            rest = payloads[:, norms.shape[1] * 4 + packed.shape[1] :].clone()
            return packed.contiguous(), norms.contiguous(), rest, most

        packed, norms, rest, most = same_everywhere(run)
        assert out.intact() and (rest == 9).all()
        for row, key in enumerate(keys):
            one, own_norms = quantize_packed(x[row], bits, bucket, "l2", key)
            assert torch.equal(packed[row], one) and torch.equal(norms[row], own_norms)
            assert torch.equal(most[row : row + 1], abs_max_tensor(x[row]))


def test_sums_of_invalid_terms_are_refused():
    """With the index of the first one, and `out` unchanged."""
    terms = [quantize_packed(torch.randn(1000), 4, 100, key=key) for key in range(4)]
    terms[3][1][0] = -1.0
    out = torch.ones(1000)
    for bad in (float("nan"), float("inf"), -1.0):
        terms[2][1][9] = bad
        with pytest.raises(PayloadError, match="norm of a bucket") as refused:
            quantize_decode_sum(terms, out, 4, 100)
        assert refused.value.index == 2
    terms[1] = terms[1][0][1:], terms[1][1]
    with pytest.raises(PayloadError, match="got 499 bytes and 10 norms, expected 500 and 10 for") as refused:
        quantize_decode_sum(terms, out, 4, 100)
    assert refused.value.index == 1 and (out == 1).all()


def test_awkward_values_at_every_simd_level():
    for name, array in arrays(1000).items():
        for norm in ("l2", "max"):
            codes, norms = same_everywhere(lambda a=array, n=norm: quantize(sliced(a), 4, 100, n, KEY))
            assert torch.isfinite(norms).all() and codes.abs().max() <= 7, name
            assert torch.isfinite(dequantize(codes, norms, 4, 100)).all()


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1.0, 1e30, 3e38])
@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_unbiased(bits, norm, scale):
    """The mean of many draws, within five standard errors, at any magnitude."""
    x = torch.from_numpy(np.random.default_rng(1).uniform(-1, 1, 64).astype(np.float32)) * scale
    many = 4000
    codes, norms = quantize(x.repeat(many), bits, 64, norm, 3)
    s = 2 ** (bits - 1) - 1
    t = x.double() * s / norms[0].double()
    error = codes.view(many, 64).double().mean(0) - t
    fraction = t.abs() - t.abs().floor()
    assert (error.abs() <= 5 * (fraction * (1 - fraction) / many).sqrt() + 1e-3 * (1 / many)).all()


def test_a_single_value_is_exact():
    for value in (1e-45, -1e-38, 0.1, 7.0, -3e38):
        x = torch.zeros(100)
        x[37] = value
        codes, norms = quantize(x, 4, 512, "l2", 1)
        assert torch.equal(dequantize(codes, norms, 4, 512), x)


def test_zeros_stay_zero():
    codes, norms = quantize(torch.zeros(1000), 4, 10, "l2", 1)
    assert not codes.any() and not norms.any()


def test_keys_differ_and_draws_belong_to_elements():
    x = torch.randn(5000)
    a, _ = quantize(x, 4, 5000, "max", 1)
    b, _ = quantize(x, 4, 5000, "max", 2)
    assert 0.2 < (a != b).double().mean() < 0.7
    assert torch.equal(quantize(x[:1024], 4, 64, "max", 1)[0], quantize(x, 4, 64, "max", 1)[0][:1024])


@examples
@given(data=st.binary(max_size=64), bits=st.integers(2, 16), bucket=st.integers(1, 40), n=st.integers(0, 64))
def test_any_bytes_decode_to_bounded_levels_or_are_refused(data, bits, bucket, n):
    out = Guarded(n, torch.float32)
    out.out.zero_()
    packed = as_tensor(data)
    norms = torch.full((-(-n // bucket),), 2.0)
    if len(data) == packed_nbytes(n, bits):
        quantize_decode_add(packed, norms, out.out, bits, bucket)
        assert out.out.abs().max() <= 2.0 if n else True
    else:
        with pytest.raises(PayloadError, match=f"got {len(data)} bytes"):
            quantize_decode_add(packed, norms, out.out, bits, bucket)
    assert out.intact()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_corrupt_norms_are_refused(bad):
    packed, norms = quantize_packed(torch.randn(1000), 4, 100)
    norms[3] = bad
    out = torch.zeros(1000)
    with pytest.raises(PayloadError, match="norm of a bucket"):
        quantize_decode_add(packed, norms, out, 4, 100)
    assert not out.any()


def test_errors():
    x = torch.randn(100)
    for arguments, message in [
        ((x, 1), "got bits = 1, expected an integer from 2 to 16"),
        ((x, 17), "got bits = 17"),
        ((x, 4, 0), "got bucket = 0, expected an integer >= 1"),
        ((x, 4, 512, "l1"), "got norm = 'l1', expected 'l2' or 'max'"),
        ((x, 4, 512, "l2", -1), "got key = -1, expected an integer from 0"),
        ((x, 4, 512, "l2", 1 << 64), "got key = 18446744073709551616"),
        ((x.double(), 4), "got torch.float64, expected torch.float32"),
    ]:
        for f in (quantize, quantize_packed):
            with pytest.raises(ValueError, match=message):
                f(*arguments)
    codes, norms = quantize(x, 4, 10)
    with pytest.raises(ValueError, match="norms: got 10 elements, expected 1"):
        dequantize(codes, norms, 4, 512)
    with pytest.raises(ValueError, match="got a level beyond 7"):
        dequantize(codes + 8, norms, 4, 10)
    with pytest.raises(ValueError, match="out: got 49 elements, expected 50"):
        quantize_packed(x, 4, out=torch.empty(49, dtype=torch.uint8))
    with pytest.raises(PayloadError, match="expected 50 and 10 for 100 elements of 4 bits in buckets of 10"):
        quantize_decode_add(torch.empty(50, dtype=torch.uint8), norms[:9], x, 4, 10)


def test_errors_of_rows():
    x, payloads = torch.randn(3, 100), torch.empty(3, 92, dtype=torch.uint8)
    for arguments, message in [
        ((x, 4, 10, "l2", [1, 2], payloads), "got 2 keys, expected one for each of 3 rows"),
        ((x[0], 4, 10, "l2", [1], payloads), r"got shape \(100,\), expected a tensor of shape \(rows, n\)"),
        ((x, 4, 10, "l2", [1, 2, -1], payloads), "got key = -1"),
        ((x, 4, 10, "l1", [1, 2, 3], payloads), "got norm = 'l1'"),
        ((x, 4, 10, "l2", [1, 2, 3], payloads[:2]), r"got payloads of shape \(2, 92\), expected 3 of a multiple of 4"),
        ((x, 4, 10, "l2", [1, 2, 3], payloads[:, :88]), r"\(3, 88\), expected 3 of a multiple of 4 bytes, at least 90"),
    ]:
        with pytest.raises(ValueError, match=message):
            quantize_packed_all(*arguments)


def test_a_bucket_longer_than_the_tensor():
    x = torch.randn(1000)
    for a, b in zip(quantize(x, 4, 1000), quantize(x, 4, 1 << 70)):
        assert torch.equal(a, b)
