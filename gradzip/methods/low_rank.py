"""Low-rank gradient compression.

Power-SGD: Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization,
NeurIPS 2019. ACP-SGD: Zhang, Zhang, Shi, Chu, Li, Evaluation and Optimization of Gradient Compression for Distributed
Deep Learning, ICDCS 2023.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import ops
from ..collectives import Mean, Routine
from ..compressor import Compressor
from ..registry import register
from ..state import State


class Factors(NamedTuple):
    """An average P Qᵀ, and the product that peers saw of this rank (for error feedback)."""

    p: Tensor  # (n, r)
    q: Tensor  # (m, r)
    sent_p: Tensor
    sent_q: Tensor


@dataclass
class LowRank(Compressor):
    """What Power-SGD and ACP-SGD share: a gradient G of any shape is the n x m matrix G.reshape(shape[0], -1), n r and
    m r numbers travel for it, and P Qᵀ is its average.

    A step reads and writes the gradient twice: G += residual, P = G Q before the collective; residual = G - sent and
    G = P Qᵀ after it, when the average is known to be finite. Gradients of (n + m) r >= n m numbers go uncompressed.
    """

    rank: int = 4
    error_feedback: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.rank, int) and self.rank >= 1):
            raise ValueError(f"{type(self).__name__}: got rank = {self.rank!r}, expected an integer >= 1")

    @abstractmethod
    def factorize(self, m: Tensor, state: State) -> Routine:
        """Coroutine that returns the `Factors` of the average of all ranks' m (n, m), which it may change."""

    def reduce(self, grad: Tensor, state: State) -> Routine:
        return (yield from self.factorize(grad.view(grad.shape[0], -1), state))

    def bypasses(self, grad: Tensor) -> bool:
        if super().bypasses(grad):
            return True
        rows, columns = grad.shape[0], grad.numel() // grad.shape[0]
        return (rows + columns) * self.rank >= rows * columns

    def add_residual(self, grad: Tensor, state: State) -> Tensor:
        return grad  # `project` adds the residual on its way

    def state_shapes(self, grad: Tensor) -> dict[str, tuple[int, ...]]:
        rows = grad.shape[0]
        return super().state_shapes(grad) | {"p": (rows, self.rank), "q": (grad.numel() // rows, self.rank)}

    def project(self, m: Tensor, state: State, factor: Tensor, transpose: bool = False) -> Tensor:
        """m += residual, and the product of that with a factor, in one pass."""
        if state.residual is None:
            return ops.low_rank_project(m, None, factor, transpose=transpose)
        return ops.low_rank_project(state.residual.view(m.shape), m, factor, transpose=transpose)

    def max_abs_bound(self, average: Factors, limit: float) -> float:
        bound = self.rank * ops.abs_max(average.p) * ops.abs_max(average.q)
        return bound if bound <= limit else ops.abs_max(ops.low_rank_expand(average.p, average.q))

    def apply_average(self, grad: Tensor, corrected: Tensor, average: Factors, state: State) -> None:
        m = corrected.view(corrected.shape[0], -1)
        if not self.error_feedback:
            ops.low_rank_expand(average.p, average.q, out=m)
        else:
            if state.residual is None:
                state.residual = torch.empty_like(corrected)
            residual = state.residual.view(m.shape)
            ops.low_rank_apply_average(m, residual, average.sent_p, average.sent_q, average.p, average.q)
        if corrected is not grad:
            grad.copy_(corrected)

    def random_factor(self, rows: int, state: State, device: torch.device) -> Tensor:
        """(rows, rank) uniform numbers in [-1/2, 1/2), the same ones on all ranks and on every processor."""
        generator = np.random.Generator(np.random.Philox(key=state.key(self.seed)._replace(rank="shared").bits))
        return torch.from_numpy(generator.random((rows, self.rank), dtype=np.float32) - np.float32(0.5)).to(device)

    def replace_zero_columns(self, factor: Tensor, state: State) -> Tensor:
        """A factor to go on from, with random columns for those that are 0, as all are after a gradient of zeros.

        `orthogonalize_` would make axes of them. Along those the gradient may have nothing, as rows and columns of dead
        units do: then they would be 0 ever after, and the rank that much less.
        """
        alive = factor.any(dim=0)
        return factor if alive.all() else self.random_factor(len(factor), state, factor.device).where(~alive, factor)


@register("powersgd")
@dataclass
class PowerSGD(LowRank):
    """One step of power iteration per training step: P = orthogonalize(mean(G Q)), Q = mean(Gᵀ P), average = P Qᵀ.

    rank: columns r of P and Q. error_feedback: what the average leaves out of this rank's gradient is added to the
    next. warm_start: start from the last step's Q, so that the steps make up a power iteration; otherwise from a random
    one. seed: of the random Q.

    What travels: n r float32 numbers, and then m r, each through an all-reduce. Vogels et al., Algorithms 1 and 2.
    """

    warm_start: bool = True

    rounds = 2

    def factorize(self, m: Tensor, state: State) -> Routine:
        q = getattr(state, "q", None)
        if q is None or not self.warm_start:
            q = self.random_factor(m.shape[1], state, m.device)
        p = yield Mean(self.project(m, state, q))
        if math.isfinite(ops.abs_max(p)):
            ops.orthogonalize_(p)
        q = yield Mean(ops.low_rank_project(m, None, p, transpose=True))
        # What Q spans counts. Scaled, so that the next P is of the gradient's magnitude, not of its square's.
        largest = ops.abs_max(q)
        state.q = self.replace_zero_columns(q / largest if largest > 0 else q, state)
        return Factors(p, q, p, q)


@register("acpsgd")
@dataclass
class ACPSGD(LowRank):
    """Alternate compressed Power-SGD: P = mean(G Q) in one step, Q = mean(Gᵀ P) in the next, with the other one
    orthogonalized from the step before; average = P Qᵀ.

    rank: columns r of P and Q. error_feedback: what this rank's own factor leaves out of its gradient is added to the
    next. reuse: orthogonalize the last step's factor; otherwise a random one. seed: of the random factor.

    What travels: n r or m r float32 numbers through one all-reduce, that of a parameter while backward computes the
    next one. Zhang et al., Algorithm 2.
    """

    reuse: bool = True

    def factorize(self, m: Tensor, state: State) -> Routine:
        transpose = state.step % 2 == 1  # which factor is computed: Q in the second step
        known, wanted = ("p", "q") if transpose else ("q", "p")
        fixed = getattr(state, known, None)
        if fixed is None or not self.reuse:
            fixed = self.random_factor(m.shape[0 if transpose else 1], state, m.device)
        else:
            fixed = fixed.clone()
        ops.orthogonalize_(fixed)
        own = self.project(m, state, fixed, transpose)
        mean = yield Mean(own.clone())
        setattr(state, known, fixed)
        setattr(state, wanted, self.replace_zero_columns(mean, state).clone())
        return Factors(fixed, mean, fixed, own) if transpose else Factors(mean, fixed, own, fixed)
