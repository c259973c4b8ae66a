"""Gradients to inspect: saved by `capture` in a training, or computed by a function in a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..averaging.handshake import parameters_by_name
from . import script

Named = dict[str, Tensor]


def capture(source: torch.nn.Module | Iterable[tuple[str, Tensor]], path: str | os.PathLike[str]) -> None:
    """Save the gradients of a model for `gradzip inspect`. Call it after `backward()`, on one rank.

        loss.backward()
        if step == 500:
            gradzip.capture(model, "step500.pt")

    Methods compress the gradient of one rank. After `optimizer.synchronize()` under Horovod, and after `backward()`
    under DDP, gradients are (compressed) averages: capture without the distributed optimizer, in `no_sync()`, or with
    `NoCompression`.

    Args:
        source: a model, or pairs as of `model.named_parameters()`. Parameters without a gradient are left out, and so
            are sparse gradients, which are never compressed.
        path: of the file, which is written whole or not at all. ``torch.load(weights_only=True)`` reads it: a dict from
            names to tensors on the CPU.

    Raises:
        ValueError: no parameter has a gradient.
    """
    named = source.named_parameters() if isinstance(source, torch.nn.Module) else source
    gradients = _gradients(parameters_by_name(named, "capture"))
    if not gradients:
        raise ValueError("capture: got parameters without gradients, expected some; call it after backward()")
    part = Path(f"{os.fspath(path)}.part")
    torch.save(gradients, part)
    os.replace(part, path)


def _gradients(parameters: Mapping[str, Tensor]) -> Named:
    """Copies of the dense gradients. A gradient may be a view of a bucket, which is not copied."""
    found = {name: p.grad.detach() for name, p in parameters.items() if p.grad is not None}
    return {name: grad.to("cpu", copy=True) for name, grad in found.items() if grad.layout == torch.strided}


def read(path: str | os.PathLike[str]) -> Named:
    """Read gradients from a file of `capture`, or from any file of a dict from names to tensors.

    Raises:
        ValueError: there is no such file, or it has no gradients.
    """
    what, remedy = os.fspath(path), "save gradients with gradzip.capture(model, path) after backward()"
    try:
        contents: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises errors of many kinds for a file of another kind
        reason = error.strerror if isinstance(error, OSError) else f"torch.load refuses it ({type(error).__name__})"
        raise ValueError(f"{what}: {reason}; {remedy}") from None
    return check(contents, what, remedy)


def compute(path: str | os.PathLike[str], function: str) -> Named:
    """Compute gradients by a function in a Python file.

    Args:
        function: name of a function without arguments that returns a model after `backward()`, a model and its loss, or
            a dict from names to gradients. The loss is a tensor of no dimensions that requires a gradient.

    Raises:
        ValueError: there is no such file or function, or the function fails or returns something else.
    """
    what, remedy = f"{os.fspath(path)}:{function}", "return a model after backward(), or a model and its loss"
    returned = script.call(Path(path), function)
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        returned, loss = returned
        with script.one_line_errors(f"{what}: backward() of the second, which must be a loss"):
            loss.backward()
    if isinstance(returned, torch.nn.Module):
        returned = _gradients(dict(returned.named_parameters()))
    return check(returned, what, remedy)


def check(contents: Any, what: str, remedy: str) -> Named:
    """Check a dict from names to gradients; drop entries that are None. Raises ValueError for anything else."""
    if not isinstance(contents, Mapping):
        raise ValueError(f"{what}: got {type(contents).__name__}, expected gradients by name; {remedy}")
    found = {name: gradient for name, gradient in contents.items() if gradient is not None}
    for name, gradient in found.items():
        tensor = isinstance(gradient, Tensor)
        if not (isinstance(name, str) and tensor and gradient.layout == torch.strided and gradient.is_floating_point()):
            kind = f"{gradient.layout} {gradient.dtype}" if tensor else type(gradient).__name__
            raise ValueError(
                f"{what}: got {name!r} of {kind}, expected dense floating-point gradients by name; {remedy}"
            )
    if not any(gradient.numel() for gradient in found.values()):
        raise ValueError(f"{what}: got no gradients in {len(contents)} entries, expected some; {remedy}")
    return {name: gradient.detach() for name, gradient in found.items()}
