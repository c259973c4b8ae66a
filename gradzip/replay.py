"""One step of one rank alone, on a copy of its state: what peers would see of its gradient, and what is lost."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import ops
from .averaging import Averaging, no_autocast
from .collectives import Collective, Gather
from .compressor import Compressor
from .engines.local import drive
from .methods.transform_codec import TransformCodec
from .routines import Done, Routine, advance
from .state import State
from .traffic import sent_nbytes


@dataclass(frozen=True)
class Replay:
    """What one rank sends in a step.

    Args:
        wanted: x, the gradient and what error feedback adds to it: float32, of the gradient's shape.
        sent: x^, what peers see of it: the average of a group of this rank alone.
        nbytes: bytes that the rank sends.
        clamped: share of the coded values that a fixed range has clamped; None for methods without range floats.
    """

    wanted: Tensor
    sent: Tensor
    nbytes: int
    clamped: float | None

    @property
    def energies(self) -> tuple[float, float]:
        """|x - x^|^2 and |x|^2. Synchronises a device, as the other properties do."""
        return _norm(self.wanted - self.sent) ** 2, _norm(self.wanted) ** 2

    @property
    def error(self) -> float:
        """Relative error alpha = |x - x^| / |x| (Wang et al., HPDC 2020, assumption 3.2); 0 if both are 0."""
        return relative_error(*self.energies)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between x and x^; 1 if both are 0, and 0 if only one is."""
        return cosine(*self.energies, _norm(self.sent) ** 2)

    @property
    def zeros(self) -> float:
        """Share of the elements of x^ that are 0."""
        return (self.sent == 0).double().mean().item() if self.sent.numel() else 0.0


def replay(compressor: Compressor, name: str, grad: Tensor, state: State | None = None) -> Replay:
    """Run one step of a parameter in a group of one rank, with a clone of the method.

    Nothing that the compressor keeps is read or changed. Random draws are those of rank 0.

    Args:
        compressor: a method, or one that selects methods by name.
        grad: any shape, strides and floating-point dtype. It is compressed as float32.
        state: of the parameter, ready for the step; it is copied. None: a fresh one.

    With error feedback, what is lost is the new residual. Otherwise it is the gradient, and the residual that another
    method has left, minus what is sent. If the gradient is not finite, nor are the results.

    Memory: some copies of the gradient and of the state.
    """
    gradient = grad.detach().to(torch.float32, copy=True)
    averaging = Averaging(compressor.clone(), name, gradient)
    method = averaging.method
    before = None if state is None else state.residual
    if state is not None:
        method.states[name] = copy.deepcopy(state)
    collectives: list[Collective] = []
    with no_autocast(grad.device):
        [sent] = drive([recorded(averaging.run(gradient.clone(), 0, 1), collectives.append)])
    wanted, clamped = gradient, None
    nbytes = grad.numel() * grad.element_size()  # uncompressed gradients travel in their own type
    if averaging.compresses(gradient):
        nbytes = sum(map(sent_nbytes, collectives))
        after = method.states[name].residual
        if method.error_feedback and after is not None:
            wanted = sent + after
        elif before is not None:  # left by another method
            wanted = gradient + before
        if isinstance(method, TransformCodec):
            clamped = _clamped_share(method, collectives, gradient.numel())
    return Replay(wanted, sent, nbytes, clamped)


def recorded(routine: Routine, record: Callable[[Collective], object]) -> Routine:
    """The same routine; calls `record` with each of its collectives."""
    result = None
    while not isinstance(collective := advance(routine, result), Done):
        record(collective)
        result = yield collective
    return collective.result


def relative_error(lost: float, whole: float) -> float:
    """The square root of lost / whole, two energies; 0 if both are 0."""
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
    """The share of the values in the payload of a method's only step that were clamped."""
    (payload,) = (method.open(c.tensor, numel) for c in collectives if isinstance(c, Gather))
    if payload.flags & ops.NON_FINITE:
        return None
    part = method.coded_part(payload, numel)
    return int(method.clamped) / (part.k * part.transform.group)


def _norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x, dtype=torch.float64).item()
