"""What adapters share: averages and local steps in a loop that is a library's, and the states of all ranks.

Libraries save models and optimizers on one rank. Residuals differ between ranks, and so do parameters between two
exchanges of local steps. Each rank therefore saves a file of its own, as the libraries do with random states: nothing
crosses the network, and no rank holds the states of others. Lightning has one file, with the states merged.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import ddp
from ..collectives.traffic import Traffic
from ..memory import checkpoint
from ..memory.names import bare, innermost
from ..methods.base.compressor import Compressor
from ..outer import LocalSteps


def merge(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the state dicts of all ranks, in rank order: of compressors, `ReplicaAverages` or `LocalTraining`."""
    if "outer" in states[0]:
        outers = [state["outer"] for state in states]
        ranks = [{key: value for key, value in state.items() if key != "outer"} for state in states]
        return {"outer": outers[0] and checkpoint.merge(outers), "ranks": ranks}
    if "method" in states[0]:
        return checkpoint.merge(states)
    return {key: own for state in states for key, own in state.items()}


def shard(merged: Mapping[str, Any], rank: int, size: int) -> Mapping[str, Any]:
    """Get one rank's state dict from a merged one. With other ranks, what all had in common, or what rank 0 had."""
    if "outer" in merged:
        own = merged["ranks"][rank if size == len(merged["ranks"]) else 0]
        return {**own, "outer": merged["outer"] and checkpoint.shard(merged["outer"], rank, size)}
    # ReplicaAverages finds its own, and refuses those of another mesh.
    return checkpoint.shard(merged, rank, size) if "ranks" in merged else merged


@dataclass(frozen=True)
class RankFiles:
    """The files `NAME_RANK.pt` in the folder of a checkpoint: a list of state dicts of each rank."""

    name: str

    def save(self, folder: str | os.PathLike[str], states: Sequence[Any]) -> None:
        """Write this rank's file. All ranks call it."""
        rank, size = place()
        path = self._path(folder, rank)
        path.parent.mkdir(parents=True, exist_ok=True)  # the rank that makes it may be late, or on another node
        fresh = path.with_suffix(".new")
        torch.save({"size": size, "states": list(states)}, fresh)
        fresh.replace(path)

    def load(self, folder: str | os.PathLike[str]) -> list[Any]:
        """Read this rank's state dicts. None are there, with a warning, if the checkpoint was saved without.

        If as many ranks have saved it, they are what this rank has saved. Otherwise they are what all ranks had in
        common (`gradzip.checkpoint.shard`), and residuals are dropped with a warning.

        Raises:
            ValueError: this rank's file is missing.
        """
        rank, size = place()
        present = next((number for number in (0, rank) if self._path(folder, number).exists()), None)
        if present is None:
            warnings.warn(f"got a checkpoint without {self.name}_*.pt: {folder}; states begin anew", stacklevel=2)
            return []
        saved = self._read(folder, present)["size"]
        if saved == size:
            states: list[Any] = self._read(folder, rank)["states"]
        else:
            of_ranks = zip(*(self._read(folder, number)["states"] for number in range(saved)))
            states = [shard(merge(of_part), rank, size) for of_part in of_ranks]
        return copy.deepcopy(states)  # the folder may be deleted

    def _path(self, folder: str | os.PathLike[str], rank: int) -> Path:
        return Path(folder) / f"{self.name}_{rank}.pt"

    def _read(self, folder: str | os.PathLike[str], rank: int) -> Any:
        """What a rank has saved. Tensors that nobody copies are not read from the disk."""
        path = self._path(folder, rank)
        if not path.exists():
            raise ValueError(f"got no {path}, expected a file of each rank that has saved the checkpoint")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def check_compressor(compressor: Any, what: str) -> None:
    """Raise TypeError for what is no compressor. what: the name of the user's function or class."""
    if not isinstance(compressor, Compressor):
        raise TypeError(f"{what}: got {compressor!r}, expected a compressor, as gradzip.TopK()")


def of_traffic(part: Any, traffic: Traffic) -> dict[str, float]:
    """What adapters add to a library's logs, by tag. part: what `average` has returned."""
    ranks = dist.get_world_size(getattr(part, "group", None))  # of FSDP2, those that hold the same shard
    return {"gradzip/ratio": traffic.wire_ratio(ranks), "gradzip/mb": traffic.bytes_wire / 1e6}


def place() -> tuple[int, int]:
    """This rank and the number of ranks; (0, 1) without a process group."""
    started = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if started else (0, 1)


def ddp_model(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP model in what a library runs, which may have wrapped or compiled it."""
    return next((module for module in model.modules() if isinstance(module, DistributedDataParallel)), None)


def average(
    wrapped: nn.Module, model: nn.Module, compressor: Compressor, scaler: Any, group: dist.ProcessGroup | None = None
) -> Any:
    """Average the gradients of a model with a method, from now on.

    Args:
        wrapped: the model as the library runs it.
        model: the model itself, which may have modules of FSDP2.
        scaler: the GradScaler of this rank, if there is one.
        group: for FSDP2, the ranks that hold the same shard; None: they are found.

    Returns:
        What has the states: of DDP or FSDP2, or on one process the compressor. None if the model has neither.

    Raises:
        ValueError: FSDP2 without replicas.
    """
    if scaler is not None:
        compressor.follow(scaler)
    if place() == (0, 1):
        return compressor
    replica = ddp_model(wrapped)
    if replica is not None:
        return ddp.register(replica, compressor)
    mesh = next((p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")), None)
    if mesh is None:
        return None
    from .. import fsdp  # it needs a torch with fully_shard

    return fsdp.compress(model, compressor, _replicas_of(mesh) if group is None else group)


def _replicas_of(mesh: Any) -> dist.ProcessGroup:
    """A group of the ranks that hold the same shards as this one: those at the same place in their mesh."""
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, mesh.get_coordinate())
    by_place: dict[Any, list[int]] = {}
    for rank, place_of in enumerate(places):
        by_place.setdefault(None if place_of is None else tuple(place_of), []).append(rank)
    if min(map(len, by_place.values())) == 1:
        raise ValueError(
            f"Compression: got a model that is sharded over all {len(places)} ranks, expected replicas of shards: "
            "fully_shard(module, mesh=mesh['shard']), or Accelerator(parallelism_config=gradzip.integrations.accelerate"
            ".Replicas(...)); without replicas, use gradzip.fsdp.reduce_scatter"
        )
    group: Any = dist.new_subgroups_by_enumeration([*by_place.values()])[0]  # all ranks make all groups
    return group


class LocalTraining:
    """`gradzip.outer.LocalSteps` of a model that a library has wrapped. Nothing on one process.

    Args:
        model: a DDP model, or one that is not wrapped.
        optimizer: one of torch, which steps it.
        scaler: the GradScaler of this rank, if there is one.
        options: of LocalSteps; `start` is 0 by default.

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
        self._model, self._optimizer, self._scaler = innermost(model), optimizer, scaler
        self.outer: LocalSteps | None = None
        if place() != (0, 1):
            self.outer = LocalSteps(bare(model), optimizer, compressor, **{"start": 0} | options)

    def synchronize(self) -> None:
        """Make the parameters of all ranks equal (`gradzip.outer.LocalSteps.synchronize`). All ranks call it."""
        if self.outer is not None:
            self.outer.synchronize()

    def remove(self) -> None:
        """Exchange no more. A DDP model averages gradients again."""
        if self.outer is not None:
            self.outer.remove()

    def state_dict(self) -> dict[str, Any]:
        """What differs between ranks: trained parameters, buffers, states of the optimizer and of LocalSteps."""
        model = self._model
        frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        return {
            "model": {name: value for name, value in model.state_dict().items() if name not in frozen},
            "optimizer": self._optimizer.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "outer": None if self.outer is None else self.outer.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` has returned.

        Raises:
            ValueError: it is of one process, and this is one of several.
        """
        if self.outer is not None and state_dict["outer"] is None:
            raise ValueError("got a checkpoint of one process, expected one of several: load the model alone")
        self._model.load_state_dict(state_dict["model"], strict=False)
        self._optimizer.load_state_dict(state_dict["optimizer"])
        if self._scaler is not None:
            self._scaler.load_state_dict(state_dict["scaler"])
        if self.outer is not None:
            self.outer.load_state_dict(state_dict["outer"])
