import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import philox
from gradzip.ops import (
    PayloadError,
    WeightedSum,
    abs_max_tensor,
    bitmap_nbytes,
    bucket_norms,
    majority,
    majority_all,
    pack_signs,
    pack_signs_all,
    signs_decode_add,
    signs_decode_add_all,
)
from reference import LARGE, SIZES, Guarded, arrays, bitmap, examples, same_everywhere, sliced

KEY = 0xFEDC_BA98_7654_3210


def bits(packed: torch.Tensor, n: int) -> np.ndarray:
    return np.unpackbits(packed.numpy(), bitorder="little")[:n].astype(bool)


@pytest.mark.parametrize("n", [*SIZES, LARGE])
def test_signs_and_coins(n):
    cases = arrays(n) if n < 1000 else {k: v for k, v in arrays(n).items() if k in ("few values", "NaN", "denormal")}
    for name, array in cases.items():
        x, out = sliced(array), Guarded(bitmap_nbytes(n), torch.uint8)

        def run(x=x, out=out):
            total = torch.full((x.numel(),), 0.5)
            signs_decode_add(pack_signs(x, KEY, out=out.out), total, 0.25)
            return out.out.clone(), total

        packed, total = same_everywhere(run)
        expected = philox.negative(array, KEY)
        assert np.array_equal(packed.numpy(), bitmap(expected)), name
        assert np.array_equal(total.numpy(), np.where(expected, np.float32(0.25), np.float32(0.75)))
        assert out.intact()


def test_zeros_are_unbiased():
    """Over the elements of one step, and over many steps for each element: within five standard errors."""
    n = 40000
    assert abs(bits(pack_signs(torch.zeros(n), 1), n).mean() - 0.5) < 5 * 0.5 / n**0.5
    steps = np.mean([bits(pack_signs(torch.zeros(64), key), 64) for key in range(2000)], axis=0)
    assert np.abs(steps - 0.5).max() < 5 * 0.5 / 2000**0.5


@pytest.mark.parametrize("voters", [1, 2, 3, 4, 5, 7, 8, 16, 31, 64, 257])
def test_majority(voters):
    for n in (0, 1, 31, 32, 33, 4095, 4096, 4097, 9001) if voters < 64 else (33, 4097):
        rng = np.random.default_rng([voters, n])
        ballots = rng.random((voters, n)) < rng.choice([0.1, 0.5, 0.9], n)
        votes = [sliced(bitmap(b)) for b in ballots]
        if n % 8:  # spare bits are ignored
            votes[0][-1] |= 0x80
        out = Guarded(bitmap_nbytes(n), torch.uint8)
        packed = same_everywhere(lambda v=votes, n=n, o=out: majority(v, n, KEY, o.out).clone())
        twice = 2 * ballots.sum(0)
        expected = np.where(twice == voters, philox.coins(KEY, n), twice > voters)
        assert np.array_equal(packed.numpy(), bitmap(expected)) and out.intact()
        assert torch.equal(majority(votes[::-1], n, KEY), packed)


def test_ties_are_unbiased():
    n = 40000
    ones = torch.full((n // 8,), 255, dtype=torch.uint8)
    assert abs(bits(majority([ones, ~ones], n, 5), n).mean() - 0.5) < 5 * 0.5 / n**0.5


@examples
@given(st.lists(st.integers(0, 255), min_size=1, max_size=9), st.integers(0, 70))
def test_majority_of_constant_votes(values, n):
    votes = [torch.full((bitmap_nbytes(n),), value, dtype=torch.uint8) for value in values]
    found = bits(majority(votes, n, 3), n)
    for i in range(n):
        count = sum(value >> (i % 8) & 1 for value in values)
        if 2 * count != len(values):
            assert found[i] == (2 * count > len(values))


TABLE = (0, 1, 31, 8192, 33, 100_003, 8193)  # sizes of a table: more than a chunk, in no order


def test_pack_all():
    """The signs and statistics of each tensor, as by the functions for one."""
    cases = {name: [arrays(n)[name] for n in TABLE] for name in arrays(1)}
    for name, tensors in cases.items():
        sources = [(sliced(x), KEY + i, Guarded(bitmap_nbytes(len(x)), torch.uint8)) for i, x in enumerate(tensors)]

        def run(sources=sources):
            return torch.stack(pack_signs_all([(x, key, out.out) for x, key, out in sources]))

        statistics = same_everywhere(run)
        for (x, key, out), (largest, mean) in zip(sources, statistics):
            assert torch.equal(out.out, pack_signs(x, key)) and out.intact(), name
            assert torch.equal(largest, abs_max_tensor(x)[0]) or (largest.isnan() and x.isnan().any()), name
            total = bucket_norms(x, norm="l1").double().sum()
            assert mean == ((total / max(1, x.numel())).float() if total < torch.finfo(torch.float32).max else math.inf)
    assert pack_signs_all([]) == []


def test_the_mean_of_magnitudes():
    """Within the rounding of the sum and of the quotient to float32; infinite if the sum is."""
    x = sliced(np.random.default_rng(1).normal(size=70_001).astype(np.float32))
    out = torch.empty(bitmap_nbytes(x.numel()), dtype=torch.uint8)
    (numbers,) = pack_signs_all([(x, 0, out)])
    expected = np.abs(x.numpy().astype(np.float64)).mean()
    assert 0 < abs(numbers[1].item() / expected - 1) <= 2**-23
    (numbers,) = pack_signs_all([(torch.full((9,), 3e38), 0, torch.empty(2, dtype=torch.uint8))])
    assert numbers[0] == np.float32(3e38) and numbers[1] == math.inf


@pytest.mark.parametrize("voters", [1, 2, 3, 8])
def test_majority_all(voters):
    """Each vote, and how many signs of each voter it overrules."""
    rng = np.random.default_rng(voters)
    ballots = [rng.random((voters, n)) < 0.5 for n in TABLE]
    votes = [([sliced(bitmap(b)) for b in of], of.shape[1], KEY + i) for i, of in enumerate(ballots)]
    for packed, n, _ in votes:
        if n % 8:  # spare bits are ignored
            packed[0][-1] |= 0x80
    results = majority_all(votes)
    counts = same_everywhere(lambda: torch.cat([against for _, against in majority_all(votes)]))
    assert torch.equal(counts, torch.cat([against for _, against in results]))
    for (packed, n, key), of, (winner, against) in zip(votes, ballots, results):
        assert torch.equal(winner, majority(packed, n, key))
        assert against.tolist() == (of != bits(winner, n)).sum(1).tolist()
    assert majority_all([]) == []


def test_decode_add_all():
    """The bits of one call for each term, with and without the sum before."""
    rng = np.random.default_rng(2)
    sums, expected = [], []
    for i, n in enumerate(TABLE):
        out = Guarded(n, torch.float32)
        out.out.copy_(torch.from_numpy(rng.normal(size=n).astype(np.float32)))
        terms = [(sliced(bitmap(rng.random(n) < 0.5)), 0.3 * t - 1) for t in range(i)]
        one_by_one = out.out.clone() if i % 2 else torch.zeros(n)
        for packed, scale in terms:
            signs_decode_add(packed, one_by_one, scale)
        sums.append((out, terms, bool(i % 2)))
        expected.append(one_by_one)
    before = [out.out.clone() for out, _, _ in sums]

    def run():
        for (out, _, _), old in zip(sums, before):
            out.out.copy_(old)
        signs_decode_add_all([WeightedSum(out.out, terms, add) for out, terms, add in sums])
        return torch.cat([out.out for out, _, _ in sums])

    assert torch.equal(same_everywhere(run), torch.cat(expected))
    assert all(out.intact() for out, _, _ in sums)
    signs_decode_add_all([])


def test_tables_of_two_devices_are_refused():
    here, there = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8, device="meta")
    x = torch.ones(3)
    for f in (
        lambda: pack_signs_all([(x, 0, here), (x.to("meta"), 0, there)]),
        lambda: majority_all([([here], 3, 0), ([there], 3, 0)]),
        lambda: signs_decode_add_all([WeightedSum(x, [(here, 1.0), (there, 1.0)])]),
    ):
        with pytest.raises(ValueError, match="got a tensor on meta"):
            f()
    with pytest.raises(ValueError, match="got 1 voters, expected 2 as in the first vote"):
        majority_all([([here, here], 3, 0), ([here], 3, 0)])


def test_errors():
    byte = torch.zeros(1, dtype=torch.uint8)
    for f, error, message in [
        (lambda: pack_signs(torch.ones(3).double()), ValueError, "got torch.float64, expected torch.float32"),
        (lambda: pack_signs(torch.ones(3), key=1.5), ValueError, "got key = 1.5"),
        (lambda: pack_signs(torch.ones(9), out=byte), ValueError, "out: got 1 elements, expected 2"),
        (lambda: majority([], 3), ValueError, "got 0 voters, expected 1 to 65535"),
        (lambda: majority([byte, byte], 9), PayloadError, "got 1 bytes from voter 0, expected 2 for 9 signs"),
        (lambda: signs_decode_add(byte, torch.ones(9)), PayloadError, "got 1 bytes, expected 2 for 9 signs"),
    ]:
        with pytest.raises(error, match=message):
            f()
