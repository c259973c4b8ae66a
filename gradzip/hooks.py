"""The hooks of a step around the routine of a method, with their defaults, and error feedback."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from . import ops
from .collectives import ToHost
from .routines import Local, Routine, jointly
from .state import State, Workspace

_MAX_ABS = "_gradzip_max_abs"  # attribute of an average: its largest magnitude, if it is known


class Hooks(ABC):
    """What `Averaging` calls for each gradient in a step, in this order. Base of `Compressor`."""

    min_numel: int  # a hyper-parameter
    workspace: Workspace

    # Methods with error feedback declare it as a hyper-parameter. (A ClassVar here would fix its place among them.)
    error_feedback = False

    # Whether `apply_uncompressed` has to see the averages of gradients that bypass compression.
    changes_uncompressed = False

    def bypasses(self, grad: Tensor) -> bool:
        """Whether a gradient of this shape is averaged uncompressed, because compression would not pay."""
        return grad.dim() < 2 or grad.numel() < max(1, self.min_numel)

    def joined_shape(self, shape: torch.Size) -> tuple[int, ...] | None:
        """The shape of the tensor that a gradient of this shape is joined to, with -1 for one length; None joins none.

        Front ends that have buckets concatenate the gradients of a bucket whose joined shapes are equal, and compress
        them as one: `state.VECTOR` as one vector, (-1, 1, 3, 3) as rows of kernels.
        """
        return None

    def state_shapes(self, grad: Tensor) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors in the state of this gradient, by field. Loaded states are checked against them."""
        return {"residual": tuple(grad.shape)}

    def add_residual(self, grad: Tensor, state: State) -> Routine:
        """Coroutine: the gradient plus the residual, what `reduce` gets.

        Args:
            grad: contiguous float32; may be changed and returned.
        """
        if state.residual is not None:
            yield Local(_add_all, grad.device, (grad, state.residual))
        return grad

    @abstractmethod
    def reduce(self, grad: Tensor, state: State) -> Routine:
        """Average `grad` over the group: the method itself, as a coroutine over collectives.

        Args:
            grad: the gradient plus residual, in its own shape, contiguous float32.

        Returns the average, in any shape with as many elements, or any other value that `max_abs_bound` and
        `apply_average` of the method accept.
        """

    def max_abs_bound(self, average: Any, limit: float) -> float:
        """An upper bound of the average's magnitudes: exact if above `limit`, not finite if any element is not finite.

        The same number on all ranks. Waits for the device, unless `reduce` has returned what `with_max_abs` did.
        """
        known = getattr(average, _MAX_ABS, None)
        return ops.abs_max(average) if known is None else known

    def commit(self, grad: Tensor, corrected: Tensor, average: Any, state: State) -> Routine:
        """Coroutine: `apply_average`, joined with that of other gradients."""
        yield from jointly(self.apply_averages, grad.device, (grad, corrected, average, state))

    def apply_averages(self, updates: list[tuple[Tensor, Tensor, Any, State]]) -> list[None]:
        """`apply_average` for several gradients."""
        for update in updates:
            self.apply_average(*update)
        return [None] * len(updates)

    def apply_average(self, grad: Tensor, corrected: Tensor, average: Any, state: State) -> None:
        """Write the average to `grad`, and the residual to the state. Called when the average is known to be finite.

        Args:
            corrected: what `reduce` got; it may share memory with `grad`.
            average: what `reduce` returned.
        """
        if self.error_feedback:
            self.store_residual(corrected, state)
        grad.copy_(average.view(grad.shape))
        if self.error_feedback:
            self.subtract_transmitted(state)

    def apply_uncompressed(self, average: Tensor, state: State) -> None:
        """Change the average of a gradient that bypassed compression, in place. Called if `changes_uncompressed`."""
        raise TypeError(f"{type(self).__name__} leaves uncompressed averages as they are")

    # --- for `reduce` to call

    def with_max_abs(self, average: Tensor, max_abs: float | None = None) -> Routine:
        """Coroutine that returns the average, and on a device its largest magnitude for `max_abs_bound`.

        `reduce` ends with it, so that the host waits once for the magnitudes of all gradients.

        Args:
            average: must keep its values until it is applied: `new_average` makes it.
            max_abs: the largest magnitude, if it is known.
        """
        if max_abs is None and ops.on_device(average):
            max_abs = float((yield ToHost((yield Local(ops.abs_max_all, average.device, average)))))
        setattr(average, _MAX_ABS, max_abs)
        return average

    def new_average(self, numel: int, device: torch.device) -> Tensor:
        """Uninitialized memory for an average (float32, flat).

        On a CPU, the next call reuses it. On a device it does not: several averages wait for `with_max_abs` together.
        """
        if device.type == "cpu":
            return self.workspace.empty("average", (numel,), torch.float32, device)
        return torch.empty(numel, dtype=torch.float32, device=device)

    # --- error feedback

    def store_residual(self, corrected: Tensor, state: State) -> None:
        """Error feedback: copy the corrected gradient to the residual, before its memory is overwritten."""
        state.residual = (torch.empty_like(corrected) if state.residual is None else state.residual).copy_(corrected)

    def subtract_transmitted(self, state: State) -> None:
        """Error feedback: subtract what peers saw of this rank's gradient from the residual."""
        assert state.residual is not None
        state.residual.sub_(self.transmitted(state).view(state.residual.shape))

    def transmitted(self, state: State) -> Tensor:
        """What peers saw of this rank's gradient in the current step."""
        raise TypeError(f"{type(self).__name__} has no error feedback")


def _add_all(pairs: list[tuple[Tensor, Tensor]]) -> list[None]:
    torch._foreach_add_(*map(list, zip(*pairs)))  # one operation on a device
    return [None] * len(pairs)
