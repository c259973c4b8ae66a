import numpy as np
import pytest
import torch

from gradzip import ops
from reference import same_everywhere


@pytest.mark.parametrize("n", [1, 33, 8193, 1000003])
def test_bitmap_of_a_selection(n):
    x = torch.randn(n).round()  # with ties: those of lowest index are kept
    order = np.argsort(-np.abs(x.numpy()), kind="stable")
    for k in {1, (n + 2) // 3, n}:
        bits = same_everywhere(lambda k=k: ops.bitmap(x, ops.select(x, k)))
        kept = np.unpackbits(bits.numpy(), bitorder="little")  # spare bits are 0
        assert np.array_equal(np.flatnonzero(kept), np.sort(order[:k]))
        assert ops.bitmap_count(bits, n) == k


@pytest.mark.parametrize("n", [1, 33, 8193, 1000003])
def test_count_and_indices(n):
    for share in (0.0, 0.01, 0.6, 1.0):
        chosen = np.random.default_rng(n).random(n) < share
        bits = torch.from_numpy(np.packbits(chosen, bitorder="little"))
        where = np.flatnonzero(chosen)
        found = same_everywhere(lambda bits=bits, k=where.size: ops.bitmap_indices(bits, n, k))
        assert np.array_equal(found.numpy(), where)
        assert ops.bitmap_count(bits, n) == where.size


@pytest.mark.parametrize("count", [0, 2])
def test_another_count(count):
    with pytest.raises(ValueError, match=f"got a bitmap with 1 bits set, expected {count} bits set"):
        ops.bitmap_indices(torch.tensor([1], dtype=torch.uint8), 8, count)


def test_wrong_sizes():
    with pytest.raises(ValueError, match="bitmap_count: bitmap: got 1 elements, expected 2"):
        ops.bitmap_count(torch.zeros(1, dtype=torch.uint8), 9)
    with pytest.raises(ValueError, match="got 2147483648 elements, expected 0 to"):
        ops.bitmap_indices(torch.zeros(1, dtype=torch.uint8), 2**31, 1)
