"""What methods ask for, and what advances them: collectives, routines, fusion, the abstract engine."""

from .requests import (
    AllToAll,
    Broadcast,
    Collective,
    Gather,
    Mean,
    RingSum,
    Scope,
    ToHost,
    among,
    ring_segments,
    split_equally,
)

__all__ = [
    "AllToAll", "Broadcast", "Collective", "Gather", "Mean", "RingSum", "Scope", "ToHost", "among",
    "ring_segments", "split_equally",
]  # fmt: skip
