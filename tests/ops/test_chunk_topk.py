"""The largest elements of each chunk, compared with NumPy."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from gradzip.ops import (
    PayloadError,
    chunk_topk,
    chunk_topk_count,
    chunk_topk_nbytes,
    chunk_topk_values,
    groups,
)
from reference import FLT_MAX, SIZES, Guarded, U, arrays, as_tensor, examples, same_everywhere, sliced

FORMATS = [(32, 1), (32, 32), (96, 7), (256, 100), (1024, 15), (4096, 61), (4096, 2000)]
BFLOAT = 2.0**-8  # rounding of a level


def in_chunks(n, chunk):
    return [slice(i, min(n, i + chunk)) for i in range(0, n, chunk)]


def largest(x, k):
    """Indices of the k largest magnitudes, ties to the lower index; NaN above infinity."""
    bits = np.abs(x).view(np.uint32).astype(np.int64)
    return np.sort(np.argsort(-bits, kind="stable")[:k])


def levels(records, k):
    """The levels (low, high) of each chunk, and the codes of k elements of each."""
    words = records.numpy().view("<u4").reshape(-1, 1 + -(-k // 16))
    low, high = (words[:, 0] << 16).view(np.float32), (words[:, 0] & 0xFFFF0000).view(np.float32)
    codes = (words[:, 1:, None] >> np.arange(0, 32, 2, dtype=np.uint32) & 3).reshape(len(words), 16 * -(-k // 16))
    return low, high, codes


@pytest.mark.parametrize("chunk, k", FORMATS)
def test_kept_elements_and_their_values(chunk, k):
    for n in filter(lambda n: n <= 400 * chunk, (*SIZES, 9000)):  # each chunk takes the reference as long
        for name, array in arrays(n).items():
            indices, records = chunk_topk(sliced(array), k, chunk)
            parts = in_chunks(n, chunk)
            counts = [-(-k * (p.stop - p.start) // chunk) for p in parts]
            assert chunk_topk_count(n, k, chunk) == sum(counts) == indices.numel()
            expected = [p.start + largest(array[p], count) for p, count in zip(parts, counts)]
            assert np.array_equal(indices.numpy(), np.concatenate([np.empty(0), *expected])), (name, n)
            assert records.numel() == chunk_topk_nbytes(n, k, chunk)
            low, high, codes = levels(records, k)
            finite = [np.isfinite(array[kept]).all() for kept in expected]
            for c, kept in enumerate(expected):
                if not finite[c]:
                    assert np.isnan(low[c]) and np.isnan(high[c])
                    continue
                x = array[kept].astype(np.float64)
                magnitudes, mine = np.abs(x), codes[c, : len(kept)]
                assert np.array_equal(mine >> 1, np.signbit(x)) and not codes[c, len(kept) :].any()
                # Magnitudes are compared as multiples of 2^-20 of the largest.
                unit, above = max(magnitudes.max(), 2.0**-100) * 2.0**-20, mine & 1 == 1
                mean = magnitudes.mean()
                assert (magnitudes[above] > mean - 2 * unit).all() and (magnitudes[~above] <= mean + 2 * unit).all()
                for level, of in ((low[c], ~above), (high[c], above)):
                    if of.any():
                        wanted = magnitudes[of].mean()
                        assert abs(level - wanted) <= wanted * (BFLOAT + 4 * U) + 2 * unit or level > 3.38e38
                assert low[c] <= high[c]
            if all(finite) and n:
                got = chunk_topk_values(records, n, k, chunk).numpy()
                for c, values in enumerate(np.split(got, np.cumsum(counts)[:-1])):
                    sign = np.where(codes[c] >> 1, -1, 1)[: len(values)].astype(np.float32)
                    assert np.array_equal(values, sign * np.where(codes[c] & 1, high[c], low[c])[: len(values)])
            elif n:
                with pytest.raises(PayloadError, match="levels of a chunk are not those of finite numbers"):
                    chunk_topk_values(records, n, k, chunk)


def test_squared_error_is_that_of_two_means():
    """Of normal numbers, 61 of 4096: half of what one level leaves, and within a quarter of the best two levels."""
    x = np.random.default_rng(0).standard_normal(4096 * 50).astype(np.float32)
    indices, records = chunk_topk(torch.from_numpy(x), 61, 4096)
    values = chunk_topk_values(records, x.size, 61, 4096).numpy().astype(np.float64)
    kept = x[indices.numpy()].astype(np.float64)
    magnitudes = np.sort(np.abs(kept).reshape(50, 61), 1)
    cuts = [
        sum(((part - part.mean(1, keepdims=True)) ** 2).sum(1) for part in np.split(magnitudes, [cut], 1))
        for cut in range(1, 61)
    ]
    best, one = np.min(cuts, 0).sum(), ((magnitudes - magnitudes.mean(1, keepdims=True)) ** 2).sum()
    assert best < ((kept - values) ** 2).sum() < 1.25 * best < 0.5 * one


@pytest.mark.parametrize("chunk", [32, 256, 4096])
def test_several_vectors_in_one_call(chunk):
    """The bits of as many calls, with a k for each vector; and the largest level of each."""
    rng = np.random.default_rng(chunk)
    sizes = [0, 1, 31, chunk, chunk + 1, 40_000, *rng.integers(1, 5 * chunk, 120).tolist()]
    xs = [sliced((rng.standard_normal(n) * 2.0 ** rng.integers(-20, 20)).astype(np.float32)) for n in sizes]
    xs[4][-1], xs[5][777] = np.inf, np.nan
    ks = [1 + i % chunk for i in range(len(sizes))]
    counts = list(map(chunk_topk_count, sizes, ks, [chunk] * len(ks)))
    expected = [chunk_topk(x, k, chunk) for x, k in zip(xs, ks)]
    outs = [Guarded(chunk_topk_nbytes(n, k, chunk), torch.uint8) for n, k in zip(sizes, ks)]

    def run():
        indices, most = groups.chunk_topk(xs, counts, ks, chunk, [out.out for out in outs])
        return torch.cat(list(indices)), most, *(out.out.clone() for out in outs)

    indices, most, *records = same_everywhere(run)
    assert torch.equal(indices, torch.cat([own for own, _ in expected]))
    assert all(torch.equal(got, own) for got, (_, own) in zip(records, expected))
    assert all(out.intact() for out in outs)
    assert not most[[4, 5]].isfinite().any() and most[0] == 0
    some = [i for i in range(1, len(sizes)) if i not in (4, 5)]  # finite, and not empty
    words = [levels(records[i], ks[i]) for i in some]
    assert [most[i].view(torch.int32).item() >> 16 for i in some] == [
        int(high.max().view(np.uint32)) >> 16 for _, high, _ in words
    ]
    of = [[list_of[i] for i in some] for list_of in (records, sizes, ks, counts)]
    values, failed = groups.chunk_topk_values(*of, chunk)
    assert failed == 0
    for i, own in zip(some, values):
        assert torch.equal(own, chunk_topk_values(records[i], sizes[i], ks[i], chunk))
    for wrong in (some.index(6), len(some) - 1):  # the first of two
        of[0][wrong] = of[0][wrong].clone()
        of[0][wrong].view(torch.int16)[1] = 0x7FC0
    assert groups.chunk_topk_values(*of, chunk)[1] == some.index(6) + 1


@pytest.mark.parametrize("chunk, k", FORMATS[2:])
def test_the_same_at_every_simd_level(chunk, k):
    for n in (33, 1000, 4097, 9000):
        for array in arrays(n).values():
            x, out = sliced(array), Guarded(chunk_topk_nbytes(n, k, chunk), torch.uint8)

            def run(x=x, out=out):
                indices, records = chunk_topk(x, k, chunk, records=out.out)
                return indices, records.clone()

            same_everywhere(run)
            assert out.intact()


def test_the_largest_and_the_smallest_floats():
    for value in (FLT_MAX, 3e38, 1.0, 2.0**-90):
        x = torch.zeros(64)
        x[37] = -value
        indices, records = chunk_topk(x, 1, 32)
        assert indices.tolist() == [0, 37]
        values = chunk_topk_values(records, 64, 1, 32)
        assert values.isfinite().all() and abs(values[1].item() + value) <= BFLOAT * 1.01 * value
    tiny = torch.full((64,), 1e-40)
    assert chunk_topk_values(chunk_topk(tiny, 3, 32)[1], 64, 3, 32).abs().max() <= 1e-40


@examples
@given(data=st.binary(max_size=80), n=st.integers(0, 130), k=st.integers(1, 32))
def test_any_bytes_decode_or_are_refused(data, n, k):
    if len(data) != chunk_topk_nbytes(n, k, 32):
        with pytest.raises(PayloadError, match=rf"got {len(data)} bytes, expected"):
            chunk_topk_values(as_tensor(data), n, k, 32)
        data = bytes(data[i % len(data)] if data else 7 for i in range(chunk_topk_nbytes(n, k, 32)))
    low, high, _ = levels(as_tensor(data), k) if data else (np.zeros(0),) * 3
    if np.isfinite(high).all() and (np.signbit(low) == 0).all() and (low <= high).all():
        assert chunk_topk_values(as_tensor(data), n, k, 32).isfinite().all()
    else:
        with pytest.raises(PayloadError, match="not those of finite numbers"):
            chunk_topk_values(as_tensor(data), n, k, 32)


def test_errors():
    x = torch.randn(100)
    for arguments, message in [
        ((x, 3, 48), "got chunk = 48, expected a multiple of 32 from 32 to 4096"),
        ((x, 3, 8192), "got chunk = 8192"),
        ((x, 0, 32), "got k = 0, expected 1 to 32"),
        ((x, 33, 32), "got k = 33"),
        ((x.double(), 3, 32), "got torch.float64, expected torch.float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            chunk_topk(*arguments)
    with pytest.raises(ValueError, match="records: got 3 elements, expected 32"):
        chunk_topk(x, 3, 32, records=torch.empty(3, dtype=torch.uint8))
