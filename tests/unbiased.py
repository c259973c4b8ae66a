"""Whether a codec that draws at random is right on average, and as often wrong as its theory says."""

import numpy as np
import torch

from gradzip.state import Key

SHAPE = (40, 50)


def gradients():
    """2000 elements (a length that its transform does not pad), awkward in different ways, by name."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(5))
    one_hot = torch.zeros(SHAPE)
    one_hot[7, 3] = -3.0
    return {
        "normal": x,
        "all-equal": 0.25 * x.sign(),
        "constant": torch.full(SHAPE, -0.1),
        "one-hot": one_hot,
        "tiny": 1e-30 * x,
        "mostly zero": x * (x.abs() > 2),
    }


def assert_unbiased(codec, grad, mean, size, p, coordinates=None, keys=300):
    """The mean and the error of what peers see, over many keys, against theory.

    mean: what it should be on average. In some orthonormal basis it is off by size_k (b_k - p_k), b_k Bernoulli(p_k)
    and independent: variance size_k^2 p_k (1 - p_k), fourth moment accordingly. coordinates: of the mean in that basis,
    where it is not the elements' own. Bounds are five standard errors of the statistics, on both sides, so that too
    little noise fails as well as too much or a bias.
    """
    n = grad.numel()
    mean = np.asarray(mean, np.float64).reshape(-1)
    size, p = np.asarray(size, np.float64), np.asarray(p, np.float64)
    variance = size**2 * p * (1 - p)
    fourth = size**4 * p * (1 - p) * (1 - 3 * p * (1 - p))
    total, squares = np.zeros(n), 0.0
    for step in range(keys):
        payload = codec.encode(grad, Key(0, step, "w", 0))
        seen = codec.decode([payload], n).reshape(-1).double().numpy()
        total += seen
        squares += ((seen - mean) ** 2).sum()
    rounding = 3e-6 * np.linalg.norm(mean)
    if variance.sum() <= rounding**2:
        assert np.linalg.norm(total / keys - mean) <= rounding
        return
    # Of one draw: the squared error is the variance.
    excess = max(0.0, (fourth - variance**2).sum())
    slack = 3e-5 * variance.sum()  # what is not drawn still is rounded to float32
    assert abs(squares / keys - variance.sum()) <= 5 * np.sqrt(excess / keys) + slack
    # Of the mean: its squared error is the variance / keys; the fourth cumulant shrinks with keys.
    excess = (2 * variance**2 + (fourth - 3 * variance**2) / keys).sum()
    assert abs(keys * ((total / keys - mean) ** 2).sum() - variance.sum()) <= 5 * np.sqrt(excess) + slack
    # And along the gradient, where shrinking or stretching it would show.
    coordinates = mean if coordinates is None else np.asarray(coordinates, np.float64)
    deviation = np.sqrt((coordinates**2 * variance).sum() / keys)
    assert abs((total / keys - mean) @ mean) <= 5 * deviation + rounding * np.linalg.norm(mean)
