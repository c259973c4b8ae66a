"""Horovod's front end: `hvd.DistributedOptimizer(..., compression=gradzip.FFTRange())`, on stock Horovod.

Horovod calls ``compress(gradient)`` in its backward hook, all-reduces what it returns, and calls ``decompress`` in
``optimizer.synchronize()``. So `compress` runs a method to its first collective. An average is left to Horovod's own
all-reduce; anything else is started beside it, and Horovod is given a single number to keep it busy.
"""

from __future__ import annotations

import itertools
import sys
from threading import Lock
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from . import agreement
from .collectives import Collective, Mean, RingSum, Routine, fused
from .compressor import Compressor, as_written
from .methods.none import NoCompression

if TYPE_CHECKING:
    from .engines.horovod import HorovodEngine, Pending


# A backward pass has a thread for each device.
_one_at_a_time = Lock()


class FrontEnd:
    """What leads from Horovod's two calls to a compressor. One per compressor; it may serve several optimizers."""

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self._scopes: WeakKeyDictionary[Any, _Scope] = WeakKeyDictionary()
        self._named: dict[str, dict[str, ref[Any]]] = {}  # by the prefix

    def __reduce__(self) -> tuple[Any, ...]:
        # The copy of a compressor serves no optimizer yet.
        return FrontEnd, (self.compressor,)

    def compress(self, tensor: Tensor) -> tuple[Tensor, Running]:
        optimizer, parameter = _find_owner(tensor)
        with _one_at_a_time, as_written(tensor.device):
            scope = self._scopes.get(optimizer)
            if scope is None or scope.engine.is_over:
                scope = self._scopes[optimizer] = _Scope(optimizer, self)
            scope.keep_up(optimizer)
            running = Running(scope, optimizer._parameter_names[parameter], tensor, frozen=not parameter.requires_grad)
            wire = running.start(tensor)
            scope.under_way += 1
            return wire, running

    def drop_in_flight(self) -> None:
        """Forgets what is under way, and what was agreed on: the group that did is no more."""
        self._scopes.clear()

    def prefix(self, optimizer: Any) -> str:
        """What keeps the states of equally named parameters of several optimizers apart.

        The first optimizer that comes with a name has it without a prefix; and so has a later one of the same
        parameters. That a parameter is gone frees its state, but no name: when it goes is not the same on all ranks.
        Optimizers of a process set are counted apart: its ranks need not have others in common.
        """
        for known_prefix, known in self._named.items():
            for name, parameter in known.items():
                if parameter() is None:
                    for part in self.compressor.parts:
                        part.states.pop(known_prefix + name, None)
        names = {name: parameter for parameter, name in optimizer._parameter_names.items()}

        def fits(known: dict[str, ref[Any]]) -> bool:
            return all(name not in known or known[name]() is parameter for name, parameter in names.items())

        number = optimizer.process_set.process_set_id
        group = f"process_set{number}." if number else ""
        prefixes = itertools.chain([group], (f"{group}optimizer{i}." for i in itertools.count(1)))
        prefix = next(p for p in prefixes if fits(self._named.get(p, {})))
        self._named.setdefault(prefix, {}).update((name, ref(parameter)) for name, parameter in names.items())
        return prefix


class _Scope:
    """One optimizer's part of a front end: its engine, and what is under way."""

    def __init__(self, optimizer: Any, front_end: FrontEnd) -> None:
        import horovod.torch as hvd

        from .engines.horovod import HorovodEngine

        compressor = front_end.compressor
        # Horovod's class for Adasum has no `op`.
        op = getattr(optimizer, "op", hvd.Adasum)
        if op not in (hvd.Average, hvd.Sum):
            raise ValueError(
                f"{type(compressor).__name__} with op=Adasum: Adasum combines the very gradients that compression "
                "changes; use op=hvd.Average or op=hvd.Sum"
            )
        self.sums = op == hvd.Sum
        self.compressor = compressor
        self.engine: HorovodEngine = HorovodEngine(optimizer.process_set, compressor.traffic)
        self.prefix = front_end.prefix(optimizer)
        self.plain = NoCompression()
        self.plain.traffic = compressor.traffic
        self.waiting: list[Running] = []
        self.under_way = 0
        self._finished: list[Running] = []
        self._handles = optimizer._handles
        named = ((name, parameter) for parameter, name in optimizer._parameter_names.items())
        agreement.check(self.engine.share(agreement.statement(compressor, named, self.prefix), "gradzip"))

    def keep_up(self, optimizer: Any) -> None:
        """Drops what is under way where the optimizer has: loading a state dict does that, maybe on one rank alone."""
        if optimizer._handles is not self._handles:
            self._handles = optimizer._handles
            self.waiting, self.under_way, self._finished = [], 0, []

    def finished(self, running: Running) -> None:
        """Under a loss scale, one gradient that is not finite makes the optimizer skip the step of all: then the steps
        of the others are taken back, when the last one of them is finished."""
        self.under_way -= 1
        if self.compressor.follows:
            self._finished.append(running)
        if self.under_way:
            return
        step, self._finished = self._finished, []
        if not all(r.result.isfinite().all() for r in step if r.result is not None):
            for r in step:
                r.part.take_back(self.prefix + r.name)

    def complete(self) -> None:
        """Runs all gradients that wait for a collective of ours to their ends.

        Horovod calls `decompress` when it has called `compress` for all gradients, but not in the same order on every
        rank. So later rounds go through all gradients in the order of their names, joined into one collective. Rings,
        which nothing but their order matches, are such a round from the beginning.
        """
        turn, self.waiting = sorted(self.waiting, key=lambda running: running.name), []
        joint = fused(running.rest() for running in turn)
        answers: Any = None
        for number in itertools.count(2):
            try:
                collectives = joint.send(answers)
            except StopIteration:
                return
            name = f"{turn[0].name}.gradzip.{number}"
            pending = [self.engine.launch(c, f"{name}.{i}") for i, c in enumerate(collectives)]
            answers = [self.engine.wait(p) for p in pending]


class Running:
    """One gradient between `compress` and `decompress`."""

    def __init__(self, scope: _Scope, name: str, grad: Tensor, frozen: bool) -> None:
        self.name = name
        self._scope = scope
        part, engine = scope.compressor.part(name, grad.shape), scope.engine
        # Horovod averages zeros for a frozen parameter. What is left to be sent of it would move it all the same.
        self.part = scope.plain if frozen else part
        self._routine: Routine = self.part.average(grad, scope.prefix + name, engine.rank, engine.size)
        self._single = self.part.rounds == 1 or self.part.bypasses(grad)
        self._pending: Pending | RingSum | None = None
        self._dtype: torch.dtype | None = None
        self.result: Tensor | None = None

    def start(self, grad: Tensor) -> Tensor:
        """Runs the method to its first collective; returns the tensor that Horovod shall all-reduce."""
        engine = self._scope.engine
        collective = next(self._routine)
        if isinstance(collective, Mean) and self._single:
            self._dtype = collective.tensor.dtype
            return engine.wire(collective.tensor)
        if isinstance(collective, RingSum):
            self._pending = collective
        else:
            self._pending = engine.launch(collective, f"{self.name}.gradzip")
        self._scope.waiting.append(self)
        # In the gradient's own type: Horovod's groups hold one type each.
        return engine.wire(grad.new_zeros(1))

    def rest(self) -> Routine:
        """The method from the answer of its first collective on; from the collective itself if that is a ring."""
        first = self._pending
        assert first is not None
        answer = (yield first) if isinstance(first, RingSum) else self._scope.engine.wait(first)
        while (collective := self._resume(answer)) is not None:
            answer = yield collective

    def finish(self, reduced: Tensor) -> Tensor:
        """The gradient's average (or sum); `reduced` is what Horovod made of `start`'s tensor."""
        size = self._scope.engine.size
        with as_written(reduced.device):
            if self._pending is not None:
                self._scope.complete()
            elif self._resume((reduced / size if self._scope.sums else reduced).to(self._dtype)) is not None:
                raise RuntimeError(f"{self.name}: the method asks for a second collective, but declares rounds = 1")
            assert self.result is not None
            if self._scope.sums:
                self.result.mul_(size)
        self._scope.finished(self)
        return self.result

    def _resume(self, answer: Any) -> Collective | None:
        try:
            return self._routine.send(answer)
        except StopIteration as done:
            self.result = done.value
            return None


def _find_owner(tensor: Tensor) -> tuple[Any, Any]:
    """The DistributedOptimizer that called, and its parameter whose gradient `tensor` is.

    Horovod passes the bare gradient. The optimizer is the `self` of a calling frame, and holds the parameters' names.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        optimizer = frame.f_locals.get("self")
        names = getattr(optimizer, "_parameter_names", None)
        if names is None or not hasattr(optimizer, "_compression"):
            frame = frame.f_back
            continue
        # Horovod's own loop variable, as a guess that is verified. A sparse gradient comes made dense.
        guess = [p for p in [frame.f_locals.get("p")] if p is not None and p in names]
        for parameter in (*guess, *names):
            if _is_gradient(tensor, parameter):
                return optimizer, parameter
        if guess and guess[0].grad is not None and guess[0].grad.is_sparse:
            return optimizer, guess[0]
        raise RuntimeError(
            f"a gradient of shape {tuple(tensor.shape)} belongs to no parameter of the optimizer that asks for its "
            "compression; give hvd.DistributedOptimizer named_parameters=model.named_parameters() of that model"
        )
    raise RuntimeError(
        "compress() was not called by a hvd.DistributedOptimizer; to compress a tensor yourself use "
        "gradzip.roundtrip(compressor, tensor) or gradzip.LocalGroup"
    )


def _is_gradient(tensor: Tensor, parameter: Any) -> bool:
    # Adasum hands over the parameter itself; it is told so later.
    return parameter.grad is tensor or parameter is tensor


def __getattr__(name: str) -> Any:
    if name == "elastic_state":
        from .elastic import elastic_state

        return elastic_state
    if name != "Compression":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import horovod.torch as hvd

    from .methods import REGISTRY

    # .none and .fp16 stay Horovod's own.
    names = {key.replace("-", "_"): method for key, method in REGISTRY.items()}
    members = {key: method for key, method in names.items() if not hasattr(hvd.Compression, key)}
    globals()[name] = type(name, (hvd.Compression,), members)
    return globals()[name]
