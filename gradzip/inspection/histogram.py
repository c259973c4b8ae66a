"""The distribution of a gradient, of what is sent of it, and of the error, as the FFT paper draws them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_QUANTILES = 200
_MOST = 1 << 20  # elements for quantiles: a stride through the rest tells no less


@dataclass(frozen=True)
class Histogram:
    """Counts of elements in equal bins, and quantiles of the error.

    Args:
        low, high: ends of the first and of the last bin, which also count what lies beyond them.
        wanted, sent: elements of x and of x^ in each bin.
        errors: |x_i - x^_i| at the quantiles 0, 1 / n, ..., 1, ascending.

    Source: Wang et al., HPDC 2020, figure 15.
    """

    low: float
    high: float
    wanted: list[int]
    sent: list[int]
    errors: list[float]

    @classmethod
    def of(cls, wanted: Tensor, sent: Tensor, bins: int) -> Histogram:
        """Of the same gradient before and after: float32. The range holds all but 0.1 % of its elements."""
        x, y = wanted.reshape(-1), sent.reshape(-1)
        step = -(-x.numel() // _MOST)
        limit = torch.quantile(x[::step].abs(), 0.999).item() or 1.0
        error = torch.quantile((x - y)[::step].abs(), torch.linspace(0, 1, _QUANTILES + 1, device=x.device))
        return cls(-limit, limit, _counts(x, limit, bins), _counts(y, limit, bins), error.tolist())


def _counts(x: Tensor, limit: float, bins: int) -> list[int]:
    return torch.histc(x.clamp(-limit, limit), bins, -limit, limit).long().tolist()
