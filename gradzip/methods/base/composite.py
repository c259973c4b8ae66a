"""Methods made of methods: each parameter is averaged by one of several parts."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...collectives.routines import Routine
from ...memory.state_dict import check_method
from .compressor import Compressor
from .group import Group


@dataclass
class Composite(Compressor):
    """Base of methods that choose another method for each parameter. Subclasses define `method_for`.

    Each part keeps the states of its parameters, and its own `min_numel` applies to them.
    """

    def set_parts(self, parts: Sequence[Any]) -> None:
        """Set the compressors that `method_for` may return. They share one `Traffic`.

        Raises:
            ValueError: a part is no compressor, or is a composite itself.
        """
        for part in parts:
            if not isinstance(part, Compressor) or isinstance(part, Composite):
                got = type(part).__name__ if isinstance(part, Compressor) else repr(part)
                raise ValueError(
                    f"{type(self).__name__}: got {got}, expected a compressor other than PerLayer, Auto, Phases and "
                    "Hierarchical"
                )
            part.traffic = self.traffic
            part.memory.skips_nonfinite = self.memory.skips_nonfinite
        self._parts: list[Compressor] = list(parts)
        self.rounds = max(part.rounds for part in self._parts)

    @property
    def parts(self) -> list[Compressor]:
        return self._parts

    @property
    def undone_on_device(self) -> bool:  # type: ignore[override]
        return all(part.undone_on_device for part in self._parts)

    @abstractmethod
    def method_for(self, name: str, shape: torch.Size, prefix: str = "") -> Compressor: ...

    def register_parameter(self, name: str, shape: torch.Size, state_name: str) -> None:
        """Put the part that is in charge of a parameter now in charge of its residual, too."""
        self._move_residual(self.method_for(name, shape, state_name.removesuffix(name)), state_name)

    def move_to(self, method: Compressor, state_name: str) -> None:
        """Put a part in charge of a parameter, and move what others have of its gradients there.

        That part adds the residual to the next gradient; a part without error feedback sends it once. Other states of
        the parameter are freed, and so are the workspaces of parts that are left without states. The parameter must not
        be in a step.
        """
        self.choice_number += 1
        self._move_residual(method, state_name)

    def _move_residual(self, method: Compressor, state_name: str) -> None:
        for part in self.parts:
            if part is not method:
                part.memory.move_residual(state_name, method.memory)
                if not part.states:
                    part.workspace.clear()

    def end_step(self, engine: Any, names: Sequence[str]) -> None:
        for part in self.parts:
            part.end_step(engine, names)

    def complete_step(self, names: Sequence[str]) -> None:
        for part in self.parts:
            part.complete_step(names)

    def skip_step(self) -> None:
        for part in self.parts:
            part.skip_step()

    def bypasses(self, grad: Tensor) -> bool:
        """Whether every part bypasses a gradient of this shape."""
        return all(part.bypasses(grad) for part in self.parts)

    def reduce(self, group: Group) -> Routine:
        raise TypeError(f"{type(self).__name__}: gradients are averaged by the methods that `method_for` returns")

    # --- configuration

    @property
    @abstractmethod
    def configuration(self) -> Any:
        """The hyper-parameters besides the parts, as a value whose text is equal on ranks that agree."""

    @property
    def digest(self) -> int:
        parts = [part.digest for part in self.parts]
        return zlib.crc32(f"{type(self).__name__}{self.configuration}{parts}".encode())

    # --- state

    def state_dict(self) -> dict[str, Any]:
        return {"method": type(self).__name__, "parts": [part.state_dict() for part in self.parts]}

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        saved = self.saved_parts(state_dict)
        self.choice_number += 1  # a part may have residuals that its successor has not taken over yet
        for part, of_part in zip(self.parts, saved):
            part._load(of_part)

    def saved_parts(self, state_dict: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """The state dicts of the parts in a state dict of this method.

        Raises:
            ValueError: the state dict belongs to another method, or has not one for each part.
        """
        check_method(state_dict, type(self).__name__)
        what, saved = f"{type(self).__name__}.load_state_dict: got", state_dict.get("parts")
        if not isinstance(saved, (list, tuple)):
            raise ValueError(f"{what} {type(saved).__name__} as parts, expected a list of state dicts")
        if len(saved) != len(self.parts):
            raise ValueError(
                f"{what} the states of {len(saved)} compressors, expected {len(self.parts)}: one for each of its parts"
            )
        return saved
