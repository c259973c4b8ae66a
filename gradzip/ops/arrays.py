"""Arrays of other libraries in place of torch tensors: NumPy, CuPy, and all that export DLPack.

``takes_arrays`` converts the arguments and results of a function of tensors. No memory is copied.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
        first = _first_array((*args, *kwargs.values()))
        return function(*args, **kwargs) if first is None else _call_with_arrays(function, args, kwargs, first)

    return call


def take_arrays(namespace: dict[str, Any], names: Iterable[str]) -> None:
    """Apply `takes_arrays` to those functions of a namespace that take tensors or sequences."""
    for name in names:
        function = namespace[name]
        if inspect.isfunction(function):
            kinds = [str(kind) for parameter, kind in function.__annotations__.items() if parameter != "return"]
            if any(word in kind for kind in kinds for word in ("Tensor", "Sequence", "Iterable")):
                namespace[name] = takes_arrays(function)
                vars(sys.modules[function.__module__])[name] = namespace[name]  # pickle looks there


def _first_array(value: Any) -> Any:
    """The first array in an argument, None if it holds none. Of a list, only the first element is looked at."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, (tuple, list)):
        for item in value if isinstance(value, tuple) else value[:1]:
            if type(item) not in _NO_ARRAYS and (array := _first_array(item)) is not None:
                return array
        return None
    return value if _is_array(value) else None


def _is_array(value: Any) -> bool:
    return hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")


def _call_with_arrays(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], first: Any) -> Any:
    """Call a function of tensors with arrays. `first`: the array that decides about stream and results."""
    passed: dict[int, tuple[Tensor, Any]] = {}  # by the id of the tensor, which is kept so that the id stays its own

    def tensor(value: Any) -> Any:
        if not (isinstance(value, Tensor) or _is_array(value)):
            return value
        shared = value if isinstance(value, Tensor) else _tensor_of(value, function.__name__)
        passed[id(shared)] = shared, value
        return shared

    def array(result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        return passed[id(result)][1] if id(result) in passed else _array_like(first, result)

    arguments = [*args, *kwargs.values()]
    with _stream_of(first, any(_each(arguments, lambda x: isinstance(x, Tensor) and x.is_cuda))):
        result = function(*_map(tensor, args), **{name: _map(tensor, value) for name, value in kwargs.items()})
        return _map(array, result)


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Call a function on all leaves of lists and tuples."""
    if type(value) in _NO_ARRAYS or not isinstance(value, (tuple, list)):
        return function(value)
    items = [_map(function, item) for item in value]
    if isinstance(value, list):
        return items
    return value._make(items) if hasattr(value, "_make") else tuple(items)  # a NamedTuple


def _each(value: Any, function: Callable[[Any], bool]) -> Iterator[bool]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _each(item, function)
    else:
        yield function(value)


def _cupy_of(array: Any) -> Any:
    """CuPy if it is the array's library, otherwise None. Whoever has an array of it has imported it."""
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and isinstance(array, cupy.ndarray) else None


def _tensor_of(array: Any, what: str) -> Tensor:
    """A tensor that shares the array's memory. Raises ValueError if there is none."""
    try:
        if isinstance(array, np.ndarray):
            return _tensor_of_numpy(array)
        if hasattr(array, "__dlpack__"):
            return torch.from_dlpack(array)
        _wait_for(array.__cuda_array_interface__.get("stream"))
        return torch.as_tensor(array, device="cuda")
    except Exception as error:  # of the other library, or torch's about it: any type
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{what}: got a {kind} that torch cannot use ({reason}), expected a torch dtype, strides >= 0 and a device "
            "of this torch; convert or copy it"
        ) from error


class _Writable:
    """The memory of a read-only NumPy array. torch warns of read-only arrays, also if nothing writes to them."""

    def __init__(self, array: np.ndarray) -> None:
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
        self._array = array  # keeps the memory


def _tensor_of_numpy(array: np.ndarray) -> Tensor:
    if array.flags.writeable:
        return torch.from_numpy(array)
    tensor = torch.from_numpy(np.asarray(_Writable(array)))
    setattr(tensor, READ_ONLY, True)
    return tensor


def _array_like(first: Any, result: Tensor) -> Any:
    """The result as an array of the library of `first`, as it is if that library is not known or has no such device."""
    if isinstance(first, np.ndarray):
        return result.detach().numpy() if result.device.type == "cpu" else result
    cupy = _cupy_of(first)
    return cupy.from_dlpack(result.detach()) if cupy is not None and result.is_cuda else result


def _stream_of(array: Any, with_tensors: bool) -> AbstractContextManager[Any]:
    """Make CuPy's current stream on the array's device torch's current one there; for other arrays, do nothing.

    with_tensors: tensors on a device are among the arguments; they are used on torch's current stream before and after.
    """
    cupy = _cupy_of(array)
    if cupy is None:
        return nullcontext()
    device = array.device.id
    stream = _torch_stream(cupy.cuda.get_current_stream(device).ptr, device)
    return _between(torch.cuda.current_stream(device), stream) if with_tensors else torch.cuda.stream(stream)


@contextmanager
def _between(caller: torch.cuda.Stream, stream: torch.cuda.Stream) -> Iterator[None]:
    """Work on `stream`, after what `caller` has to do and before what it gets to do."""
    stream.wait_stream(caller)
    with torch.cuda.stream(stream):
        yield
    caller.wait_stream(stream)


def _torch_stream(pointer: int, device: int | None = None) -> torch.cuda.Stream:
    """The stream with this handle. torch knows the legacy default stream (0; 1 in protocols) by another call."""
    if pointer in (0, 1):
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(pointer, device=device)


def _wait_for(pointer: int | None) -> None:
    """Let torch's current stream wait for the stream of a ``__cuda_array_interface__``, if it has one."""
    if pointer is not None:
        torch.cuda.current_stream().wait_stream(_torch_stream(pointer))
