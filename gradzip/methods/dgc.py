"""Deep gradient compression: sparsification with momentum correction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..collectives.fusion import pieces
from ..collectives.routines import Routine, jointly
from ..ops import groups
from .base.compressor import add_all, copy_all, is_number, with_scratch
from .base.gather import Undecoded
from .base.group import Group
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
    fixed_nbytes = changes_parts = True
    loss_scaled: ClassVar = {**SparseCodec.loss_scaled, "velocity": 1, "average_velocity": 1}
    rank_local = (*SparseCodec.rank_local, "velocity")

    theta: Theta = 0.999
    momentum: float = 0.9
    clip_norm: float | None = None
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_theta(self.theta)
        clip, steps = self.clip_norm, self.warmup_steps
        self.check("momentum", is_number(self.momentum) and 0 <= self.momentum < 1, "a number in [0, 1)")
        self.check("clip_norm", clip is None or (is_number(clip) and 0 < clip < math.inf), "None or a number > 0")
        self.check("warmup_steps", isinstance(steps, int) and steps >= 0, "an integer >= 0")

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

    def apply_uncompressed(self, group: Group) -> Routine:
        yield from jointly(self._add_velocities, group.gradients[0].device, group)

    def _add_velocities(self, of: list[Group]) -> list[None]:
        """Add velocities to uncompressed averages, and store the sums as the new velocities.

        Velocities of 16-bit averages are float32, and averages are rounded: sums over steps drift in 16 bits.
        """
        before: list[Any] = []
        stored: list[Any] = []
        added: list[tuple[Any, Any]] = []  # where the sums are made, and former velocities
        widened: list[tuple[Tensor, Tensor]] = []
        copied: list[tuple[Tensor, Tensor]] = []
        for group in of:
            state, averages = group.state, group.gradients
            like = torch.empty(0, dtype=torch.promote_types(averages[0].dtype, torch.float32), device=group.device)
            state.cast("average_velocity", like.dtype)
            before.append(self._views(group, getattr(state, "average_velocity", None)))
            state.average_velocity = state.renewed("average_velocity", like, group.numel)
            stored.append(self._views(group, state.average_velocity))
            sums, copies = averages, stored[-1]
            if averages[0].dtype != like.dtype:
                widened += zip(stored[-1], averages)
                sums, copies = copies, sums
            if before[-1] is not None:
                added.append((sums, before[-1]))
            copied += zip(copies, sums)
        copy_all(widened)
        if added:
            add_all(added, self.momentum)
        copy_all(copied)
        if not self.memory.checks:  # else the step is undone
            # A velocity may overflow even if the average did not. Stored, it would never become finite again.
            for views, olds in zip(stored, before):
                for view, old in zip(views, olds or [0.0] * len(views)):
                    view.copy_(torch.where(view.isfinite().all(), view, old))
        return [None] * len(of)

    def _views(self, group: Group, flat: Tensor | None) -> Any:
        """The elements of each gradient of the group."""
        return None if flat is None else pieces(flat, [gradient.shape for gradient in group.gradients])

    def state_shapes(self, shape: torch.Size) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("residual", "velocity", "average_velocity"), tuple(shape))

    @property
    def kept_fields(self) -> tuple[str, ...]:
        return (*super().kept_fields, *(("velocity",) if self.momentum else ()))

    def kept_nbytes(self, group: Group) -> int:
        if not group.compressed:  # velocities of the averages
            return max(group.nbytes, 4 * group.numel) if self.changes_uncompressed else 0
        return super().kept_nbytes(group)

    def memory_for(self, group: Group, dtype: torch.dtype) -> Tensor:
        # It becomes the velocity.
        return torch.empty(group.numel, dtype=dtype, device=group.device)

    def add_residual(self, group: Group) -> Routine:
        """Coroutine: the velocity u, and the residual v with it.

        Gradients that hold the error hold u: v can be made again of u and the former residual. If the error is made
        again, so is u.
        """
        yield from ()
        self.keep_owner_residual(group)
        velocity, state = self._new_velocity(group), group.state
        if group.remakes:
            group.parts = [velocity if state.residual is None else velocity.add_(state.residual)]
            return
        state.next_velocity = velocity
        if group.holds and state.residual is None:
            state.residual = velocity.new_full((group.numel,), -0.0)  # u - 0 has the bits of u
        if state.residual is not None:
            total = torch.add(velocity, state.residual, out=state.renewed("residual", velocity))
            group.parts = [total]
            if not group.holds:
                state.next_residual = total

    def _new_velocity(self, group: Group) -> Tensor:
        """On a CPU in memory of its own; on a device in the gradients' memory, unless they must stay as they are."""
        group.load_parts()
        (velocity,) = group.parts
        if self.clip_norm is not None:
            of_gradients = pieces(velocity, group.shapes_of_parts)
            norms = torch.stack(torch._foreach_norm(of_gradients, dtype=torch.float64))
            scales = (self.clip_norm * self.memory.loss_scale.value / math.sqrt(group.size) / norms).clamp(max=1.0)
            for piece, scale in zip(of_gradients, scales):
                piece.mul_(scale)
        before = getattr(group.state, "velocity", None)
        if self.momentum and group.device.type == "cpu":
            gradient, velocity = velocity, group.state.renewed("velocity", velocity)
            if before is None:
                velocity.copy_(gradient)
            else:
                torch.add(gradient, before, alpha=self.momentum, out=velocity)
            group.parts = [velocity]
        elif before is not None:
            velocity.add_(before, alpha=self.momentum)
        return velocity

    def num_kept(self, numel: int, step: int) -> int:
        return num_kept(self.theta_at(step), numel)

    def store_residuals(self, of: Sequence[Group]) -> None:
        for group in of:
            state, velocity = group.state, group.state.next_velocity
            if self.momentum:
                on_cpu = group.device.type == "cpu"
                state.velocity = velocity if on_cpu else state.renewed("velocity", velocity).copy_(velocity)
            state.next_velocity = None
        super().store_residuals(of)

    def subtract_transmitted(self, of: Sequence[Group]) -> None:
        for group in of:
            state, sent = group.state, self._sent(group)
            if group.holds:
                velocity, state.next_velocity = state.next_velocity, None
                group.parts = [velocity.index_fill_(0, sent, 0.0)]
                state.sent = sent  # until `commit_held`
                continue
            for field in ("residual", "velocity") if self.momentum else ("residual",):
                getattr(state, field).view(-1).index_fill_(0, sent, 0.0)

    def _sent(self, group: Group) -> Tensor:
        """The indices of the elements that this rank has sent (int64)."""
        assert group.state.payload is not None
        ranges = [(0, group.numel) if partition is None else partition[0][:2] for _, partition in group.state.payload]
        numels = [stop - start for start, stop in ranges]
        streams, values = self.parse([payload for payload, _ in group.state.payload], numels)
        counts = list(map(Tensor.numel, values))
        sent = groups.index_code_decode(streams, numels, counts).long()
        if len(ranges) > 1:
            torch._foreach_add_(sent.split_with_sizes(counts), [start for start, _ in ranges])
        return sent

    def commit_held(self, group: Group, average: Undecoded, number: Tensor) -> Routine:
        if group.holds:
            taking = jointly(self._take_all, group.device, (group, vars(group.state).pop("sent"), number))
            yield from with_scratch(taking, 4 * group.numel)
        else:
            taking = jointly(self._take_again, group.device, (group, number))
            yield from with_scratch(taking, 8 * group.numel)
        yield from self.commit(group, average)

    def _take_again(self, of: list[tuple[Group, Tensor]]) -> list[None]:
        """As `_take_all`, with gradients that have stayed as they were."""
        for group, number in of:
            residual, velocity = group.state.residual, self._new_velocity(group)
            assert residual is not None
            now, new = [residual], [velocity + residual]
            if self.momentum:
                now, new = [*now, group.state.velocity], [*new, velocity]
            sent = self._sent(group)
            for one in new:
                one.index_fill_(0, sent, 0.0)
            groups.take_errors([(number, now, new)])
            group.parts = []
        return [None] * len(of)

    def _take_all(self, of: list[tuple[Group, Tensor, Tensor]]) -> list[None]:
        """Update velocities and residuals, if a number is finite. Gradients are the new velocities."""
        now: list[Tensor] = []
        new: list[Tensor] = []
        for group, sent, _ in of:
            state, velocities = group.state, group.gradients
            assert state.residual is not None
            residual = state.residual.clone()
            torch._foreach_add_(pieces(residual, group.shapes_of_parts), velocities)
            residual.index_fill_(0, sent, 0.0)
            now, new = [*now, state.residual], [*new, residual]
            if self.momentum:
                now, new = [*now, *pieces(state.velocity, group.shapes_of_parts)], [*new, *velocities]
        groups.take_errors([(of[0][2], now, new)])
        return [None] * len(of)
