"""No compression: the baseline."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..collectives import Mean
from ..collectives.routines import Routine
from .base.compressor import Average, Compressor
from .base.group import Group
from .base.registry import register


@register("none")
@dataclass
class NoCompression(Compressor):
    """Averages gradients uncompressed, by an all-reduce."""

    unbiased = True
    undone_on_device = True

    def bypasses(self, grad: Tensor) -> bool:
        return True

    def reduce(self, group: Group) -> Routine:
        return Average([(yield Mean(group.vector))])
