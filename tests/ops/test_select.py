import numpy as np
import pytest
import torch

from gradzip import ops
from reference import LARGE, SIZES, arrays, bitmap, by_magnitude, same_everywhere, sliced

KINDS = list(arrays(0))


def check(x: np.ndarray, k: int, order: np.ndarray, tensor: torch.Tensor) -> None:
    mask = np.zeros(x.size, dtype=bool)
    mask[order[:k]] = True  # ties go to the lower index
    threshold = np.abs(x[order[k - 1]])

    def select_and_mark():
        selection = ops.select(tensor, k)
        return selection[:4].view(torch.float32), selection[8:].view(torch.int64), ops.bitmap(tensor, selection)

    got, ties, bits = same_everywhere(select_and_mark)
    assert np.array_equal(got.numpy(), [threshold], equal_nan=True)
    same = np.isnan(x) if np.isnan(threshold) else np.abs(x) == threshold
    assert ties.item() == np.count_nonzero(same & mask)
    assert np.array_equal(bits.numpy(), bitmap(mask))
    assert np.unpackbits(bits.numpy()).sum() == k


def counts(n: int) -> set[int]:
    return {k for k in (1, 2, n // 100, n // 7, round(0.15 * n), n // 2, n - 1, n) if 1 <= k <= n}


@pytest.mark.parametrize("n", SIZES[1:])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_a_sort(kind, n):
    x = arrays(n)[kind]
    order, tensor = by_magnitude(x), sliced(x)
    for k in counts(n):
        check(x, k, order, tensor)


@pytest.mark.parametrize("n", [8191, 8192, 8193, 65537])  # sampling begins at 2^13
def test_counts_near_the_ends_and_some_between(n):
    x = arrays(n, seed=1)["laplace"]
    order, tensor = by_magnitude(x), torch.from_numpy(x)
    for k in {1, 2, 3, 4, 5, 17, 64, n - 64, n - 17, n - 3, n - 2, n - 1, n, *range(5, n, n // 23)}:
        check(x, k, order, tensor)


@pytest.mark.parametrize("kind", ["normal", "few values", "mostly zero", "periodic"])
def test_large(kind):
    x = arrays(LARGE)[kind]
    order, tensor = by_magnitude(x), sliced(x, 3)
    for k in (1, 1000, 150000, LARGE):
        check(x, k, order, tensor)


@pytest.mark.parametrize("n", [9000, 100003])
def test_data_that_misleads_a_sample(n):
    """Sorted, blockwise constant and nearly constant data, and the k-th value at the edge of a plateau."""
    rng = np.random.default_rng(2)
    sorted_up = np.sort(np.abs(rng.standard_normal(n))).astype(np.float32)
    blocks = np.repeat(rng.standard_normal(n // 1000 + 1), 1000)[:n].astype(np.float32)
    plateau = np.full(n, 0.5, np.float32)
    plateau[: n // 10] = rng.random(n // 10) + 0.5
    plateau[-(n // 10) :] = rng.random(n // 10) * 0.5
    adjacent = np.nextafter(np.float32(1), np.where(rng.random(n) < 0.5, 2, 0).astype(np.float32))
    spikes = np.zeros(n, np.float32)
    spikes[:: n // 7] = 1e30
    for x in (sorted_up, sorted_up[::-1].copy(), blocks, plateau, adjacent, spikes):
        order, tensor = by_magnitude(x), torch.from_numpy(x)
        for k in (1, 7, 8, n // 10, n // 10 + 1, n // 2, n - n // 10, n - n // 10 + 1, n):
            check(x, k, order, tensor)


def test_threshold():
    x = torch.tensor([[1.0, -3.0], [2.0, -0.0]])
    assert [ops.select_threshold(x, k).item() for k in (1, 2, 3, 4)] == [3.0, 2.0, 1.0, 0.0]
    threshold = ops.select_threshold(x, 1)
    assert threshold.dtype == torch.float32 and threshold.dim() == 0


def test_strides_are_followed():
    x = torch.arange(12.0).view(3, 4)
    assert ops.select_threshold(x.t()[1], 2).item() == 5.0
    expected = bitmap((x.t() >= 8).numpy().reshape(-1))
    assert ops.bitmap(x.t(), ops.select(x.t(), 4)).tolist() == expected.tolist()


@pytest.mark.parametrize("k", [0, -1, 5, 2**40])
def test_k_out_of_range(k):
    with pytest.raises(ValueError, match=rf"select: got k = {k}, expected 1 to 4"):
        ops.select(torch.ones(4), k)
    with pytest.raises(ValueError, match=rf"got k = {k}, expected 1 to 4"):
        ops.select_threshold(torch.ones(4), k)


def test_empty_input():
    with pytest.raises(ValueError, match="got k = 1, expected 1 to 0"):
        ops.select(torch.empty(0), 1)


@pytest.mark.parametrize("x", [[1.0, 2.0], None, torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int32)])
def test_wrong_input(x):
    with pytest.raises(ValueError, match="select: x: got .*, expected"):
        ops.select(x, 1)
    with pytest.raises(ValueError, match="bitmap: x: got .*, expected"):
        ops.bitmap(x, ops.select(torch.ones(2), 1))


@pytest.mark.parametrize(
    "selection", [None, torch.ones(1), torch.zeros(15, dtype=torch.uint8), torch.zeros(4, dtype=torch.float32)]
)
def test_wrong_selection(selection):
    with pytest.raises(ValueError, match="bitmap: selection: got .*, expected"):
        ops.bitmap(torch.ones(4), selection)


@pytest.mark.parametrize(
    "out", [[0, 0], torch.zeros(1, dtype=torch.uint8), torch.zeros(2), torch.zeros(4, dtype=torch.uint8)[::2]]
)
def test_wrong_output(out):
    x = torch.ones(9)
    with pytest.raises(ValueError, match="bitmap: out: got .*, expected"):
        ops.bitmap(x, ops.select(x, 1), out=out)
