"""What ranks must have in common: they compare it before the first step, where they would otherwise wait for each other
or average what does not belong together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from torch import Tensor

from . import _version
from .compressor import Compressor


def by_name(named_parameters: Iterable[tuple[str, Tensor]], what: str) -> dict[str, Tensor]:
    """What `model.named_parameters()` gives, as a dict; ValueError for anything else, and for equal names."""
    expected = "expected (name, tensor) pairs, as of model.named_parameters()"
    try:
        pairs = list(named_parameters)
    except TypeError:
        raise ValueError(f"{what}: got {type(named_parameters).__name__}, {expected}") from None
    for pair in pairs:
        name, tensor = pair if isinstance(pair, tuple) and len(pair) == 2 else (None, None)
        if not (isinstance(name, str) and isinstance(tensor, Tensor)):
            raise ValueError(f"{what}: got named_parameters of {type(pair).__name__}, {expected}")
    named = dict(pairs)
    if len(named) < len(pairs):
        raise ValueError(f"{what}: got named_parameters with equal names, expected a name for each parameter")
    return named


def statement(compressor: Compressor, parameters: Iterable[tuple[str, Tensor]], prefix: str = "") -> bytes:
    """A line that says how this rank compresses what, and how far it is. prefix: of the names of their states."""
    shapes, steps = {}, {}
    for name, p in parameters:
        shapes[name] = f"{str(p.dtype).removeprefix('torch.')}{list(p.shape)}"
        if (state := compressor.part(name, p.shape).states.get(prefix + name)) is not None:
            steps[name] = state.step
    parts = compressor.parts
    said = {
        "version": _version.__version__,
        "method": repr(compressor),
        # Which says what payloads mean, and not how they travel.
        "digest": [compressor.digest, *(getattr(part, "exchange", None) for part in parts)],
        "parameters": shapes,
        "steps": steps,
    }
    return json.dumps(said).encode() + b"\n"


def check(statements: Sequence[bytes]) -> None:
    """RuntimeError, the same on all ranks, that names both sides of the first difference. statements: in rank order."""
    first, *others = map(json.loads, statements)
    for rank, other in enumerate(others, start=1):
        if other["version"] != first["version"]:
            raise RuntimeError(
                f"rank {rank} runs gradzip {other['version']}, rank 0 gradzip {first['version']}; install the same "
                "version everywhere"
            )
        if other["digest"] != first["digest"]:
            raise RuntimeError(
                f"rank {rank} compresses with {other['method']}, rank 0 with {first['method']}; give all ranks the "
                "same method and the same arguments"
            )
        for name in first["parameters"] | other["parameters"]:
            sides = [said["parameters"].get(name, "no such parameter") for said in (other, first)]
            if sides[0] != sides[1]:
                raise RuntimeError(
                    f"parameter {name!r}: rank {rank} has {sides[0]}, rank 0 has {sides[1]}; build the same model on "
                    "all ranks"
                )
        for name in first["steps"] | other["steps"]:
            steps = [said["steps"].get(name, 0) for said in (other, first)]
            if steps[0] != steps[1]:
                raise RuntimeError(
                    f"parameter {name!r}: rank {rank} has compressed it {steps[0]} times, rank 0 {steps[1]} times; "
                    "load the compressor's state on all ranks or on none, and train elastically with "
                    "gradzip.horovod.elastic_state in place of hvd.elastic.TorchState"
                )
