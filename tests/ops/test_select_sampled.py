import pytest
import torch

from gradzip import ops
from reference import same_everywhere


@pytest.mark.parametrize("theta", [0.999, 0.99, 0.85, 0.5])
def test_the_count_is_close_to_k(theta):
    n = 1000003
    k = round((1 - theta) * n)
    for seed, x in enumerate((torch.randn(n), torch.randn(n) ** 3, torch.rand(n))):
        selection, count = same_everywhere(lambda x=x, seed=seed: ops.select_sampled(x, k, seed))
        threshold = selection[:4].view(torch.float32).item()
        assert 0.9 * k <= count <= 1.1 * k
        assert count == (x.abs() >= threshold).sum()
        bits = ops.bitmap(x, selection)
        assert ops.bitmap_indices(bits, n, count).numel() == count
    # It is a sample: two-sided, so that an exact selection would not pass for one.
    counts = {ops.select_sampled(x, k, key)[1] for key in range(5)}
    assert len(counts) > 1


def test_data_that_misleads_a_sample():
    n, k = 1000003, 10000
    mostly_zero = torch.where(torch.rand(n) < 0.02, torch.randn(n), torch.zeros(n))
    _, count = ops.select_sampled(mostly_zero, k, 0)
    assert 0.9 * k <= count <= 1.1 * k
    fewer = torch.where(torch.rand(n) < 0.001, torch.randn(n), torch.zeros(n))
    selection, count = ops.select_sampled(fewer, k, 0)  # threshold 0 would keep everything
    assert count == fewer.count_nonzero()
    assert ops.bitmap_indices(ops.bitmap(fewer, selection), n, count).tolist() == fewer.nonzero().flatten().tolist()
    _, count = ops.select_sampled(torch.zeros(n), k, 0)
    assert count == 0
    for x, wanted in ((torch.ones(n), k), (torch.randn(33), 1), (torch.randn(33), 33), (torch.randn(n), 3)):
        selection, count = ops.select_sampled(x, wanted, 0)
        assert count == wanted
        assert ops.bitmap_indices(ops.bitmap(x, selection), x.numel(), count).numel() == wanted


@pytest.mark.parametrize("k", [0, 4])
def test_k_out_of_range(k):
    with pytest.raises(ValueError, match=f"got k = {k}, expected 1 to 3"):
        ops.select_sampled(torch.zeros(3), k, 0)
