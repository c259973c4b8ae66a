"""Averaging in half precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..collectives import Mean, Routine
from ..compressor import Compressor, State


@dataclass
class Cast(Compressor):
    """Casts gradients to a 16-bit type and averages those.

    dtype: torch.float16 (magnitudes above 65504, or sums above it on the way, become infinite, and the step is one that
    GradScaler skips) or torch.bfloat16 (float32's range, 8 bits of precision; Horovod cannot average it, so there it
    travels as float32 and saves nothing). A name such as "float16" will do.
    """

    dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.dtype, str):
            self.dtype = getattr(torch, self.dtype, self.dtype)
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"Cast: got dtype = {self.dtype}, expected torch.float16 or torch.bfloat16")

    def reduce(self, grad: Tensor, state: State) -> Routine:
        average = yield Mean(grad.to(self.dtype))
        return average.float()
