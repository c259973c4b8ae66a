"""Arrays of other libraries in place of torch tensors: NumPy, CuPy, and all that export DLPack. No memory is copied."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from ._native import READ_ONLY

P = ParamSpec("P")
R = TypeVar("R")

# Types that hold no array. Looking up types is what a call without arrays costs more: it is all done in C.
_NO_ARRAYS = frozenset((Tensor, Parameter, int, float, bool, str, bytes, type(None), torch.device, torch.Size))


def takes_arrays(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function of tensors also take arrays, alone and in sequences, and return arrays to those who pass some.

    An array has ``__dlpack__`` or ``__cuda_array_interface__``. The first one among the arguments decides about the
    results: arrays of its library if that is NumPy (results on the CPU) or CuPy (on a GPU), otherwise tensors. A result
    that is an argument is returned as the object that was passed. All elements of a list are arrays if the first is.

    CuPy: work is queued on CuPy's current stream of the array's device. Other libraries: on torch's current stream,
    for which ``__dlpack__`` orders what the library has queued.

    Raises ValueError for arrays that torch cannot read, and for read-only NumPy arrays that are written to.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _NO_ARRAYS.issuperset(map(type, args)) and (not kwargs or _NO_ARRAYS.issuperset(map(type, kwargs.values()))):
            return function(*args, **kwargs)
        first = next(filter(_is_array, _leaves((*args, *kwargs.values()), most=1)), None)
        return function(*args, **kwargs) if first is None else _call_with_arrays(function, args, kwargs, first)

    return call


def take_arrays(namespace: dict[str, Any], names: Iterable[str]) -> None:
    """Apply `takes_arrays` to the functions of a module's namespace."""
    for name in names:
        if inspect.isfunction(function := namespace[name]):
            namespace[name] = taking = takes_arrays(function)
            taking.__module__ = namespace["__name__"]  # where pickle finds it


def _is_array(value: Any) -> bool:
    has_array = hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")
    return has_array and not isinstance(value, Tensor)


def _leaves(value: Any, most: int | None = None) -> Iterator[Any]:
    """What nested lists and tuples hold; of each list, the first `most` elements."""
    if not isinstance(value, (tuple, list)):
        yield value
        return
    for item in value[:most] if isinstance(value, list) else value:
        yield from _leaves(item, most)


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Call a function on all leaves of lists and tuples."""
    if type(value) in _NO_ARRAYS or not isinstance(value, (tuple, list)):
        return function(value)
    items = [_map(function, item) for item in value]
    if isinstance(value, list):
        return items
    return value._make(items) if hasattr(value, "_make") else tuple(items)  # a NamedTuple


def _call_with_arrays(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], first: Any) -> Any:
    """Call a function of tensors with arrays. `first`: the array that decides about stream and results."""
    passed: dict[int, tuple[Any, Any]] = {}  # by the id of what the function gets, which is kept: its id stays its own
    cupy: Any = sys.modules.get("cupy")  # whoever has an array of it has imported it
    of_cupy = cupy is not None and isinstance(first, cupy.ndarray)

    def tensor(value: Any) -> Any:
        shared = _tensor_of(value, function.__name__) if _is_array(value) else value
        passed[id(shared)] = shared, value
        return shared

    def array(result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        if id(result) in passed:
            return passed[id(result)][1]
        if isinstance(first, np.ndarray) and result.device.type == "cpu":
            return result.detach().numpy()
        return cupy.from_dlpack(result.detach()) if of_cupy and result.is_cuda else result

    with _stream_of(first, cupy, (*args, *kwargs.values())) if of_cupy else contextlib.nullcontext():
        result = function(*_map(tensor, args), **{name: _map(tensor, value) for name, value in kwargs.items()})
        return _map(array, result)


def _tensor_of(array: Any, what: str) -> Tensor:
    """A tensor that shares the array's memory. Raises ValueError if there is none."""
    try:
        if isinstance(array, np.ndarray):
            return torch.from_numpy(array) if array.flags.writeable else _read_only(array)
        if hasattr(array, "__dlpack__"):
            return torch.from_dlpack(array)
        if (pointer := array.__cuda_array_interface__.get("stream")) is not None:
            torch.cuda.current_stream().wait_stream(_torch_stream(pointer))
        return torch.as_tensor(array, device="cuda")
    except Exception as error:  # of the other library, or torch's about it: any type
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{what}: got a {kind} that torch cannot use ({reason}), expected a torch dtype, strides >= 0 and a device "
            "of this torch; convert or copy it"
        ) from error


def _read_only(array: np.ndarray) -> Tensor:
    """A tensor of a read-only array, marked as such. torch would warn of it, also if nothing writes to it."""
    interface = array.__array_interface__ | {"data": (array.ctypes.data, False)}
    tensor = torch.from_numpy(np.asarray(SimpleNamespace(__array_interface__=interface, memory=array)))
    setattr(tensor, READ_ONLY, True)
    return tensor


@contextlib.contextmanager
def _stream_of(array: Any, cupy: Any, arguments: tuple) -> Iterator[None]:
    """Make CuPy's current stream on the array's device torch's current one there.

    If tensors on a device are among the arguments, that stream waits for torch's before, and torch's for it after.
    """
    device = array.device.id
    caller, stream = torch.cuda.current_stream(device), _torch_stream(cupy.cuda.get_current_stream(device).ptr, device)
    mixed = any(isinstance(value, Tensor) and value.is_cuda for value in _leaves(arguments))
    if mixed:
        stream.wait_stream(caller)
    with torch.cuda.stream(stream):
        yield
    if mixed:
        caller.wait_stream(stream)


def _torch_stream(pointer: int, device: int | None = None) -> torch.cuda.Stream:
    """The stream with this handle. torch knows the legacy default stream (0; 1 in protocols) by another call."""
    default = pointer in (0, 1)
    return torch.cuda.default_stream(device) if default else torch.cuda.ExternalStream(pointer, device=device)
