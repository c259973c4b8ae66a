"""Horovod's buckets: what happens to their gradients, and those that have come in a step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..averaging.buckets import Plan


class PlannedBucket:
    """What happens to the gradients of a bucket.

    Args:
        engine: of Horovod.
    """

    def __init__(self, plan: Plan, engine: Any) -> None:
        self.plan = plan
        self.lacked = False  # whether a gradient did not come in a step: its parameter has another step number since
        self.ids = list(map(id, plan.parameters))
        # What Horovod all-reduces in place of the gradients: a zero of their type each, as its groups hold one type.
        # Nothing else writes to them, so a step may hand them over again.
        zeros = plan.parameters[0].detach().new_zeros(len(self.ids)) if self.ids else None
        self.wires = [] if zeros is None else list(engine.accepted(zeros).split(1))
        self.wires_nbytes = sum(wire.nbytes for wire in self.wires)


class WaitingBucket:
    """A bucket whose gradients have not all come in this step."""

    def __init__(self, planned: PlannedBucket) -> None:
        self.planned = planned
        self.wires = dict(zip(planned.ids, planned.wires))  # of the gradients that have to come
        self.gradients: dict[int, Tensor] = {}  # that have come, by the parameter's id
