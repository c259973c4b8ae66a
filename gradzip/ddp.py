"""DDP's front end: `model.register_comm_hook(gradzip.ddp.HookState(gradzip.TopK()), gradzip.ddp.hook)`.

DDP calls the hook for one bucket of gradients after the other, the same ones in the same order on all ranks, while the
backward pass goes on. So the hook runs the methods of a bucket's parameters to their first collectives, joined into one
per kind, and starts those. All else is done when the backward pass has computed its last gradient, just before DDP
itself waits for the buckets: bucket by bucket, answers are decoded while those of later buckets are still on their way,
and where methods need more rounds, each is run for all buckets together.

A process group matches operations by their order. Here it is the same on all ranks, for they are all started by one
thread, in an order that depends on nothing but the buckets and on what all ranks have received alike.
"""
# No `from __future__ import annotations`: DDP refuses hooks whose annotations are strings.

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Gather, Round, Routine, Traffic, adjacent
from .compressor import Compressor, State, Workspace, split_shards
from .engines.torch import Pending, TorchEngine

Future: TypeAlias = torch.futures.Future[torch.Tensor]


def hook(state: "HookState", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages the gradients of a bucket over the group, in the bucket's own memory."""
    return state._take(bucket)


class HookState:
    """What `hook` needs to know: the method, the group, and what the method keeps for each parameter.

    compressor: the method; it is cloned, so that one may serve several models. process_group: that of the DDP model,
    the default group where DDP has no other. named_parameters: as `model.named_parameters()` gives them. Without them
    parameters are numbered as DDP first shows them, which depends on its bucket sizes; give names where rules of a
    `PerLayer` look at them, or where checkpoints should survive a change of the model's buckets.

    Each DDP model needs a HookState of its own. Methods with `flat` see the parameters of a bucket that they are in
    charge of as one vector. `traffic` counts bytes.

    Errors, such as `PayloadError`, are raised by `backward()`. Ranks with different methods raise a RuntimeError that
    names them, in the first step.
    """

    def __init__(
        self,
        compressor: Compressor,
        process_group: dist.ProcessGroup | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        if not isinstance(compressor, Compressor):
            raise TypeError(f"HookState: got {compressor!r}, expected a compressor, such as gradzip.TopK()")
        self.compressor = compressor.clone()
        self.process_group = process_group
        self._names = {} if named_parameters is None else {p: name for name, p in named_parameters}
        if len(set(self._names.values())) < len(self._names):
            raise ValueError("HookState: got named_parameters with equal names, expected a name for each parameter")
        self._all_known = named_parameters is not None
        self._engine: TorchEngine | None = None
        self._plans: dict[int, _Plan] = {}  # by the bucket's index, until DDP rebuilds its buckets
        self._joined: dict[str, _Unit] = {}  # by the names of its parameters, for units with a state of their own
        self._buckets: list[_Bucket] = []  # of this step
        self._workspace = Workspace()

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has sent, padding included, and those of the gradients."""
        return self.compressor.traffic

    def state_dict(self) -> dict[str, Any]:
        """This rank's states by parameter, whatever the buckets: as `Compressor.state_dict`, and readable by it."""
        units = list({unit.name: unit for unit in self._joined.values()}.values())
        live = [(unit.part, unit.part.states) for unit in units]
        try:
            for unit in units:
                unit.part.states = dict(unit.part.states)
                self._take_apart(unit)
            return self.compressor.state_dict()
        finally:
            for part, states in reversed(live):
                part.states = states

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned on a rank of the same number; ValueError for another method's."""
        self.compressor.load_state_dict(state_dict)
        self._plans, self._joined = {}, {}

    @torch.no_grad()
    def _take(self, bucket: dist.GradBucket) -> Future:
        """The hook: starts the averaging of a bucket."""
        try:
            if self._engine is None:
                self._engine = self._connect(bucket.buffer().device)
            index, parameters = bucket.index(), bucket.parameters()
            if index != len(self._buckets):
                raise RuntimeError(
                    f"HookState: got bucket {index}, expected bucket {len(self._buckets)} of the same model: "
                    "give each DDP model a HookState of its own"
                )
            plan = self._plans.get(index)
            if plan is None or not plan.fits(parameters):
                plan = self._plans[index] = self._plan(parameters)
            gradients = [_as_laid_out(g, p) for g, p in zip(bucket.gradients(), parameters)]
            routines = {(index, i): self._average(unit, gradients) for i, unit in enumerate(plan.units)}
            self._buckets.append(_Bucket(bucket.buffer(), routines, self._engine, plan.names))
            future = self._buckets[-1].future
            if bucket.is_last():
                self._all_known = True
                self._finish_later()
        except BaseException:
            self._buckets = []
            raise
        return future

    def _finish_later(self) -> None:
        # DDP waits for the buckets in a callback of its own at the end of the backward pass, which it asks for when
        # this hook returns: ours comes before. Outside of a node of the graph, though, DDP waits at once (the first
        # step with static_graph=True, and ranks that have run out of data under `join`).
        if torch._C._current_autograd_node() is None:
            self._finish()
        else:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def _finish(self) -> None:
        """Runs all buckets' routines to their ends."""
        assert self._engine is not None
        buckets, self._buckets = self._buckets, []
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
        for bucket in buckets:
            bucket.future.set_result(bucket.buffer)

    def _connect(self, device: torch.device) -> TorchEngine:
        """The engine, when it is sure that all ranks run the same method."""
        group = self.process_group or dist.group.WORLD
        assert group is not None  # DDP is not built without one
        engine = TorchEngine(group, self.traffic)
        texts = _exchange_texts(engine, self._configuration(), device)
        ranks: dict[str, list[str]] = {}
        for rank, text in enumerate(texts):
            ranks.setdefault(text.partition("\n")[0], []).append(str(rank))
        if len(ranks) > 1:
            shown = {text.partition("\n")[0]: text.partition("\n")[2] for text in texts}
            who = "; ".join(f"rank {', '.join(members)}: {shown[key]}" for key, members in ranks.items())
            raise RuntimeError(f"got other methods or names on other ranks, expected the same on all: {who}")
        return engine

    def _configuration(self) -> str:
        """A line of what all ranks must have in common, and one for people."""
        parts = getattr(self.compressor, "parts", [self.compressor])
        exchanges = [getattr(part, "exchange", None) for part in parts]  # no part of the digest
        names = zlib.crc32(repr(sorted(self._names.values())).encode())
        key = f"{self.compressor.digest:08x} {exchanges} {names:08x}"
        return f"{key}\n{self.compressor!r}" + (f" (names {names:08x})" if self._names else "")

    def _name(self, parameter: Tensor) -> str:
        name = self._names.get(parameter)
        if name is None:
            if self._all_known:
                raise RuntimeError(
                    f"HookState: got a gradient of shape {tuple(parameter.shape)} of an unknown parameter, expected "
                    "those of named_parameters, or of the first step; give each DDP model a HookState of its own"
                )
            name = self._names[parameter] = str(len(self._names))
        return name

    def _plan(self, parameters: list[Tensor]) -> "_Plan":
        """Who averages what of a bucket whose parameters have not been seen together before."""
        names = [self._name(p) for p in parameters]
        for name in names:
            if (unit := self._joined.get(name)) is not None:
                self._take_apart(unit)
                for member in unit.names:
                    del self._joined[member]
        members: dict[Any, list[int]] = {}
        parts = [self.compressor.part(name, p.shape) for name, p in zip(names, parameters)]
        for i, (part, parameter) in enumerate(zip(parts, parameters)):
            flat = part.flat and not part.bypasses(parameter)
            members.setdefault(("flat", id(part)) if flat else i, []).append(i)
        units = []
        for indices in members.values():
            shapes = [parameters[i].shape for i in indices]
            unit = _Unit(parts[indices[0]], indices, [names[i] for i in indices], shapes)
            unit.prepare(parameters[indices[0]].device, self._engine)
            if len(indices) > 1:
                self._joined |= dict.fromkeys(unit.names, unit)
            units.append(unit)
        return _Plan(parameters, tuple(names), units)

    def _take_apart(self, unit: "_Unit") -> None:
        state = unit.part.states.pop(unit.name, None)
        if state is not None:
            unit.part.states |= unit.split(state, self._engine)

    def _average(self, unit: "_Unit", of_bucket: list[Tensor]) -> Routine:
        """Replaces a unit's gradients by their averages."""
        assert self._engine is not None
        group = self._engine.rank, self._engine.size
        gradients = [of_bucket[i] for i in unit.indices]
        if len(gradients) == 1:
            return (yield from unit.part.average(gradients[0], unit.name, *group))
        numels = [g.numel() for g in gradients]
        flat = adjacent(gradients)
        if flat is not None:
            return (yield from unit.part.average(flat.view(1, -1), unit.name, *group))
        flat = self._workspace.empty(unit.name, (sum(numels),), gradients[0].dtype, gradients[0].device)
        torch.cat([g.reshape(-1) for g in gradients], out=flat)
        average = yield from unit.part.average(flat.view(1, -1), unit.name, *group)
        for gradient, piece in zip(gradients, average.view(-1).split(numels)):
            gradient.copy_(piece.view(gradient.shape))
        return average


class _Bucket:
    """A bucket whose averages are on their way."""

    def __init__(
        self, buffer: Tensor, routines: dict[Any, Routine], engine: TorchEngine, names: tuple[str, ...]
    ) -> None:
        self.buffer = buffer
        self.routines = routines
        self.future = Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._first = Round()
        self._first.resume(routines, dict.fromkeys(routines))
        self._pending: list[Pending] = [engine.launch(c, (names, i)) for i, c in enumerate(self._first.collectives())]

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
    names: tuple[str, ...]
    units: list["_Unit"]

    def fits(self, parameters: list[Tensor]) -> bool:
        return len(parameters) == len(self.parameters) and all(p is q for p, q in zip(parameters, self.parameters))


@dataclass
class _Unit:
    """Parameters of a bucket that a method averages as one: a single one, or, flat, all it is in charge of."""

    part: Compressor
    indices: list[int]  # within the bucket
    names: list[str]
    shapes: list[torch.Size]

    def __post_init__(self) -> None:
        self.name = self.names[0] if len(self.names) == 1 else f"{self.names[0]} and {len(self.names) - 1} more"

    def prepare(self, device: torch.device, engine: TorchEngine | None) -> None:
        """Makes the parameters' states, where there are any, this unit's."""
        found = {}
        for name, shape in zip(self.names, self.shapes):
            state = self.part.states.get(name)
            if state is None:
                continue
            if state.residual is not None and state.residual.numel() != shape.numel():
                raise ValueError(
                    f"state of parameter {name!r}: got a residual of {state.residual.numel()} elements, expected "
                    f"{shape.numel()}: it is another model's, or was saved under other names; give HookState "
                    "named_parameters"
                )
            for key, value in vars(state).items():
                if isinstance(value, Tensor):
                    vars(state)[key] = value.to(device)
            found[name] = state
        if len(self.names) > 1 and found:
            for name in found:
                del self.part.states[name]
            self.part.states[self.name] = self.join(found, engine)

    def join(self, states: Mapping[str, State], engine: TorchEngine | None) -> State:
        """The state of the flat gradient, from those of the parameters that have one."""
        joined = State(self.name)
        kept = {name: _folded(state, engine) for name, state in states.items()}
        for key in dict.fromkeys(key for values in kept.values() for key in values):
            values = {name: of_name[key] for name, of_name in kept.items() if key in of_name}
            some = next(iter(values.values()))
            if isinstance(some, Tensor):
                parts = [
                    values[name].reshape(-1) if name in values else some.new_zeros(shape.numel())
                    for name, shape in zip(self.names, self.shapes)
                ]
                vars(joined)[key] = torch.cat(parts).view(1, -1)
            else:
                vars(joined)[key] = sum(values.values()) if key == "payload_nbytes" else max(values.values())
        return joined

    def split(self, state: State, engine: TorchEngine | None) -> dict[str, State]:
        """The states of the parameters, from that of the flat gradient."""
        states = {name: State(name) for name in self.names}
        numels = [shape.numel() for shape in self.shapes]
        for key, value in _folded(state, engine).items():
            if isinstance(value, Tensor):
                parts = value.view(-1).split(numels)
                values = [part.view(shape).clone() for part, shape in zip(parts, self.shapes)]
            elif key == "payload_nbytes":
                values = [value * numel // sum(numels) for numel in numels]
            else:
                values = [value] * len(numels)
            for name, v in zip(self.names, values):
                vars(states[name])[key] = v
        return states


def _as_laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient in the order of its elements: DDP shows it contiguous, but has written it with the strides of the
    parameter, if its memory is dense."""
    dense = 1 + sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride())) == parameter.numel()
    if parameter.is_contiguous() or not dense:
        return gradient
    return gradient.as_strided(parameter.shape, parameter.stride())


def _folded(state: State, engine: TorchEngine | None) -> dict[str, Any]:
    """What a state keeps; what this rank owes as the owner of a shard is made part of its own residual.

    The owner's residual was left over from an average, and its gradient is a `size`-th of one.
    """
    values = state.state_dict()
    owner = values.pop("owner_residual", None)
    if owner is not None and engine is not None:
        values["residual"] = values["residual"].clone()
        shard = split_shards(values["residual"], engine.size)[engine.rank]
        if shard.shape == owner.shape:
            shard.add_(owner, alpha=engine.size)
    return values


def _exchange_texts(engine: TorchEngine, text: str, device: torch.device) -> list[str]:
    """Every rank's text."""
    pending = engine.launch(Gather(torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)), "texts")
    pending.extend()
    return [bytes(part.tolist()).decode() for part in pending.answer()]
