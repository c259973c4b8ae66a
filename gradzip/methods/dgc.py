"""Deep gradient compression: sparsification with momentum correction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import ops
from ..collectives.routines import Routine, jointly
from ..memory.state import VECTOR, Key, State
from .base.registry import register
from .base.schedule import Theta, check_theta, theta_at
from .topk import SparseCodec, num_kept

_WARM_UP_THETA = (0.75, 0.9375, 0.984375, 0.99609375)  # in the four quarters of the warm-up


@register("dgc", number=3, examples=["theta=0.9", "", "theta=0.9,warmup_steps=2,clip_norm=9"])
@dataclass
class DGC(SparseCodec):
    """Sends the k largest elements of a residual that accumulates gradients with momentum.

    For the gradient g, velocity u and residual v of a rank (Algorithm 1, with momentum factor masking):

        u = momentum u + g
        v = v + u
        send the k = round((1 - theta) n) largest elements of v, and set u and v to 0 there

    An element that is sent in every step has no momentum. With momentum = 0 this is Top-k with error feedback.

    Args:
        theta: fraction of the elements that is dropped, in [0, 1), or a schedule step -> theta. Front ends compress the
            gradients of a bucket as one vector, of which it is the fraction, as with `TopK`.
        momentum: in [0, 1). It replaces the momentum of the optimizer. Parameters that bypass compression get it on
            their average, which is equivalent.
        clip_norm: before accumulation, scale each parameter's gradient down to the norm clip_norm / sqrt(world size).
            The paper clips the norm over all parameters. None does not clip.
        warmup_steps: theta is at most 75 %, 93.75 %, 98.4375 % and 99.6 % in the four quarters of these steps.

    Use `gradzip.optim.DGCSGD`, which applies the momentum to the weight decay as well. It acts as
    SGD(momentum=momentum, weight_decay=...) does without compression:

        optimizer = hvd.DistributedOptimizer(
            gradzip.optim.DGCSGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4),
            named_parameters=model.named_parameters(), compression=gradzip.DGC(momentum=0.9),
        )

    Under Horovod, DDP and FSDP2, the first step of an optimizer of torch with momentum or weight decay raises
    ValueError, unless its weight decay is decoupled, as in AdamW. `LocalGroup` has no optimizer.

    Payload: that of `TopK`, 48 + 4 k + I bytes, padded to 16; I is about 1.4 bytes per index at theta = 0.999.

    Deterministic. Lengths on a CUDA device are those of `TopK`.

    Source: Lin, Han, Mao, Wang, Dally, Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
    Training, ICLR 2018.
    """

    error_feedback = True
    fixed_nbytes = True
    loss_scaled: ClassVar = {**SparseCodec.loss_scaled, "velocity": 1, "average_velocity": 1}
    rank_local = (*SparseCodec.rank_local, "velocity")

    theta: Theta = 0.999
    momentum: float = 0.9
    clip_norm: float | None = None
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_theta(self.theta)
        if not (isinstance(self.momentum, (int, float)) and 0 <= self.momentum < 1):
            raise ValueError(f"DGC: got momentum = {self.momentum!r}, expected a number in [0, 1)")
        clip = self.clip_norm
        if clip is not None and not (isinstance(clip, (int, float)) and 0 < clip < math.inf):
            raise ValueError(f"DGC: got clip_norm = {clip!r}, expected None or a number > 0")
        if not (isinstance(self.warmup_steps, int) and self.warmup_steps >= 0):
            raise ValueError(f"DGC: got warmup_steps = {self.warmup_steps!r}, expected an integer >= 0")

    def theta_at(self, step: int) -> float:
        """The value of theta at a step, limited during warm-up."""
        theta = theta_at(self.theta, step)
        return min(theta, _WARM_UP_THETA[4 * step // self.warmup_steps]) if step < self.warmup_steps else theta

    @property
    def optimizer_momentum(self) -> float:  # type: ignore[override]
        return self.momentum

    @property
    def changes_uncompressed(self) -> bool:  # type: ignore[override]
        return self.momentum > 0

    def joined_shape(self, shape: torch.Size) -> tuple[int, ...]:
        return VECTOR

    def apply_uncompressed(self, average: Tensor, state: State) -> Routine:
        yield from jointly(self._add_velocities, average.device, (average, state))

    def _add_velocities(self, of: list[tuple[Tensor, State]]) -> list[None]:
        """Add velocities to uncompressed averages, and store the sums as the new velocities."""
        averages, states = map(list, zip(*of))
        velocities = [getattr(state, "average_velocity", None) for state in states]
        if moving := [(average, u) for average, u in zip(averages, velocities) if u is not None]:
            torch._foreach_add_(*map(list, zip(*moving)), alpha=self.momentum)  # one operation on a device
        # A velocity may overflow even if the average did not. Stored, it would never become finite again.
        stored: Sequence[Tensor | None]
        if self.memory.checks:  # the step is undone then
            stored = copies = [torch.empty_like(average) for average in averages]
            torch._foreach_copy_(copies, averages)
        else:
            stored = [_if_finite(average, u) for average, u in zip(averages, velocities)]
        for state, velocity in zip(states, stored):
            state.average_velocity = velocity
        return [None] * len(of)

    def state_shapes(self, grad: Tensor) -> dict[str, tuple[int, ...]]:
        names = ("residual", "velocity", "average_velocity")
        return dict.fromkeys(names, tuple(grad.shape))

    def add_residual(self, grad: Tensor, state: State) -> Routine:
        """Coroutine: the velocity u. `reduce` adds the residual v."""
        yield from ()
        if self.clip_norm is not None:
            pieces = state.pieces(grad)
            norms = torch.stack(torch._foreach_norm(pieces, dtype=torch.float64))
            scales = (self.clip_norm * self.memory.loss_scale.value / math.sqrt(state.size) / norms).clamp(max=1.0)
            for piece, scale in zip(pieces, scales):
                piece.mul_(scale)
        if (velocity := getattr(state, "velocity", None)) is not None:
            grad.add_(velocity, alpha=self.momentum)
        return grad

    def reduce(self, velocity: Tensor, state: State) -> Routine:
        if state.residual is None:
            return (yield from super().reduce(velocity, state))
        # One buffer serves all buckets: it is encoded before the first collective is yielded.
        total = self.workspace.empty("total", tuple(velocity.shape), torch.float32, velocity.device)
        return (yield from super().reduce(torch.add(velocity, state.residual, out=total), state))

    def encode(self, grad: Tensor, key: Key) -> Tensor:
        k = num_kept(self.theta_at(key.step), grad.numel())
        return self.pack(*ops.topk_abs(grad.reshape(-1), k), grad.numel())

    def store_residuals(self, velocities: list[Tensor], states: list[State]) -> None:
        for velocity, state in zip(velocities, states):
            renewed = state.renewed("residual", velocity)
            if state.residual is None:
                state.residual = renewed.copy_(velocity)
            else:
                state.residual = torch.add(state.residual, velocity, out=renewed)
            if self.momentum:
                state.velocity = state.renewed("velocity", velocity).copy_(velocity)

    def subtract_all(self, states: list[State]) -> None:
        for state in states:
            self.subtract_transmitted(state)

    def subtract_transmitted(self, state: State) -> None:
        assert state.residual is not None
        parts = self.transmitted_parts(state)
        begin = 0
        for payload, residual in parts:
            end = begin + residual.numel()
            stream, values = self.parse(self.open(payload, residual.numel()), residual.numel())
            sent = ops.index_code_decode(stream, residual.numel(), values.numel()).long()
            residual.index_fill_(0, sent, 0.0)
            if self.momentum:
                state.velocity.view(-1)[begin:end].index_fill_(0, sent, 0.0)
            begin = end


def _if_finite(average: Tensor, velocity: Tensor | None) -> Tensor | None:
    """The sum of a velocity and an average as the new velocity, or the old velocity if the sum is not finite."""
    finite = average.isfinite().all()
    if ops.on_device(average):  # without waiting to know
        return torch.where(finite, average, 0.0 if velocity is None else velocity)
    return average.clone() if finite else velocity
