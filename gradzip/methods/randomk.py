"""Random sparsification with indices that never travel.

Wangni, Wang, Liu, Zhang, Gradient Sparsification for Communication-Efficient Distributed Optimization, NeurIPS 2018;
Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018, definition 2.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from .. import ops
from ..collectives import Mean, Routine
from ..compressor import Compressor
from ..registry import register
from ..schedule import Theta, check_theta, theta_at
from ..state import State
from .topk import num_kept


@register("randomk", example="theta=0.9")
@dataclass
class RandomK(Compressor):
    """Averages k = round((1 - theta) n) elements, the same ones on all ranks, others at every step.

    theta: fraction of the elements that is dropped, in [0, 1), or a schedule step -> theta. seed: of the choice.
    error_feedback: what is not sent is added to the next gradient. What is sent is then sent as it is: a contraction,
    E|x - C(x)|^2 = (1 - k / n) |x|^2. Without error feedback it is multiplied by n / k, and the average unbiased.

    An element waits n / k steps for its turn on average, where Top-k sends the large ones at once. An optimizer's
    momentum multiplies what comes late: at 99 % take little or none, and a higher learning rate.

    What travels: k float32 numbers, through an all-reduce; all ranks know the indices from (seed, step, name). One is
    taken of each of k strata of n / k neighbours, at random, and the strata are shifted at random: every element is as
    likely, k / n.
    """

    theta: Theta = 0.99
    error_feedback: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_theta(self.theta)

    def reduce(self, grad: Tensor, state: State) -> Routine:
        numel = grad.numel()
        k = num_kept(theta_at(self.theta, state.step), numel)
        indices = ops.random_indices(numel, k, state.key(self.seed)._replace(rank="shared").bits, grad.device)
        state.payload = indices
        values = grad.view(-1).index_select(0, indices)
        if not math.isfinite(ops.abs_max(grad)):
            values.fill_(math.nan)  # where it was not chosen, too, it is every rank's
        values = yield Mean(values)
        if not self.error_feedback:
            values = values * (numel / k)
        average = self.workspace.empty("average", (numel,), grad.dtype, grad.device).zero_()
        return average.index_copy_(0, indices.long(), values)

    def subtract_transmitted(self, state: State) -> None:
        assert state.residual is not None and state.payload is not None
        state.residual.view(-1).index_fill_(0, state.payload.long(), 0.0)
