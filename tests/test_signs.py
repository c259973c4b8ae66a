import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import philox
from gradzip.ops import (
    PayloadError,
    bitmap_nbytes,
    majority,
    pack_signs,
    signs_decode_add,
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
