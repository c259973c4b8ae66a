"""Find the optimizer and the parameter of a gradient: Horovod's `compress(tensor)` gets neither."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import Tensor


def find_owner(tensor: Tensor) -> tuple[Any, Any]:
    """The DistributedOptimizer that called `compress`, and the parameter that has `tensor` as its gradient.

    Horovod passes the gradient alone. The optimizer is the `self` of a calling frame, and holds the parameters' names.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        optimizer = frame.f_locals.get("self")
        names = getattr(optimizer, "_parameter_names", None)
        if names is None or not hasattr(optimizer, "_compression"):
            frame = frame.f_back
            continue
        # Guess Horovod's loop variable, and verify. A sparse gradient was made dense.
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
    # Adasum passes the parameter itself, and is refused later.
    return parameter.grad is tensor or parameter is tensor
