import numpy as np
import pytest
import torch

import philox
from gradzip import ops
from reference import same_everywhere


def reference(n, k, key):
    """The definition: one index per stratum, shifted, sorted."""
    draws = [int(w) for w in philox.words(key, k + 1)]
    bounds = [i * n // k for i in range(k + 1)]
    shift = draws[k] * n >> 32
    chosen = [b + (w * (e - b) >> 32) for b, e, w in zip(bounds, bounds[1:], draws)]
    return sorted((c + shift) % n for c in chosen)


@pytest.mark.parametrize("n, k", [(1, 1), (7, 3), (33, 33), (1000, 1), (1000, 10), (1000, 999), (300007, 40001)])
def test_equals_the_definition(n, k):
    for key in (0, 1, 2**64 - 1):
        indices = same_everywhere(lambda: ops.random_indices(n, k, key))  # noqa: B023 (called at once)
        assert indices.dtype == torch.int32 and indices.tolist() == reference(n, k, key)
        assert len(set(indices.tolist())) == k


@pytest.mark.parametrize("n, k", [(100, 10), (97, 13), (50, 40)])
def test_all_indices_are_equally_likely(n, k):
    keys = 20000
    counts = np.zeros(n)
    for key in range(keys):
        counts[ops.random_indices(n, k, key).numpy()] += 1
    p = k / n
    z = (counts - keys * p) / np.sqrt(keys * p * (1 - p))
    assert abs(z).max() < 4.5
    assert 0.7 < z.std() < 1.3  # as random as independent draws


def test_zero_of_n():
    assert ops.random_indices(5, 0, 0).tolist() == ops.random_indices(0, 0, 0).tolist() == []


def test_errors():
    with pytest.raises(ValueError, match="got k = 4, expected 0 to 3"):
        ops.random_indices(3, 4, 0)
    with pytest.raises(ValueError, match="expected fewer than 2\\^31"):
        ops.random_indices(2**31, 4, 0)
    with pytest.raises(ValueError, match="got key = -1"):
        ops.random_indices(3, 1, -1)
