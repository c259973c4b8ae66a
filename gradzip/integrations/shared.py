"""What adapters share: checkpoints with a file of each rank, and local steps in a loop that is a library's.

Libraries save models and optimizers on one rank. Residuals differ between ranks, and so do parameters between two
exchanges of local steps. Each rank therefore saves a file of its own, as the libraries do with random states: nothing
crosses the network, and no rank holds the states of others.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..memory import checkpoint
from ..methods.base.compressor import Compressor
from ..outer import LocalSteps


@dataclass(frozen=True)
class RankFiles:
    """The files `NAME_RANK.pt` in the folder of a checkpoint: a list of state dicts of each rank.

    Args:
        name: of the files.
        rank, size: this rank, and the number of ranks.
    """

    name: str
    rank: int
    size: int

    def save(self, folder: str | os.PathLike[str], states: Sequence[Any]) -> None:
        """Write this rank's file. All ranks call it."""
        path = self._path(folder, self.rank)
        path.parent.mkdir(parents=True, exist_ok=True)  # the rank that makes it may be late, or on another node
        fresh = path.with_suffix(".new")
        torch.save({"size": self.size, "states": list(states)}, fresh)
        fresh.replace(path)

    def load(self, folder: str | os.PathLike[str]) -> list[Any] | None:
        """Read this rank's state dicts. None, with a warning, if the checkpoint was saved without.

        If as many ranks have saved it, they are what this rank has saved. Otherwise they are what all ranks had in
        common (`gradzip.checkpoint.shard`), and residuals are dropped with a warning.

        Raises:
            ValueError: this rank's file is missing; or another number of ranks has saved states of FSDP2, or one rank
                those of local steps.
        """
        present = next((rank for rank in (0, self.rank) if self._path(folder, rank).exists()), None)
        if present is None:
            warnings.warn(f"got a checkpoint without {self.name}_*.pt: {folder}; states begin anew", stacklevel=2)
            return None
        size = self._read(folder, present)["size"]
        if size == self.size:
            states = self._read(folder, self.rank)["states"]
        else:
            of_ranks = zip(*(self._read(folder, rank)["states"] for rank in range(size)))
            states = [self._resized(folder, of_part) for of_part in of_ranks]
        own: list[Any] = copy.deepcopy(states)  # the folder may be deleted
        return own

    def _resized(self, folder: str | os.PathLike[str], states: Sequence[Any]) -> Any:
        if "outer" in states[0]:  # of LocalTraining: all ranks go on from what rank 0 had
            if len(states) == 1:
                raise ValueError(
                    f"got a checkpoint of one process in {folder}, where nothing is exchanged, expected one of "
                    "several: load the model alone, and begin local steps anew"
                )
            outers = [state["outer"] for state in states]
            return {**states[0], "outer": checkpoint.shard(checkpoint.merge(outers), self.rank, self.size)}
        if "method" not in states[0]:
            raise ValueError(
                f"got the states of {len(states)} ranks in {folder}, expected those of {self.size}: go on with as many "
                "ranks as have saved them"
            )
        return checkpoint.shard(checkpoint.merge(states), self.rank, self.size)

    def _path(self, folder: str | os.PathLike[str], rank: int) -> Path:
        return Path(folder) / f"{self.name}_{rank}.pt"

    def _read(self, folder: str | os.PathLike[str], rank: int) -> Any:
        """What a rank has saved. Tensors that nobody copies are not read from the disk."""
        path = self._path(folder, rank)
        if not path.exists():
            raise ValueError(f"got no {path}, expected a file of each rank that has saved the checkpoint")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def bare(model: nn.Module) -> nn.Module:
    """The model that `torch.compile` has compiled, or the model itself."""
    original: nn.Module = getattr(model, "_orig_mod", model)
    return original


class LocalTraining:
    """`gradzip.outer.LocalSteps` of a model that a library has wrapped. Nothing on one process.

    A DDP model stops averaging gradients: it is set to what `no_sync()` sets, for good, and no longer broadcasts
    buffers. Unwrapping it would take the library's mixed precision and its references away; a communication hook that
    does nothing would still copy gradients to buckets, and broadcast buffers in each step.

    Args:
        model: a DDP model, or one that is not wrapped.
        optimizer: one of torch, which steps it.
        scaler: the GradScaler of this rank, if there is one.
        options: of LocalSteps.

    Attributes:
        outer: the LocalSteps; None on one process.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        compressor: Compressor | None,
        scaler: Any,
        **options: Any,
    ) -> None:
        self._ddp = model = bare(model)
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._optimizer, self._scaler = optimizer, scaler
        self.outer: LocalSteps | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.outer = LocalSteps(self._model, optimizer, compressor, **options)
            self._average_in_ddp(False)

    def synchronize(self) -> None:
        """Make the parameters of all ranks equal (`gradzip.outer.LocalSteps.synchronize`). All ranks call it."""
        if self.outer is not None:
            self.outer.synchronize()

    def remove(self) -> None:
        """Exchange no more. A DDP model averages gradients again."""
        if self.outer is not None:
            self.outer.remove()
            self._average_in_ddp(True)

    def state_dict(self) -> dict[str, Any]:
        """What differs between ranks: trained parameters, buffers, states of the optimizer and of LocalSteps."""
        return {
            "model": {
                name: value
                for name, value in self._model.state_dict(keep_vars=True).items()
                if value.requires_grad or not isinstance(value, nn.Parameter)
            },
            "optimizer": self._optimizer.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "outer": None if self.outer is None else self.outer.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._model.load_state_dict(state_dict["model"], strict=False)
        self._optimizer.load_state_dict(state_dict["optimizer"])
        if self._scaler is not None:
            self._scaler.load_state_dict(state_dict["scaler"])
        if self.outer is not None:
            self.outer.load_state_dict(state_dict["outer"])

    def _average_in_ddp(self, enabled: bool) -> None:
        if isinstance(self._ddp, DistributedDataParallel):
            self._ddp.require_backward_grad_sync = self._ddp.require_forward_param_sync = enabled
