"""The routine around every method: bypass, residual, reduce, non-finite guard, commit."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..collectives import AllFinite, Mean
from ..collectives.node_chunks import NodeChunks, among_peers
from ..collectives.routines import Routine, timed
from ..memory.state import State
from ..methods.base.compressor import Compressor


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
        self.method = compressor.method_for(name, like.shape, prefix)
        compressor.register_parameter(name, like.shape, self.name)
        self.node_chunks: NodeChunks | None = compressor.node_chunks
        self._compressor = compressor
        self.frozen = frozen
        self.finite = True  # whether the last average was, if the compressor checks that
        self.compressed_momentum = False  # whether the last one is of compressed momenta
        self._before: dict[str, Any] | None = None  # of the state, in a step that has begun and is not over
        self._traffic = compressor.traffic
        self.compressed = compressed = self.compresses(like)
        later = () if frozen else compressor.later_methods(name, prefix)
        self.later_methods = [method for method in later if not method.bypasses(like)]
        if not (compressed or frozen) and like.numel() > self.method.max_numel:
            warnings.warn(
                f"parameter {name!r} is averaged uncompressed: got {like.numel()} elements, "
                f"{type(self.method).__name__} takes at most {self.method.max_numel}",
                stacklevel=2,
            )
        # On a device, methods ask for what the host must know (ToHost), one round more.
        self.rounds = self.method.rounds + ops.on_device(like) if compressed else 1
        self.joined_shape = self.method.joined_shape(like.shape) if compressed and self.node_chunks is None else None
        if compressed and self.node_chunks is not None:
            self.rounds += self.node_chunks.rounds
        self.joins = compressed and (self.method.joins or self.rounds > 1)

    def compresses(self, grad: Tensor) -> bool:
        """Whether a gradient of this shape is compressed, rather than averaged as it is."""
        if self.frozen:
            return False
        return not (self.method if self.node_chunks is None else self.node_chunks).bypasses(grad)

    def run(self, grad: Tensor, rank: int = 0, size: int = 1) -> Routine:
        """Coroutine that replaces `grad` by its average over the group, and returns it.

        If the gradient of any rank is not finite, the average is not finite on any rank, no state changes, and
        `finite` is False. Call `end_step` at the end of the step, in which several gradients may be averaged.

        Args:
            grad: any shape, strides and floating-point dtype; the average has the same.
            rank, size: this rank's number and the world size.
        """
        if not grad.is_floating_point() or grad.is_sparse:
            raise ValueError(
                f"gradient of {self.name!r}: got {grad.layout} {grad.dtype}, expected a dense float tensor"
            )
        state = self.method.memory.states.get(self.name)
        if state is not None and self._before is None:
            state.abandon()  # a step that nobody has ended: its backward pass has failed
        if not self.frozen:
            self._compressor.observe(self.name, grad)
        monitor = self._compressor.monitor
        report = None if monitor is None else monitor.begin(self, grad, rank, size)
        self._traffic.bytes_dense += grad.numel() * grad.element_size()
        if self.node_chunks is not None:
            rank, size = self.node_chunks.node, self.node_chunks.nodes
        if not self.compresses(grad):
            return (yield from self._uncompressed(grad, rank, size))
        routine = timed(self._compressed(grad, rank, size), self._traffic)
        return (yield from (routine if report is None else report(routine)))

    def end_step(self, skipped: bool) -> None:
        """End a step: complete it, or undo what it has changed."""
        before, self._before = self._before, None
        state = self.method.memory.states.get(self.name)
        if before is None or state is None:
            return
        if not skipped:
            state.complete(before)
        elif state.abandon(before):
            self.method.clean(state)

    def _begin(self, state: State) -> dict[str, Any]:
        """Begin a step of the state, unless it has begun. Returns the fields before it."""
        if self._before is None:
            self._before = state.begin()
        return self._before

    def _compressed(self, grad: Tensor, rank: int, size: int) -> Routine:
        method, memory = self.method, self.method.memory
        own = grad if self.node_chunks is None else (yield from self.node_chunks.scatter(grad))
        state = memory.begin_step(self.name, own, method.state_shapes, rank, size)
        before, fields = self._begin(state), state.fields()
        self.compressed_momentum = method.compresses_momentum(state)
        try:
            # The gradient is going to be overwritten: if it is float32, the residual is added in place.
            corrected = yield from method.add_residual(own.float().contiguous(), state)
            reduce = method.reduce(corrected, state)
            average = yield from (reduce if self.node_chunks is None else among_peers(reduce))
            # All ranks see the same average, so all commit or all undo. Limit of the gradient's own type: a finite
            # float32 number may overflow in float16.
            limit = torch.finfo(grad.dtype).max
            finite = method.max_abs_bound(average, limit) <= limit
            if finite:
                state.step += 1
                yield from method.commit(own, corrected, average, state)
                yield from method.decay_residuals(state)
                state.payload = state.next_residual = None
                if not method.error_feedback:
                    state.residual = None  # of the method that was in charge before: it is sent now
            if self.node_chunks is not None:
                finite = yield from self.node_chunks.gather(own, finite, grad)
        except BaseException:  # also if the routine is closed, because the backward pass has failed
            state.abandon(before)
            raise
        if not finite:
            state.replace_fields(fields)
            method.clean(state)  # another chunk of the node may be the one that is not finite
            grad.fill_(math.nan)
        self.finite = finite
        return grad

    def _uncompressed(self, grad: Tensor, rank: int, size: int) -> Routine:
        method = self.method
        state = None if self.frozen else method.memory.states.get(self.name)
        residual = None if state is None else state.residual  # that the method which was in charge has left
        changes = method.changes_uncompressed and not self.frozen
        if changes or residual is not None:
            state = method.memory.begin_step(self.name, grad, method.state_shapes, rank, size)
            self._begin(state)
            residual = state.residual
        if residual is not None:
            grad.add_(residual)
        average = yield Mean(grad.contiguous(), in_place=True)
        if average.data_ptr() != grad.data_ptr():
            grad.copy_(average)
        if state is not None and residual is not None and bool(grad.isfinite().all()):
            state.residual = None
        if state is not None and changes:
            yield from method.apply_uncompressed(grad, state)
        if method.memory.checks:
            self.finite = yield from is_finite(grad)
        return grad


def is_finite(average: Tensor) -> Routine:
    """Coroutine: whether all elements of an average are finite.

    On a device, the host waits for it together with other numbers.
    """
    if not (ops.on_device(average) and average.numel()):
        return ops.all_finite([average])
    return math.isfinite((yield AllFinite(average)))


def averaged(compressor: Compressor, grad: Tensor, name: str, rank: int = 0, size: int = 1) -> Routine:
    """One step of one parameter: `Averaging.run` and `Averaging.end_step`. Skipped if the average is not finite."""
    return _step(Averaging(compressor, name, grad), grad, rank, size)


def _step(averaging: Averaging, grad: Tensor, rank: int, size: int) -> Routine:
    average = yield from averaging.run(grad, rank, size)
    averaging.end_step(skipped=averaging.method.memory.checks and not averaging.finite)
    return average


@contextlib.contextmanager
def no_autocast(device: torch.device) -> Iterator[None]:
    """Disable autograd and autocast: a method must compute in its own types, whatever the backward pass runs in."""
    autocast = torch.is_autocast_enabled(device.type)  # entering it for nothing costs as much as a small gradient
    with torch.no_grad(), torch.autocast(device.type, enabled=False) if autocast else contextlib.nullcontext():
        yield
