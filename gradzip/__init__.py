"""gradzip: gradient compression for data-parallel PyTorch training, on stock Horovod and torch.

>>> import torch
>>> approximation, nbytes = roundtrip(FFTRange(theta=0.85), torch.randn(512, 512))
>>> 512 * 512 * 4 / nbytes > 15
True
"""

from . import checkpoint, horovod, ops
from ._version import __version__ as __version__
from .collectives import AllToAll, Broadcast, Gather, Mean, Traffic, fused
from .compressor import Compressor, GatherCompressor, State
from .engines.local import LocalGroup, roundtrip, simulate
from .methods import (
    ACPSGD,
    ATOMO,
    DGC,
    QSGD,
    Cast,
    FFTRange,
    GradiVeQ,
    NoCompression,
    OneBitSGD,
    PerLayer,
    PowerSGD,
    RandomK,
    SignSGD,
    TernGrad,
    TopK,
    parse,
)
from .ops import PayloadError
from .schedule import DiminishingTheta, StepSchedule

__all__ = [
    "ACPSGD",
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
    "GradiVeQ",
    "LocalGroup",
    "Mean",
    "NoCompression",
    "OneBitSGD",
    "PayloadError",
    "PerLayer",
    "PowerSGD",
    "RandomK",
    "SignSGD",
    "State",
    "StepSchedule",
    "TernGrad",
    "TopK",
    "Traffic",
    "checkpoint",
    "fused",
    "horovod",
    "ops",
    "parse",
    "roundtrip",
    "simulate",
]
