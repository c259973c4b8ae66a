"""Front end for DDP: `gradzip.ddp.register(model, gradzip.TopK())`, or DDP's `register_comm_hook` with `hook`.

DDP calls the hook for each bucket of gradients during the backward pass, and for the last bucket at its end. The hook
starts the first collectives of the bucket; on a device, those of several buckets of a large model together, because
small ones take the host as long to queue (`bucket_nbytes`). The rest happens in the hook of the last bucket: the
results of one bucket are decoded while those of later ones are in transfer, and later rounds run for all buckets
together. Methods that exchange partitions send half of their bytes in the second round. That of a bucket therefore
starts in the hook of the next one.

A process group matches operations by their order, which is the same on all ranks: DDP calls the hook for one bucket at
a time, in the order of the buckets; no other thread starts an operation; and the operations at the end follow from the
order of the buckets, and from lengths and results that all ranks have received alike. No operation waits until the last
hook has returned: with `find_unused_parameters`, DDP then starts an all-reduce of its own.

The step is complete when DDP has written the averages to the gradients. A backward pass that fails before then has
changed no state.

It tells DDP which parameters no rank has used since the last step. DDP leaves their gradients alone and discards their
averages, in which the parts of residuals are that were sent. At the end of the backward pass, those averages are added
to the residuals again.
"""
# No `from __future__ import annotations`: DDP refuses hooks whose annotations are strings.

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter, eq
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ..averaging.buckets import Plan, bucket_nbytes
from ..averaging.handshake import parameters_by_name
from ..averaging.session import Session, check_compressor, queue_callback
from ..collectives import Mean
from ..collectives.routines import Routine
from ..collectives.traffic import Traffic, nbytes_of
from ..methods.base.compressor import Compressor
from ..ops import tensors as ops


def register(model: torch.nn.Module, compressor: Compressor) -> "HookState | None":
    """Average the gradients of a DDP model with a method from its next backward pass on. Call it once for each model.

    States have the names of the module's parameters, and the group is the model's.

    Args:
        model: what DistributedDataParallel returned.
        compressor: the method.

    Returns:
        The HookState that is registered. None, and nothing is registered, if the model's group has one rank, or if the
        model is not a DDP model: then there is a warning if the default group has several ranks.

    Raises:
        TypeError: compressor is not a compressor.
        RuntimeError: the model has a communication hook already (raised by DDP).
    """
    check_compressor(compressor, "register")
    if not isinstance(model, DistributedDataParallel):
        if dist.is_initialized() and dist.get_world_size() > 1:
            warnings.warn(
                f"register: got a {type(model).__name__}, expected a DistributedDataParallel: nothing is compressed",
                stacklevel=2,
            )
        return None
    if model.process_group.size() == 1:
        return None
    state = HookState(compressor, model.process_group, model.module.named_parameters())
    model.register_comm_hook(state, hook)
    return state


def hook(state: "HookState", bucket: dist.GradBucket) -> Future[Tensor]:
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

    A DDP model with the hook can be copied and pickled. As torch does it, the copy has no hook registered. A copied
    HookState has a copy of the method with its states, knows no parameters, and is for the default group. Register it
    with another model if it was made without names. With names, register
    ``HookState(copy.compressor, named_parameters=...)``.

    If an average is not finite, the step is skipped for all parameters of the model (`Compressor.skip_nonfinite`).

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
        self._set_up(compressor, process_group, named_parameters is not None)
        if named_parameters is None and compressor.selects_by_name:
            raise ValueError(
                f"HookState: got no names of parameters, expected named_parameters=model.named_parameters(): "
                f"rules of {type(compressor).__name__} match names"
            )
        if named_parameters is None:
            # Models are numbered as they are wrapped: this object holds the place of the first parameter.
            self._session.name_states({"0": self}, "model")
        else:
            named = parameters_by_name(named_parameters, "HookState")
            self._session.name_states(named, "model")
            self._names.update((parameter, name) for name, parameter in named.items())

    def _set_up(self, compressor: Compressor, process_group: dist.ProcessGroup | None, has_names: bool) -> None:
        self._session = Session(compressor, "HookState")
        self.compressor = compressor
        self.process_group = process_group
        self._has_names = self._all_named = has_names
        self._names: Any = WeakIdKeyDictionary()  # parameter -> name
        self._group: dist.ProcessGroup | None = None  # of the session's engine
        self._plans: dict[int, Plan] = {}  # by the number of the joined buckets, until DDP rebuilds its buckets
        self._joined: list[_Joined] = []  # the buckets of the current step
        self._futures: list[tuple[Future[Tensor], Tensor]] = []  # of the current step: DDP waits for them, and buffers
        self._cap_mb: float | None = None  # `bucket_cap_mb` of rank 0
        self._cap_nbytes: float | None = None  # of joined buckets, once all parameters are known
        self._least_nbytes = 0.0  # of joined buckets, in the current step

    def __getstate__(self) -> dict[str, Any]:
        return {"compressor": self.compressor, "has_names": self._has_names, "prefix": self._session.prefix}

    def __setstate__(self, state: dict[str, Any]) -> None:
        compressor, has_names = state["compressor"], state["has_names"]
        self._set_up(compressor, None, has_names)
        self._session.prefix = state["prefix"]
        if not has_names:
            compressor.memory.names.add(state["prefix"], {"0": self})

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

    def average_bucket(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Start averaging a bucket; with the last one, end the step. Called by `hook`."""
        buffer = bucket.buffer()
        try:
            if bucket.index() == 0:
                self._begin(bucket.parameters(), buffer)
            with self.compressor.streams.on(buffer):
                self._add(bucket, buffer)
            future = self._futures[-1][0]
            if bucket.is_last():
                self._all_named = True
                self._finish()
        except BaseException:
            self._drop()
            raise
        return future

    def _begin(self, parameters: list[Tensor], buffer: Tensor) -> None:
        """Begin a step."""
        if self._joined and not set(parameters).isdisjoint(self._joined[0].parameters):
            if self._joined[-1].plan is not None and not self._session.buckets:
                self._group = None  # it failed at its end, which may not be so on all ranks: compare them again
            self._drop()  # the last backward pass was interrupted
        if not self._plans:
            self._name(parameters)
        self._connect(buffer.device)
        self._choose_least_nbytes(buffer)

    def _add(self, bucket: dist.GradBucket, buffer: Tensor) -> None:
        """Add a bucket to those of the step, and start it, unless it waits for the next one."""
        index, parameters = bucket.index(), bucket.parameters()
        if index != len(self._futures):
            raise RuntimeError(
                f"HookState: got bucket {index}, expected bucket {len(self._futures)} of the same model: "
                "give each DDP model a HookState of its own"
            )
        waiting = self._joined[-1] if self._joined and self._joined[-1].plan is None else None
        if waiting is not None and (buffer.is_sparse or buffer.device != waiting.buffers[0].device):
            with self.compressor.streams.on(waiting.buffers[0]):
                self._start(waiting)
            waiting = None
        if waiting is None:
            self._joined.append(waiting := _Joined())
        waiting.parameters += parameters
        waiting.averages += [] if buffer.is_sparse else bucket.gradients()
        waiting.versions += _versions(parameters)
        waiting.buffers.append(buffer)
        waiting.nbytes += buffer.nbytes if not buffer.is_sparse else 0
        self._futures.append((Future(devices=[buffer.device] if buffer.is_cuda else None), buffer))
        if buffer.is_sparse or bucket.is_last() or waiting.nbytes >= self._least_nbytes:
            self._start(waiting)

    def _choose_least_nbytes(self, buffer: Tensor) -> None:
        """Choose the size of joined buckets: on a device, once the parameters of all ranks are known."""
        self._least_nbytes = 0.0
        if ops.on_device(buffer) and self._all_named:
            if self._cap_nbytes is None:
                self._cap_nbytes = bucket_nbytes(self._cap_mb, [p for p in self._names if p.requires_grad], 0.0)
            self._least_nbytes = self._cap_nbytes
            engine = self._session.engine
            engine.bucket_nbytes = max(type(engine).bucket_nbytes, self._least_nbytes)

    def _start(self, joined: "_Joined") -> None:
        """Start averaging the buckets that have come last."""
        session, number, parameters = self._session, len(self._joined) - 1, joined.parameters
        plan = self._plans.get(number)
        if plan is None or not plan.fits(self.compressor, parameters):
            # DDP has rebuilt its buckets: later plans are out of date, too.
            for later in [i for i in self._plans if i >= number]:
                for group in self._plans.pop(later).groups:
                    group.method.workspace.clear()  # DDP's first bucket is the whole model
            plan = self._plans[number] = session.plan(parameters, self._name(parameters))
        joined.plan = plan
        for i, parameter in enumerate(parameters):
            if not parameter.is_contiguous() and _is_dense(parameter):
                # DDP shows it as contiguous, but writes it with the parameter's strides.
                joined.averages[i] = joined.averages[i].as_strided(parameter.shape, parameter.stride())
        slot = ",".join(plan.names)
        if joined.buffers[0].is_sparse:
            session.launch(number, {(number, 0): self._average_sparse(joined.buffers[0])}, slot)
        else:
            session.start(number, plan.groups, plan.parameters, joined.averages, slot)

    def _drop(self) -> None:
        self._joined, self._futures = [], []
        self._session.drop()

    def _finish(self) -> None:
        """Run the routines of all buckets to their ends, and end the step: all its collectives are done."""
        futures = self._futures
        with self.compressor.streams.on_all(futures[0][1].device):
            self._session.finish("round")
            sparse = [buffer._values() for _, buffer in futures if buffer.is_sparse]
            self._session.end(skipped := self._session.is_skipped(sparse))
        # A future records an event of the current stream, which now waits for the home stream. DDP waits for the event.
        for future, buffer in futures:
            future.set_result(buffer)
        # The hook runs outside of a backward pass on a rank that has joined. DDP queues its own callback, which writes
        # the gradients, after the last hook: a callback that is queued by a callback comes behind it.
        if torch._C._current_graph_task_id() == -1:
            self._complete(skipped)
        else:
            queue_callback(lambda: queue_callback(lambda: self._complete(skipped, written=True)))

    def _complete(self, skipped: bool, written: bool = False) -> None:
        """Complete the step. written: whether DDP has written the averages to the gradients, and may discard some."""
        of_step, self._joined, self._futures = self._joined, [], []
        with self.compressor.streams.on_all(of_step[0].buffers[0].device):
            self._session.complete(skipped)
        # Add to the residuals the averages that DDP has discarded.
        for joined in of_step if written and not skipped else ():
            discarded = joined.discarded()
            if discarded and joined.plan is not None:
                with self.compressor.streams.on(joined.buffers[0]):
                    self._session.take_back(joined.plan, discarded)

    def _connect(self, device: torch.device) -> None:
        """Connect to the ranks of the group, unless the last step had the same group."""
        group: Any = self.process_group or dist.group.WORLD  # DDP needs one
        if self._group is not group:
            engine = self._session.torch_engine(group, device)
            named = {name: p for p, name in self._names.items()}
            self._cap_mb = self._session.connect(engine, named, "handshake", self.compressor.bucket_cap_mb)[0]
            self._group = group

    def _name(self, parameters: list[Tensor]) -> list[str]:
        """The names of a bucket's parameters. Without names, they are numbered as they come."""
        session, known = self._session, self.compressor.memory.names
        for parameter in parameters:
            if parameter in self._names:
                continue
            if self._all_named:
                raise RuntimeError(
                    f"HookState: got a gradient of shape {tuple(parameter.shape)} of an unknown parameter, expected "
                    "those of named_parameters, or of the first step; give each DDP model a HookState of its own, and "
                    "each copy of one HookState(state.compressor, named_parameters=model.named_parameters())"
                )
            found = known.find(parameter)  # by an earlier HookState: the model was wrapped again
            if found is not None:
                session.prefix, name = found
            else:
                name = known.add_number(session.prefix, parameter, self)
            self._names[parameter] = name
        return [self._names[parameter] for parameter in parameters]

    def _average_sparse(self, gradient: Tensor) -> Routine:
        """Average the gradient of an embedding with sparse=True, which has a bucket of its own, uncompressed."""
        self.traffic.bytes_dense += nbytes_of(gradient)
        return (yield Mean(gradient))


@dataclass
class _Joined:
    """Consecutive buckets of DDP whose gradients are averaged together, or are going to be; one on a CPU."""

    buffers: list[Tensor] = field(default_factory=list)  # of DDP
    nbytes: int = 0  # of the buffers
    parameters: list[Tensor] = field(default_factory=list)
    averages: list[Tensor] = field(default_factory=list)  # in the buffers, by parameter; none if it is sparse
    versions: list[int | None] = field(default_factory=list)  # of the parameters, when DDP had filled the buffer
    plan: Plan | None = None  # once they are started

    def discarded(self) -> dict[int, Tensor]:
        """The averages that DDP has not written to gradients, less those gradients. By the parameter's number."""
        found = {}
        if self.averages and any(map(eq, _versions(self.parameters), self.versions)):
            for i, (parameter, average) in enumerate(zip(self.parameters, self.averages)):
                gradient = parameter.grad
                if (None if gradient is None else gradient._version) != self.versions[i]:
                    continue
                if gradient is None:
                    found[i] = average.float()
                elif gradient.data_ptr() != average.data_ptr():  # else it is a view of the buffer
                    found[i] = average.float() - gradient.float()
        return found


def _versions(parameters: list[Tensor]) -> list[int | None]:
    """The numbers of in-place changes of the parameters' gradients, None without a gradient."""
    try:
        return list(map(_VERSION, parameters))
    except AttributeError:  # some have no gradient
        return [None if (gradient := parameter.grad) is None else gradient._version for parameter in parameters]


_VERSION = attrgetter("grad._version")


def _is_dense(parameter: Tensor) -> bool:
    """Whether the elements of a parameter fill its memory, in any order."""
    return 1 + sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride())) == parameter.numel()
