"""Averaging in half precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..collectives import Mean
from ..collectives.routines import Routine
from .base.compressor import Average, Compressor
from .base.group import Group
from .base.registry import register


@register("fp16", examples=["", "dtype=bfloat16"])
@dataclass
class Cast(Compressor):
    """Casts gradients to a 16-bit type and averages those.

    Args:
        dtype: torch.float16 or torch.bfloat16, or the name of one, such as "float16". In float16, a step overflows if
            an element of one rank's gradient, or of the average, exceeds 65504; sums may (`Mean`). Such a step is
            skipped; use a GradScaler if that happens often. bfloat16 has float32's range and 8 bits of precision;
            Horovod cannot average it, so it is sent as float32 there, which saves nothing.
    """

    undone_on_device = reads_half = True

    dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.dtype, str):
            self.dtype = getattr(torch, self.dtype, self.dtype)
        self.check("dtype", self.dtype in (torch.float16, torch.bfloat16), "torch.float16 or torch.bfloat16")

    def groups_by(self, shape: torch.Size) -> tuple[int, ...]:
        return self.joined_shape(shape)

    def reduce(self, group: Group) -> Routine:
        cast = group.vector.to(self.dtype, copy=True)  # the collective may change it
        group.release_parts()
        average = yield Mean(cast)  # cast back where it is written
        if group.on_device:
            return Average([average])
        return (yield from self.with_max_abs(group, average))
