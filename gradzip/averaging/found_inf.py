"""Optimizers whose step a flag on the device can skip.

torch's fused optimizers and those of `gradzip.optim` read the attribute `found_inf`: a float32 tensor of one element on
the device of the parameters. A step with 1.0 changes neither parameters nor states, whatever the gradients are. The
host does not wait for it.

    prepare     Whether an optimizer is one of them.
    hand_over   Set the attribute, before a step.
    take_away   Restore the attribute, after the step.

A GradScaler sets the attribute of fused optimizers, too, and deletes it after their step.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import Tensor

# The functions behind `step` of torch's optimizers that read `found_inf` with fused=True. AdamW has that of Adam.
_FUSED = {inspect.unwrap(kind.step): kind for kind in (torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)}

# What was handed over to an optimizer, and what its attribute was before; None: it had none.
_handed_over: weakref.WeakKeyDictionary[Any, tuple[Tensor, Tensor | None]] = weakref.WeakKeyDictionary()


def prepare(optimizer: Any) -> bool:
    """Whether `found_inf` on the device can skip the next step of an optimizer, whose gradients are there already.

    It is one of `gradzip.optim`, or torch's Adam, AdamW, SGD or Adagrad with fused=True in all param groups, or
    Horovod's around one of them. Subclasses that override `step` are not, nor are others with an option "fused". All
    gradients are on one CUDA device. Does not synchronise.

    torch's fused SGD leaves new momentum buffers uninitialized if it skips its first step. They are made here. They are
    -0.0, from which the first step has the bits of one that makes them.
    """
    with_gradient = [(group, p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if len({p.device for _, p in with_gradient}) > 1:
        return False
    if any(not p.is_cuda or p.grad.is_sparse for _, p in with_gradient):
        return False
    step = _step(optimizer)
    if (owner := _reads_found_inf(type(optimizer))) is not None:
        return inspect.unwrap(owner.step) is step
    kind = _FUSED.get(step)
    if kind is None or not all(group.get("fused") for group in optimizer.param_groups):
        return False
    if kind is not torch.optim.Adam and any(hasattr(p, "to_local") for _, p in with_gradient):
        return False  # DTensor has no rules for their kernels
    return kind is not torch.optim.SGD or _make_buffers(optimizer, with_gradient)


def hand_over(optimizer: Any, found_inf: Tensor) -> Tensor:
    """Set the attribute of an optimizer, before its step.

    What was handed over before, to a step that has failed, is taken away first.

    Args:
        found_inf: float32, of one element, on the device of the parameters: 1.0 skips the step, 0.0 does not. It is
            read in the step, and not changed.

    Returns:
        What the optimizer reads, of shape (): 1.0 also if a GradScaler skips the step. Does not synchronise.
    """
    take_away(optimizer)
    former: Tensor | None = getattr(optimizer, "found_inf", None)
    handed_over = found_inf.reshape(())  # torch subtracts it from counters of this shape
    if former is not None:
        handed_over = torch.maximum(handed_over, former.reshape(()).to(found_inf.device, non_blocking=True))
    _handed_over[optimizer] = handed_over, former
    optimizer.found_inf = handed_over
    return handed_over


def take_away(optimizer: Any) -> None:
    """Restore the attribute that an optimizer had before `hand_over`. Does nothing if there was no `hand_over`."""
    handed_over, former = _handed_over.pop(optimizer, (None, None))
    if handed_over is None or getattr(optimizer, "found_inf", None) is not handed_over:
        return  # a GradScaler has set or deleted it since
    if former is None:
        del optimizer.found_inf
    else:
        optimizer.found_inf = former


def _step(optimizer: Any) -> Any:
    """The function that computes the step of an optimizer, without torch's decorators and Horovod's average."""
    for kind in type(optimizer).__mro__:
        if (step := kind.__dict__.get("step")) is not None:
            step = inspect.unwrap(step)
            if step.__module__.partition(".")[0] != "horovod":
                return step
    return None


def _reads_found_inf(kind: type) -> Any:
    """The class of `gradzip.optim` that a class is of, and whose `step` reads the attribute; None: it is of none."""
    return next((base for base in kind.__mro__ if base.__dict__.get("reads_found_inf")), None)


def _make_buffers(optimizer: Any, with_gradient: list[tuple[dict[str, Any], Any]]) -> bool:
    """Make the momentum buffers that SGD is about to make. Returns False if dampening makes its first step another."""
    new = [(group, p) for group, p in with_gradient if group["momentum"]]
    new = [(group, p) for group, p in new if optimizer.state.get(p, {}).get("momentum_buffer") is None]
    if any(group["dampening"] for group, _ in new):
        return False
    for _, parameter in new:
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter.grad, -0.0)
    return True
