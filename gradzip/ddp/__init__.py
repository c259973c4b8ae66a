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

With `find_unused_parameters`, DDP leaves the gradients of parameters that no rank has used since the last step as they
were, and discards their averages. Ranks tell each other what they have used, by an all-reduce in the hook of the last
bucket, and the states of those parameters stay as they were, too.
"""
# No `from __future__ import annotations`: DDP refuses hooks whose annotations are strings.

import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
from ..collectives import Mean, ToHost
from ..collectives.fusion import pieces
from ..collectives.routines import Routine
from ..collectives.traffic import Traffic, nbytes_of
from ..memory.verdict import Verdict
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
    finds_unused = model.find_unused_parameters or model.static_graph
    state = HookState(compressor, model.process_group, model.module.named_parameters(), finds_unused)
    if model.static_graph:
        state._unnumbered = len(str(model._get_ddp_logging_data()["bucket_sizes"]).split(","))
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
        find_unused_parameters: whether the DDP model has `find_unused_parameters` or `static_graph`. False saves an
            all-reduce of a number for each parameter.
    """

    def __init__(
        self,
        compressor: Compressor,
        process_group: dist.ProcessGroup | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        find_unused_parameters: bool = True,
    ) -> None:
        self._finds_unused = find_unused_parameters
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
            self._watch(named.values())

    def _set_up(self, compressor: Compressor, process_group: dist.ProcessGroup | None, has_names: bool) -> None:
        self._session = Session(compressor, "HookState")
        self._session.may_hold = True
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
        self._used: list[Tensor] = []  # parameters that this rank has used since the last step; maybe several times
        self._handles: dict[int, Any] = {}  # of hooks by which parameters come into this list, by `id`
        self._discarded: set[int] = set()  # parameters that no rank has used, by `id`
        self._unnumbered = 0  # buckets of the first pass of a static graph, in which DDP gives all the number 0
        weakref.finalize(self, _remove, self._handles)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "compressor": self.compressor,
            "has_names": self._has_names,
            "prefix": self._session.prefix,
            "finds_unused": self._finds_unused,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        compressor, has_names = state["compressor"], state["has_names"]
        self._finds_unused = state["finds_unused"]
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
        buffer, number, is_last = bucket.buffer(), bucket.index(), bucket.is_last()
        if self._unnumbered:
            number = len(self._futures)
            is_last = number == self._unnumbered - 1
        try:
            if number == 0:
                self._begin(bucket.parameters(), buffer)
            with self.compressor.streams.on(buffer):
                self._add(bucket, buffer, number, is_last)
            future = self._futures[-1][0]
            if is_last:
                self._all_named, self._unnumbered = True, 0
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

    def _add(self, bucket: dist.GradBucket, buffer: Tensor, number: int, is_last: bool) -> None:
        """Add a bucket to those of the step, and start it, unless it waits for the next one."""
        parameters = bucket.parameters()
        if number != len(self._futures):
            raise RuntimeError(
                f"HookState: got bucket {number}, expected bucket {len(self._futures)} of the same model: "
                "give each DDP model a HookState of its own"
            )
        waiting = self._joined[-1] if self._joined and self._joined[-1].plan is None else None
        if waiting is not None and (buffer.is_sparse or buffer.device != waiting.buffers[0].device):
            with self.compressor.streams.on(waiting.buffers[0]):
                self._start(waiting)
            waiting = None
        if waiting is None:
            self._joined.append(waiting := _Joined())
        gradients = [] if buffer.is_sparse else bucket.gradients()
        if parameters[0].is_complex():  # DDP shows twice as many real numbers, and cuts them as if there were half
            gradients = pieces(torch.view_as_complex(buffer.view(-1, 2)), [p.shape for p in parameters])
        if self._finds_unused:
            used = set(map(id, self._used))
            for parameter, view in zip(parameters, gradients):
                is_view = parameter.grad is not None and parameter.grad.data_ptr() == view.data_ptr()
                if is_view and id(parameter) in self._handles.keys() - used:
                    waiting.former.append((id(parameter), view, view.clone()))
        waiting.parameters += parameters
        waiting.averages += gradients
        waiting.vectors += [number] * len(parameters)
        waiting.buffers.append(buffer)
        waiting.nbytes += buffer.nbytes if not buffer.is_sparse else 0
        self._futures.append((Future(devices=[buffer.device] if buffer.is_cuda else None), buffer))
        if buffer.is_sparse or is_last or waiting.nbytes >= self._least_nbytes:
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
            plan = self._plans[number] = session.plan(parameters, self._name(parameters), joined.vectors)
            self._watch(parameters)
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
        """Run the routines of all buckets to their ends."""
        device = self._futures[0][1].device
        with self.compressor.streams.on_all(device):
            if self._finds_unused:
                self._session.launch("used", {("used", 0): self._exchange_used(device)}, "used")
            self._session.finish("round")
        if torch._C._current_graph_task_id() != -1 and torch._C._current_autograd_node() is not None:
            queue_callback(self._end)  # the rest of the backward pass may fail
        else:  # DDP waits now: on a rank that has joined, or in a callback, in the first pass of a static graph
            self._end()

    def _end(self) -> None:
        """End the step: write the averages to DDP's buckets, and have it completed."""
        try:
            skipped = self._write_averages()
        except BaseException:
            self._drop()
            raise
        # DDP queues its own callback, which writes the gradients, after the last hook: a callback that the hook queues
        # comes before it, and one that a callback queues behind it.
        if torch._C._current_graph_task_id() == -1:
            self._complete(skipped)
        else:
            queue_callback(lambda: self._complete(skipped))

    def _write_averages(self) -> Verdict | bool:
        """Write the averages to DDP's buckets. Returns whether the step is skipped."""
        futures, device = self._futures, self._futures[0][1].device
        with self.compressor.streams.on_all(device):
            sparse = [buffer._values() for _, buffer in futures if buffer.is_sparse]
            skipped = self._session.is_skipped(sparse, fills=False, doubtful=self._discarded)
            self._session.end(skipped)
            for number, view, former in [of for joined in self._joined for of in joined.former]:
                if number in self._discarded:
                    view.copy_(former)
        # A future records an event of the current stream, which now waits for the home stream. DDP waits for the event.
        for future, buffer in futures:
            future.set_result(buffer)
        return skipped

    def _complete(self, skipped: Verdict | bool) -> None:
        """Complete the step: DDP has written the averages to the gradients."""
        of_step, self._joined, self._futures = self._joined, [], []
        with self.compressor.streams.on_all(of_step[0].buffers[0].device):
            self._session.complete(skipped, self._discarded)
        self._used.clear()
        self._discarded.clear()

    def _watch(self, parameters: Iterable[Tensor]) -> None:
        """Have parameters come into the list of those that this rank has used."""
        for parameter in parameters:
            if self._finds_unused and parameter.requires_grad and id(parameter) not in self._handles:
                self._handles[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._used.append)

    def _exchange_used(self, device: torch.device) -> Routine:
        """Coroutine: find out which parameters no rank has used."""
        parameters = [parameter for joined in self._joined for parameter in joined.parameters]
        used = set(map(id, self._used))
        # Those that are not watched yet may have been used.
        here = [id(parameter) in used or id(parameter) not in self._handles for parameter in parameters]
        # Ones are made on the device: a copy from the host would wait for it.
        flags = torch.ones(len(here), device=device) if all(here) else torch.tensor(here, device=device).float()
        share = yield Mean(flags)
        if all(here):  # none is left that no rank has used: the host does not wait to read the flags, as in DDP itself
            return
        share = yield ToHost(share)
        self._discarded.update(id(parameter) for parameter, of in zip(parameters, share.tolist()) if of == 0)

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
    vectors: list[int] = field(default_factory=list)  # by parameter, the number of its buffer
    # Gradients that are views of the buffers, of parameters that this rank has not used: number, view, values.
    former: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    plan: Plan | None = None  # once they are started


def _remove(handles: dict[int, Any]) -> None:
    for handle in handles.values():
        handle.remove()


def _is_dense(parameter: Tensor) -> bool:
    """Whether the elements of a parameter fill its memory, in any order."""
    return 1 + sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride())) == parameter.numel()
