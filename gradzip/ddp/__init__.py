"""Front end for DDP: `model.register_comm_hook(gradzip.ddp.HookState(gradzip.TopK()), gradzip.ddp.hook)`.

DDP calls the hook for one bucket of gradients after the other, in the same order on all ranks, during the backward
pass. The hook runs the methods of a bucket's parameters to their first collectives, joins those into one per kind, and
starts them. The rest is done when the last gradient is computed, just before DDP waits for the buckets: results are
decoded bucket by bucket, while those of later buckets are still in transfer. Later rounds run for all buckets together.
Where ranks exchange shards, though, half of the bytes is in the second round: that of a bucket starts when the next
bucket has started. If the hook waits for shards then, the next ones are on the wire.

A process group matches operations by their order, which is the same on all ranks: the hook is called for one bucket at
a time, in the order of the buckets; no other thread and no callback starts an operation; and the operations at the end
follow from the order of the buckets, and from lengths and results that all ranks have received alike.
"""
# No `from __future__ import annotations`: DDP refuses hooks whose annotations are strings.

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import decay_momentum, handshake, ops
from ..averaging import no_autocast
from ..buckets import Plan, finish
from ..collectives import Mean
from ..compressor import Compressor
from ..engines.torch import TorchEngine, nbytes_of
from ..routines import Routine
from ..streams import home_streams
from ..traffic import Traffic
from .buckets import Future, GradBuffer, Names


def hook(state: "HookState", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of a bucket over the group, in the bucket's own memory. Returns a future of it."""
    if not isinstance(state, HookState):
        raise TypeError(f"hook: got {state!r} as its state, expected one as of gradzip.ddp.HookState(gradzip.TopK())")
    return state.average_bucket(bucket)


class HookState:
    """The state of `hook`: the method, the group, and the names of the parameters.

    Each DDP model needs a HookState of its own. Several may share a compressor: states are kept apart by a prefix for
    all but the first. A HookState for parameters that an earlier one was for, as when a model is wrapped again,
    continues with their states. Some methods compress several gradients of a bucket as one
    (`Compressor.joined_shape`).

    Under `compressor.follow(scaler)` one optimizer has to step all parameters of the model: a gradient that is not
    finite rolls back the step of all.

    `backward()` raises errors such as `PayloadError`, and in the first step a RuntimeError that names both sides if
    ranks run different methods.

    Args:
        compressor: the method.
        process_group: the group of the DDP model, if it is not the default group.
        named_parameters: `model.named_parameters()`. Without names, parameters are numbered in the order in which DDP
            first shows them, which depends on its bucket sizes. Pass names if rules of a `PerLayer` use them, or if
            checkpoints should survive a change of the buckets.
    """

    def __init__(
        self,
        compressor: Compressor,
        process_group: dist.ProcessGroup | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        if not isinstance(compressor, Compressor):
            raise TypeError(f"HookState: got {compressor!r}, expected a compressor, such as gradzip.TopK()")
        decay_momentum.prepare(compressor)
        self.compressor = compressor
        self.process_group = process_group
        if named_parameters is None and compressor.selects_by_name:
            raise ValueError(
                f"HookState: got no names of parameters, expected named_parameters=model.named_parameters(): "
                f"rules of {type(compressor).__name__} match names"
            )
        named = {p: name for name, p in handshake.parameters_by_name(named_parameters or (), "HookState").items()}
        self._all_known = named_parameters is not None
        models = self._models()
        model = next((model for model in models if model.matches(named)), None)
        if model is None:
            model = Names(f"model{len(models)}." if models else "")
            models.append(model)
        model.names.update(named)
        self._model: Names = model
        self._engine: TorchEngine | None = None
        self._streams = home_streams(compressor.memory.attachments)
        self._plans: dict[int, Plan] = {}  # by the bucket's index, until DDP rebuilds its buckets
        self._buckets: list[GradBuffer] = []  # of the current step

    def _models(self) -> list[Names]:
        """The models that the compressor serves."""
        return self.compressor.memory.attachments.setdefault("ddp", [])

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has sent, padding included, and bytes of the gradients."""
        return self.compressor.traffic

    def state_dict(self) -> dict[str, Any]:
        """`Compressor.state_dict`: this rank's states by parameter, whatever the buckets are."""
        return self.compressor.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """`Compressor.load_state_dict`. Raises ValueError for the state dict of another method."""
        self.compressor.load_state_dict(state_dict)

    def average_bucket(self, bucket: dist.GradBucket) -> Future:
        """Start averaging a bucket; after the last one, schedule the end of the step. Called by `hook`."""
        try:
            with no_autocast(bucket.buffer().device), self._streams.on(bucket.buffer()):
                self._start(bucket)
                future = self._buckets[-1].future
                if bucket.is_last():
                    self._all_known = True
                    self._schedule_finish()
        except BaseException:
            self._buckets = []
            raise
        return future

    def _start(self, bucket: dist.GradBucket) -> None:
        index, parameters = bucket.index(), bucket.parameters()
        if not self._model.names:
            known = (model for model in self._models() if parameters[0] in model.names)
            self._model = next(known, self._model)
        if index == 0 and self._buckets and not set(parameters).isdisjoint(self._plans[0].parameters):
            self._buckets = []  # of a backward pass that was interrupted
        plan = self._plans.get(index)
        if plan is not None and not plan.fits(self.compressor, parameters):
            plan = None
        names = [self._name(p) for p in parameters] if plan is None else plan.names
        group = self.process_group or dist.group.WORLD
        assert group is not None  # DDP needs one
        if self._engine is None or self._engine.group is not group:
            self._engine = self._connect(group, bucket.buffer().device)
        if index != len(self._buckets):
            raise RuntimeError(
                f"HookState: got bucket {index}, expected bucket {len(self._buckets)} of the same model: "
                "give each DDP model a HookState of its own"
            )
        if plan is None:
            # DDP has rebuilt its buckets: later plans are out of date, too.
            for later in [i for i in self._plans if i >= index]:
                for unit in self._plans.pop(later).units:
                    unit.averaging.method.workspace.clear()  # DDP's first bucket is the whole model
            self._engine.capacities.clear()  # other methods, or other buckets, have payloads of other lengths
            plan = self._plans[index] = Plan.of(self.compressor, parameters, names, self._model.prefix)
        for parameter, averaging in zip(plan.parameters, plan.averagings):
            decay_momentum.register(parameter, averaging)
        rank, size = self._engine.rank, self._engine.size
        if bucket.buffer().is_sparse:
            routines = {(index, 0): self._average_sparse(bucket.buffer())}
        else:
            gradients = [_with_strides_of(p, g) for p, g in zip(parameters, bucket.gradients())]
            routines = {
                (index, i): unit.average([gradients[j] for j in unit.indices], rank, size)
                for i, unit in enumerate(plan.units)
            }
        self._buckets.append(GradBuffer(bucket.buffer(), routines, self._engine, ",".join(names)))
        if index > 0:
            self._buckets[index - 1].gather_shards()

    def _schedule_finish(self) -> None:
        # DDP waits for the buckets in a callback at the end of the backward pass, which it queues when this hook
        # returns: ours is called before. Outside of a graph node, though, DDP waits at once (in the first step with
        # static_graph=True, and on ranks that have run out of data under `join`).
        if torch._C._current_autograd_node() is None:
            self._finish()
        else:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        """Run the routines of all buckets to their ends, and end the step."""
        buckets, self._buckets = self._buckets, []
        with no_autocast(buckets[0].buffer.device), self._streams.on_all():
            if self._run(buckets):
                self.compressor.end_step(self._engine)
            else:
                self.compressor.skip_step()
        # DDP waits for an event of the current stream, that of `backward()`, which now waits for the home stream.
        for bucket in buckets:
            bucket.future.set_result(bucket.buffer)

    def _run(self, buckets: list[GradBuffer]) -> bool:
        """Run the routines of all buckets to their ends. Returns False if GradScaler is going to skip the step."""
        assert self._engine is not None
        finish(buckets, self._engine)
        if self.compressor.memory.scaler is None:
            return True
        # GradScaler skips the step of all parameters, not only of those whose gradients are not finite.
        averages = [b.buffer._values() if b.buffer.is_sparse else b.buffer for b in buckets]
        skipped = not ops.all_finite(averages)
        for unit in [unit for index in range(len(buckets)) for unit in self._plans[index].units]:
            unit.end_step(skipped)
        return not skipped

    def _connect(self, group: dist.ProcessGroup, device: torch.device) -> TorchEngine:
        """Make the engine, and compare the configurations of all ranks."""
        engine = TorchEngine(group, self.traffic, device)
        named = ((name, parameter) for parameter, name in self._model.names.items())
        description = handshake.describe(self.compressor, named, self._model.prefix)
        handshake.compare(engine.allgather_bytes(description, "handshake"))
        self.compressor.join_group(engine)
        return engine

    def _name(self, parameter: Tensor) -> str:
        name = self._model.names.get(parameter)
        if name is None:
            if self._all_known:
                raise RuntimeError(
                    f"HookState: got a gradient of shape {tuple(parameter.shape)} of an unknown parameter, expected "
                    "those of named_parameters, or of the first step; give each DDP model a HookState of its own"
                )
            name = self._model.add_number(parameter)
        return name

    def _average_sparse(self, gradient: Tensor) -> Routine:
        """Average the gradient of an embedding with sparse=True, which has a bucket of its own, uncompressed."""
        self.traffic.bytes_dense += nbytes_of(gradient)
        return (yield Mean(gradient))


def _with_strides_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient in its true layout: DDP shows it as contiguous, but writes it with the parameter's strides."""
    dense = 1 + sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride())) == parameter.numel()
    if parameter.is_contiguous() or not dense:
        return gradient
    return gradient.as_strided(parameter.shape, parameter.stride())
