"""The routine around every method: bypass, residual, reduce, non-finite guard, commit."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..collectives import AllFinite, Mean
from ..collectives.fusion import pieces
from ..collectives.node_chunks import NodeChunks, among_peers
from ..collectives.routines import Routine, timed
from ..memory.state import State
from ..methods.base.compressor import Compressor

# The joined shape of gradients that are averaged as they are. No method compresses a gradient of one dimension.
UNCOMPRESSED = (-1,)


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
        self.shapes = {self.name: like.shape}  # of the gradients, by the names of their states
        self.method = compressor.method_for(name, like.shape, prefix)
        compressor.register_parameter(name, like.shape, self.name)
        self.node_chunks: NodeChunks | None = compressor.node_chunks
        self._compressor = compressor
        self.frozen = frozen
        self.finite = True  # whether the last average was, if the compressor checks that
        self.culprits: list[str] = []  # names of the gradients whose averages were not
        self.compressed_momentum = False  # whether the last one is of compressed momenta
        self._before: dict[str, dict[str, Any]] = {}  # of the states, by name, in a step that has begun and is not over
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
        self.joined_shape = None if self.node_chunks is not None else self._joined_shape(like)
        if compressed and self.node_chunks is not None:
            self.rounds += self.node_chunks.rounds
        self.joins = compressed and (self.method.joins or self.rounds > 1)

    def _joined_shape(self, like: Tensor) -> tuple[int, ...] | None:
        """The shape in which gradients of a bucket are averaged as one, None if each is averaged alone."""
        if self.compressed:
            return self.method.joined_shape(like.shape)
        alone = self.frozen or self.method.changes_uncompressed or self._compressor.observes
        return None if alone else UNCOMPRESSED

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
        report = self._start([grad], rank, size)
        if self.node_chunks is not None:
            rank, size = self.node_chunks.node, self.node_chunks.nodes
        if not self.compresses(grad):
            yield from self._uncompressed([grad], rank, size)
            return grad
        routine = timed(self._compressed(grad, rank, size), self._traffic)
        return (yield from (routine if report is None else report(routine)))

    def run_uncompressed(self, gradients: list[Tensor], rank: int = 0, size: int = 1) -> Routine:
        """`run` for all gradients of a unit that is not compressed."""
        self._start(gradients, rank, size)
        yield from self._uncompressed(gradients, rank, size)

    def _start(self, gradients: list[Tensor], rank: int, size: int) -> Callable[[Routine], Routine] | None:
        """Check gradients that are going to be averaged as one. Returns what `Monitor.begin` returns."""
        for grad in gradients:
            if grad.is_sparse or not grad.dtype.is_floating_point:
                raise ValueError(
                    f"gradient of {self.name!r}: got {grad.layout} {grad.dtype}, expected a dense float tensor"
                )
        if not self._before:
            for name in self.shapes:
                if (state := self.method.memory.states.get(name)) is not None:
                    state.abandon()  # a step that nobody has ended: its backward pass has failed
        if not self.frozen:
            self._compressor.observe(self.name, gradients[0])
        monitor = self._compressor.monitor
        report = None if monitor is None else monitor.begin(self, gradients[0], rank, size)
        self._traffic.bytes_dense += sum(grad.nbytes for grad in gradients)
        return report

    def end_step(self, skipped: bool) -> None:
        """End a step: complete it, or undo what it has changed."""
        of_states, self._before = self._before, {}
        for name, before in of_states.items():
            state = self.method.memory.states.get(name)
            if state is None:
                continue
            if not skipped:
                state.complete(before)
            elif state.abandon(before):
                self.method.clean(state)

    def _begin(self, name: str, state: State) -> dict[str, Any]:
        """Begin a step of a state, unless it has begun. Returns the fields before it."""
        if name not in self._before:
            self._before[name] = state.begin()
        return self._before[name]

    def _compressed(self, grad: Tensor, rank: int, size: int) -> Routine:
        method, memory = self.method, self.method.memory
        own = grad if self.node_chunks is None else (yield from self.node_chunks.scatter(grad))
        state = memory.begin_step(self.name, own, method.state_shapes, rank, size)
        before, fields = self._begin(self.name, state), state.fields()
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
        self.culprits = [] if finite else [self.name]
        return grad

    def _uncompressed(self, gradients: list[Tensor], rank: int, size: int) -> Routine:
        """Coroutine that replaces gradients by their averages: those of a unit, or the vector that has them."""
        method, memory = self.method, self.method.memory
        changes = method.changes_uncompressed and not self.frozen
        # States with a residual, which a method that was in charge has left.
        left = [] if self.frozen else [n for n in self.shapes if (s := memory.states.get(n)) and s.residual is not None]
        states = []
        if changes or left:
            for name, piece in zip(self.shapes, self._pieces(gradients)):
                if changes or name in left:
                    states.append(state := memory.begin_step(name, piece, method.state_shapes, rank, size))
                    self._begin(name, state)
                    if state.residual is not None:
                        piece.add_(state.residual)
        if len(gradients) > 1:
            average = yield Mean(gradients[0], in_place=True, tensors=gradients)
        else:
            (grad,) = gradients
            average = yield Mean(grad.contiguous(), in_place=True)
            if average.data_ptr() != grad.data_ptr():
                average = grad.copy_(average)
        if left and bool(average.isfinite().all()):
            for state in states:
                state.residual = None
        if changes:
            yield from method.apply_uncompressed(gradients[0], states[0])
        if memory.checks:
            self.finite = yield from is_finite(average)
            by_name = [] if self.finite else zip(self.shapes, self._pieces(gradients))
            self.culprits = [name for name, piece in by_name if not ops.all_finite([piece])]

    def _pieces(self, gradients: list[Tensor]) -> list[Tensor]:
        """The gradients of a unit: its vector has views of them."""
        if len(gradients) == len(self.shapes):
            return gradients
        return pieces(gradients[0], list(self.shapes.values()))


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
