import numpy as np
import pytest
import torch

import philox
from gradzip.ops import bernoulli, bitmap_count, bitmap_nbytes
from reference import LARGE, SIZES, Guarded, bitmap, same_everywhere, sliced

KEY = 0x1234_5678_9ABC_DEF0


@pytest.mark.parametrize("n", [*SIZES, LARGE])
def test_draws(n):
    p = np.random.default_rng(n).random(n).astype(np.float32)
    p[::7], p[1::7], p[2::7], p[3::7] = 0, 1, np.nan, 2.0**-31
    x, out = sliced(p), Guarded(bitmap_nbytes(n), torch.uint8)
    drawn = same_everywhere(lambda: bernoulli(x, KEY, out.out).clone())
    with np.errstate(invalid="ignore"):
        expected = philox.words(KEY, n) < p.astype(np.float64) * 2.0**32
    assert np.array_equal(drawn.numpy(), bitmap(expected)) and out.intact()
    assert bitmap_count(drawn, n) == expected.sum()


def test_errors():
    for call, message in [
        (lambda: bernoulli(torch.ones(3).double(), 0), "got torch.float64, expected torch.float32"),
        (lambda: bernoulli(torch.ones(3), -1), "got key = -1"),
        (lambda: bernoulli(torch.ones(3), 0, torch.zeros(2, dtype=torch.uint8)), "got 2 elements, expected 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
