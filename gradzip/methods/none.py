"""No compression: the baseline."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..collectives import Mean
from ..compressor import Compressor
from ..registry import register
from ..routines import Routine
from ..state import State


@register("none")
@dataclass
class NoCompression(Compressor):
    """Averages gradients uncompressed, by an all-reduce."""

    def bypasses(self, grad: Tensor) -> bool:
        return True

    def reduce(self, grad: Tensor, state: State) -> Routine:
        return (yield Mean(grad))
