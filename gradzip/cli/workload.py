"""The argument `--model` of a command: a well-known network, or a function in a file."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ..advice.models import MODELS, Parameter
from ..inspection import script
from .command import CommandError


def load(text: str) -> list[Parameter]:
    """The parameters of the workload that `--model` names, in the order of the forward pass. Raises CommandError."""
    if text in MODELS:
        return list(MODELS[text]())
    path, _, function = text.partition(":")
    if path.endswith(".py"):
        return _from_file(Path(path), function or "build")
    raise CommandError(f"got --model {text!r}, expected file.py:build, or one of: {', '.join(MODELS)}")


def _from_file(path: Path, function: str) -> list[Parameter]:
    """The parameters of the module that a function returns. Their work is estimated by their number of elements."""
    expected = f"expected a file with a function {function}() that returns a torch.nn.Module"
    try:
        built = script.call(path, function)
    except ValueError as error:
        raise CommandError(f"{error}; {expected}") from None
    if not isinstance(built, nn.Module):
        raise CommandError(f"{path}:{function}: got {type(built).__name__}, {expected}")
    named = [(name, p) for name, p in built.named_parameters() if p.requires_grad and p.numel()]
    if not named:
        raise CommandError(f"{path}:{function}: got a module without parameters that need a gradient, expected some")
    return [Parameter(name, tuple(p.shape), float(p.numel())) for name, p in named]
