"""Horovod's buckets: what happens to their gradients, and those that have come in a step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..averaging.buckets import Plan


class PlannedBucket:
    """What happens to the gradients of a bucket: at least so many are averaged together, the others alone."""

    def __init__(self, plan: Plan, least: int = 2) -> None:
        self.plan = plan
        joining = [group for group in plan.groups if group.joins]
        if sum(len(group.indices) for group in joining) < least:
            joining = []
        self.groups = joining
        self.joined = dict.fromkeys(plan.parameters[i] for group in joining for i in group.indices)
        self.alone = {plan.parameters[group.indices[0]]: group for group in plan.groups if group not in joining}
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

    def add(self, parameter: Any, grad: Tensor) -> None:
        """Add a gradient."""
        self.gradients[parameter] = grad
        self.missing.discard(parameter)
