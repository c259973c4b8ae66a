"""gradzip: gradient compression for data-parallel PyTorch training, on stock Horovod and torch.

>>> import torch
>>> approximation, nbytes = roundtrip(FFTRange(theta=0.85), torch.randn(512, 512))
>>> 512 * 512 * 4 / nbytes > 15
True
"""

from typing import TYPE_CHECKING, Any

from . import checkpoint, horovod, ops
from ._version import __version__ as __version__
from .collectives import AllToAll, Broadcast, Gather, Mean, RingSum, Traffic, fused
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
from .monitor import ReplicaMonitor
from .ops import PayloadError
from .schedule import DiminishingTheta, StepSchedule

if TYPE_CHECKING:
    from . import ddp

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
    "ReplicaMonitor",
    "RingSum",
    "SignSGD",
    "State",
    "StepSchedule",
    "TernGrad",
    "TopK",
    "Traffic",
    "checkpoint",
    "ddp",
    "fused",
    "horovod",
    "ops",
    "parse",
    "roundtrip",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name != "ddp":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return importlib.import_module(".ddp", __name__)  # needs a torch with torch.distributed, unlike all else here
