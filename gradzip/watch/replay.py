"""One step of a single rank, on a copy of its state: what peers decode of its gradient, and the error."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..collectives import Collective, Gather
from ..collectives.routines import Done, Routine, advance
from ..collectives.traffic import sent_nbytes
from ..engines.local import drive
from ..memory.state import State
from ..memory.streams import no_autocast
from ..methods.base.compressor import Compressor
from ..methods.base.group import plan_groups
from ..methods.base.transform_codec import TransformCodec
from ..ops import tensors as ops


@dataclass(frozen=True)
class Replay:
    """The result of `replay`.

    Args:
        wanted: x, the gradient plus the residual, float32.
        sent: x^, what peers decode: the average of a group of this rank alone.
        nbytes: bytes that the rank sends.
        clamped: share of the coded values that a fixed range has clamped; None for methods without range floats.
    """

    wanted: Tensor
    sent: Tensor
    nbytes: int
    clamped: float | None

    @property
    def energies(self) -> tuple[float, float]:
        """|x - x^|^2 and |x|^2. Synchronises a device."""
        parts = self.wanted - self.sent, self.wanted
        lost, whole = (torch.linalg.vector_norm(x, dtype=torch.float64).item() ** 2 for x in parts)
        return lost, whole


def replay(compressor: Compressor, name: str, grad: Tensor, state: State | None = None) -> Replay:
    """`replay_group` for one gradient, with results of its shape."""
    seen = replay_group(compressor, {name: grad}, state)
    return replace(seen, wanted=seen.wanted.view(grad.shape), sent=seen.sent.view(grad.shape))


def replay_group(compressor: Compressor, gradients: Mapping[str, Tensor], state: State | None = None) -> Replay:
    """Run one step of a group of parameters on one rank alone, with a clone of the method.

    Does not read or change the compressor's states. Random draws are those of rank 0. If a gradient is not finite,
    neither are the results. With error feedback, x - x^ is the new residual. Results are flat.

    Args:
        compressor: a method, or one made of methods.
        gradients: by name, any shapes, strides and floating-point dtypes. They are compressed as float32.
        state: of the group, from `Memory.begin_step`; it is copied. None: a fresh one.

    Memory: some copies of the gradients and of the state.
    """
    copies = [grad.detach().to(torch.float32, copy=True) for grad in gradients.values()]
    flat = torch.cat([x.reshape(-1) for x in copies])
    (group,) = plan_groups(compressor.clone(), copies, list(gradients))
    method = group.method
    method.residual_decay = 1.0  # x - x^ is the residual before it decays
    if state is not None:
        method.states[group.name] = copy.deepcopy(state)
    collectives: list[Collective] = []
    with no_autocast(flat.device):
        drive([recorded(group.average(copies), collectives.append)])
    sent = torch.cat([x.reshape(-1) for x in copies])
    nbytes, after, clamped = sum(map(sent_nbytes, collectives)), None, None
    if not group.compressed:  # gradients travel in their own type
        nbytes = sum(grad.nbytes for grad in gradients.values())
    elif method.keeps_residual:
        after = method.states[group.name].residual
    if group.compressed and isinstance(method, TransformCodec):
        clamped = _clamped_share(method, collectives, flat.numel())
    if after is not None:
        flat = sent + after
    elif state is not None and state.residual is not None:  # which another method has left; it is sent
        flat = flat + state.residual
    return Replay(flat, sent, nbytes, clamped)


def recorded(routine: Routine, record: Callable[[Collective], object]) -> Routine:
    """The same routine; calls `record` with each of its collectives."""
    result = None
    while not isinstance(collective := advance(routine, result), Done):
        record(collective)
        result = yield collective
    return collective.result


def relative_error(lost: float, whole: float) -> float:
    """The square root of lost / whole, two squared norms; 0 if both are 0."""
    if whole == 0:
        return 0.0 if lost == 0 else math.inf
    return math.sqrt(lost / whole)


def cosine(lost: float, whole: float, sent: float) -> float:
    """Cosine of the angle between x and x^, from |x - x^|^2, |x|^2 and |x^|^2.

    1 if both are 0, and 0 if only one is.
    """
    norms = math.sqrt(whole) * math.sqrt(sent)
    return (whole + sent - lost) / (2 * norms) if norms else float(whole == sent)


def _clamped_share(method: TransformCodec, collectives: list[Collective], numel: int) -> float | None:
    """The share of the values in the payload that were clamped. The method has made one step."""
    ((payload,),) = (method.open_all([c.tensor], [numel], 1) for c in collectives if isinstance(c, Gather))
    if payload.flags & ops.NON_FINITE:
        return None
    parts = method.parse([payload], [numel])
    return int(method.clamped) / (int(parts.k[0]) * parts.plans[0].transform.group)
