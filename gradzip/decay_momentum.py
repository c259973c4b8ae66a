"""Momentum for the weight decay of `torch.optim.SGD`, next to a method that applies momentum to gradients.

SGD(momentum=m, weight_decay=w) applies its momentum to the gradient plus w p, for a parameter p. A method such as DGC
applies momentum to the gradient, and SGD then adds w p without momentum, which decays p 1 / (1 - m) times too slowly.
So each time an SGD steps such a parameter, its closure ends with

    p.grad = p.grad + m d        (p.grad - m d, if it maximizes)
    d = m d + w p

and SGD subtracts lr (p.grad + w p): the momentum of both. d starts as 0. It is the `decay_velocity` of the parameter's
state in the method, with which it is saved, loaded and broadcast: Horovod's broadcast_optimizer_state() would hang
where only some ranks' optimizers have a state. p.grad keeps the sum after the step: before a step with a closure
under Horovod, which averages p.grad before it calls the closure, call zero_grad().

The closure has two merits: gradients are complete when it returns, also under Horovod, whose optimizer averages them
after its own hooks; and a step that fails before leaves nothing behind.

Source: the SGD in the published code of Lin, Han, Mao, Wang, Dally, Deep Gradient Compression, ICLR 2018, which gives
weight decay a momentum buffer of its own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from .averaging import Averaging
from .compressor import Compressor

# By parameter: a weak reference to the method that has averaged its gradient since the last step, and the name of its
# state. Only parameters whose method applies momentum.
_methods: Any = WeakIdKeyDictionary()


def prepare(compressor: Compressor) -> None:
    """Prepare for `register` in the closure of an optimizer's first step."""
    if any(part.optimizer_momentum for part in compressor.parts):
        _hook_optimizers()


def register(parameter: Tensor, averaging: Averaging) -> None:
    """Record how the gradient of a parameter is averaged. Call it in each step, before SGD updates the parameter."""
    if averaging.method.optimizer_momentum:
        _hook_optimizers()
        _methods[parameter] = weakref.ref(averaging.method), averaging.name
    elif parameter in _methods:
        del _methods[parameter]


@functools.cache
def _hook_optimizers() -> None:
    """Have `_before_step` called by all optimizers: DDP does not know the optimizer of its parameters."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]
) -> tuple[tuple[Any, ...], dict[Any, Any]] | None:
    """Replace the closure of a step. args: the optimizer, and the closure if it is not in kwargs."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    # Horovod's optimizer passes its closure on to SGD, whose step calls this again.
    if not isinstance(optimizer, torch.optim.SGD) or isinstance(closure, _Closure):
        return None
    # The closure may register the parameters.
    if closure is None and not any(p in _methods for group in optimizer.param_groups for p in group["params"]):
        return None
    return (args[0], _Closure(optimizer, closure)), {key: kwargs[key] for key in kwargs if key != "closure"}


class _Closure:
    """The user's closure, if any, followed by the addition of the momentum of the weight decay."""

    def __init__(self, optimizer: torch.optim.SGD, closure: Callable[[], Any] | None) -> None:
        self._optimizer = optimizer
        self._closure = closure

    def __call__(self) -> Any:
        loss = None if self._closure is None else self._closure()
        # GradScaler leaves it to a fused SGD to unscale gradients, and to skip the step.
        found_inf = getattr(self._optimizer, "found_inf", None)
        if found_inf is None or not found_inf.item():
            scale = getattr(self._optimizer, "grad_scale", None)
            with torch.no_grad():
                for group in self._optimizer.param_groups:
                    for parameter in group["params"]:
                        _add_momentum(parameter, group, 1.0 if scale is None else float(scale))
        return loss


def _add_momentum(parameter: Tensor, group: dict[str, Any], scale: float) -> None:
    """Add the momentum of the decay to a gradient. group: the parameter's options; scale: of the gradient."""
    reference, name = _methods.pop(parameter, (None, None))
    method = None if reference is None else reference()
    if method is None or parameter.grad is None or parameter.grad.is_sparse:
        return
    momentum = method.optimizer_momentum
    if group["momentum"]:
        raise ValueError(
            f"SGD: got momentum = {group['momentum']} for a parameter to which {type(method).__name__} applies "
            f"momentum {momentum}, expected 0: give its param group momentum=0"
        )
    state = method.states.get(name)
    if state is None or state.loaded:
        return  # the parameter is frozen: the method has averaged its gradient without momentum
    decay, velocity = float(group["weight_decay"]), getattr(state, "decay_velocity", None)
    own = _local(parameter)
    if velocity is not None:
        _local(parameter.grad).add_(velocity, alpha=(-momentum if group["maximize"] else momentum) * scale)
        velocity.mul_(momentum).add_(own, alpha=decay)
    elif decay:
        state.decay_velocity = own * decay


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
