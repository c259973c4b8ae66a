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
from .shared import LocalTraining, average, check_compressor, ddp_model, merge, of_traffic, place, shard

try:
    from lightning.pytorch import Callback, callbacks
except ImportError as error:
    try:
        from pytorch_lightning import Callback, callbacks
    except ImportError:
        raise error from None  # the name under which to install it

# Callbacks that replace weights by their averages over steps. Early versions lack one.
_AVERAGES = tuple(
    getattr(callbacks, name) for name in ("StochasticWeightAveraging", "WeightAveraging") if hasattr(callbacks, name)
)


class _Callback(Callback):
    """Has the states of all ranks in checkpoints, and loads those of this rank when training starts."""

    _part: Any = None  # what has the states of this rank, once training has started
    _loaded: Mapping[str, Any] | None = None  # before it starts
    _fits = True  # not while a Trainer validates, tests or predicts

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called by a Trainer before it loads a checkpoint."""
        self._fits = stage == "fit"
        if self._fits:
            self._part = self._loaded = None

    def _begin(self, part: Any) -> None:
        self._part = part
        if self._loaded is not None:
            self._load(self._loaded)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's states of what `state_dict` has returned on rank 0, in a fit: now, or when it starts."""
        if self._part is not None and self._fits:
            self._load(state_dict)
        elif self._fits:
            self._loaded = state_dict

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

    A Trainer's loggers get ``gradzip/mb``, the megabytes (10^6 bytes) that this rank has sent to others so far, and
    ``gradzip/ratio``, how many times as many uncompressed all-reduces would have sent (`Traffic.wire_ratio`).

    The states of all ranks are in the Trainer's checkpoints, and come back with `ckpt_path`. With a Fabric, save the
    callback beside the model: ``fabric.save(path, {"model": model, "compression": compression})``. A Fabric does not
    call it in `setup_module`: call ``fabric.call("on_after_setup", fabric=fabric, module=model)`` then.

    Args:
        compressor: the method.

    Raises:
        TypeError: compressor is not a compressor.
        ValueError: at the start of a fit, another strategy of several ranks, or shards without replicas.
        RuntimeError: at the end of the first step, a Fabric's model that is not averaged.
    """

    def __init__(self, compressor: Compressor) -> None:
        check_compressor(compressor, "Compression")
        self.compressor = compressor
        self._averaged: set[int] = set()  # parameters of a Fabric's models, by `id`

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Called by a Trainer when the strategy has wrapped the model."""
        self._start(trainer.strategy, trainer.strategy.model, pl_module, trainer.precision_plugin)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Called by a Trainer after each batch: log what was sent, when loggers are told of numbers."""
        every = trainer.log_every_n_steps
        if every and trainer.global_step % every == 0 and self._part is not self.compressor:
            pl_module.log_dict(of_traffic(self._part, self.compressor.traffic))

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Called by a Fabric at the end of `setup`."""
        self._start(fabric.strategy, module, module.module, fabric.strategy.precision)
        self._averaged.update(map(id, module.parameters()))

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        """Called by a Fabric at the end of a step."""
        if place() != (0, 1) and id(optimizer.param_groups[0]["params"][0]) not in self._averaged:
            raise RuntimeError(
                "Compression: got a step of parameters that are not averaged, expected those of fabric.setup; "
                'after fabric.setup_module, call fabric.call("on_after_setup", fabric=fabric, module=model)'
            )

    def _start(self, strategy: Any, wrapped: nn.Module, module: nn.Module, precision: Any) -> None:
        part = average(wrapped, module, self.compressor, getattr(precision, "scaler", None))
        if part is None:
            expected = "expected strategy='ddp', or ModelParallelStrategy and a model after fully_shard"
            raise ValueError(f"Compression: got {type(strategy).__name__}, {expected}")
        self._begin(part)


class LocalSteps(_Callback):
    """Trains each rank alone, and averages what has changed after every n-th step: `gradzip.outer.LocalSteps`.

    A callback of a Trainer with strategy="ddp" and one optimizer. It takes the model out of DDP when local steps begin:
    nothing communicates between exchanges, and DDP's buckets are freed. In a data-parallel start, DDP averages
    gradients, with the method of a `Compression` beside this callback if there is one.

    When training ends, ranks synchronize: all have the global parameters then. Until then, each rank validates its own
    parameters. In one process, it does nothing. It synchronizes once more at the end of the fit, if another callback
    has changed parameters after the last step.

    Training continues from a checkpoint with the same bits. Beside model, optimizer and loss scale of rank 0, which
    Lightning saves, it has those of all ranks: its size grows with their number, and it passes through the memory of
    rank 0. On another number of ranks, all continue from what rank 0 had.

    Args:
        compressor: the method; default `NoCompression()`.
        options: the other arguments of `gradzip.outer.LocalSteps`: every, outer, fragments, delay, blend, start,
            offload.

    Attributes:
        outer: the `gradzip.outer.LocalSteps` of the current fit, or of the last one.

    Raises:
        ValueError: when training starts, another strategy of several ranks, several optimizers, callbacks that average
            weights over steps, or options that do not go together.
        RuntimeError: in the setup of a Fabric's model, or at the end of its first step.
    """

    def __init__(self, compressor: Compressor | None = None, **options: Any) -> None:
        self.compressor = compressor
        self.options = options
        self.outer: outer.LocalSteps | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":  # the last one may have failed
            self._remove()
        super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called by a Trainer before the first step, when it has loaded rank 0's model and optimizer."""
        if place() == (0, 1):
            return
        replica = ddp_model(trainer.strategy.model)
        if replica is None or len(trainer.optimizers) != 1:
            got = f"{type(trainer.strategy).__name__} and {len(trainer.optimizers)} optimizers"
            raise ValueError(f"LocalSteps: got {got}, expected strategy='ddp' and one optimizer")
        for callback in trainer.callbacks:
            if isinstance(callback, _AVERAGES):
                got = f"a {type(callback).__name__} callback, whose weights differ between ranks"
                raise ValueError(f"LocalSteps: got {got}, expected none: average checkpoints after training")
        (optimizer,) = trainer.optimizers
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        training = LocalTraining(replica, optimizer, self.compressor, scaler, **self.options)
        self.outer = training.outer
        self._begin(training)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Called by a Trainer before each batch."""
        if self.outer is not None and not self.outer.start:
            trainer.strategy.model = pl_module

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Called by a Trainer after the last step."""
        if self._part is not None:
            self._part.synchronize()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Called by a Trainer when all callbacks have ended the training."""
        self.on_train_end(trainer, pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called by a Trainer at the end of a fit."""
        self._remove()

    def on_after_setup(self, *_: Any, **__: Any) -> None:
        """Called by a Fabric."""
        raise RuntimeError("LocalSteps: got a Fabric, expected a Trainer: with a Fabric, use gradzip.outer.LocalSteps")

    on_after_optimizer_step = on_after_setup

    def _remove(self) -> None:
        if self._part is not None:
            self._part.remove()


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
