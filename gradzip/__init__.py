"""gradzip: gradient compression for data-parallel PyTorch training, on stock Horovod and torch.

>>> import torch
>>> approximation, nbytes = roundtrip(FFTRange(theta=0.85), torch.randn(512, 512))
>>> 512 * 512 * 4 / nbytes > 15
True
"""

from . import horovod, ops
from .collectives import Gather, Mean, Traffic, fused
from .compressor import Compressor, GatherCompressor, State
from .engines.local import LocalGroup, roundtrip, simulate
from .methods import ATOMO, QSGD, Cast, FFTRange, NoCompression, OneBitSGD, SignSGD, TernGrad, parse
from .ops import PayloadError
from .schedule import DiminishingTheta, StepSchedule

__version__ = "0.1.0"

__all__ = [
    "ATOMO",
    "QSGD",
    "Cast",
    "Compressor",
    "DiminishingTheta",
    "FFTRange",
    "Gather",
    "GatherCompressor",
    "LocalGroup",
    "Mean",
    "NoCompression",
    "OneBitSGD",
    "PayloadError",
    "SignSGD",
    "State",
    "StepSchedule",
    "TernGrad",
    "Traffic",
    "fused",
    "horovod",
    "ops",
    "parse",
    "roundtrip",
    "simulate",
]
