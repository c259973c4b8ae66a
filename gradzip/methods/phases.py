"""Another method from a step on, such as compression after an uncompressed warm-up."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..memory.names import moved, original
from ..memory.state_dict import in_line, is_count
from .base.composite import Composite
from .base.compressor import Compressor
from .base.registry import register
from .base.rules import Rule, compiled, matches, text


@register("phases", examples=["0=none,1=acpsgd", "0=onebit,1=acpsgd,2=none", "0=onebit,1=acpsgd,exempt=v"])
@dataclass
class Phases(Composite):
    """Compresses each parameter by one method after the other, for example by none at first.

    Low-rank methods profit from an uncompressed warm-up: torch's `powerSGD_hook` starts to compress at step 1000 by
    default.

    At the end of a phase, residuals move to the next method. A method without error feedback sends them once, with the
    next gradients. All other state of the last phase's method is freed, and that of the new method starts fresh:
    factors, bases, velocities, and the step number of the method's own schedules and `warmup_steps`.

    Args:
        phases: methods by the first step of their phase. One phase begins at step 0. On a command line:
            ``phases:0=none,1000=acpsgd(rank=4)``.
        exempt: rules as of `PerLayer`. The last phase never begins for parameters that one of them matches, as for
            embeddings, whose rows may have their first gradients late, if it is `Momentum`. On a command line:
            ``phases:0=none,1000=acpsgd,exempt=^embedding``.

    The step of a parameter is the number of times it was averaged. Steps that are skipped do not count on a CPU; on a
    device they do. Steps that do not use it count where the front end averages zeros for it, as DDP and Horovod do; DDP
    also for one that is frozen after it was wrapped. Step numbers are equal on all ranks, and a part of the state dict.
    Parameters that are trained together change their method together; those of a model that is added later begin with
    the first phase.

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
    exempt: Sequence[Rule] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.phases = _in_order(self.phases)
        self.set_parts(list(self.phases.values()))
        self._steps: dict[str, int] = {}  # completed steps, by the name of the state
        several = isinstance(self.exempt, Sequence) and not isinstance(self.exempt, str)
        self.check(
            "exempt", several and len(self.phases) > bool(self.exempt), "a list of rules, and two phases or more"
        )
        self._rules = [compiled(rule, "Phases") for rule in self.exempt]
        self._exempted: set[str] = set()  # the names of the states of parameters that a rule matches
        self._loaded: set[str] = set()  # names of loaded steps that no parameter has had yet

    @property
    def selects_by_name(self) -> bool:
        return super().selects_by_name or any(isinstance(rule, re.Pattern) for rule in self._rules)

    @property
    def configuration(self) -> list[int | str]:
        return [*self.phases, *map(text, self.exempt)]

    def method_for(self, name: str, shape: torch.Size, prefix: str = "") -> Compressor:
        if any(matches(rule, name, shape) for rule in self._rules):
            self._exempted.add(prefix + name)  # what comes later knows no shape
        step = self._steps.get(prefix + name, 0)
        return self.phases[max(start for start in self._starts(prefix + name) if start <= step)]

    def later_methods(self, name: str, prefix: str = "") -> Sequence[Compressor]:
        step = self._steps.get(prefix + name, 0)
        return [self.phases[start] for start in self._starts(prefix + name) if start > step]

    def stages(self, names: Sequence[str]) -> list[list[Compressor]]:
        stages: list[list[Compressor]] = []
        for step in self.phases:
            clone: Any = self.clone()
            clone._steps = dict.fromkeys(names, step)
            stages.append([clone])
        return stages

    def _starts(self, state_name: str) -> list[int]:
        """The first steps of a parameter's phases."""
        return list(self.phases)[: -1 if state_name in self._exempted else None]

    def register_parameter(self, name: str, shape: torch.Size, state_name: str) -> None:
        super().register_parameter(name, shape, state_name)
        self._loaded.discard(state_name)

    def step_of(self, name: str, shape: torch.Size, prefix: str = "") -> int:
        return self._steps.get(prefix + name, 0)

    # --- a step

    def complete_step(self, names: Sequence[str]) -> None:
        super().complete_step(names)
        for name in names:
            self._steps[name] = step = self._steps.get(name, 0) + 1
            if step in self._starts(name):
                self.move_to(self.phases[step], name)

    # --- state

    @property
    def loaded_names(self) -> set[str]:
        return super().loaded_names | self._loaded

    def rename_states(self, names: Mapping[str, str | None]) -> None:
        super().rename_states(names)
        found = {name: self._steps.pop(name) for name in names if name in self._steps}
        self._steps |= {to: found[name] for name, to in names.items() if to is not None and name in found}
        self._exempted, self._loaded = moved(self._exempted, names), moved(self._loaded, names)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"steps": dict(self._steps)}

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict, and continue in the phase of its steps.

        If phases begin at other steps than in the saved job, residuals move to the methods of this job's phases.

        Raises:
            ValueError: as for other methods; or the step numbers are malformed.
        """
        super()._load(state_dict)
        steps = state_dict.get("steps")
        if not (isinstance(steps, Mapping) and all(map(is_count, steps.values()))):
            raise ValueError(
                f"Phases.load_state_dict: got steps = {in_line(steps)}, expected integers by parameter name"
            )
        self._steps = {original(name): step for name, step in steps.items()}
        self._loaded = set(self._steps)


def _in_order(phases: Any) -> dict[int, Compressor]:
    if not (isinstance(phases, Mapping) and phases):
        raise ValueError(
            f"Phases: got {phases!r}, expected a dict of methods by step, as in {{0: NoCompression(), 1000: ACPSGD()}}"
        )
    for step in phases:
        if not is_count(step):
            raise ValueError(f"Phases: got the step {step!r}, expected an integer >= 0")
    if 0 not in phases:
        raise ValueError(f"Phases: got the steps {sorted(phases)}, expected step 0 among them, and its method")
    return dict(sorted(phases.items()))
