"""gradzip: gradient compression for data-parallel PyTorch training, on stock Horovod and torch.

>>> import torch
>>> approximation, nbytes = roundtrip(FFTRange(theta=0.85), torch.randn(512, 512))
>>> 512 * 512 * 4 / nbytes > 15
True
"""

from typing import TYPE_CHECKING, Any

from . import checkpoint, horovod, methods, ops, optim
from ._version import __version__ as __version__
from .auto import Auto
from .collectives import AllToAll, Broadcast, Gather, Mean, RingSum
from .compressor import Compressor
from .engines.local import LocalGroup, roundtrip, simulate
from .fusion import fused
from .gather import GatherCompressor
from .inspection import capture
from .methods import *  # noqa: F403 (the classes in its __all__)
from .monitor import ReplicaMonitor
from .ops import PayloadError
from .registry import register
from .schedule import DiminishingTheta, StepSchedule
from .spec import parse
from .state import State
from .telemetry import Monitor
from .traffic import Traffic

if TYPE_CHECKING:
    from . import ddp, fsdp

__all__ = [
    "AllToAll",
    "Auto",
    "Broadcast",
    "Compressor",
    "DiminishingTheta",
    "Gather",
    "GatherCompressor",
    "LocalGroup",
    "Mean",
    "Monitor",
    "PayloadError",
    "ReplicaMonitor",
    "RingSum",
    "State",
    "StepSchedule",
    "Traffic",
    "capture",
    "checkpoint",
    "ddp",
    "fsdp",
    "fused",
    "horovod",
    "ops",
    "optim",
    "parse",
    "register",
    "roundtrip",
    "simulate",
]
__all__ += methods.__all__


def __getattr__(name: str) -> Any:
    if name not in ("ddp", "fsdp"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    # It needs a torch with torch.distributed, which the rest does not.
    return importlib.import_module(f".{name}", __name__)
