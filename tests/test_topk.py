import numpy as np
import pytest
import torch

from gradzip import ops
from reference import same_everywhere

SIZES = [1, 31, 32, 33, 8192, 8193, 300007]


def ranking(x):
    """Indices by magnitude, the largest first, NaN above infinity, ties to the lower index."""
    magnitude = x.numpy().view(np.uint32) & 0x7FFFFFFF
    return np.argsort(-magnitude.astype(np.int64), kind="stable")


def inputs(n):
    x = torch.randn(n)
    yield x
    yield torch.zeros(n)
    yield torch.full((n,), -2.5)
    yield (x * 3).round()  # many ties
    yield x * 1e-42  # denormals
    special = x.clone()
    special[:: max(1, n // 7)] = torch.tensor(float("nan"))
    special[n // 2] = -float("inf")
    yield special
    yield torch.where(torch.rand(n) < 0.001, x, torch.zeros(n))


@pytest.mark.parametrize("n", SIZES)
def test_topk_abs(n):
    for x in inputs(n):
        order = ranking(x)
        for k in {0, 1, n // 100, n // 3, n}:
            indices, values = same_everywhere(lambda x=x, k=k: ops.topk_abs(x, k))
            expected = torch.from_numpy(np.sort(order[:k]))
            assert indices.dtype == torch.int32 and torch.equal(indices.long(), expected)
            assert torch.equal(values.view(torch.int32), x[expected].view(torch.int32))


def test_topk_abs_takes_any_strides():
    x = torch.randn(100, 70).t()
    indices, values = ops.topk_abs(x, 50)
    assert torch.equal(values, x.reshape(-1)[indices.long()])


@pytest.mark.parametrize("n", [1, 33, 8193, 1000003])
def test_marked_indices(n):
    for share in (0.0, 0.01, 0.6, 1.0):
        chosen = np.random.default_rng(n).random(n) < share
        bits = torch.from_numpy(np.packbits(chosen, bitorder="little"))
        where = np.flatnonzero(chosen)
        found = same_everywhere(lambda bits=bits, k=where.size: ops.marked_indices(bits, n, k))
        assert np.array_equal(found.numpy(), where)


@pytest.mark.parametrize("theta", [0.999, 0.99, 0.85, 0.5])
def test_sampled_threshold_is_close(theta):
    n = 1000003
    k = round((1 - theta) * n)
    for seed, x in enumerate((torch.randn(n), torch.randn(n) ** 3, torch.rand(n))):
        selection, count = same_everywhere(lambda x=x, seed=seed: ops.sampled_threshold(x, k, seed))
        threshold = selection[:4].view(torch.float32).item()
        assert 0.9 * k <= count <= 1.1 * k
        assert count == (x.abs() >= threshold).sum()
        bits = ops.bitmap(x, selection)
        assert ops.marked_indices(bits, n, count).numel() == count
    # It is a sample: two-sided, so that an exact selection would not pass for one.
    counts = {ops.sampled_threshold(x, k, key)[1] for key in range(5)}
    assert len(counts) > 1


def test_sampled_threshold_where_samples_fail():
    n, k = 1000003, 10000
    mostly_zero = torch.where(torch.rand(n) < 0.02, torch.randn(n), torch.zeros(n))
    _, count = ops.sampled_threshold(mostly_zero, k, 0)
    assert 0.9 * k <= count <= 1.1 * k
    fewer = torch.where(torch.rand(n) < 0.001, torch.randn(n), torch.zeros(n))
    selection, count = ops.sampled_threshold(fewer, k, 0)  # threshold 0 would keep everything
    assert count == fewer.count_nonzero()
    assert ops.marked_indices(ops.bitmap(fewer, selection), n, count).tolist() == fewer.nonzero().flatten().tolist()
    _, count = ops.sampled_threshold(torch.zeros(n), k, 0)
    assert count == 0
    for x, wanted in ((torch.ones(n), k), (torch.randn(33), 1), (torch.randn(33), 33), (torch.randn(n), 3)):
        selection, count = ops.sampled_threshold(x, wanted, 0)
        assert count == wanted
        assert ops.marked_indices(ops.bitmap(x, selection), x.numel(), count).numel() == wanted


def test_errors():
    with pytest.raises(ValueError, match="got k = 4, expected 0 to 3"):
        ops.topk_abs(torch.zeros(3), 4)
    with pytest.raises(ValueError, match="got k = -1, expected 0 to 3"):
        ops.topk_abs(torch.zeros(3), -1)
    with pytest.raises(ValueError, match="x: got torch.int32, expected torch.float32"):
        ops.topk_abs(torch.zeros(3, dtype=torch.int32), 1)
    with pytest.raises(ValueError, match="got k = 0, expected 1 to 3"):
        ops.sampled_threshold(torch.zeros(3), 0, 0)
    with pytest.raises(ValueError, match="other than the expected 2 bits set"):
        ops.marked_indices(torch.tensor([1], dtype=torch.uint8), 8, 2)
