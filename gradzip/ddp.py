"""DDP's front end: `model.register_comm_hook(gradzip.ddp.HookState(gradzip.TopK()), gradzip.ddp.hook)`.

DDP calls the hook for one bucket of gradients after the other, the same ones in the same order on all ranks, while the
backward pass goes on. So the hook runs the methods of a bucket's parameters to their first collectives, joined into one
per kind, and starts those. All else is done when the backward pass has computed its last gradient, just before DDP
itself waits for the buckets: bucket by bucket, answers are decoded while those of later buckets are still on their way,
and where methods need more rounds, each is run for all buckets together.

A process group matches operations by their order. Here it is the same on all ranks: the hook is called for one bucket
at a time, in the order of the buckets; no other thread and no callback of an operation starts any; and what is started
at the end follows from the order of the buckets, and from lengths and results that all ranks have received alike.
"""
# No `from __future__ import annotations`: DDP refuses hooks whose annotations are strings.

import itertools
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from . import agreement
from .collectives import Mean, Round, Routine, Traffic, adjacent
from .compressor import Compressor, State, as_written
from .engines.torch import Pending, TorchEngine, nbytes_of
from .joint import JointState

Future: TypeAlias = torch.futures.Future[torch.Tensor]


def hook(state: "HookState", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages the gradients of a bucket over the group, in the bucket's own memory; returns a future of that."""
    if not isinstance(state, HookState):
        raise TypeError(f"hook: got {state!r} as its state, expected one as of gradzip.ddp.HookState(gradzip.TopK())")
    return state._take(bucket)


class HookState:
    """What `hook` needs to know: the method, the group, and what the method keeps for each parameter.

    compressor: the method. process_group: that of the DDP model, the default group where DDP has no other.
    named_parameters: as `model.named_parameters()` gives them. Without them parameters are numbered as DDP first shows
    them, which depends on its bucket sizes; give names where rules of a `PerLayer` look at them, or where checkpoints
    should survive a change of the buckets.

    Each DDP model needs a HookState of its own; several may share a compressor, and their states are kept apart, by a
    prefix for all but the first. One for parameters that an earlier one was for, as when a model is wrapped anew, finds
    what was kept of them. Methods that are `flat` see the parameters of a bucket that they are in charge of as one
    vector.

    Under `compressor.follow(scaler)` one optimizer has to step all parameters of the model: a gradient that is not
    finite takes back the step of all.

    `backward()` raises what goes wrong, such as `PayloadError`; and, in the first step, a RuntimeError that names both
    where ranks run different methods.
    """

    def __init__(
        self,
        compressor: Compressor,
        process_group: dist.ProcessGroup | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        if not isinstance(compressor, Compressor):
            raise TypeError(f"HookState: got {compressor!r}, expected a compressor, such as gradzip.TopK()")
        self.compressor = compressor
        self.process_group = process_group
        if named_parameters is None and compressor.looks_at_names:
            raise ValueError(
                f"HookState: got no names of parameters, expected named_parameters=model.named_parameters(), at which "
                f"rules of {type(compressor).__name__} look"
            )
        named = {p: name for name, p in agreement.by_name(named_parameters or (), "HookState").items()}
        self._all_known = named_parameters is not None
        model = next((model for model in compressor._models if model.has(named)), None)
        if model is None:
            model = _Model(f"model{len(compressor._models)}." if compressor._models else "")
            compressor._models.append(model)
        model.names.update(named)
        self._model: _Model = model
        self._engine: TorchEngine | None = None
        self._plans: dict[int, _Plan] = {}  # by the bucket's index, until DDP rebuilds its buckets
        self._buckets: list[_Bucket] = []  # of this step

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has sent, padding included, and those of the gradients."""
        return self.compressor.traffic

    def state_dict(self) -> dict[str, Any]:
        """`Compressor.state_dict`: this rank's states by parameter, whatever the buckets are."""
        return self.compressor.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned on a rank of the same number; ValueError for another method's."""
        self.compressor.load_state_dict(state_dict)
        self._plans = {}

    def _take(self, bucket: dist.GradBucket) -> Future:
        """The hook: starts the averaging of a bucket."""
        try:
            with as_written(bucket.buffer().device):
                self._start(bucket)
                future = self._buckets[-1].future
                if bucket.is_last():
                    self._all_known = True
                    self._finish_later()
        except BaseException:
            self._buckets = []
            raise
        return future

    def _start(self, bucket: dist.GradBucket) -> None:
        index, parameters = bucket.index(), bucket.parameters()
        if not self._model.names:
            self._model = next((m for m in self.compressor._models if parameters[0] in m.names), self._model)
        if index == 0 and self._buckets and not set(parameters).isdisjoint(self._plans[0].parameters):
            self._buckets = []  # of a backward pass that came to no end
        plan = self._plans.get(index)
        if plan is not None and not plan.fits(parameters):
            plan = None
        names = [self._name(p) for p in parameters] if plan is None else plan.names
        group = self.process_group or dist.group.WORLD
        assert group is not None  # DDP is not built without one
        if self._engine is None or self._engine.group is not group:
            self._engine = self._connect(group, bucket.buffer().device)
        if index != len(self._buckets):
            raise RuntimeError(
                f"HookState: got bucket {index}, expected bucket {len(self._buckets)} of the same model: "
                "give each DDP model a HookState of its own"
            )
        if plan is None:
            # The buckets are cut anew, and those behind this one, too: what is kept for them may be taken apart.
            for later in [i for i in self._plans if i >= index]:
                for unit in self._plans.pop(later).units:
                    unit.part._workspace.clear()  # DDP's first bucket is the whole model
            plan = self._plans[index] = self._plan(names, parameters)
        if bucket.buffer().is_sparse:
            routines = {(index, 0): self._average_sparse(bucket.buffer())}
        else:
            gradients = [_as_laid_out(g, p) for g, p in zip(bucket.gradients(), parameters)]
            routines = {(index, i): self._average(unit, gradients) for i, unit in enumerate(plan.units)}
        self._buckets.append(_Bucket(bucket.buffer(), routines, self._engine, (index, *names)))

    def _finish_later(self) -> None:
        # DDP waits for the buckets in a callback of its own at the end of the backward pass, which it asks for when
        # this hook returns: ours comes before. Outside of a node of the graph, though, DDP waits at once (the first
        # step with static_graph=True, and ranks that have run out of data under `join`).
        if torch._C._current_autograd_node() is None:
            self._finish()
        else:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        """Runs all buckets' routines to their ends."""
        buckets, self._buckets = self._buckets, []
        with as_written(buckets[0].buffer.device):
            self._end(buckets)
        for bucket in buckets:
            bucket.future.set_result(bucket.buffer)

    def _end(self, buckets: list["_Bucket"]) -> None:
        assert self._engine is not None
        turn = Round()
        # Those with parts that were longer than expected come last: the rest of them is on its way meanwhile.
        late = [bucket for bucket in buckets if not bucket.resume_if_there(turn)]
        for bucket in late:
            bucket.resume(turn)
        routines = {key: routine for bucket in buckets for key, routine in bucket.routines.items()}
        number = 1
        while collectives := turn.collectives():
            number += 1
            pending = [self._engine.launch(c, (number, i)) for i, c in enumerate(collectives)]
            for p in pending:
                p.extend()
            answers = turn.split([p.answer() for p in pending])
            turn = Round()
            turn.resume(routines, answers)
        if not self.compressor.follows:
            return
        # GradScaler skips the step of all parameters, not only of the one that is not finite.
        averages = [b.buffer._values() if b.buffer.is_sparse else b.buffer for b in buckets]
        skipped = not all(bool(average.isfinite().all()) for average in averages)
        for unit in [unit for index in range(len(buckets)) for unit in self._plans[index].units]:
            if skipped:
                unit.part.take_back(unit.name)
            unit.part._undo.pop(unit.name, None)  # not to be held until the next step

    def _connect(self, group: dist.ProcessGroup, device: torch.device) -> TorchEngine:
        """The engine, when it is sure that all ranks run the same method."""
        engine = TorchEngine(group, self.traffic)
        named = ((self._model.prefix + name, parameter) for parameter, name in self._model.names.items())
        agreement.check(engine.share(agreement.statement(self.compressor, named), device))
        return engine

    def _name(self, parameter: Tensor) -> str:
        name = self._model.names.get(parameter)
        if name is None:
            if self._all_known:
                raise RuntimeError(
                    f"HookState: got a gradient of shape {tuple(parameter.shape)} of an unknown parameter, expected "
                    "those of named_parameters, or of the first step; give each DDP model a HookState of its own"
                )
            name = self._model.names[parameter] = str(next(self._model.numbers))
        return name

    def _plan(self, names: list[str], parameters: list[Tensor]) -> "_Plan":
        """Who averages what of a bucket whose parameters have not been seen together before."""
        for name, parameter in zip(names, parameters):
            if not parameter.is_floating_point():  # of a complex one, DDP's bucket is one of twice as many real numbers
                raise ValueError(f"gradient of {name!r}: got {parameter.dtype}, expected a real floating-point type")
        members: dict[Any, list[int]] = {}
        parts = [self.compressor.part(name, p.shape) for name, p in zip(names, parameters)]
        for i, (part, parameter) in enumerate(zip(parts, parameters)):
            flat = part.flat and not part.bypasses(parameter)
            members.setdefault(("flat", id(part)) if flat else i, []).append(i)
        units = []
        for indices in members.values():
            shapes = {self._model.prefix + names[i]: parameters[i].shape for i in indices}
            units.append(_Unit(parts[indices[0]], indices, shapes))
        for unit in units:  # those of the buckets before these
            for state in list(unit.part.states.values()):
                if isinstance(state, JointState) and state.members.keys() & unit.shapes.keys():
                    del unit.part.states[state.name]
                    unit.part.states |= state.apart()
        return _Plan(parameters, names, units)

    def _average(self, unit: "_Unit", of_bucket: list[Tensor]) -> Routine:
        """Replaces a unit's gradients by their averages."""
        assert self._engine is not None
        group = self._engine.rank, self._engine.size
        gradients = [of_bucket[i] for i in unit.indices]
        unit.prepare(gradients, *group)
        if len(gradients) == 1:
            return (yield from unit.part.average(gradients[0], unit.name, *group))
        flat = adjacent(gradients)
        if flat is not None:
            return (yield from unit.part.average(flat.view(1, -1), unit.name, *group))
        numels = [g.numel() for g in gradients]
        if unit.memory is None:
            unit.memory = gradients[0].new_empty(sum(numels))
        flat = torch.cat([g.reshape(-1) for g in gradients], out=unit.memory)
        average = yield from unit.part.average(flat.view(1, -1), unit.name, *group)
        for gradient, piece in zip(gradients, average.view(-1).split(numels)):
            gradient.copy_(piece.view(gradient.shape))
        return average

    def _average_sparse(self, gradient: Tensor) -> Routine:
        """Of an embedding with sparse=True, alone in its bucket: as without compression."""
        self.traffic.bytes_dense += nbytes_of(gradient)
        return (yield Mean(gradient))


class _Model:
    """The names of a model's parameters, which a compressor remembers as long as they live."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.names: Any = WeakIdKeyDictionary()
        self.numbers = itertools.count()  # for those that are given no names

    def has(self, named: Mapping[Tensor, str]) -> bool:
        """Whether these are parameters of this model; others may have come, but none that takes another's name."""
        owners = {name: parameter for parameter, name in self.names.items()}
        same = all(owners.get(name, parameter) is parameter for parameter, name in named.items())
        return same and any(parameter in self.names for parameter in named)


class _Bucket:
    """A bucket whose averages are on their way."""

    def __init__(self, buffer: Tensor, routines: dict[Any, Routine], engine: TorchEngine, slot: Hashable) -> None:
        self.buffer = buffer
        self.routines = routines
        self.future = Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._first = Round()
        self._first.resume(routines, dict.fromkeys(routines))
        self._pending: list[Pending] = [engine.launch(c, (slot, i)) for i, c in enumerate(self._first.collectives())]

    def resume_if_there(self, turn: Round) -> bool:
        """Resumes the routines, unless there is something more to wait for."""
        extended = [p.extend() for p in self._pending]  # all: each may have something to start
        if any(extended):
            return False
        self.resume(turn)
        return True

    def resume(self, turn: Round) -> None:
        turn.resume(self.routines, self._first.split([p.answer() for p in self._pending]))


@dataclass
class _Plan:
    """What is to be done with a bucket of these parameters."""

    parameters: list[Tensor]
    names: list[str]
    units: list["_Unit"]

    def fits(self, parameters: list[Tensor]) -> bool:
        return len(parameters) == len(self.parameters) and all(p is q for p, q in zip(parameters, self.parameters))


@dataclass
class _Unit:
    """Parameters of a bucket that a method averages as one: a single one, or, flat, all it is in charge of."""

    part: Compressor
    indices: list[int]  # within the bucket
    shapes: dict[str, torch.Size]  # by name

    def __post_init__(self) -> None:
        first, *others = self.shapes
        self.name = f"{first} and {len(others)} more" if others else first
        self.memory: Tensor | None = None  # of the flat gradient, where a bucket has other things in between
        self._states: dict[str, State] | None = None

    def prepare(self, gradients: list[Tensor], rank: int, size: int) -> None:
        """Sees to it that what was kept for the parameters is this unit's."""
        states = self.part.states
        if self._states is states:  # no other ones were loaded
            return
        self._states = states
        found = {name: states[name] for name in self.shapes if name in states}
        if len(self.shapes) > 1:
            for name, gradient in zip(self.shapes, gradients):
                if name in found and found[name].loaded:
                    self.part.adopt(found[name], gradient, rank, size)
            for name in found:
                del states[name]
            states[self.name] = JointState.of(self.name, self.shapes, found)


def _as_laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient in the order of its elements: DDP shows it contiguous, but has written it with the strides of the
    parameter, if its memory is dense."""
    dense = 1 + sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride())) == parameter.numel()
    if parameter.is_contiguous() or not dense:
        return gradient
    return gradient.as_strided(parameter.shape, parameter.stride())
