"""Local steps as benchmarks write them: local(every=30):METHOD."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LocalSteps:
    """How a method with local steps exchanges differences of parameters, as in local(every=30,lr=0.7):METHOD.

    Args:
        lr, momentum: of the outer optimizer, SGD, with Nesterov's momentum. With 1 and 0, parameters become their mean.
        every, fragments, delay, blend: as of `gradzip.outer.LocalSteps`.
    """

    every: int
    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    blend: float = 0.0

    def outer(self, params: list[Tensor]) -> torch.optim.Optimizer:
        """The outer optimizer."""
        return torch.optim.SGD(params, self.lr, self.momentum, nesterov=self.momentum > 0)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `gradzip.outer.LocalSteps` and `LocalWorkers`."""
        return {
            "every": self.every, "outer": self.outer, "fragments": self.fragments, "delay": self.delay,
            "blend": self.blend,
        }  # fmt: skip


def local_steps(method: str) -> tuple[LocalSteps | None, str]:
    """Split a method into its local steps, if it has them, and the spec of its compressor.

    Raises:
        ValueError: unknown argument.
    """
    found = re.fullmatch(r"local\(([^()]*)\):(.*)", method, re.DOTALL)
    if found is None:
        return None, method
    try:
        pairs = [pair.split("=") for pair in found[1].split(",")]
        return LocalSteps(**{name.strip(): ast.literal_eval(value.strip()) for name, value in pairs}), found[2]
    except (SyntaxError, TypeError, ValueError):
        known = ", ".join(field.name for field in fields(LocalSteps))
        raise ValueError(f"got local({found[1]}), expected every=N and numbers of these: {known}") from None
