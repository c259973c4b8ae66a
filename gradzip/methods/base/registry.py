"""The registry of methods. Classes register with a decorator; entry points name the modules of other packages."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import TypeVar

from .compressor import Compressor
from .gather import GatherCompressor

# Modules named by entry points of this group are imported, and register their methods.
ENTRY_POINT_GROUP = "gradzip.methods"

REGISTRY: dict[str, type[Compressor]] = {}

Method = TypeVar("Method", bound=type[Compressor])


def register(name: str, *, number: int | None = None, examples: Sequence[str] = ("",)) -> Callable[[Method], Method]:
    """Register a method, as a class decorator.

    Args:
        name: on a command line (`gradzip.parse`).
        number: identifies the method in payload headers, 1 to 255, and is never reused. Only for methods with payloads.
            gradzip itself uses numbers up to 127.
        examples: command-line arguments for each variant of the method's payloads. Tests, golden payloads and
            benchmarks of all methods use them. With the first ones, a few steps on small gradients use all state of the
            method.

    Raises:
        ValueError: the name or the number is taken, or a method with payloads has no number.

    >>> from gradzip import GatherCompressor
    >>> @register("mine", number=200)  # doctest: +SKIP
    ... class Mine(GatherCompressor): ...
    """

    def decorate(method: Method) -> Method:
        what = f"register({name!r}): got {method.__name__}"
        other = REGISTRY.get(name, method)
        if (other.__module__, other.__qualname__) != (method.__module__, method.__qualname__):
            raise ValueError(f"{what}, expected another name: {other.__name__} has this one")
        if number is None and issubclass(method, GatherCompressor):
            raise ValueError(f"{what}, whose payloads need a number, expected register({name!r}, number=1 to 255)")
        if number is not None:
            if not (isinstance(number, int) and 1 <= number <= 255):
                raise ValueError(f"{what} with number = {number!r}, expected an integer from 1 to 255")
            taken = {getattr(m, "number", None): m.__name__ for m in REGISTRY.values() if m is not other}
            if number in taken:
                raise ValueError(f"{what} with number = {number}, expected another one: {taken[number]} has it")
            method.number = number  # type: ignore[attr-defined]
        method.examples = tuple(f"{name}:{arguments}".removesuffix(":") for arguments in examples)
        REGISTRY[name] = method
        return method

    return decorate


def registered() -> dict[str, type[Compressor]]:
    """All methods by name, including those of other packages."""
    _import_entry_points()
    return dict(sorted(REGISTRY.items()))


@functools.cache
def _import_entry_points() -> None:
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            entry_point.load()
        except Exception as error:  # of another package: the methods of all others still work
            warnings.warn(
                f"methods of the entry point {entry_point.name} = {entry_point.value} cannot be imported "
                f"({type(error).__name__}: {error}); update or remove the package that installed it",
                stacklevel=3,
            )
