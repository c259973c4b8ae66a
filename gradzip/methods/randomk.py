"""Random sparsification by indices that all ranks draw alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..collectives import Mean
from ..collectives.routines import Local, Routine
from ..ops import tensors as ops
from .base.compressor import INDEXED_NUMEL, Average, with_scratch
from .base.error_feedback import ErrorFeedback
from .base.group import Group
from .base.registry import register
from .base.schedule import Theta, check_theta, theta_at
from .topk import num_kept


class _Chosen(NamedTuple):
    """An average on a device whose zeros are added where it is written."""

    indices: Tensor  # of the elements that are not 0: int32
    values: Tensor


@register("randomk", examples=["theta=0.9"])
@dataclass
class RandomK(ErrorFeedback):
    """Averages k random elements, the same on all ranks, drawn in each step.

    k = round((1 - theta) n) of the n elements. Indices depend on (seed, step, name) only, so they are not sent. They
    are stratified: one random index in each of k runs of n / k neighbours, with a random shift of the runs. Each
    element is chosen with probability k / n.

    An element is sent every n / k steps on average, while Top-k sends large ones at once. The optimizer's momentum
    multiplies these late gradients: at theta = 0.99, use little or no momentum and a higher learning rate.

    Args:
        theta: fraction of the elements that is dropped, in [0, 1), or a schedule step -> theta. Front ends compress the
            gradients of a bucket as one vector, of which it is the fraction.
        error_feedback: add what was not sent to the next gradient. Elements are sent unscaled then, which is a
            contraction: E|x - C(x)|^2 = (1 - k / n) |x|^2. Without error feedback, elements are multiplied by n / k,
            and the average is unbiased.
        seed: of the indices.

    Payload: k float32 numbers, 4 k bytes, through one all-reduce.

    Deterministic for a seed.

    Source: Wangni, Wang, Liu, Zhang, Gradient Sparsification for Communication-Efficient Distributed Optimization,
    NeurIPS 2018; Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018, definition 2.2.
    """

    max_numel = INDEXED_NUMEL
    undone_on_device = remakes = True

    theta: Theta = 0.99
    error_feedback: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_theta(self.theta)

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return not self.error_feedback

    def groups_by(self, shape: torch.Size) -> tuple[int, ...]:
        return self.joined_shape(shape)

    def reduce(self, group: Group) -> Routine:
        state, numel = group.state, group.numel
        k = num_kept(theta_at(self.theta, state.step), numel)
        indices = ops.random_indices(numel, k, state.key(self.seed)._replace(rank="shared").bits, group.device)
        state.payload = indices
        # All ranks must see that a gradient is not finite, even if the element was not chosen. Magnitudes that count as
        # infinite are those of the methods that gather payloads.
        finite = ops.abs_max_tensor(group.vector) <= 2.0**127
        values = torch.where(finite, group.vector.index_select(0, indices).float(), math.nan)
        if group.holds:
            self.subtract_transmitted([group])
        if group.commits_late or not self.keeps_residual:
            group.release_parts()
        values = yield Mean(values)
        if not self.error_feedback:
            values = values * (numel / k)
        if group.on_device:
            if group.may_hold:  # a device has to know if the average is finite before it is written
                largest = yield Local(ops.abs_max_all, group.device, values)
                group.numbers.append(largest if self.error_feedback else largest.mul_(2))  # n / k times 2^127 at most
            return _Chosen(indices, values)
        return (yield from self.with_max_abs(group, self._spread(group, _Chosen(indices, values))))

    def holds(self, group: Group) -> bool:
        return self.keeps_residual

    def commit(self, group: Group, average: Average | _Chosen) -> Routine:
        if isinstance(average, Average):
            yield from super().commit(group, average)
            return
        flat = self._spread(group, average)
        yield from with_scratch(super().commit(group, Average([flat])), flat.nbytes)

    def _spread(self, group: Group, average: _Chosen) -> Tensor:
        """The average of a group as a vector: in the gradients' memory if that has held the error, and on a CPU."""
        target = group.target if group.commits_late or (not group.on_device and group.free_outs()) else None
        flat = self.new_average(group.numel, group.device) if target is None else target
        return flat.zero_().index_copy_(0, average.indices.long(), average.values)

    def subtract_transmitted(self, groups: Sequence[Group]) -> None:
        for group in groups:
            (error,) = group.errors
            error.index_fill_(0, group.state.payload.long(), 0.0)
