"""State dicts of compressors: saving, loading, and checks of loaded states."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops import tensors as ops
from .state import Fields, State
from .streams import use_on_current_stream

COUNTS = ("step", "rank", "size")  # fields that every state has
_OF_ANY_DTYPE = ("average_velocity",)  # float32 or float64, earlier that of gradients; others are float32


def state_dict_of(saved: Mapping[str, Fields], rank_local: tuple[str, ...], method: str) -> dict[str, Any]:
    """The state dict of a compressor: plain tensors and numbers.

    Args:
        saved: fields by parameter.
        method: name of the compressor's class.
    """
    return {"method": method, "rank_local": list(rank_local), "states": dict(saved)}


def fields_from(state_dict: Mapping[str, Any], method: str) -> dict[str, Fields]:
    """Copies of the fields of a state dict, by parameter. `check_fields` fits them to their gradients.

    Raises:
        ValueError: the state dict belongs to another method or is malformed.
    """
    zeros = {"step": 0, "rank": 0, "size": 1}
    return {name: zeros | copy.deepcopy(dict(fields)) for name, fields in saved_states(state_dict, method).items()}


def saved_states(state_dict: Mapping[str, Any], method: str) -> Mapping[str, Mapping[str, Any]]:
    """The fields of all states of a state dict, by parameter name.

    Raises:
        ValueError: the state dict belongs to another method or is malformed.
    """
    check_method(state_dict, method)
    what = f"{method}.load_state_dict: got"
    states = state_dict.get("states")
    if not isinstance(states, Mapping):
        raise ValueError(f"{what} {type(states).__name__} as states, expected a dict of them by parameter name")
    for name, fields in states.items():
        if not (isinstance(name, str) and isinstance(fields, Mapping)):
            raise ValueError(
                f"{what} {type(fields).__name__} as the state of {name!r}, expected a dict, of a parameter's name"
            )
        for key, value in fields.items():
            if not isinstance(key, str) or hasattr(State, key) or key in State.TRANSIENT:
                raise ValueError(f"{what} a field {in_line(key)} of {name!r}, expected those of state_dict()")
            count, tensors = key in COUNTS, isinstance(value, list) and all(isinstance(item, Tensor) for item in value)
            if not (is_count(value) if count else tensors or isinstance(value, (Tensor, int, float))):
                expected = "an integer >= 0" if count else "a tensor or number"
                raise ValueError(f"{what} {type(value).__name__} as {key} of {name!r}, expected {expected}")
            if key == "loss_scale" and not (isinstance(value, (int, float)) and value > 0):
                raise ValueError(f"{what} {in_line(value)} as loss_scale of {name!r}, expected a number > 0")
            dtype = None if key in _OF_ANY_DTYPE else torch.float32
            check_values(value, dtype, f"{method}.load_state_dict: {key} of {name!r}")
    return states


def check_values(value: Any, dtype: torch.dtype | None, what: str) -> None:
    """Raise ValueError unless a loaded number is finite, or a tensor, or each of a list: dense, finite and of a dtype.

    dtype: None for any floating-point or complex one.
    """
    tensors = [value] if isinstance(value, Tensor) else value if isinstance(value, list) else []
    for tensor in tensors:
        known = tensor.is_floating_point() or tensor.is_complex() if dtype is None else tensor.dtype == dtype
        if tensor.layout != torch.strided or tensor.is_meta or not known:
            expected = "dense real or complex numbers" if dtype is None else f"dense {dtype}"
            raise ValueError(f"{what}: got {tensor.layout} {tensor.dtype} on {tensor.device}, expected {expected}")
    if not (ops.all_finite(tensors) if tensors else isinstance(value, list) or abs(value) < math.inf):
        raise ValueError(f"{what}: got values that are not finite, expected finite ones: load an earlier state")


@contextlib.contextmanager
def all_or_nothing(*objects: Any) -> Iterator[None]:
    """Run the block. If it raises an error, the objects get back the attributes that they had."""
    before = [(one, dict(vars(one))) for one in objects]
    try:
        yield
    except BaseException:
        for one, attributes in before:
            vars(one).clear()
            vars(one).update(attributes)
        raise


def is_count(value: Any) -> bool:
    """Whether a value is an integer >= 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def in_line(value: Any) -> str:
    """A short description of any value, in one line, for errors."""
    return " ".join(repr(value).split())[:80]


def check_method(state_dict: Mapping[str, Any], method: str) -> None:
    """Raise ValueError for what is no state dict, that of another method, or a merged one of all ranks."""
    what = f"{method}.load_state_dict"
    if state_dict is None:
        raise ValueError(f"{what}: got None, expected what state_dict() returned; without one, load nothing")
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"{what}: got {type(state_dict).__name__}, expected what state_dict() returned")
    if "ranks" in state_dict:
        raise ValueError(f"{what}: got all ranks' states, expected gradzip.checkpoint.shard(states, rank, size)")
    if state_dict.get("method") != method:
        raise ValueError(f"{what}: got the state of {in_line(state_dict.get('method'))}, expected that of {method!r}")


def check_fields(
    parameter: str,
    fields: Fields,
    shapes: Mapping[str, tuple[int, ...]],
    device: torch.device,
    rank: int,
    size: int,
    rank_local: tuple[str, ...],
    method: str,
) -> None:
    """Check the fields of a parameter, and move them to the gradient's device. Drop another rank's, with a warning.

    Args:
        shapes: expected shapes of tensors, by field.
        device: of the gradient.

    Raises:
        ValueError: a tensor has another shape than expected.
    """
    for name, shape in shapes.items():
        value = fields.get(name)
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if value is not None and got != shape:
            raise ValueError(
                f"{method}, parameter {parameter!r}: got a state whose {name} has the shape {got}, expected {shape}; "
                "load the state of the same model and the same arguments"
            )
    for name, value in fields.items():
        if isinstance(value, Tensor):
            fields[name] = use_on_current_stream(value.to(device))
        elif isinstance(value, list):
            fields[name] = [use_on_current_stream(tensor.to(device)) for tensor in value]
    local = [name for name in rank_local if isinstance(fields.get(name), Tensor)]
    if local and (fields["rank"], fields["size"]) != (rank, size):
        warnings.warn(
            f"the state of rank {fields['rank']} of {fields['size']} was loaded by rank {rank} of {size}: residuals of "
            "that rank are dropped",
            stacklevel=3,
        )
        for name in rank_local:
            fields.pop(name, None)
