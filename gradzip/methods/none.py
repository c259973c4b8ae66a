"""No compression: the row to compare every other with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..collectives import Mean, Routine
from ..compressor import Compressor, State


@dataclass
class NoCompression(Compressor):
    """The plain average."""

    def bypasses(self, grad: Tensor) -> bool:
        return True

    def reduce(self, grad: Tensor, state: State) -> Routine:
        return (yield Mean(grad))
