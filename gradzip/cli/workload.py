"""The argument `--model` of a command: a well-known network, a function in a file, or shapes in JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..cost import Step
from ..inspection import script
from ..measure import measure_step
from .command import CommandError
from .models import MODELS, Parameter

# Largest number of elements of one parameter. Larger ones are mistakes, and some do not fit in 64 bits.
MOST_ELEMENTS = 1 << 36


@dataclass(frozen=True)
class Workload:
    """A model: its parameters in the order of the forward pass.

    module, inputs: what the function in a file returned; None otherwise.
    """

    name: str
    parameters: list[Parameter]
    module: nn.Module | None = None
    inputs: tuple[Any, ...] | None = None

    def train_step(self) -> Callable[[], object]:
        """Get a function that runs a training step of the module, with plain SGD. The loss is the outputs' mean."""
        module, inputs = self.module, self.inputs
        assert module is not None and inputs is not None
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)

        def step() -> None:
            optimizer.zero_grad()
            torch.stack([output.float().mean() for output in _tensors(module(*inputs))]).sum().backward()
            optimizer.step()

        return step

    def measured_step(self) -> Step:
        """Measure a training step. Raises CommandError if the module is not on the CPU, or if its step fails."""
        module = self.module
        assert module is not None
        for parameter in module.parameters():
            if parameter.device.type != "cpu":
                raise CommandError(
                    f"{self.name}: got a module on {parameter.device}, but --measure measures on the CPU; expected "
                    "--bandwidth, --ranks and --step-ms in place of --measure"
                )
        try:
            with script.user_errors(f"{self.name}: a training step"):
                step = measure_step(module, self.train_step())
        except script.UserError as error:
            expected = "expected inputs for module(*inputs), which returns floating-point tensors"
            raise CommandError(f"{error}; {expected}") from None
        return step


def load(text: str) -> Workload:
    """Load the workload that `--model` names. Raises CommandError."""
    if text in MODELS:
        return Workload(text, list(MODELS[text]()))
    path, _, function = text.partition(":")
    if path.endswith(".py"):
        return _from_file(Path(path), function or "build")
    if path.endswith(".json"):
        return _from_shapes(Path(text))
    raise CommandError(f"got --model {text!r}, expected file.py:build, shapes.json or one of: {', '.join(MODELS)}")


def _from_file(path: Path, function: str) -> Workload:
    expected = f"expected a file with a function {function}() that returns a torch.nn.Module, or (module, inputs)"
    try:
        built = script.call(path, function)
    except script.UserError as error:
        raise CommandError(f"{error}; {expected}") from None
    inputs = None
    if isinstance(built, (tuple, list)) and len(built) == 2:
        built, inputs = built
        if isinstance(inputs, Tensor) and inputs.dim() == 0:
            raise CommandError(
                f"{path}:{function}: got a tensor of no dimensions, as a loss is, for inputs; {expected}"
            )
        inputs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    if not isinstance(built, nn.Module):
        raise CommandError(f"{path}:{function}: got {type(built).__name__}, {expected}")
    named = [(name, tuple(p.shape)) for name, p in built.named_parameters() if p.requires_grad and p.numel()]
    if not named:
        raise CommandError(f"{path}:{function}: got a module without parameters that need a gradient, expected some")
    return Workload(f"{path.name}:{function}", _by_elements(named), built, inputs)


def _from_shapes(path: Path) -> Workload:
    expected = 'expected a list of [name, [rows, columns, ...]], or an object {"name": [rows, columns, ...]}'
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise CommandError(f"got --model {path}, which cannot be read ({error.strerror}); {expected}") from None
    except ValueError as error:
        raise CommandError(f"{path}: got no JSON ({script.one_line(error)}), {expected}") from None
    if not isinstance(content, (list, dict)) or not content:
        raise CommandError(f"{path}: got no shapes, {expected}")
    pairs = list(content.items()) if isinstance(content, dict) else content
    named = []
    for pair in pairs:
        if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str)):
            raise CommandError(f"{path}: got {json.dumps(pair)[:80]}, {expected}")
        name, shape = pair
        if not isinstance(shape, list) or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in shape):
            raise CommandError(
                f"{path}: got the shape {json.dumps(shape)[:80]} of {name!r}, expected a list of integers >= 1"
            )
        if math.prod(shape) > MOST_ELEMENTS:
            raise CommandError(
                f"{path}: got the shape {json.dumps(shape)[:80]} of {name!r}, expected at most {MOST_ELEMENTS} elements"
            )
        named.append((name, tuple(shape)))
    return Workload(path.name, _by_elements(named))


def _by_elements(named: Sequence[tuple[str, tuple[int, ...]]]) -> list[Parameter]:
    """Make parameters whose work is estimated by their number of elements."""
    return [Parameter(name, shape, float(math.prod(shape))) for name, shape in named]


def _tensors(outputs: Any) -> list[Tensor]:
    """The floating-point tensors in what a module returns."""
    if isinstance(outputs, Tensor):
        return [outputs] if outputs.is_floating_point() else []
    if isinstance(outputs, Mapping):
        outputs = list(outputs.values())
    return [t for output in outputs for t in _tensors(output)] if isinstance(outputs, (list, tuple)) else []
