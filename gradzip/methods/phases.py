"""Another method from a step on, such as compression after an uncompressed warm-up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..composite import Composite
from ..compressor import Compressor
from ..registry import register
from ..state import BucketState


@register("phases", example="0=none,1=acpsgd")
@dataclass
class Phases(Composite):
    """Compresses each parameter by one method after the other, such as by none at first.

    Low-rank methods profit from an uncompressed warm-up: torch's `powerSGD_hook`, for example, starts to compress at
    step 1000 by default.

    A residual moves to the next method. If that has no error feedback, the residual is sent once, with the next
    gradient. All else begins anew with a method, and is freed when it is over: factors, bases, velocities, and the step
    number that schedules and `warmup_steps` of the method itself see.

    Args:
        phases: methods, by the step from which on they are in charge. One begins at step 0. On a command line:
            ``phases:0=none,1000=acpsgd(rank=4)``.

    The step of a parameter is the number of its optimizer's steps so far that averaged it. Steps in which it is frozen
    and steps that GradScaler skips do not count. It is the same on all ranks, and a part of the state dict. Parameters
    that are trained together therefore change their method together; those of a model that is added later begin with
    the first one.

    >>> import gradzip
    >>> compressor = gradzip.Phases({0: gradzip.NoCompression(), 2: gradzip.ACPSGD(rank=1)})
    >>> group, sent = gradzip.LocalGroup(compressor, size=2), []
    >>> for _ in range(4):
    ...     averages = group.average([torch.ones(64, 32), torch.zeros(64, 32)], "weight")
    ...     sent.append(group.bytes_sent)
    >>> sent
    [8192, 16384, 16640, 16768]
    """

    phases: Mapping[int, Compressor]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.phases = _in_order(self.phases)
        self.set_parts(list(self.phases.values()))
        self._steps: dict[str, int] = {}  # that are over, by the name of the state
        self._methods: dict[str, Compressor] = {}  # in charge, by the name of the state; the first one of all others
        self._averaged: set[str] = set()  # names of the states whose step is not over
        self._change_due = False

    @property
    def configuration(self) -> list[int]:
        return list(self.phases)

    def method_for(self, name: str, shape: torch.Size, prefix: str = "") -> Compressor:
        return self._methods.get(prefix + name, self.parts[0])

    def step_of(self, name: str, shape: torch.Size, prefix: str = "") -> int:
        return self._steps.get(prefix + name, 0)

    # --- what happens in a step

    def observe(self, state_name: str, grad: Tensor) -> None:
        states = [part.states.get(state_name) for part in self.parts]
        bucket = next((state for state in states if isinstance(state, BucketState)), None)
        self._averaged.update([state_name] if bucket is None else bucket.shapes)

    def skip_step(self) -> None:
        self._averaged.clear()

    def end_step(self, engine: Any) -> None:
        for name in self._averaged:
            self._steps[name] = step = self._steps.get(name, 0) + 1
            self._change_due |= step in self.phases
        self._averaged.clear()
        # The residuals of gradients in flight, of another optimizer, are on the way: its step ends later.
        if self._change_due and not self.memory.in_flight:
            self._change_methods()

    def _change_methods(self) -> None:
        """Put the methods in charge that the step numbers ask for."""
        self._methods = {name: self._method_at(step) for name, step in self._steps.items()}
        self._change_due = False
        self.hand_over(self._methods)

    def _method_at(self, step: int) -> Compressor:
        return self.phases[max(start for start in self.phases if start <= step)]

    # --- state

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"steps": dict(self._steps)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict, and go on in the phase of its steps.

        If the phases begin at other steps than those of the saved ones, residuals move to the methods in charge.

        Raises:
            ValueError: as for other methods, or the step numbers are malformed.
        """
        super().load_state_dict(state_dict)
        steps = state_dict.get("steps")
        if not (isinstance(steps, Mapping) and all(map(_is_step, steps.values()))):
            raise ValueError(f"Phases.load_state_dict: got steps = {steps!r:.80}, expected integers by parameter name")
        self._steps = dict(steps)
        self._averaged.clear()
        self._change_methods()


def _in_order(phases: Any) -> dict[int, Compressor]:
    if not (isinstance(phases, Mapping) and phases):
        raise ValueError(
            f"Phases: got {phases!r}, expected a dict of methods by step, as in {{0: NoCompression(), 1000: ACPSGD()}}"
        )
    for step in phases:
        if not _is_step(step):
            raise ValueError(f"Phases: got the step {step!r}, expected an integer >= 0")
    if 0 not in phases:
        raise ValueError(f"Phases: got the steps {sorted(phases)}, expected step 0 among them, and its method")
    return dict(sorted(phases.items()))


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
