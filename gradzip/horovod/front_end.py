"""Run a method between Horovod's calls of `compress` and `decompress`.

Horovod calls ``compress(gradient)`` in its backward hook, all-reduces the tensor it returns, and calls ``decompress``
in ``optimizer.synchronize()``. `FrontEnd.compress` runs a method to its first collective. A Mean is left to Horovod's
own all-reduce. Any other collective is started beside it, and Horovod gets a tensor of one element to all-reduce.
"""

from __future__ import annotations

import itertools
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from .. import decay_momentum, handshake
from ..averaging import Averaging, no_autocast
from ..collectives import Done, Mean, RingSum, advance
from ..compressor import Compressor
from ..fusion import Round
from .owner import find_owner

if TYPE_CHECKING:
    from ..engines.base import Pending
    from ..engines.horovod import HorovodEngine


# A backward pass has one thread for each device.
_lock = Lock()


def front_end(compressor: Compressor) -> FrontEnd:
    """The front end of a compressor."""
    attachments = compressor.memory.attachments
    return attachments.get("horovod") or attachments.setdefault("horovod", FrontEnd())


class FrontEnd:
    """The optimizers that use one compressor. A copy of the compressor starts with a new one."""

    def __init__(self) -> None:
        self._contexts: WeakKeyDictionary[Any, OptimizerContext] = WeakKeyDictionary()
        self._named: dict[str, dict[str, ref[Any]]] = {}  # prefix -> name -> parameter

    def __reduce__(self) -> tuple[Any, ...]:
        return FrontEnd, ()

    def compress(self, compressor: Compressor, tensor: Tensor) -> tuple[Tensor, InFlightGradient]:
        """Start averaging a gradient. Returns the tensor for Horovod to all-reduce, and `decompress`'s context."""
        optimizer, parameter = find_owner(tensor)
        with _lock, no_autocast(tensor.device):
            context = self._contexts.get(optimizer)
            if context is None or context.engine.is_stale:
                context = OptimizerContext(optimizer, compressor, self.prefix(compressor, optimizer))
                self._contexts[optimizer] = context
            context.reset_if_stale(optimizer)
            name = optimizer._parameter_names[parameter]
            in_flight = InFlightGradient(context, name, tensor, frozen=not parameter.requires_grad)
            decay_momentum.register(parameter, in_flight.averaging)
            wire = in_flight.start(tensor)
            context.num_in_flight += 1
            return wire, in_flight

    def drop_in_flight(self) -> None:
        """Drop gradients in flight, and the result of the handshake: the group has changed."""
        self._contexts.clear()

    def prefix(self, compressor: Compressor, optimizer: Any) -> str:
        """The prefix that keeps states of equally named parameters of several optimizers apart.

        The first optimizer with a name gets no prefix for it; a later optimizer of the same parameters gets the same
        prefix. A deleted parameter's state is freed; its name stays reserved, because ranks may delete it at different
        times. Optimizers of a process set are numbered separately: its ranks may have no other optimizer in common.
        """
        for known_prefix, known in self._named.items():
            for name, parameter in known.items():
                if parameter() is None:
                    for part in compressor.parts:
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


class OptimizerContext:
    """One optimizer: its engine, and its gradients in flight."""

    def __init__(self, optimizer: Any, compressor: Compressor, prefix: str) -> None:
        import horovod.torch as hvd

        from ..engines.horovod import HorovodEngine

        # Horovod's optimizer for Adasum has no `op`.
        op = getattr(optimizer, "op", hvd.Adasum)
        if op not in (hvd.Average, hvd.Sum):
            raise ValueError(
                f"{type(compressor).__name__} with op=Adasum: Adasum combines the very gradients that compression "
                "changes; use op=hvd.Average or op=hvd.Sum"
            )
        self.sums = op == hvd.Sum
        self.compressor = compressor
        self.engine: HorovodEngine = HorovodEngine(optimizer.process_set, compressor.traffic)
        self.prefix = prefix
        self.waiting: list[InFlightGradient] = []  # for a collective that gradzip starts
        self.num_in_flight = 0
        self._finished: list[InFlightGradient] = []
        self._handles = optimizer._handles
        named = ((name, parameter) for parameter, name in optimizer._parameter_names.items())
        handshake.compare(self.engine.allgather_bytes(handshake.describe(compressor, named, prefix), "gradzip"))

    def reset_if_stale(self, optimizer: Any) -> None:
        """Drop gradients in flight if the optimizer has: it does when it loads a state dict, maybe on one rank only."""
        if optimizer._handles is not self._handles:
            self._handles = optimizer._handles
            self.waiting, self.num_in_flight, self._finished = [], 0, []

    def complete(self) -> None:
        """Run all waiting gradients to their ends.

        When Horovod calls `decompress`, it has called `compress` for all gradients, but in an order that differs
        between ranks. Later rounds are therefore run for all gradients in the order of their names, as fused
        collectives. So are rings, which are matched by their order alone.
        """
        waiting, self.waiting = sorted(self.waiting, key=lambda gradient: gradient.name), []
        routines = {gradient.name: gradient.routine for gradient in waiting}
        first = Round()
        returned: dict[str, Tensor] = {}
        for gradient in waiting:
            if isinstance(gradient.pending, RingSum):
                first.add(gradient.name, gradient.pending)
            else:
                assert gradient.pending is not None
                returned |= first.advance(routines, {gradient.name: gradient.pending.result()})
        returned |= self.engine.finish(routines, first, f"{waiting[0].name}.gradzip")
        for gradient in waiting:
            gradient.average = returned[gradient.name]

    def finished(self, gradient: InFlightGradient) -> None:
        """Count a finished gradient; after the last one, end the step, and roll it back if the optimizer will skip it.

        With a loss scale, one gradient that is not finite makes GradScaler skip the step for all parameters.
        """
        self.num_in_flight -= 1
        if self.compressor.memory.scaler is not None:
            self._finished.append(gradient)
        if self.num_in_flight:
            return
        step, self._finished = self._finished, []
        if all(g.average.isfinite().all() for g in step if g.average is not None):
            self.compressor.end_step(self.engine)
            return
        for g in step:
            g.averaging.method.memory.rollback(g.averaging.name)
        self.compressor.skip_step()


class InFlightGradient:
    """One gradient between Horovod's calls of `compress` and `decompress`."""

    def __init__(self, context: OptimizerContext, name: str, grad: Tensor, frozen: bool) -> None:
        self.name = name
        self.averaging = Averaging(context.compressor, name, grad, prefix=context.prefix, frozen=frozen)
        self.routine = self.averaging.run(grad, context.engine.rank, context.engine.size)
        self.pending: Pending | RingSum | None = None  # first collective; None if it is Horovod's own all-reduce
        self.average: Tensor | None = None
        self._context = context
        self._dtype: torch.dtype | None = None

    def start(self, grad: Tensor) -> Tensor:
        """Run the method to its first collective. Returns the tensor that Horovod all-reduces."""
        engine = self._context.engine
        collective = advance(self.routine)
        if isinstance(collective, Mean) and self.averaging.rounds == 1:
            self._dtype = collective.tensor.dtype
            return engine.wire(collective.tensor)
        is_ring = isinstance(collective, RingSum)
        self.pending = collective if is_ring else engine.launch(collective, f"{self.name}.gradzip")
        self._context.waiting.append(self)
        # Of the gradient's own type: Horovod's groups hold one type each.
        return engine.wire(grad.new_zeros(1))

    def finish(self, reduced: Tensor) -> Tensor:
        """The gradient's average (or sum). reduced: what Horovod all-reduced."""
        context = self._context
        size = context.engine.size
        with no_autocast(reduced.device):
            if self.pending is None:
                end = advance(self.routine, (reduced / size if context.sums else reduced).to(self._dtype))
                if not isinstance(end, Done):
                    raise RuntimeError(f"{self.name}: the method asks for a second collective, but declares rounds = 1")
                self.average = end.result
            elif self.average is None:
                context.complete()
            assert self.average is not None
            if context.sums:
                self.average.mul_(size)
        context.finished(self)
        return self.average
