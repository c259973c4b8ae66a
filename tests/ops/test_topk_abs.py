import numpy as np
import pytest
import torch

from gradzip import ops
from gradzip.ops import groups
from reference import same_everywhere

SIZES = [1, 31, 32, 33, 8192, 8193, 300007]


def ranking(x):
    """Indices by descending magnitude, NaN above infinity, ties to the lower index."""
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


@pytest.mark.parametrize("n", SIZES)
def test_given_selections(n):
    """Of k elements, and of all that reach a threshold."""
    xs = list(inputs(n))
    for threshold in (None, 0.0, 0.5, float("inf"), float("nan")):
        if threshold is None:
            selections = torch.stack([ops.select(x, 1 + n // 3) for x in xs])
            expected = [torch.from_numpy(np.sort(ranking(x)[: 1 + n // 3])) for x in xs]
        else:
            selection = np.array((threshold, 0, n), "f4, i4, i8")
            selections = torch.from_numpy(np.tile(selection.reshape(1).view(np.uint8), (len(xs), 1)))
            least = selection["f0"].view(np.uint32) & 0x7FFFFFFF
            expected = [torch.from_numpy((x.numpy().view(np.uint32) & 0x7FFFFFFF >= least).nonzero()[0]) for x in xs]
        ks = list(map(len, expected))
        values = list(map(torch.empty, ks))
        indices = groups.topk_abs(xs, ks, values, selections)
        for x, found, at, wanted in zip(xs, values, indices, expected):
            assert torch.equal(at.long(), wanted)
            assert torch.equal(found.view(torch.int32), x[wanted].view(torch.int32))


def test_topk_abs_takes_any_strides():
    x = torch.randn(100, 70).t()
    indices, values = ops.topk_abs(x, 50)
    assert torch.equal(values, x.reshape(-1)[indices.long()])


def test_errors():
    with pytest.raises(ValueError, match="got k = 4, expected 0 to 3"):
        ops.topk_abs(torch.zeros(3), 4)
    with pytest.raises(ValueError, match="got k = -1, expected 0 to 3"):
        ops.topk_abs(torch.zeros(3), -1)
    with pytest.raises(ValueError, match="x: got torch.int32, expected torch.float32"):
        ops.topk_abs(torch.zeros(3, dtype=torch.int32), 1)
