"""Horovod's front end: `hvd.DistributedOptimizer(..., compression=gradzip.FFTRange())`, on stock Horovod.

Horovod calls ``compress(gradient)`` in its backward hook, all-reduces what it returns, and calls ``decompress`` in
``optimizer.synchronize()``. So `compress` runs a method to its first collective. An average is left to Horovod's own
all-reduce; anything else is started beside it, and Horovod is given a single number to keep it busy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .collectives import Collective, Mean, Routine
from .compressor import Compressor

if TYPE_CHECKING:
    from .engines.horovod import HorovodEngine


class FrontEnd:
    """What leads from Horovod's two calls to a compressor. One per compressor; it may serve several optimizers."""

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self._scopes: WeakKeyDictionary[Any, _Scope] = WeakKeyDictionary()

    def compress(self, tensor: Tensor) -> tuple[Tensor, Running]:
        optimizer, parameter = _find_owner(tensor)
        scope = self._scopes.get(optimizer)
        if scope is None:
            scope = self._scopes[optimizer] = _Scope(optimizer, self.compressor, len(self._scopes))
        name = optimizer._parameter_names[parameter]
        with torch.no_grad():
            running = Running(scope, name, self.compressor.average(tensor, scope.prefix + name, scope.engine.rank))
            return running.start(tensor), running


class _Scope:
    """One optimizer's part of a front end: its engine, and a prefix that keeps its parameters' states apart."""

    def __init__(self, optimizer: Any, compressor: Compressor, index: int) -> None:
        import horovod.torch as hvd

        from .engines.horovod import HorovodEngine

        # Horovod's class for Adasum has no `op`.
        op = getattr(optimizer, "op", hvd.Adasum)
        if op not in (hvd.Average, hvd.Sum):
            raise ValueError(
                f"{type(compressor).__name__} with op=Adasum: Adasum combines the very gradients that compression "
                "changes; use op=hvd.Average or op=hvd.Sum"
            )
        self.sums = op == hvd.Sum
        self.engine = HorovodEngine(optimizer.process_set, compressor.traffic)
        self.prefix = f"optimizer{index}." if index else ""


class Running:
    """One gradient between `compress` and `decompress`."""

    def __init__(self, scope: _Scope, name: str, routine: Routine) -> None:
        self._engine: HorovodEngine = scope.engine
        self._sums = scope.sums
        self._name = name
        self._routine = routine
        self._pending: Any = None
        self._dtype: torch.dtype | None = None

    def start(self, grad: Tensor) -> Tensor:
        """Runs the method to its first collective; returns the tensor that Horovod shall all-reduce."""
        collective: Collective = next(self._routine)
        if isinstance(collective, Mean):
            self._dtype = collective.tensor.dtype
            return self._engine.wire(collective.tensor)
        self._pending = self._engine.launch(collective, f"{self._name}.gradzip")
        # In the gradient's own type: Horovod's groups hold one type each.
        return self._engine.wire(grad.new_zeros(1))

    @torch.no_grad()
    def finish(self, reduced: Tensor) -> Tensor:
        """Takes the answer to that collective and runs the method to its end; returns the gradient's average."""
        if self._pending is not None:
            answer = self._engine.wait(self._pending)
        else:
            answer = (reduced / self._engine.size if self._sums else reduced).to(self._dtype)
        try:
            for turn in range(2, 1_000_000):
                collective = self._routine.send(answer)
                answer = self._engine.wait(self._engine.launch(collective, f"{self._name}.gradzip.{turn}"))
        except StopIteration as done:
            return done.value.mul_(self._engine.size) if self._sums else done.value
        raise RuntimeError(f"{self._name}: the method does not come to an end")


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
    if name != "Compression":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import horovod.torch as hvd

    from .methods import REGISTRY

    def factory(method: Callable[..., Compressor]) -> staticmethod:
        return staticmethod(lambda *args, **kwargs: method(*args, **kwargs))

    # .none and .fp16 stay Horovod's own.
    names = {key.replace("-", "_"): factory(method) for key, method in REGISTRY.items()}
    members = {key: make for key, make in names.items() if not hasattr(hvd.Compression, key)}
    globals()[name] = type(name, (hvd.Compression,), members)
    return globals()[name]
