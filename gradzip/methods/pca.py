"""Principal components of samples, as linear combinations of the samples."""

from __future__ import annotations

import torch
from torch import Tensor

from .base.threads import one_thread


def max_dimension(samples: int, size: int) -> int:
    """The largest number of principal components of `samples` vectors of `size` elements."""
    return min(samples - 1, size)


def dimension(eigenvalues: Tensor, loss: float) -> int:
    """The smallest d for which the sum of the first d eigenvalues is at least 1 - loss of their total; 0 if all are 0.

    eigenvalues: float64, descending. Those below float32's resolution of the total count as 0.

    Source: GradiVeQ, equation 6.
    """
    eigenvalues = eigenvalues.clamp(min=0.0)
    eigenvalues = eigenvalues * (eigenvalues > torch.finfo(torch.float32).eps * eigenvalues.sum())
    sums = eigenvalues.cumsum(0)
    return int((sums < (1 - loss) * sums[-1]).sum()) + 1 if sums[-1] > 0 else 0


def principal_weights(centred: Tensor, loss: float, recent: int) -> tuple[Tensor, bool]:
    """Weights that combine samples to their first d principal components, and whether d is stable.

    The rows of weights @ centred are orthonormal, in the order of descending eigenvalues. The eigenvalues are those of
    the samples' Gram matrix, n x n in float64, which are also those of their covariance, K x K.

    Args:
        centred: (n, K) float32: n samples with mean 0, at most 1 in magnitude.
        loss: the fraction of the variance that the components may lose; it determines d.
        recent: d is stable if it differs by at most 1/20 (or by 1) without the last `recent` samples.

    Returns:
        weights: (max_dimension(n, K), n) float32; rows after the first d are 0.
        stable: whether d is stable.
    """
    count, size = centred.shape
    gram = torch.zeros(count, count, dtype=torch.float64, device="cpu")
    for part in centred.split(1 << 16, dim=1):
        wide = part.double()
        gram += (wide @ wide.t()).cpu()
    with one_thread():
        eigenvalues, vectors = torch.linalg.eigh(gram)
    eigenvalues, vectors = eigenvalues.flip(0), vectors.flip(1)
    d = min(dimension(eigenvalues, loss), max_dimension(count, size))
    weights = centred.new_zeros(max_dimension(count, size), count)
    weights[:d] = (vectors[:, :d] / eigenvalues[:d].sqrt()).t()
    earlier = count - recent
    if earlier < 2:
        return weights, False
    gram = gram[:earlier, :earlier]
    gram = gram - gram.mean(0) - gram.mean(1, keepdim=True) + gram.mean()  # centred about their own mean
    with one_thread():
        before = dimension(torch.linalg.eigvalsh(gram).flip(0), loss)
    return weights, abs(d - before) <= max(1, d // 20)
