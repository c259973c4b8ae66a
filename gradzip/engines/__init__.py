"""What runs collectives. An engine is imported when it is made: it needs Horovod or torch.distributed."""

from __future__ import annotations

from typing import Any

import torch

from ..collectives.engine import Engine
from ..collectives.traffic import Traffic


def torch_engine(group: Any, traffic: Traffic, device: torch.device, shards: Any = None) -> Engine:
    """The engine of a torch process group. shards: the group of the ranks that hold the shards of a model."""
    from .torch import TorchEngine

    return TorchEngine(group, traffic, device, shards)


def horovod_engine(process_set: Any, traffic: Traffic) -> Engine:
    """The engine of a Horovod process set."""
    from .horovod import HorovodEngine

    return HorovodEngine(process_set, traffic)
