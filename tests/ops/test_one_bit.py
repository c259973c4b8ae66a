import math

import numpy as np
import pytest
import torch

import philox
from gradzip.ops import (
    PayloadError,
    WeightedSum,
    abs_max,
    bitmap_nbytes,
    one_bit_decode_add,
    one_bit_decode_add_all,
    one_bit_packed,
    one_bit_packed_all,
    pack_signs,
)
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


def test_tables():
    """Several tensors in one call have the bits of each alone; terms are added in order."""
    shapes = [(64, 576), (1, 1), (3, 40001), (5, 7), (0, 5), (33, 31)]
    rng = np.random.default_rng(3)
    tensors = [sliced(rng.normal(size=shape).astype(np.float32)) for shape in shapes]
    sources = [
        (x, KEY + i, torch.empty(bitmap_nbytes(x.numel()), dtype=torch.uint8), torch.empty(len(x), 2))
        for i, x in enumerate(tensors)
    ]
    largest = same_everywhere(lambda: torch.cat(one_bit_packed_all(sources)))
    for (x, key, out, means), most in zip(sources, largest):
        alone, its_means = one_bit_packed(x, key)
        assert torch.equal(out, alone) and torch.equal(means, its_means) and most == abs_max(x)
    expected, sums = [], []
    for i, (x, _, packed, means) in enumerate(sources):
        terms = [((packed, means), 0.5), ((packed, means.flip(1)), -0.25)][: 1 + i % 2]
        one_by_one = torch.ones(x.shape) * (i % 3)
        for (term, its_means), weight in terms:
            one_bit_decode_add(term, its_means, one_by_one, weight)
        expected.append(one_by_one.view(-1))
        sums.append((x.shape, terms, i % 3))

    def run():
        outs = [torch.full(shape, float(before)) for shape, _, before in sums]
        one_bit_decode_add_all([WeightedSum(out, t, add=before > 0) for out, (_, t, before) in zip(outs, sums)])
        return torch.cat([out.view(-1) for out in outs])

    assert torch.equal(same_everywhere(run), torch.cat(expected))
    assert one_bit_packed_all([]) == [] and one_bit_decode_add_all([]) is None


def test_a_corrupt_term_of_a_table_is_named():
    byte, good, bad = torch.zeros(1, dtype=torch.uint8), torch.ones(1, 2), torch.tensor([[1.0, math.inf]])
    outs = [torch.zeros(3), torch.zeros(3)]
    with pytest.raises(PayloadError, match="mean of a row is not finite") as raised:
        one_bit_decode_add_all(
            [WeightedSum(outs[0], [((byte, good), 1.0)]), WeightedSum(outs[1], [((byte, m), 1.0) for m in (good, bad)])]
        )
    assert raised.value.index == 2 and not torch.cat(outs).any()


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
