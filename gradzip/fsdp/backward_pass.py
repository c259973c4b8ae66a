"""Where a backward pass of FSDP begins and ends."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..averaging.session import queue_callback


class BackwardPass:
    """The backward passes of one model, one after the other.

    Args:
        what: the function of the user's, for errors.
        finish: called at the end of a pass, behind all callbacks of FSDP, in which it may reduce gradients.
        drop: called for what a pass has left that has failed.
    """

    def __init__(self, what: str, finish: Callable[[], None], drop: Callable[[], None]) -> None:
        self._what, self._finish, self._drop = what, finish, drop
        self._number: int | None = None  # torch's, of the current one

    def begin(self) -> bool:
        """Called when gradients come. Returns whether they are the first ones of a pass.

        Raises:
            RuntimeError: they come outside of a backward pass, as from torch's pipeline schedules.
        """
        number = torch._C._current_graph_task_id()
        if number == self._number:
            return False
        self._drop()
        if number == -1:
            got = "got gradients outside of a backward pass"
            raise RuntimeError(f"{self._what}: {got}, expected them within backward()")
        queue_callback(self._end)
        self._number = number
        return True

    def _end(self) -> None:
        """Called when all gradients are computed."""
        if torch._C._current_autograd_node() is not None:
            self._drop()
            got = "got a module whose backward pass runs within another one, as by checkpoint(use_reentrant=True)"
            raise RuntimeError(f"{self._what}: {got}, where a step has no single end; expected use_reentrant=False")
        # A callback that is queued by a callback comes behind all that were queued while gradients were computed.
        queue_callback(self._finish)
