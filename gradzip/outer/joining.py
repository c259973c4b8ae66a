"""What a rank receives that joins others: all they have in common, and one's own training, but no residuals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..memory.checkpoint import join, split


def shared_state(outer: Any) -> dict[str, Any]:
    """The state that a joining rank receives, in tensors that go on changing. Waits for an exchange in progress.

    outer: a LocalSteps. This module works on its parts; that imports modules that import this one.
    """
    state = outer.state_dict()
    common, _ = split(state["compressor"])
    return {"outer": {**state, "compressor": common}, "optimizer": outer._workers[0].optimizer.state_dict()}


def adopt(outer: Any, state: Mapping[str, Any], own: Mapping[str, Any] | None, rank: int, size: int) -> None:
    """Go on where another rank is, from the global parameters.

    Args:
        state: of the other rank, from `shared_state`.
        own: the rank-local half of the compressor's state (`split`); None: without residuals.
        rank, size: of this rank, in the group in which it goes on.
    """
    compressor = join(state["outer"]["compressor"], own, rank, size)
    pending = state["outer"]["pending"]
    if pending is not None:
        pending = pending | {"diverged": [False]}  # the other one may have
    outer.load_state_dict({**state["outer"], "compressor": compressor, "pending": pending})
    (worker,) = outer._workers
    worker.optimizer.load_state_dict(state["optimizer"])
    outer._global.write(worker.parameters)
    outer._equal = True
