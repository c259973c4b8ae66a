"""A method for each parameter, by its name or shape."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..collectives import Routine
from ..compressor import Compressor, State
from .none import NoCompression

_RULE = "(regular expression or predicate(name, shape), compressor)"

Predicate = Callable[[str, torch.Size], bool]
Rule = str | re.Pattern[str] | Predicate


@dataclass
class PerLayer(Compressor):
    """The compressor of the first rule that fits a parameter; `default` where none does.

    rules: (regular expression to be found in the parameter's name, or predicate(name, shape)) and compressor, in order.
    The compressors decide by their own `min_numel` what they leave uncompressed, and keep the states of their
    parameters.

    TernGrad, say, leaves the last layer alone (Wen et al., NeurIPS 2017, section 3.2).

    >>> from gradzip import Cast, NoCompression
    >>> compressor = PerLayer([(r"^fc\\.", NoCompression()), (lambda name, shape: len(shape) == 4, Cast())])
    >>> compressor.part("fc.weight", torch.Size([10, 64])), compressor.part("conv1.weight", torch.Size([64, 3, 3, 3]))
    (NoCompression(min_numel=1024), Cast(min_numel=1024, dtype=torch.float16))
    """

    rules: Sequence[tuple[Rule, Compressor]]
    default: Compressor = field(default_factory=NoCompression)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rules or not isinstance(self.rules, Sequence):
            got = f"rules = {self.rules!r}" if self.rules else "no rules"
            raise ValueError(f"PerLayer: got {got}, expected a list of {_RULE}")
        self._tests: list[re.Pattern[str] | Predicate] = []
        for rule in self.rules:
            if not (isinstance(rule, tuple) and len(rule) == 2):
                raise ValueError(f"PerLayer: got the rule {rule!r}, expected {_RULE}")
            self._tests.append(_test(rule[0]))
        for compressor in self.parts:
            if not isinstance(compressor, Compressor) or isinstance(compressor, PerLayer):
                raise ValueError(f"PerLayer: got {compressor!r}, expected a compressor that is no PerLayer itself")
            compressor.traffic = self.traffic
        self.rounds = max(compressor.rounds for compressor in self.parts)
        self._chosen: dict[tuple[str, torch.Size], Compressor] = {}

    @property
    def parts(self) -> list[Compressor]:
        """The compressors of all rules, and the default."""
        return [*(compressor for _, compressor in self.rules), self.default]

    @property
    def looks_at_names(self) -> bool:
        """Whether a parameter needs its name to be given its compressor."""
        return any(isinstance(test, re.Pattern) for test in self._tests)

    def part(self, name: str, shape: torch.Size) -> Compressor:
        chosen = self._chosen.get((name, shape))
        if chosen is None:
            fitting = (part for test, part in zip(self._tests, self.parts) if _fits(test, name, shape))
            chosen = self._chosen[name, shape] = next(fitting, self.default)
        return chosen

    def follow(self, scaler: Any) -> Compressor:
        for part in self.parts:
            part.follow(scaler)
        return super().follow(scaler)

    def move(self, rank: int, size: int) -> None:
        for part in self.parts:
            part.move(rank, size)

    def average(self, grad: Tensor, name: str, rank: int = 0, size: int = 1) -> Routine:
        return self.part(name, grad.shape).average(grad, name, rank, size)

    def reduce(self, grad: Tensor, state: State) -> Routine:
        return self.part(state.name, grad.shape).reduce(grad, state)

    def bypasses(self, grad: Tensor) -> bool:
        """Whether a gradient goes uncompressed whatever its name is."""
        return all(part.bypasses(grad) for part in self.parts)

    def clone(self) -> Compressor:
        rules = [(rule, part.clone()) for rule, part in self.rules]
        return self._clone_with(rules=rules, default=self.default.clone())

    @property
    def digest(self) -> int:
        rules = [_text(rule) for rule, _ in self.rules]
        return zlib.crc32(f"PerLayer{rules}{[part.digest for part in self.parts]}".encode())

    def state_dict(self) -> dict[str, Any]:
        return {"method": "PerLayer", "parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict({"method": state_dict.get("method"), "states": {}})
        saved = state_dict["parts"]
        if len(saved) != len(self.parts):
            raise ValueError(
                f"PerLayer.load_state_dict: got the states of {len(saved)} compressors, expected {len(self.parts)}: "
                "one for each rule and the default"
            )
        for part, values in zip(self.parts, saved):
            part.load_state_dict(values)


def _test(rule: Rule) -> re.Pattern[str] | Predicate:
    if isinstance(rule, (str, re.Pattern)):
        try:
            return re.compile(rule)
        except re.error as error:
            raise ValueError(f"PerLayer: got the regular expression {rule!r}: {error}") from None
    if not callable(rule):
        raise ValueError(f"PerLayer: got the rule {rule!r}, expected a regular expression or predicate(name, shape)")
    return rule


def _fits(test: re.Pattern[str] | Predicate, name: str, shape: torch.Size) -> bool:
    return test.search(name) is not None if isinstance(test, re.Pattern) else test(name, shape)


def _text(rule: Rule) -> str:
    """What a rule adds to the digest: a predicate's repr may hold an address."""
    if isinstance(rule, str):
        return rule
    return rule.pattern if isinstance(rule, re.Pattern) else getattr(rule, "__qualname__", type(rule).__qualname__)
