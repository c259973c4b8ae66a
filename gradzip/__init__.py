"""gradzip: gradient compression for data-parallel PyTorch training, on stock Horovod and torch.

>>> import torch
>>> approximation, nbytes = roundtrip(FFTRange(theta=0.85), torch.randn(512, 512))
>>> 512 * 512 * 4 / nbytes > 15
True
"""

from . import horovod, ops
from .collectives import AllToAll, Broadcast, Gather, Mean, RingSum, Traffic, fused
from .compressor import Compressor, GatherCompressor, State
from .engines.local import LocalGroup, roundtrip, simulate
from .methods import (
    ATOMO,
    DGC,
    QSGD,
    Cast,
    FFTRange,
    NoCompression,
    OneBitSGD,
    PerLayer,
    RandomK,
    SignSGD,
    TernGrad,
    TopK,
    parse,
)
from .ops import PayloadError
from .schedule import DiminishingTheta, StepSchedule

__version__ = "0.1.0"

__all__ = [
    "ATOMO",
    "DGC",
    "QSGD",
    "AllToAll",
    "Broadcast",
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
    "PerLayer",
    "RandomK",
    "RingSum",
    "SignSGD",
    "State",
    "StepSchedule",
    "TernGrad",
    "TopK",
    "Traffic",
    "fused",
    "horovod",
    "ops",
    "parse",
    "roundtrip",
    "simulate",
]
