"""gradzip: gradient compression for data-parallel PyTorch training, on stock Horovod and torch.

>>> import torch
>>> approximation, nbytes = roundtrip(FFTRange(theta=0.85), torch.randn(512, 512))
>>> 512 * 512 * 4 / nbytes > 15
True
"""

from . import horovod, ops
from .collectives import AllToAll, Gather, Mean, Traffic, fused
from .compressor import Compressor, GatherCompressor, State
from .engines.local import LocalGroup, roundtrip, simulate
from .methods import DGC, Cast, FFTRange, NoCompression, PerLayer, RandomK, TopK, parse
from .ops import PayloadError
from .schedule import DiminishingTheta, StepSchedule

__version__ = "0.1.0"

__all__ = [
    "DGC",
    "AllToAll",
    "Cast",
    "Compressor",
    "DiminishingTheta",
    "FFTRange",
    "Gather",
    "GatherCompressor",
    "LocalGroup",
    "Mean",
    "NoCompression",
    "PayloadError",
    "PerLayer",
    "RandomK",
    "State",
    "StepSchedule",
    "TopK",
    "Traffic",
    "fused",
    "horovod",
    "ops",
    "parse",
    "roundtrip",
    "simulate",
]
