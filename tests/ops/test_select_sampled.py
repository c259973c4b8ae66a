import pytest
import torch

from gradzip import ops
from gradzip.ops import groups
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


def vectors():
    """More than a launch of CUDA takes, of unequal sizes, misaligned."""
    memory, at = torch.randn(2000003) ** 3, 1
    for i in range(21):
        n = (300, 16384, 40000, 70001, 5, 17011, 300001)[i % 7] + i
        x = memory[at : at + n]
        at += n + i % 4
        if i % 5 == 1:
            x *= torch.rand(n) < 0.001  # fewer are nonzero than are wanted
        if i % 5 == 2:
            x.round_()
        if i % 5 == 3:
            x[n // 3], x[n // 2] = float("nan"), -float("inf")
        if i == 6:
            x.zero_()
        yield x


def test_several_vectors_have_the_selections_of_each():
    xs = list(vectors())
    ks, keys = [1 + x.numel() // 20 for x in xs], [i * 0x9E3779B97F4A7C15 % 2**64 for i in range(len(xs))]
    selections, counts = groups.select_sampled(xs, ks, keys)
    values = [torch.empty(count) for count in counts]
    indices = groups.topk_abs(xs, counts, values, selections)
    assert counts[6] == 0 and len({count == k for count, k in zip(counts, ks)}) == 2
    for x, k, key, *got in zip(xs, ks, keys, selections, counts, indices, values):
        selection, count = ops.select_sampled(x, k, key)
        assert got[1] == count and torch.equal(got[0][:4], selection[:4]) and torch.equal(got[0][8:], selection[8:])
        bits = ops.bitmap(x, selection)
        assert torch.equal(got[2], ops.bitmap_indices(bits, x.numel(), count))
        assert torch.equal(got[3].view(torch.int32), ops.compact_values(x, bits, count).view(torch.int32))


@pytest.mark.parametrize("k", [0, 4])
def test_k_out_of_range(k):
    with pytest.raises(ValueError, match=f"got k = {k}, expected 1 to 3"):
        ops.select_sampled(torch.zeros(3), k, 0)
