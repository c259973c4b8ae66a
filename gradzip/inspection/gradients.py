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
    except OSError as error:
        raise ValueError(f"{what}: {error.strerror or error}; {remedy}") from None
    except Exception as error:  # torch.load raises errors of many kinds for a file of another kind
        raise ValueError(f"{what}: got a file that torch.load refuses ({type(error).__name__}); {remedy}") from None
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
    try:
        returned = script.call(Path(path), function)
        if isinstance(returned, (tuple, list)) and len(returned) == 2:
            returned, loss = returned
            if not (isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad):
                raise ValueError(
                    f"{what}: got {_kind(returned)} and {_kind(loss)}, expected a model and its loss; {remedy}"
                )
            with script.user_errors(what):
                loss.backward()
    except script.UserError as error:
        raise ValueError(f"{error}; {remedy}") from error
    if isinstance(returned, torch.nn.Module):
        returned = _gradients(dict(returned.named_parameters()))
    return check(returned, what, remedy)


def _kind(value: object) -> str:
    """Describe a value for an error message."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"a tensor of shape {tuple(value.shape)} that requires {'a' if value.requires_grad else 'no'} gradient"


def check(contents: Any, what: str, remedy: str) -> Named:
    """Check a dict from names to gradients; drop entries that are None. Raises ValueError for anything else."""
    if not isinstance(contents, Mapping):
        raise ValueError(f"{what}: got {type(contents).__name__}, expected gradients by name; {remedy}")
    gradients: Named = {}
    for name, gradient in contents.items():
        if gradient is None:
            continue
        if not (isinstance(name, str) and isinstance(gradient, Tensor) and gradient.layout == torch.strided):
            kind = type(gradient).__name__ if not isinstance(gradient, Tensor) else gradient.layout
            raise ValueError(f"{what}: got {name!r} of {kind}, expected gradients by name; {remedy}")
        if not gradient.is_floating_point():
            raise ValueError(f"{what}: got {name!r} of {gradient.dtype}, expected floating-point gradients; {remedy}")
        gradients[name] = gradient.detach()
    if not any(gradient.numel() for gradient in gradients.values()):
        raise ValueError(f"{what}: got no gradients in {len(contents)} entries, expected some; {remedy}")
    return gradients
