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

from .. import outer
from ..methods.base.compressor import Compressor
from .shared import LocalTraining, average, check_compressor, ddp_model, merge, place, shard

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback


class _Callback(Callback):
    """Has the states of all ranks in checkpoints, and loads those of this rank when training starts."""

    _part: Any = None  # what has the states of this rank, once training has started
    _loaded: Mapping[str, Any] | None = None  # before it starts

    def _begin(self, part: Any) -> None:
        self._part = part
        if self._loaded is not None:
            self._load(self._loaded)

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        self._part.load_state_dict(shard(state_dict, *place()))
        self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks, on rank 0; {} on all others. All ranks must call it, as they save a checkpoint."""
        states = [] if self._part is None else _gather(self._part.state_dict())
        return merge(states) if states else {}


class Compression(_Callback):
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
        check_compressor(compressor, "Compression")
        self.compressor = compressor

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Called by a Trainer when the strategy has wrapped the model."""
        self._start(trainer.strategy, trainer.strategy.model, pl_module, trainer.precision_plugin)

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Called by a Fabric at the end of `setup`."""
        self._start(fabric.strategy, module, module.module, fabric.strategy.precision)

    def _start(self, strategy: Any, wrapped: nn.Module, module: nn.Module, precision: Any) -> None:
        part = average(wrapped, module, self.compressor, getattr(precision, "scaler", None))
        if part is None:
            expected = "expected strategy='ddp', or ModelParallelStrategy and a model after fully_shard"
            raise ValueError(f"Compression: got {type(strategy).__name__}, {expected}")
        self._begin(part)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's states of what `state_dict` has returned on rank 0, now or when training starts."""
        if self._part is None:
            self._loaded = state_dict
        else:
            self._load(state_dict)


class LocalSteps(_Callback):
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

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called by a Trainer before the first step, when it has loaded rank 0's model and optimizer."""
        if place() == (0, 1):
            return
        if ddp_model(trainer.strategy.model) is None or len(trainer.optimizers) != 1:
            got = f"{type(trainer.strategy).__name__} and {len(trainer.optimizers)} optimizers"
            raise ValueError(f"LocalSteps: got {got}, expected strategy='ddp' and one optimizer")
        trainer.strategy.model = pl_module
        (optimizer,) = trainer.optimizers
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        training = LocalTraining(pl_module, optimizer, self.compressor, scaler, **self.options)
        self.outer = training.outer
        self._begin(training)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Called by a Trainer after the last step."""
        if self._part is not None:
            self._part.synchronize()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called by a Trainer at the end of a fit."""
        if self._part is not None:
            self._part.remove()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep what `state_dict` has returned on rank 0. Each rank loads its states when training starts."""
        self._loaded = state_dict


def _gather(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Gather the states of all ranks on rank 0, with tensors in host memory. Returns [] on all others."""
    rank, size = place()
    if rank and state.get("outer"):
        del state["outer"]["global"]  # it is rank 0's
    buffer = io.BytesIO()
    torch.save(state, buffer)
    files: list[Any] = [buffer.getvalue()] if size == 1 else [None] * size
    if size > 1:
        dist.gather_object(buffer.getvalue(), files if rank == 0 else None)
    return [] if rank else [torch.load(io.BytesIO(file), map_location="cpu", weights_only=True) for file in files]
