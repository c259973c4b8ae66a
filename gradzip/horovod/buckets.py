"""Horovod's buckets: what happens to their gradients, and those that have come in a step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..averaging.buckets import Plan
from ..averaging.routine import Averaging


class PlannedBucket:
    """What happens to the gradients of a bucket: at least so many are averaged together, the others alone."""

    def __init__(self, plan: Plan, least: int = 2) -> None:
        self.plan = plan
        joining = [unit for unit in plan.units if unit.averaging.joins]
        if sum(len(unit.indices) for unit in joining) < least:
            joining = []
        self.units = joining
        self.joined = {plan.parameters[i]: plan.averagings[i] for unit in joining for i in unit.indices}
        self.alone = {plan.parameters[unit.indices[0]]: unit for unit in plan.units if unit not in joining}
        self.name = plan.names[joining[0].indices[0]] if joining else ""  # of its operations
        # What Horovod all-reduces in place of the gradients: a zero of the same type each, as its groups hold one type.
        # Nothing else writes to them, so a step may hand them over again.
        zeros = plan.parameters[0].detach().new_zeros(len(self.joined)).split(1) if joining else ()
        self.zeros = dict(zip(self.joined, zeros))


class WaitingBucket:
    """A bucket whose gradients have not all come in this step."""

    def __init__(self, planned: PlannedBucket) -> None:
        self.planned = planned
        self.missing = set(planned.joined)
        self.gradients: dict[Any, Tensor] = {}  # by parameter

    def add(self, parameter: Any, grad: Tensor) -> Averaging:
        """Add a gradient. Returns how it is averaged."""
        self.gradients[parameter] = grad
        self.missing.discard(parameter)
        return self.planned.joined[parameter]
