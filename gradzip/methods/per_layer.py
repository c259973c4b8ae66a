"""A method for each parameter, chosen by its name or shape."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .base.composite import Composite
from .base.compressor import Compressor
from .base.registry import register
from .base.rules import Predicate, Rule, compiled, matches, text
from .none import NoCompression

_RULE = "(regular expression or predicate(name, shape), compressor)"


@register(
    "per-layer",
    examples=[
        "^w$=topk(theta=0.9),default=acpsgd",
        "[w0]$=none,[v23]$=topk(theta=0.8,exchange=scatter_reduce),default=dgc",
    ],
)
@dataclass
class PerLayer(Composite):
    """Compresses each parameter by the compressor of the first rule that matches it.

    TernGrad's authors, for example, leave the last layer uncompressed (Wen et al., NeurIPS 2017, section 3.2).

    Args:
        rules: pairs of a rule and a compressor. A rule is a regular expression to search for in the parameter's name,
            or a predicate(name, shape). Each compressor keeps the states of its parameters, and applies its own
            `min_numel`.
        default: for parameters that no rule matches.

    >>> from gradzip import Cast, NoCompression
    >>> compressor = PerLayer([(r"^fc\\.", NoCompression()), (lambda name, shape: len(shape) == 4, Cast())])
    >>> compressor.method_for("fc.weight", torch.Size([10, 64]))
    NoCompression(min_numel=1024)
    >>> compressor.method_for("conv1.weight", torch.Size([64, 3, 3, 3]))
    Cast(min_numel=1024, dtype=torch.float16)
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
            self._tests.append(compiled(rule[0], "PerLayer"))
        self.set_parts([*(compressor for _, compressor in self.rules), self.default])
        self._chosen: dict[tuple[str, torch.Size], Compressor] = {}

    @property
    def selects_by_name(self) -> bool:
        return super().selects_by_name or any(isinstance(test, re.Pattern) for test in self._tests)

    def method_for(self, name: str, shape: torch.Size, prefix: str = "") -> Compressor:
        chosen = self._chosen.get((name, shape))
        if chosen is None:
            found = (part for test, part in zip(self._tests, self.parts) if matches(test, name, shape))
            chosen = self._chosen[name, shape] = next(found, self.default)
        return chosen

    @property
    def configuration(self) -> list[str]:
        return [text(rule) for rule, _ in self.rules]
