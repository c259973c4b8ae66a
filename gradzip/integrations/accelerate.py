"""Adapter for Hugging Face Accelerate: `compress` or `local_steps`, after `accelerator.prepare`.

    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    gradzip.integrations.accelerate.compress(accelerator, model, gradzip.PowerSGD(rank=32))

There is no handler for `Accelerator(kwargs_handlers=[...])`: Accelerate looks handlers up by their exact class, and its
`DistributedDataParallelKwargs` registers hooks of torch alone.

`accelerator.save_state` saves models and optimizers on the main process. Beside them, each rank saves its states to
`gradzip_RANK.pt`, and `load_state` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import accelerate
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from .. import ddp, fsdp
from ..methods.base.compressor import Compressor
from . import shared

_REFUSED = {
    "DEEPSPEED": "DeepSpeed, which averages gradients itself: use DDP, or FSDP2 with Replicas",
    "MEGATRON_LM": "Megatron-LM, which averages gradients itself: use DDP, or FSDP2 with Replicas",
    "XLA": "XLA, which averages gradients itself: use DDP on CPUs or GPUs",
}
_NO_FSDP = {"FSDP": "FSDP: use DDP, or gradzip.outer.LocalSteps in a loop of your own"}


@dataclass
class Replicas(accelerate.ParallelismConfig):
    """Accelerate's ParallelismConfig for FSDP2 whose replicas `compress` averages.

    FSDP2 shards over `dp_shard_size` ranks, and does not average over the `dp_replicate_size` replicas itself. All else
    is Accelerate's: `Accelerator(parallelism_config=Replicas(dp_replicate_size=2, dp_shard_size=4), ...)`.
    """

    @property
    def fsdp_dim_names(self) -> list[str]:
        return ["dp_shard_cp"]


def compress(
    accelerator: accelerate.Accelerator,
    model: nn.Module,
    compressor: Compressor,
    group: dist.ProcessGroup | None = None,
) -> ddp.HookState | fsdp.ReplicaAverages | None:
    """Average the gradients of a model with a method, and save its states with `accelerator.save_state`.

    Call it on all processes, once for each model, after `prepare` and before the first step and `load_state`. DDP gets
    the hook of `gradzip.ddp.register`, FSDP2 that of `gradzip.fsdp.compress`. Gradient accumulation works as before
    (`accelerator.accumulate`), and states follow the loss scale of `accelerator.scaler`, if there is one.

    On as many processes, training continues from a checkpoint with all residuals. On another number, DDP drops
    residuals with a warning, and FSDP2 refuses the checkpoint.

    Args:
        model: what `prepare` returned.
        compressor: the method.
        group: for FSDP2, the ranks that hold the same shard; by default all of them, as "dp_replicate" of `Replicas`.

    Returns:
        The state of the front end: `gradzip.ddp.HookState` or `gradzip.fsdp.ReplicaAverages`. None on one process,
        where nothing is averaged.

    Raises:
        TypeError: compressor is not a compressor, or model is not what `prepare` returned.
        ValueError: DeepSpeed, Megatron-LM, FSDP1 or XLA, or FSDP2 without replicas.
        RuntimeError: the model has a communication hook already (raised by DDP).
    """
    state = average(accelerator, model, compressor, group)
    _states(accelerator, model)["compress"] = state
    return None if state is compressor else state


def average(
    accelerator: accelerate.Accelerator, model: nn.Module, compressor: Compressor, group: dist.ProcessGroup | None
) -> Any:
    """`compress` without checkpoints. Returns what has the states."""
    _check(accelerator, "compress", {})
    shared.check_compressor(compressor, "compress")
    model = shared.bare(model)
    if isinstance(model, FullyShardedDataParallel):
        raise ValueError("compress: got FSDP1, expected FSDP2 (fsdp_version: 2) with Replicas, or DDP")
    state = shared.average(model, model, compressor, accelerator.scaler, group)
    if state is None:
        got = f"got a {type(model).__name__} without DDP and FSDP2"
        raise TypeError(f"compress: {got}, expected the model that accelerator.prepare returned")
    return state


def _check(accelerator: accelerate.Accelerator, what: str, more: Mapping[str, str]) -> None:
    """Refuse what is no Accelerator, and strategies whose gradients gradzip cannot average.

    Args:
        what: the function of the user's, for errors.
        more: refused strategies beside `_REFUSED`.
    """
    if not isinstance(accelerator, accelerate.Accelerator):
        raise TypeError(f"{what}: got {type(accelerator).__name__}, expected an accelerate.Accelerator")
    refused = {**_REFUSED, **more}.get(accelerator.distributed_type.value)
    if refused:
        raise ValueError(f"{what}: got {refused}")


def local_steps(
    accelerator: accelerate.Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compressor: Compressor | None = None,
    **options: Any,
) -> shared.LocalTraining:
    """Train each rank alone, and average what has changed every so many steps, with `gradzip.outer.LocalSteps`.

    Call it on all processes, after `prepare`. The training loop stays as it is; call `synchronize` of what is returned
    before a test or an export. Steps are counted as the optimizer takes them: neither those that accumulate gradients
    nor those that a GradScaler skips. Called again for a model, after an exception say, it begins anew.

    In a data-parallel start, DDP averages gradients, with the method of an earlier `compress` if there was one. After
    it, the DDP model that `prepare` returned no longer averages gradients. It keeps memory for its buckets:
    `accelerator.prepare_model(model, evaluation_mode=True)` prepares a model without DDP.

    `accelerator.save_state` saves the parameters and the optimizer of the main process. Each rank saves its own ones,
    with the state of the exchanges, to `gradzip_RANK.pt`. `load_state` continues on as many ranks with the same bits.
    On another number, all ranks go on from what rank 0 had, and residuals are dropped with a warning.

    Args:
        model, optimizer: what `prepare` returned.
        compressor: the method; default: none.
        options: of `gradzip.outer.LocalSteps`: every, outer, fragments, delay, blend, start, offload,
            group.

    Returns:
        An object with `synchronize()` and `outer`, the `gradzip.outer.LocalSteps`. On one process, `outer` is None, and
        nothing is exchanged.

    Raises:
        TypeError: accelerator is not an Accelerator, or model is not what `prepare` returned.
        ValueError: DeepSpeed, Megatron-LM, FSDP or XLA, or what `gradzip.outer.LocalSteps` refuses.
    """
    _check(accelerator, "LocalSteps", _NO_FSDP)
    states = _states(accelerator, model)
    if "local_steps" in states:
        states.pop("local_steps").remove()
    states["local_steps"] = train_alone(accelerator, model, optimizer, compressor, **options)
    training: shared.LocalTraining = states["local_steps"]
    return training


def train_alone(
    accelerator: accelerate.Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compressor: Compressor | None,
    **options: Any,
) -> shared.LocalTraining:
    """`local_steps` without checkpoints."""
    _check(accelerator, "LocalSteps", _NO_FSDP)
    inner = getattr(optimizer, "optimizer", optimizer)  # in an AcceleratedOptimizer
    return shared.LocalTraining(model, inner, compressor, accelerator.scaler, **options)


class _States(dict[str, Any]):
    """What has states of a model, by the function that made it. The model keeps it: copies of the model have none."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _States, ()


def _states_of(model: nn.Module) -> _States:
    states: _States = vars(shared.innermost(model)).setdefault("_gradzip", _States())
    return states


def _states(accelerator: accelerate.Accelerator, model: nn.Module) -> _States:
    """What has states of a model, which are in the accelerator's checkpoints from now on."""
    if shared.innermost(model) not in map(shared.innermost, accelerator._models):
        raise TypeError(f"got a {type(model).__name__}, expected a model that accelerator.prepare returned")
    if accelerator not in _checkpoints:
        _checkpoints[accelerator] = _Checkpoint(accelerator)
    return _states_of(model)


class _Checkpoint:
    """The states of this rank, in `save_state` and `load_state` of an accelerator.

    Accelerate's hooks know the folder and the models, which `free_memory` forgets. It loads registered objects last,
    after models and optimizers, which local steps have to replace.
    """

    _files = shared.RankFiles("gradzip")

    def __init__(self, accelerator: accelerate.Accelerator) -> None:
        self._accelerator = ref(accelerator)
        self._count = 0  # of the parts that are saved
        self._found: tuple[list[Any], str] = [], ""  # parts, and the folder of the checkpoint that is loaded
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._find)
        accelerator.register_for_checkpointing(self)

    def _parts(self) -> list[Any]:
        """What has states, in the order of the models and of the calls, the same on all ranks."""
        accelerator = self._accelerator()
        # Hooks get those of FSDP2 only when they save.
        bare = dict.fromkeys(map(shared.innermost, accelerator._models if accelerator else ()))
        return [part for model in bare for part in _states_of(model).values()]

    def _save(self, models: Sequence[nn.Module], weights: Any, folder: str) -> None:
        parts = self._parts()
        self._count = len(parts)
        self._files.save(folder, [part.state_dict() for part in parts])

    def _find(self, models: Sequence[nn.Module], folder: str) -> None:
        self._found = self._parts(), folder

    def state_dict(self) -> dict[str, Any]:
        """What Accelerate saves on the main process. The states are in the files of the ranks."""
        return {"parts": self._count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        (parts, folder), self._found = self._found, ([], "")
        if state_dict["parts"] != len(parts):
            got = f"got a checkpoint of {state_dict['parts']} calls of compress and local_steps"
            raise ValueError(f"{got}, expected {len(parts)}: make the same calls before load_state")
        for part, state in zip(parts, self._files.load(folder)):
            part.load_state_dict(state)


_checkpoints: WeakKeyDictionary[Any, _Checkpoint] = WeakKeyDictionary()  # by accelerator
