"""Low-rank approximation of gradients: Power-SGD and ACP-SGD."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import ops
from ..collectives import Mean, ToHost
from ..collectives.routines import Local, Routine
from ..memory.state import Key, State
from .base.error_feedback import ErrorFeedback
from .base.registry import register

# An upper bound of the magnitudes in a factor that is orthonormal up to rounding errors.
_ORTHONORMAL = 1.001


class Factors(NamedTuple):
    """The average P Qᵀ, and the factors of what to subtract from this rank's residual."""

    p: Tensor  # (n, r)
    q: Tensor  # (m, r)
    sent_p: Tensor  # (n, r)
    sent_q: Tensor  # (m, r)
    max_abs_bound: float  # of the magnitudes in P Qᵀ; 0 if nobody looks


@dataclass
class LowRank(ErrorFeedback):
    """Base of Power-SGD and ACP-SGD: the average is P Qᵀ, of rank r.

    A gradient of any shape is viewed as the matrix G = grad.reshape(shape[0], -1), n x m; P is n x r and Q is m x r.
    A gradient bypasses compression if P and Q together are not smaller: (n + m) r >= n m.

    To save memory traffic, a step passes over the gradient only twice: G += residual and P = G Q in one pass; residual
    = G - sent and G = P Qᵀ in another, when the average is known to be finite.
    """

    joins = True  # all matrices of a bucket take one call of each kernel

    rank: int = 4
    error_feedback: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.rank, int) and self.rank >= 1):
            raise ValueError(f"{type(self).__name__}: got rank = {self.rank!r}, expected an integer >= 1")
        self._random_rows: dict[Any, tuple[Tensor, Tensor]] = {}  # by bucket: each row's factor, random rows

    @abstractmethod
    def factorize(self, m: Tensor, state: State) -> Routine:
        """Coroutine that returns the `Factors` of the average over the ranks of m (n, m). May change m."""

    def reduce(self, grad: Tensor, state: State) -> Routine:
        return (yield from self.factorize(grad.view(grad.shape[0], -1), state))

    def bypasses(self, grad: Tensor) -> bool:
        if super().bypasses(grad):
            return True
        rows, columns = grad.shape[0], grad.numel() // grad.shape[0]
        return (rows + columns) * self.rank >= rows * columns

    def add_residual(self, grad: Tensor, state: State) -> Routine:
        yield from ()
        return grad  # `project` adds the residual

    def factor_shapes(self, grad: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of P and Q."""
        rows = grad.shape[0]
        return (rows, self.rank), (grad.numel() // rows, self.rank)

    def project(self, m: Tensor, state: State, factor: Tensor, transpose: bool = False) -> Routine:
        """Coroutine: add the residual to m, and return m @ factor (m.T @ factor with `transpose`), in one pass."""
        residual = None if state.residual is None else state.residual.view(m.shape)
        pair = (m, None) if residual is None else (residual, m)
        return (yield Local(ops.low_rank_project_all, m.device, (*pair, factor, transpose)))

    def max_abs_bound(self, average: Factors, limit: float) -> float:
        bound = average.max_abs_bound
        exact = bound <= limit or not math.isfinite(bound)
        return bound if exact else ops.abs_max(ops.low_rank_expand(average.p, average.q))

    def commit(self, grad: Tensor, corrected: Tensor, average: Factors, state: State) -> Routine:
        m = corrected.view(corrected.shape[0], -1)
        if not self.error_feedback:
            ops.low_rank_expand(average.p, average.q, out=m)
        else:
            state.residual = state.renewed("residual", corrected)
            residual = state.residual.view(m.shape)
            update = m, residual, average.sent_p, average.sent_q, average.p, average.q
            yield Local(_apply_averages, m.device, update)
        if corrected is not grad:
            grad.copy_(corrected)

    def random_factor(self, rows: int, state: State, device: torch.device, step: int | None = None) -> Tensor:
        """Uniform numbers in [-1/2, 1/2), shape (rows, rank), the same on all ranks and all hardware.

        step: whose numbers; default: those of the current one.
        """
        key = Key(self.seed, state.step if step is None else step, state.name, "shared")
        generator = np.random.Generator(np.random.Philox(key=key.bits))
        return torch.from_numpy(generator.random((rows, self.rank), dtype=np.float32) - np.float32(0.5)).to(device)

    def following(self, factor: Tensor, state: State, scaled: bool) -> Routine:
        """Coroutine: the factor to start the next step from, and the largest magnitude of `factor`, 0 if nobody looks.

        Columns that are 0, as after a gradient of zeros, are replaced by random ones: `orthogonalize_` would replace
        them by unit vectors. If the gradient is always 0 in that row or column, as for dead units, the column would
        stay 0 in all later steps, which lowers the rank.

        scaled: divide by the largest magnitude, unless that is 0. Otherwise, the result may be `factor`.
        """
        columns = yield Local(ops.abs_max_columns, factor.device, factor)
        if not self.looks(factor):
            return (yield Local(self._follow_all, factor.device, (factor, columns, state, scaled))), 0.0
        if ops.on_device(factor):  # the host waits once for all factors
            columns = yield ToHost(columns)
        largest = columns.max().item()
        if scaled:
            scale = largest if largest > 0 else 1.0
            factor, columns = (yield Local(_quotients, factor.device, (factor, scale))), columns / scale
        zero = columns == 0
        if zero.any():
            factor = self.random_factor(len(factor), state, factor.device).where(zero.to(factor.device), factor)
        return factor, largest

    def _follow_all(self, factors: list[tuple[Tensor, Tensor, State, bool]]) -> list[Tensor]:
        """`following` on a device, from the largest magnitudes of columns there. Does not wait for it.

        Random columns are those of step 0 in all steps: a captured step has no host that draws others.
        """
        rows = [len(factor) for factor, *_ in factors]
        device, scaled = factors[0][0].device, factors[0][3]
        key = (device, *zip(rows, (state.name for _, _, state, _ in factors)))
        if key not in self._random_rows:
            numbers = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows)).to(device)
            random = [self.random_factor(n, state, device, step=0) for n, (_, _, state, _) in zip(rows, factors)]
            self._random_rows[key] = numbers, torch.cat(random)
        numbers, random_rows = self._random_rows[key]
        largest = torch.stack([columns for _, columns, _, _ in factors])
        result = torch.cat([factor for factor, *_ in factors])
        if scaled:
            scale = largest.amax(1, keepdim=True)
            result /= scale.where(scale > 0, 1.0)[numbers]
        zero = (largest == 0)[numbers]
        return list(random_rows.where(zero, result).split(rows))


@register("powersgd", examples=["", "rank=3,warm_start=False"])
@dataclass
class PowerSGD(LowRank):
    """Averages by one step of power iteration: P = orthogonalize(mean(G Q)), Q = mean(Gᵀ P), average P Qᵀ.

    Args:
        rank: r, columns of P and Q.
        error_feedback: add the difference of the gradient and the average, G - P Qᵀ, to the next gradient.
        warm_start: start from the Q of the last step, so that training steps continue one power iteration. False
            starts from a random Q.
        seed: of the random Q.

    Payload: n r float32 numbers through an all-reduce, then m r through a second one: 4 (n + m) r bytes.

    Deterministic for a seed.

    Source: Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization,
    NeurIPS 2019, Algorithms 1 and 2.
    """

    warm_start: bool = True

    rounds = 2

    def factorize(self, m: Tensor, state: State) -> Routine:
        q = getattr(state, "q", None)
        if q is None or not self.warm_start:
            q = self.random_factor(m.shape[1], state, m.device)
        p = yield Mean((yield from self.project(m, state, q)))
        yield Local(_orthogonalize, m.device, p)  # replaces columns that are not finite; Q shows that they were not
        q = yield Mean((yield Local(ops.low_rank_project_all, m.device, (m, None, p, True))))
        # Only the span of Q matters. Scaling keeps the magnitude of the next P that of the gradient, not its square.
        following, largest = yield from self.following(q, state, scaled=True)
        state.q = state.renewed("q", q).copy_(following) if ops.is_capturing(q) else following
        return Factors(p, q, p, q, self.rank * _ORTHONORMAL * largest)

    def state_shapes(self, grad: Tensor) -> dict[str, tuple[int, ...]]:
        return super().state_shapes(grad) | {"q": self.factor_shapes(grad)[1]}


@register("acpsgd", examples=["", "rank=2,error_feedback=False"])
@dataclass
class ACPSGD(LowRank):
    """Averages by half a step of power iteration, alternately on P and Q: "alternate compressed" Power-SGD.

    The average is P Qᵀ:

        even steps:  Q = orthogonalize(Q),  P = mean(G Q)
        odd steps:   P = orthogonalize(P),  Q = mean(Gᵀ P)

    Args:
        rank: r, columns of P and Q.
        error_feedback: add what this rank did not send, such as G - (G Q) Qᵀ, to the next gradient.
        reuse: orthogonalize the factor that the last step computed. False takes a random one.
        seed: of the random factor.

    Payload: n r or m r float32 numbers, 4 bytes each, through one all-reduce, which overlaps with the backward pass.

    Deterministic for a seed.

    Source: Zhang, Zhang, Shi, Chu, Li, Evaluation and Optimization of Gradient Compression for Distributed Deep
    Learning, ICDCS 2023, Algorithm 2.
    """

    reuse: bool = True

    def factorize(self, m: Tensor, state: State) -> Routine:
        transpose = state.step % 2 == 1  # compute Q from P
        given, computed = ("next_p", "next_q") if transpose else ("next_q", "next_p")
        fixed = getattr(state, given, None)
        if fixed is None or not self.reuse:
            fixed = self.random_factor(m.shape[0 if transpose else 1], state, m.device)
            yield Local(_orthogonalize, m.device, fixed)
        own = yield from self.project(m, state, fixed, transpose)
        mean = yield Mean((yield Local(_to_overwrite, m.device, own)))
        following, largest = yield from self.following(mean, state, scaled=False)
        bound = self.rank * _ORTHONORMAL * largest
        if self.reuse:  # orthogonalized here, where all matrices of a step take one call
            if ops.is_capturing(m):  # a graph of two steps needs the memory of both factors again
                following = state.renewed(computed, following).copy_(following)
            else:
                following = yield Local(_copies, m.device, following)
                setattr(state, given, None)
            yield Local(_orthogonalize, m.device, following)
            setattr(state, computed, following)
        return Factors(fixed, mean, fixed, own, bound) if transpose else Factors(mean, fixed, own, fixed, bound)

    def state_shapes(self, grad: Tensor) -> dict[str, tuple[int, ...]]:
        p, q = self.factor_shapes(grad)
        return super().state_shapes(grad) | {"next_p": p, "next_q": q}


# --- local work for all matrices of a bucket


def _copies(matrices: list[Tensor]) -> list[Tensor]:
    """Copy matrices to adjacent memory, from which a joined collective needs no further copy."""
    copies = torch.cat([matrix.reshape(-1) for matrix in matrices]).split([matrix.numel() for matrix in matrices])
    return [copy.view(matrix.shape) for copy, matrix in zip(copies, matrices)]


def _to_overwrite(matrices: list[Tensor]) -> list[Tensor]:
    """What a Mean may overwrite, in place of matrices that are needed again. Several are joined, which copies them."""
    return matrices if len(matrices) > 1 else _copies(matrices)


def _quotients(pairs: list[tuple[Tensor, float]]) -> list[Tensor]:
    return list(torch._foreach_div(*map(list, zip(*pairs))))


def _orthogonalize(matrices: list[Tensor]) -> list[Tensor]:
    ops.orthogonalize_(matrices)
    return matrices


def _apply_averages(updates: list[ops.AverageUpdate]) -> list[None]:
    ops.low_rank_apply_average_all(updates)
    return [None] * len(updates)
