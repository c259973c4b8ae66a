"""Statistical tests of random codecs: expectation and variance against theory."""

import numpy as np
import torch

from gradzip.memory.state import Key
from single import decode, encode

SHAPE = (40, 50)


def gradients():
    """Gradients of 2000 elements, by name. Fourier transforms of this length need no padding."""
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
    """Compare the mean and variance of the decoded gradient, over many keys, with theory.

    In an orthonormal basis, the errors of the decoded gradient are size_k (b_k - p_k) with independent b_k of
    Bernoulli(p_k). Their variance is size_k^2 p_k (1 - p_k). Bounds are five standard errors on both sides, so too
    little noise fails, as do too much noise and a bias.

    Args:
        mean: expectation of the decoded gradient.
        size, p: size_k and p_k.
        coordinates: of `mean` in that basis; None if the basis is that of the elements.
    """
    n = grad.numel()
    mean = np.asarray(mean, np.float64).reshape(-1)
    size, p = np.asarray(size, np.float64), np.asarray(p, np.float64)
    variance = size**2 * p * (1 - p)
    fourth = size**4 * p * (1 - p) * (1 - 3 * p * (1 - p))
    total, squares = np.zeros(n), 0.0
    for step in range(keys):
        payload = encode(codec, grad, Key(0, step, "w", 0))
        seen = decode(codec, [payload], grad.shape).reshape(-1).double().numpy()
        total += seen
        squares += ((seen - mean) ** 2).sum()
    rounding = 3e-6 * np.linalg.norm(mean)
    if variance.sum() <= rounding**2:
        assert np.linalg.norm(total / keys - mean) <= rounding
        return
    # The mean squared error of a draw is the variance.
    excess = max(0.0, (fourth - variance**2).sum())
    slack = 3e-5 * variance.sum()  # float32 rounding of the decoded values
    assert abs(squares / keys - variance.sum()) <= 5 * np.sqrt(excess / keys) + slack
    # The squared error of the mean over draws is the variance / keys. The fourth cumulant shrinks with keys.
    excess = (2 * variance**2 + (fourth - 3 * variance**2) / keys).sum()
    assert abs(keys * ((total / keys - mean) ** 2).sum() - variance.sum()) <= 5 * np.sqrt(excess) + slack
    # The error along the gradient shows a wrong scale.
    coordinates = mean if coordinates is None else np.asarray(coordinates, np.float64)
    deviation = np.sqrt((coordinates**2 * variance).sum() / keys)
    assert abs((total / keys - mean) @ mean) <= 5 * deviation + rounding * np.linalg.norm(mean)
