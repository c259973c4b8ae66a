"""Lightning: gradient compression and local steps, as callbacks.

    Trainer(strategy="ddp", callbacks=[Compression(gradzip.BlockFloat())])
    Fabric(strategy="ddp", callbacks=[Compression(gradzip.BlockFloat())])

Lightning's own `DDPStrategy(ddp_comm_hook=...)` registers a hook on CUDA only, and a checkpoint of Lightning has the
states of rank 0 only. The callbacks work on every device, and gather the states of all ranks for the checkpoint.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import ddp, outer
from ..memory import checkpoint
from ..methods.base.compressor import Compressor
from .shared import LocalTraining

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback


class Compression(Callback):
    """Averages gradients with a method. A callback of `Trainer` and of `Fabric`.

    With DDP, it registers gradzip's hook. With `ModelParallelStrategy` and modules of `fully_shard`, it averages the
    shards over their replicas as `gradzip.fsdp.compress` does, and finds the ranks that hold the same shards. In one
    process, it does nothing. A Fabric calls it in `fabric.setup`, for each model.

    The compressor follows the `GradScaler` of precision "16-mixed". Gradient accumulation needs nothing.

    The states of all ranks are in the Trainer's checkpoints, and come back with `ckpt_path`. With a Fabric, save the
    callback beside the model: ``fabric.save(path, {"model": model, "compression": compression})``.

    Args:
        compressor: the method.

    Raises:
        TypeError: compressor is not a compressor.
        ValueError: at the start of a fit, another strategy of several ranks, or shards without replicas.
    """

    def __init__(self, compressor: Compressor) -> None:
        if not isinstance(compressor, Compressor):
            raise TypeError(f"Compression: got {compressor!r}, expected a compressor as gradzip.BlockFloat()")
        self.compressor = compressor
        self._replicas: Any = None  # what gradzip.fsdp.compress has returned
        self._started = False
        self._loaded: Mapping[str, Any] | None = None  # before the start

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Called by a Trainer when the strategy has wrapped the model."""
        self._start(trainer.strategy, trainer.strategy.model, pl_module, trainer.precision_plugin)

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Called by a Fabric at the end of `setup`."""
        self._start(fabric.strategy, module, module.module, fabric.strategy.precision)

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks, on rank 0; {} on all others. All ranks must call it, as they save a checkpoint."""
        states = _gather((self._replicas or self.compressor).state_dict())
        if not states:
            return {}
        if self._replicas is None:
            return checkpoint.merge(states)
        return {place: own for state in states for place, own in state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's states of what `state_dict` has returned on rank 0, now or when training starts."""
        if not self._started:
            self._loaded = state_dict
        elif self._replicas is None:
            self.compressor.load_state_dict(checkpoint.shard(state_dict, *_place()))
        else:
            self._replicas.load_state_dict(state_dict)

    def _start(self, strategy: Any, wrapped: nn.Module, module: nn.Module, precision: Any) -> None:
        """Average the gradients of a model from now on.

        Args:
            wrapped: the model as the strategy runs it.
            module: the model itself.
            precision: Lightning's plugin, which may have a GradScaler.
        """
        scaler = getattr(precision, "scaler", None)
        if scaler is not None:
            self.compressor.follow(scaler)
        _, size = _place()
        if size > 1:
            model = _ddp_model(wrapped)
            mesh = next((p.device_mesh for p in module.parameters() if hasattr(p, "device_mesh")), None)
            if model is not None:
                ddp.register(model, self.compressor)
            elif mesh is not None:
                from .. import fsdp  # it needs a torch with fully_shard

                self._replicas = fsdp.compress(module, self.compressor, _replicas_of(mesh))
            else:
                raise ValueError(
                    f"Compression: got {type(strategy).__name__}, expected strategy='ddp', or ModelParallelStrategy "
                    "and a model after fully_shard: other strategies average gradients out of reach"
                )
        self._started = True
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            self.load_state_dict(loaded)


class LocalSteps(Callback):
    """Trains each rank alone, and averages what has changed after every n-th step: `gradzip.outer.LocalSteps`.

    A callback of a Trainer with strategy="ddp" and one optimizer. It takes the model out of DDP when training starts:
    nothing communicates between exchanges, and DDP's buckets are freed. A communication hook that does nothing would
    copy gradients to the buckets, and broadcast buffers, in each step; `no_sync` would keep the buckets.

    When training ends, ranks synchronize: all have the global parameters then. Until then, each rank validates its own
    parameters. In one process, it does nothing.

    Training continues from a checkpoint with the same bits. Beside model, optimizer and loss scale of rank 0, which
    Lightning saves, it has those of all ranks: its size grows with their number, and it passes through the memory of
    rank 0. On another number of ranks, all continue from what rank 0 had.

    Args:
        compressor: the method; default `NoCompression()`.
        options: the other arguments of `gradzip.outer.LocalSteps`: every, outer, fragments, delay, blend.

    Attributes:
        outer: the `gradzip.outer.LocalSteps` of the current fit, or of the last one.

    Raises:
        ValueError: when training starts, another strategy of several ranks, several optimizers, or options that do not
            go together.
    """

    def __init__(self, compressor: Compressor | None = None, **options: Any) -> None:
        self.compressor = compressor
        self.options = options
        self.outer: outer.LocalSteps | None = None
        self._training: LocalTraining | None = None
        self._loaded: Mapping[str, Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called by a Trainer before the first step, when it has loaded rank 0's model and optimizer."""
        if _place() == (0, 1):
            return
        if _ddp_model(trainer.strategy.model) is None or len(trainer.optimizers) != 1:
            raise ValueError(
                f"LocalSteps: got {type(trainer.strategy).__name__} and {len(trainer.optimizers)} optimizers, expected "
                "strategy='ddp' and one optimizer"
            )
        trainer.strategy.model = pl_module
        (optimizer,) = trainer.optimizers
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._training = LocalTraining(pl_module, optimizer, self.compressor, scaler, **self.options)
        self.outer = self._training.outer
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            rank, size = _place()
            own = loaded["ranks"][rank if size == len(loaded["ranks"]) else 0]
            self._training.load_state_dict({**own, "outer": checkpoint.shard(loaded["outer"], rank, size)})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Called by a Trainer after the last step."""
        if self._training is not None:
            self._training.synchronize()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called by a Trainer at the end of a fit."""
        if self._training is not None:
            self._training.remove()

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks, on rank 0; {} on all others. All ranks must call it, as they save a checkpoint."""
        if self._training is None:
            return {}
        own = self._training.state_dict()
        if dist.get_rank():
            del own["outer"]["global"]  # it is rank 0's
        states = _gather(own)
        return {"outer": checkpoint.merge([state.pop("outer") for state in states]), "ranks": states} if states else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep what `state_dict` has returned on rank 0. Each rank loads its states when training starts."""
        self._loaded = state_dict


def _place() -> tuple[int, int]:
    """This rank and the number of ranks; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _gather(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Gather the states of all ranks on rank 0, with tensors in host memory. Returns [] on all others."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    rank, size = _place()
    files: list[Any] = [buffer.getvalue()] if size == 1 else [None] * size
    if size > 1:
        dist.gather_object(buffer.getvalue(), files if rank == 0 else None)
    return [] if rank else [torch.load(io.BytesIO(file), map_location="cpu", weights_only=True) for file in files]


def _ddp_model(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP model in what Lightning runs, which may have wrapped or compiled it."""
    return next((module for module in model.modules() if isinstance(module, DistributedDataParallel)), None)


def _replicas_of(mesh: Any) -> dist.ProcessGroup:
    """A group of the ranks that hold the same shards as this one: those at the same place in their mesh."""
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, mesh.get_coordinate())
    ranks = [rank for rank, place in enumerate(places) if place == places[dist.get_rank()]]
    if len(ranks) == 1:
        raise ValueError(
            f"Compression: got a model that is sharded over all {len(places)} ranks, expected replicas of shards, as "
            "of fully_shard(module, mesh=mesh['shard']); without replicas, quantize the reduce-scatter: "
            "gradzip.fsdp.reduce_scatter"
        )
    group: Any = dist.new_group(ranks, use_local_synchronization=True)
    return group
