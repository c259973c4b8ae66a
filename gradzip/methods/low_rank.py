"""Low-rank approximation of gradients: Power-SGD and ACP-SGD."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..collectives import Mean, ToHost
from ..collectives.fusion import flattened
from ..collectives.routines import Local, Routine
from ..memory.state import Key
from ..ops import groups
from ..ops import tensors as ops
from .base.compressor import with_scratch
from .base.error_feedback import ErrorFeedback
from .base.group import Group
from .base.registry import register

# An upper bound of the magnitudes in a factor that is orthonormal up to rounding errors.
_ORTHONORMAL = 1.001


class Factors(NamedTuple):
    """The averages P Qᵀ of a group, and the factors of what to subtract from this rank's residuals.

    Each is flat: the factors of all matrices, one after the other.
    """

    p: Tensor
    q: Tensor
    sent_p: Tensor
    sent_q: Tensor
    max_abs_bound: float  # of the magnitudes in all P Qᵀ; 0 if nobody looks
    matrices: groups.Matrices


@dataclass
class LowRank(ErrorFeedback):
    """Base of Power-SGD and ACP-SGD: the average is P Qᵀ, of rank r.

    A gradient of any shape is viewed as the matrix G = grad.reshape(shape[0], -1), n x m; P is n x r and Q is m x r.
    A gradient bypasses compression if P and Q together are not smaller: (n + m) r >= n m.

    To save memory traffic, a step passes over the gradient only twice: G += residual and P = G Q in one pass; residual
    = G - sent and G = P Qᵀ in another, when the average is known to be finite.
    """

    vectors = False
    undone_on_device = remakes = writes_half = True

    rank: int = 4
    error_feedback: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("rank", isinstance(self.rank, int) and self.rank >= 1, "an integer >= 1")
        # Local work for all Q, and for all P: they are not joined.
        self._follow = partial(self._follow_all, False), partial(self._follow_all, True)
        # By `transpose` and the first name: of which groups, and what `_given_of` returned. FSDP2's modules may end
        # one after the other.
        self._given: dict[tuple[bool, str], tuple[Any, Tensor, Tensor]] = {}

    def groups_by(self, shape: torch.Size) -> tuple[()]:
        return ()

    def bypasses(self, grad: Tensor) -> bool:
        if super().bypasses(grad):
            return True
        rows, columns = _matrix_shape(grad.shape)
        return (rows + columns) * self.rank >= rows * columns

    def add_residual(self, group: Group) -> Routine:
        if group.gradients[0].dtype == torch.float32 and not group.remakes:
            group.load_parts()  # `project` adds the residual
        else:
            yield from super().add_residual(group)

    def matrices(self, group: Group) -> groups.Matrices:
        """The sizes of the matrices of a group."""
        return groups.Matrices([_matrix_shape(shape) for shape in group.shapes_of_parts], self.rank)

    def project(self, group: Group, factor: Tensor, transpose: bool = False, residual: Tensor | None = None) -> Local:
        """Local work: add the residual to the parts G, and return G @ factor (Gᵀ @ factor with `transpose`).

        residual: not added to the parts of gradients of other types than float32, or of a group that remakes its error:
            they have it.
        """
        if group.gradients[0].dtype != torch.float32 or group.remakes:
            residual = None
        projection = groups.Projection(group.planned(self.matrices), group.parts, residual, factor, transpose)
        return Local(groups.project, group.device, projection)

    def project_again(self, group: Group, factor: Tensor, transpose: bool) -> Routine:
        """Coroutine: `project`, with parts that are made again, and released."""
        yield from group.method.add_residual(group)
        result = yield self.project(group, factor, transpose)
        group.release_parts()
        return result

    def orthogonalized(self, group: Group, factor: Tensor, transpose: bool) -> Local:
        """Local work: make the columns of each Q, of each P with `transpose`, orthonormal, in place."""
        factors = groups.Factor(group.planned(self.matrices), transpose, factor)
        return Local(groups.orthogonalize, group.device, factors)

    def max_abs_bound(self, average: Factors, limit: float) -> float:
        bound = average.max_abs_bound
        if bound <= limit or not math.isfinite(bound):
            return bound
        of = average.matrices
        p = average.p.view(-1, of.rank).split(of.rows.tolist())
        q = average.q.view(-1, of.rank).split(of.columns.tolist())
        return max(map(ops.abs_max, map(ops.low_rank_expand, p, q)))

    def holds(self, group: Group) -> bool:
        return self.keeps_residual

    def commit(self, group: Group, average: Factors) -> Routine:
        state, parts, residual = group.state, group.parts, None
        if self.error_feedback:
            residual = state.residual = state.renewed("residual", parts[0], group.numel)
        outs = group.outs or group.parts
        yield self._update(group, average, outs, parts, residual)
        group.write(outs)

    def commit_held(self, group: Group, average: Factors, number: Tensor) -> Routine:
        if group.holds:
            yield self._update(group, average, group.gradients, group.gradients, group.state.residual, number)
        else:
            yield from with_scratch(self._update_again(group, average, number), 4 * group.numel)

    def _update_again(self, group: Group, average: Factors, number: Tensor) -> Routine:
        yield from group.method.add_residual(group)
        outs = group.outs or group.parts
        yield self._update(group, average, outs, group.parts, group.state.residual, number)
        group.write(outs)
        group.release_parts()

    def _update(
        self, group: Group, of: Factors, outs: Sequence[Tensor], parts: Sequence[Tensor], residual: Tensor | None,
        number: Tensor | None = None,
    ) -> Local:  # fmt: skip
        """Local work: write the residual of the parts, unless a number is not finite, and the average to the outs."""
        update = groups.Update(of.matrices, outs, parts, residual, of.sent_p, of.sent_q, of.p, of.q, number)
        return Local(groups.apply_averages, group.device, update)

    def random_factor(self, group: Group, transpose: bool, step: int | None = None) -> Tensor:
        """Uniform numbers in [-1/2, 1/2) for all Q (P with `transpose`), the same on all ranks and all hardware.

        step: whose numbers; default: those of the current one.
        """
        step, factors = group.state.step if step is None else step, []
        for name, shape in zip(group.names, group.shapes_of_parts):
            key = Key(self.seed, step, name, "shared")
            generator = np.random.Generator(np.random.Philox(key=key.bits))
            rows = _matrix_shape(shape)[0 if transpose else 1]
            factors.append(generator.random((rows, self.rank), dtype=np.float32) - np.float32(0.5))
        return torch.from_numpy(np.concatenate(factors).reshape(-1)).to(group.device)

    def following(self, group: Group, factor: Tensor, transpose: bool, scaled: bool) -> Routine:
        """Coroutine: the factors to start the next step from, and a bound of the magnitudes in P Qᵀ, 0 if nobody looks.

        Columns that are 0, as after a gradient of zeros, are replaced by random ones: `orthogonalize_` would replace
        them by unit vectors. If the gradient is always 0 in that row or column, as for dead units, the column would
        stay 0 in all later steps, which lowers the rank. Random columns are those of step 0 in all steps: a captured
        step has no host that draws others.

        Where a device tells if a step is skipped, `Group.numbers` gets twice the bounds, by columns: as of other
        methods, magnitudes above 2^127 count as infinite. They are not finite if an element of a gradient of any rank
        is not: its products with a row of the other factor are then NaN or inf, also those with 0, and so are sums and
        means of these.

        Args:
            factor: all Q, or all P with `transpose`. The columns of the others are orthonormal.
            scaled: divide each matrix by its largest magnitude, unless that is 0. Otherwise, the result may be
                `factor`.
        """
        matrices = group.planned(self.matrices)
        columns = yield Local(groups.abs_max_columns, group.device, groups.Factor(matrices, transpose, factor))
        if not self.looks(group):
            return (yield Local(self._follow[transpose], group.device, (group, factor, columns, scaled))), 0.0
        on_host = (yield ToHost(columns)) if factor.is_cuda else columns
        most = on_host.view(-1, self.rank).numpy()
        if not most.all():
            factor = yield Local(self._follow[transpose], group.device, (group, factor, columns, scaled))
        elif scaled:
            numels = self.rank * (matrices.rows if transpose else matrices.columns)
            factor = yield Local(_quotients, group.device, (factor, numels, most.max(1)))
        return factor, self.rank * _ORTHONORMAL * float(most.max())

    def _follow_all(self, transpose: bool, of: list[tuple[Group, Tensor, Tensor, bool]]) -> list[Tensor]:
        """`following` for several groups, from the largest magnitudes of columns. Does not wait for a device."""
        scaled = of[0][3]
        of_groups = [group for group, *_ in of]
        key = of_groups[0].device, [(group.names, group.shapes_of_parts) for group in of_groups]
        first = transpose, of_groups[0].names[0]
        if self._given.get(first, (None,))[0] != key:
            self._given[first] = key, *self._given_of(of_groups, transpose)
        _, matrix_of, random = self._given[first]
        largest = flattened([columns for _, _, columns, _ in of]).view(-1, self.rank)
        result = flattened([factor for _, factor, *_ in of]).view(-1, self.rank)
        if scaled:
            scale = largest.amax(1, keepdim=True)
            result = result / scale.where(scale > 0, 1.0)[matrix_of]
        zero = (largest == 0)[matrix_of]
        followed = random.where(zero, result)
        self._show_averages(of_groups, largest)
        return list(followed.view(-1).split_with_sizes([factor.numel() for _, factor, *_ in of]))

    def _show_averages(self, of: Sequence[Group], largest: Tensor) -> None:
        """Give groups on a device their numbers. largest: the largest magnitudes of the columns of all."""
        # Not only if groups commit late, which may differ between ranks. float16 overflows before.
        if self.memory.checks and of[0].on_device:
            bounds = 2 * self.rank * _ORTHONORMAL * largest.view(-1)
            for group, own in zip(of, bounds.split_with_sizes([self.rank * len(group.names) for group in of])):
                if group.gradients[0].dtype != torch.float16:
                    group.numbers.append(own)
                    group.shows_averages = group.method is self

    def _given_of(self, of: Sequence[Group], transpose: bool) -> tuple[Tensor, Tensor]:
        """For each row of the factors of groups, the number of its matrix among all; and the factors of step 0."""
        matrices = [group.planned(self.matrices) for group in of]
        rows = np.concatenate([one.rows if transpose else one.columns for one in matrices])
        numbers = torch.from_numpy(np.repeat(np.arange(len(rows)), rows)).to(of[0].device)
        random = torch.cat([self.random_factor(group, transpose, step=0) for group in of])
        return numbers, random.view(-1, self.rank)


def _quotients(of: list[tuple[Tensor, np.ndarray, np.ndarray]]) -> list[Tensor]:
    """For each flat tensor, with the numbers of elements of its parts: the parts divided by a number each."""
    quotients = _copies([flat for flat, _, _ in of])
    parts = [part for flat, (_, numels, _) in zip(quotients, of) for part in flat.split(numels.tolist())]
    torch._foreach_div_(parts, [number for _, _, numbers in of for number in numbers.tolist()])
    return quotients


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return list(torch.cat(tensors).split_with_sizes(list(map(Tensor.numel, tensors))))  # one operation on a device


def _matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    return math.prod(shape[:1]), math.prod(shape[1:])  # of a number, too, which bypasses compression


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

    @property
    def capture_needs(self) -> str | None:
        return None if self.warm_start else "warm_start=True"

    def reduce(self, group: Group) -> Routine:
        state = group.state
        q = getattr(state, "q", None)
        if q is None or not self.warm_start:
            q = self.random_factor(group, transpose=False)
        own = yield self.project(group, q, residual=state.residual)
        if group.remakes:
            group.release_parts()
        p = yield Mean(own)
        yield self.orthogonalized(group, p, transpose=True)  # replaces columns that are not finite; Q shows them
        if group.remakes:
            own = yield from with_scratch(self.project_again(group, p, transpose=True), 4 * group.numel)
        else:
            own = yield self.project(group, p, transpose=True)
        q = yield Mean(own)
        # Only the span of Q matters. Scaling keeps the magnitude of the next P that of the gradient, not its square.
        state.q, bound = yield from self.following(group, q, transpose=False, scaled=True)
        return Factors(p, q, p, q, bound, group.planned(self.matrices))

    def state_shapes(self, shape: torch.Size) -> dict[str, tuple[int, ...]]:
        return super().state_shapes(shape) | {"q": (_matrix_shape(shape)[1], self.rank)}

    @property
    def kept_fields(self) -> tuple[str, ...]:
        return (*super().kept_fields, "q")


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

    @property
    def capture_needs(self) -> str | None:
        return None if self.reuse else "reuse=True"

    def reduce(self, group: Group) -> Routine:
        state = group.state
        transpose = state.step % 2 == 1  # compute Q from P
        given, computed = ("next_p", "next_q") if transpose else ("next_q", "next_p")
        fixed = getattr(state, given, None)
        if fixed is None or not self.reuse:
            fixed = self.random_factor(group, transpose)
            yield self.orthogonalized(group, fixed, transpose)
        own = yield self.project(group, fixed, transpose, state.residual)
        if group.remakes:
            group.release_parts()
        mean = yield Mean(own, keep=True)
        following, bound = yield from self.following(group, mean, not transpose, scaled=False)
        if self.reuse:  # orthogonalized here, where all matrices of a step take one call
            # The given factor stays: on a device, a step that is skipped counts, and the next one takes it again.
            if not group.on_device:
                following = yield Local(_copies, own.device, following)
            yield self.orthogonalized(group, following, not transpose)
            setattr(state, computed, following)
        matrices = group.planned(self.matrices)
        if transpose:
            return Factors(fixed, mean, fixed, own, bound, matrices)
        return Factors(mean, fixed, own, fixed, bound, matrices)

    def state_shapes(self, shape: torch.Size) -> dict[str, tuple[int, ...]]:
        rows, columns = _matrix_shape(shape)
        return super().state_shapes(shape) | {"next_p": (rows, self.rank), "next_q": (columns, self.rank)}

    @property
    def kept_fields(self) -> tuple[str, ...]:
        return (*super().kept_fields, *(("next_p", "next_q") if self.reuse else ()))
