"""gradzip: gradient compression for data-parallel PyTorch training, on stock Horovod and torch.

>>> import torch
>>> approximation, nbytes = roundtrip(FFTRange(theta=0.85), torch.randn(512, 512))
>>> 512 * 512 * 4 / nbytes > 15
True
"""

from typing import TYPE_CHECKING, Any

from . import horovod, methods, ops, optim, recipes
from ._version import __version__ as __version__
from .advice.auto import Auto
from .averaging.local import LocalGroup, roundtrip, simulate
from .averaging.memory_bytes import memory_bytes
from .collectives import AllToAll, Broadcast, Gather, Mean, RingSum
from .collectives.fusion import fused
from .collectives.traffic import Traffic
from .inspection import capture
from .memory import checkpoint
from .memory.state import State
from .methods import *  # noqa: F403 (the classes in its __all__)
from .methods.base.compressor import Compressor
from .methods.base.gather import GatherCompressor
from .methods.base.registry import register
from .methods.base.schedule import DiminishingTheta, StepSchedule
from .methods.spec import parse
from .ops import PayloadError
from .watch.monitor import Monitor
from .watch.replicas import ReplicaMonitor

if TYPE_CHECKING:
    from . import ddp, fsdp, integrations, outer

__all__ = [
    "AllToAll", "Auto", "Broadcast", "Compressor", "DiminishingTheta", "Gather", "GatherCompressor", "LocalGroup",
    "Mean", "Monitor", "PayloadError", "ReplicaMonitor", "RingSum", "State", "StepSchedule", "Traffic", "capture",
    "checkpoint", "ddp", "fsdp", "fused", "horovod", "integrations", "memory_bytes", "ops", "optim", "outer", "parse",
    "recipes", "register", "roundtrip", "simulate",
]  # fmt: skip
__all__ += methods.__all__


def __getattr__(name: str) -> Any:
    if name not in ("ddp", "fsdp", "integrations", "outer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    # They need a torch with torch.distributed, or other libraries, which the rest does not.
    return importlib.import_module(f".{name}", __name__)
