"""Sparsification ratios that change during training: two common schedules. Any function step -> theta is one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Theta = float | Callable[[int], float]


def theta_at(theta: Theta, step: int) -> float:
    """The value of theta at a step of a parameter. Raises ValueError outside of [0, 1)."""
    value = theta(step) if callable(theta) else theta
    if not (isinstance(value, (int, float)) and 0.0 <= value < 1.0):
        at = f" at step {step}" if callable(theta) else ""
        hint = f"; {value!r} % is {value / 100}" if isinstance(value, (int, float)) and 1 < value < 100 else ""
        raise ValueError(f"got theta = {value!r}{at}, expected a number in [0, 1): the fraction that is dropped{hint}")
    return float(value)


def check_theta(theta: Theta) -> None:
    """Raise ValueError for a fixed theta outside of [0, 1). Schedules are checked in every step."""
    if not callable(theta):
        theta_at(theta, 0)


@dataclass(frozen=True)
class StepSchedule:
    """Piecewise constant theta: the value at the largest key <= step.

    The FFT paper (HPDC'20, section 4.1) recovers full accuracy by lowering theta when the learning rate falls.

    >>> schedule = StepSchedule({0: 0.9, 1000: 0.5})
    >>> schedule(999), schedule(1000)
    (0.9, 0.5)
    """

    thetas: Mapping[int, float]

    def __post_init__(self) -> None:
        if 0 not in self.thetas:
            raise ValueError(f"StepSchedule: got steps {sorted(self.thetas)}, expected step 0 among them")
        for theta in self.thetas.values():
            theta_at(theta, 0)

    def __call__(self, step: int) -> float:
        return self.thetas[max(s for s in self.thetas if s <= step)]


@dataclass(frozen=True)
class DiminishingTheta:
    """theta_t = sqrt(L * eta_t) for the optimizer's current learning rate eta_t, at most `most`.

    Theorem 3.5: with this theta, SGD with compressed gradients converges if the sum of eta_t diverges and that of
    eta_t^2 does not (as for 1 / t, but not for a constant). The mean of |grad f(x_t)|^2, weighted by eta_t, goes to 0.
    The proof assumes:

    * theta_t <= 1/2 and eta_t <= 1 / (4 L), which are one condition here (Lemma 3.3). The theorem holds from the first
      step that meets it; earlier steps, with a larger eta_t, only delay convergence. A step with theta_t above
      sqrt(1/2) = 0.71 has no bound, because the lemma's factor 1 - L eta_t - theta_t^2 is negative.
    * theta_t bounds the relative error |v - v^| / |v| of a gradient v. Here theta_t is the fraction dropped, which is
      larger than the error of real gradients (0.2 to 0.4 at theta = 0.85, docs/inspect.md). If all coefficients have
      the same magnitude, the error is sqrt(theta_t).
    * Plain SGD: unbiased gradients of bounded variance, no momentum, one learning rate.

    Args:
        lipschitz: L, the Lipschitz constant of the gradient. In practice a tuning parameter: L = theta_0^2 / eta_0
            starts at theta_0.
        most: largest theta_t. 0.5 keeps theta_t, though not eta_t, in the domain of the theorem. The default is a
            heuristic: it keeps at least 1 % of the coefficients.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> DiminishingTheta(optimizer, lipschitz=2.5)(0)
    0.5

    Source: Wang et al., FFT-based Gradient Sparsification for the Distributed Training of Deep Neural Networks, HPDC
    2020, Lemma 3.3 and Theorem 3.5.
    """

    optimizer: torch.optim.Optimizer
    lipschitz: float
    most: float = 0.99

    def __post_init__(self) -> None:
        if not self.lipschitz >= 0:
            raise ValueError(f"DiminishingTheta: got lipschitz = {self.lipschitz}, expected a number >= 0")
        theta_at(self.most, 0)

    def __call__(self, step: int) -> float:
        rate = max(float(group["lr"]) for group in self.optimizer.param_groups)
        return min(math.sqrt(self.lipschitz * rate), self.most)
