"""Refuse optimizers that add momentum or weight decay to gradients to which a method has applied momentum.

DDP and FSDP do not know the optimizer of a parameter. A front end registers the parameters in each step, and torch
calls `_check` before and after the steps of all optimizers: after, because a closure may compute the gradients.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..methods.base.compressor import Compressor
from .routine import Averaging

# Those that add weight decay to gradients, unless it is decoupled as in AdamW.
_COUPLED = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
)

# Methods that have averaged the gradients of parameters with momentum since the last step, by parameter.
_methods: Any = WeakIdKeyDictionary()


def register(parameter: Tensor, averaging: Averaging) -> None:
    """Record how the gradient of a parameter is averaged. Call it in each step, before the optimizer's."""
    if averaging.method.optimizer_momentum and not averaging.frozen:
        _hook_optimizers()
        _methods[parameter] = weakref.ref(averaging.method)
    elif parameter in _methods:
        del _methods[parameter]


@functools.cache
def _hook_optimizers() -> None:
    register_optimizer_step_pre_hook(_check)
    register_optimizer_step_post_hook(_check)


def _check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise ValueError if an optimizer applies momentum or weight decay of its own to a registered parameter."""
    for group in optimizer.param_groups if isinstance(optimizer, _COUPLED) else ():
        options = ("momentum",) if group.get("decoupled_weight_decay") else ("momentum", "weight_decay")
        applied = next((name for name in options if group.get(name)), None)
        for parameter in group["params"]:
            reference = _methods.get(parameter)
            method: Compressor | None = None if reference is None else reference()
            if applied is not None and method is not None:
                raise ValueError(
                    f"{type(optimizer).__name__}: got {applied} = {group[applied]} for a parameter to which "
                    f"{type(method).__name__} applies momentum {method.optimizer_momentum}, expected 0: use "
                    f"gradzip.optim.DGCSGD, or give its param group {applied}=0"
                )
            _methods.pop(parameter, None)
