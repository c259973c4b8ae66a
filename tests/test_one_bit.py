import numpy as np
import pytest
import torch

import philox
from gradzip.ops import PayloadError, one_bit_decode_add, one_bit_packed, pack_signs
from reference import arrays, same_everywhere, sliced

KEY = 0xFEDC_BA98_7654_3210


@pytest.mark.parametrize(
    "rows, columns", [(0, 5), (3, 0), (1, 1), (5, 7), (33, 31), (64, 576), (3, 40001), (1, 200003)]
)
def test_means(rows, columns):
    for name, array in arrays(rows * columns).items():
        if rows * columns > 10000 and name not in ("heavy-tailed", "NaN", "few values"):
            continue
        x = sliced(array.reshape(rows, columns))

        def run(x=x):
            packed, means = one_bit_packed(x, KEY)
            total = torch.ones(x.shape)
            one_bit_decode_add(packed, means, total, 0.5)
            return packed, means, total

        packed, means, total = same_everywhere(run)
        assert torch.equal(packed, pack_signs(x, KEY)), name
        side = philox.negative(array, KEY).reshape(rows, columns)
        finite = np.where(np.isnan(array), 0.0, array).reshape(rows, columns).astype(np.float64)
        for bit in (0, 1):
            chosen = side == bool(bit)
            with np.errstate(invalid="ignore"):
                expected = np.where(chosen, finite, 0).sum(1) / np.maximum(chosen.sum(1), 1)
            expected = np.clip(expected, -float(np.finfo(np.float32).max), float(np.finfo(np.float32).max))
            np.testing.assert_allclose(means[:, bit].numpy(), expected, rtol=2**-22, atol=2.0**-149, err_msg=name)
        value = np.where(side, means[:, 1:].numpy(), means[:, :1].numpy())
        assert np.array_equal(total.numpy(), np.float32(1) + np.float32(0.5) * value)


def test_the_means_minimise_the_squared_error():
    x = torch.randn(8, 100)
    packed, means = one_bit_packed(x)
    for shift in ((0.01, 0), (-0.01, 0), (0, 0.01), (0, -0.01)):
        best, other = torch.zeros(8, 100), torch.zeros(8, 100)
        one_bit_decode_add(packed, means, best)
        one_bit_decode_add(packed, means + torch.tensor(shift), other)
        assert ((x - best) ** 2).sum() < ((x - other) ** 2).sum()


def test_errors():
    byte = torch.zeros(1, dtype=torch.uint8)
    for f, error, message in [
        (lambda: one_bit_packed(torch.ones(9)), ValueError, r"got shape \(9,\), expected \(rows, columns\)"),
        (lambda: one_bit_decode_add(byte, torch.ones(1, 2), torch.ones(3, 3)), PayloadError, "expected 2 and 6 for"),
        (lambda: one_bit_decode_add(byte, torch.full((1, 2), float("nan")), torch.ones(1, 3)), PayloadError,
         "mean of a row is not finite"),
    ]:  # fmt: skip
        with pytest.raises(error, match=message):
            f()
