"""DDP's buckets, and the names of their parameters."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..buckets import Bucket
from ..engines.torch import TorchEngine
from ..fusion import Round
from ..routines import Routine

Future: TypeAlias = torch.futures.Future[torch.Tensor]


class Names:
    """The names of one model's parameters, as long as the parameters live."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.names: Any = WeakIdKeyDictionary()  # parameter -> name
        self._numbers = itertools.count()

    def matches(self, named: Mapping[Tensor, str]) -> bool:
        """Whether these parameters belong to this model: at least one is known, and no name is another parameter's."""
        owners = {name: parameter for parameter, name in self.names.items()}
        same = all(owners.get(name, parameter) is parameter for parameter, name in named.items())
        return same and any(parameter in self.names for parameter in named)

    def add_number(self, parameter: Tensor) -> str:
        """Name an unnamed parameter by the next number."""
        name = self.names[parameter] = str(next(self._numbers))
        return name


class GradBuffer(Bucket):
    """A bucket in progress whose averages are written to a buffer of DDP, which waits for a future of it."""

    def __init__(self, buffer: Tensor, routines: dict[Any, Routine], engine: TorchEngine, slot: str) -> None:
        super().__init__(routines, Round.first(routines), engine, slot)
        self.buffer = buffer
        self.future = Future(devices=[buffer.device] if buffer.is_cuda else None)
