"""The routine around every method: bypass, residual, reduce, non-finite guard, commit."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .collectives import Mean, Routine
from .compressor import Compressor


class Averaging:
    """How the gradients of one parameter, or of a bucket, are averaged: by which method, and whether compressed.

    Args:
        compressor: the compressor of the whole model.
        name: the parameter's name, the same on all ranks.
        like: a tensor of the parameter's shape.
        prefix: keeps equal names of several models apart. The state is kept under `prefix + name`; rules of a
            `PerLayer` see the name alone.
        frozen: average the gradient uncompressed, and leave the state alone. Residuals of a frozen parameter are not
            applied.
    """

    def __init__(
        self, compressor: Compressor, name: str, like: Tensor, *, prefix: str = "", frozen: bool = False
    ) -> None:
        self.name = prefix + name
        self.method = compressor.method_for(name, like.shape)
        self._frozen = frozen
        self._traffic = compressor.traffic
        compressed = self.compresses(like)
        self.rounds = self.method.rounds if compressed else 1
        self.per_bucket = compressed and self.method.per_bucket

    def compresses(self, grad: Tensor) -> bool:
        """Whether a gradient of this shape is compressed, rather than averaged as it is."""
        return not self._frozen and not self.method.bypasses(grad)

    def run(self, grad: Tensor, rank: int = 0, size: int = 1) -> Routine:
        """Coroutine that replaces `grad` by its average over the group, and returns it.

        If the gradient of any rank is not finite, the average is not finite on any rank, and no state changes.

        Args:
            grad: any shape, strides and floating-point dtype; the average has the same.
            rank, size: this rank's number and the world size.
        """
        if not grad.is_floating_point() or grad.is_sparse:
            raise ValueError(
                f"gradient of {self.name!r}: got {grad.layout} {grad.dtype}, expected a dense float tensor"
            )
        self._traffic.bytes_dense += grad.numel() * grad.element_size()
        self.method.memory.discard_snapshot(self.name)
        return (yield from (self._compressed if self.compresses(grad) else self._uncompressed)(grad, rank, size))

    def _compressed(self, grad: Tensor, rank: int, size: int) -> Routine:
        method, memory = self.method, self.method.memory
        state = memory.begin_step(self.name, grad, method.state_shapes, rank, size)
        before = state.fields()
        # The gradient is going to be overwritten: if it is float32, the residual is added in place.
        corrected = method.add_residual(grad.float().contiguous(), state)
        average = yield from method.reduce(corrected, state)
        # All ranks see the same average, so all commit or all undo. Limit of the gradient's own type: a finite float32
        # number may overflow in float16.
        limit = torch.finfo(grad.dtype).max
        if method.max_abs_bound(average, limit) <= limit:
            memory.snapshot(state, before)
            state.step += 1
            method.apply_average(grad, corrected, average, state)
            state.payload = None
            return grad
        state.replace_fields(before)
        return grad.fill_(math.nan)

    def _uncompressed(self, grad: Tensor, rank: int, size: int) -> Routine:
        average = yield Mean(grad.contiguous())
        if average.data_ptr() != grad.data_ptr():
            grad.copy_(average)
        if self.method.changes_uncompressed and not self._frozen:
            method, memory = self.method, self.method.memory
            state = memory.begin_step(self.name, grad, method.state_shapes, rank, size)
            memory.snapshot(state, state.fields())
            method.apply_uncompressed(grad, state)
        return grad


def averaged(compressor: Compressor, grad: Tensor, name: str, rank: int = 0, size: int = 1) -> Routine:
    """One step of one parameter: `Averaging.run` as a function."""
    return Averaging(compressor, name, grad).run(grad, rank, size)


@contextlib.contextmanager
def no_autocast(device: torch.device) -> Iterator[None]:
    """Disable autograd and autocast: a method must compute in its own types, whatever the backward pass runs in."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
