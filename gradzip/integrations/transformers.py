"""Adapter for the Trainer of Hugging Face Transformers: the callbacks `Compression` and `LocalSteps`.

    trainer = Trainer(..., callbacks=[gradzip.integrations.transformers.Compression(gradzip.PowerSGD(rank=32))])

The Trainer tells callbacks neither the model that it has wrapped nor the checkpoint that it resumes from. They find the
Trainer and the argument `resume_from_checkpoint` of `Trainer.train` on the stack.

The Trainer saves models and optimizers on one rank. Beside them, in the folder `checkpoint-STEP`, each rank saves its
states. `trainer.train(resume_from_checkpoint=...)` reads them.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..methods.base.compressor import Compressor
from .accelerate import average, train_alone
from .shared import RankFiles, check_compressor, of_traffic


class _Callback(TrainerCallback):
    """Begins with the training, and saves and loads the states of this rank."""

    _files: RankFiles
    _part: Any = None  # what has the states, while training

    def _begin(self, trainer: Trainer) -> None:
        """Called when the Trainer has wrapped the model and loaded its optimizer's state: make `_part`."""
        raise NotImplementedError

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, folder = _training()
        self._begin(trainer)
        for part_state in self._files.load(folder) if folder else []:
            self._part.load_state_dict(part_state)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not (args.save_only_model or state.is_hyper_param_search):
            folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            self._files.save(folder, [self._part.state_dict()])


class Compression(_Callback):
    """Averages the gradients of a Trainer's model with a method.

    DDP gets the hook of `gradzip.ddp.register`, FSDP2 that of `gradzip.fsdp.compress`, when training begins. Gradient
    accumulation works as before, and states follow the Trainer's GradScaler, if there is one. On one process, nothing
    is averaged.

    Each rank saves its states to `gradzip_compression_RANK.pt` in the Trainer's checkpoints. On as many processes,
    training resumes with all residuals. On another number, DDP drops residuals with a warning, and FSDP2 refuses the
    checkpoint. Trials of a hyperparameter search save none.

    The Trainer's logs of the loss also have ``gradzip/mb``, the megabytes (10^6 bytes) that this rank has sent to
    others so far, and ``gradzip/ratio``, how many times as many uncompressed all-reduces would have sent
    (`Traffic.wire_ratio`).

    Args:
        compressor: the method.
        group: for FSDP2, the ranks that hold the same shard; by default all of them, with
            ``TrainingArguments(parallelism_config=gradzip.integrations.accelerate.Replicas(...))``.

    Attributes:
        state: while training, `gradzip.ddp.HookState` or `gradzip.fsdp.ReplicaAverages`; None on one process.

    `Trainer.train` raises the errors of `gradzip.integrations.accelerate.compress`.
    """

    _files = RankFiles("gradzip_compression")

    def __init__(self, compressor: Compressor, group: dist.ProcessGroup | None = None) -> None:
        check_compressor(compressor, "Compression")
        self.compressor = compressor
        self.state: Any = None
        self._group = group
        self._model: nn.Module | None = None  # that has the hook

    def _begin(self, trainer: Trainer) -> None:
        if trainer.model_wrapped is not self._model:  # it is the same one when train() is called again
            self._part = average(trainer.accelerator, trainer.model_wrapped, self.compressor, self._group)
            self.state = None if self._part is self.compressor else self._part
            self._model = trainer.model_wrapped
            handler = trainer.callback_handler  # what is logged is changed before others, as TensorBoard's, read it
            handler.callbacks = [self, *(other for other in handler.callbacks if other is not self)]

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """Called with what the Trainer logs, which its history has already."""
        if self.state is not None and "loss" in logs:
            numbers = of_traffic(self.state, self.compressor.traffic)
            logs.update(numbers)
            state.log_history[-1].update(numbers)


class LocalSteps(_Callback):
    """Trains each rank alone, and averages what has changed every so many steps: `gradzip.outer.LocalSteps`.

    The Trainer's DDP model no longer averages gradients while it trains, and `average_tokens_across_devices`, which
    communicates in each step, is off: a rank's loss is the mean over its own tokens. In a data-parallel start, DDP
    averages gradients, with the method of a `Compression` before this callback if there is one.

    At the end of training, the parameters of all ranks become equal (`synchronize`), unless the Trainer has loaded its
    best checkpoint. Between two exchanges, they differ: evaluations and the checkpoint's `model.safetensors` have those
    of the rank that evaluates or saves. Choose `eval_steps` and `save_steps` as multiples of `every`.

    Each rank saves its own parameters and optimizer, with the state of the exchanges, to
    `gradzip_local_steps_RANK.pt` in the Trainer's checkpoints. On as many processes, training resumes with the same
    bits. On another number, all go on from what rank 0 had, and residuals are dropped with a warning.

    Args:
        compressor: the method; default: none.
        options: of `gradzip.outer.LocalSteps`: every, outer, fragments, delay, blend, start, offload,
            group.

    Attributes:
        outer: while training, the `gradzip.outer.LocalSteps`; None on one process, where nothing is exchanged.

    `Trainer.train` raises the errors of `gradzip.integrations.accelerate.local_steps`.
    """

    _files = RankFiles("gradzip_local_steps")

    def __init__(self, compressor: Compressor | None = None, **options: Any) -> None:
        self._compressor, self._options = compressor, options
        self._averages_tokens = False

    @property
    def outer(self) -> Any:
        return None if self._part is None else self._part.outer

    def synchronize(self) -> None:
        """Make the parameters of all ranks equal. All ranks call it."""
        if self._part is not None:
            self._part.synchronize()

    def _begin(self, trainer: Trainer) -> None:
        self._end(trainer.args)  # the last training may have failed
        self._part = train_alone(
            trainer.accelerator, trainer.model_wrapped, trainer.optimizer, self._compressor, **self._options
        )
        self._averages_tokens = trainer.args.average_tokens_across_devices
        trainer.args.average_tokens_across_devices = False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._part is not None:
            if not (args.load_best_model_at_end and state.best_model_checkpoint):
                self._part.synchronize()
            self._end(args)

    def _end(self, args: Any) -> None:
        if self._part is not None:
            self._part.remove()
            self._part = None
            args.average_tokens_across_devices = self._averages_tokens


def _training() -> tuple[Trainer, str | None]:
    """The Trainer that trains on this thread, and the checkpoint that it resumes from."""
    for frame, _ in traceback.walk_stack(None):
        trainer = frame.f_locals.get("self")
        if isinstance(trainer, Trainer) and "resume_from_checkpoint" in frame.f_locals:
            return trainer, frame.f_locals["resume_from_checkpoint"]
    raise RuntimeError("got a call outside of Trainer.train, expected one of the Trainer's")
