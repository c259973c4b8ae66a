"""Hyper-parameters of a method, which is a dataclass of them: type checks, copies, and a digest."""

from __future__ import annotations

import zlib
from dataclasses import fields
from typing import Any


def check_types(method: Any) -> None:
    """Check switches and seeds, for which a shell or a YAML file may give strings: "false" would be true.

    Raises:
        ValueError: a bool that is not True or False, or a seed that is not an integer.
    """
    for f in fields(method):
        value = getattr(method, f.name)
        if f.type == "bool" and not isinstance(value, bool):
            raise ValueError(f"{type(method).__name__}: got {f.name} = {value!r}, expected True or False")
        if f.name == "seed" and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{type(method).__name__}: got seed = {value!r}, expected an integer")


def cloned(value: Any) -> Any:
    """A hyper-parameter with the methods in it cloned. A method is whatever has `clone` and `memory`."""
    if hasattr(value, "memory"):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(cloned(item) for item in value)
    return {key: cloned(item) for key, item in value.items()} if type(value) is dict else value


def digest_of(method: Any) -> int:
    """32 bits of a method's class and hyper-parameters, but for fields whose metadata say ``digest: False``."""
    values = {f.name: getattr(method, f.name) for f in fields(method) if f.metadata.get("digest", True)}
    # Schedules count as equal if their classes are: their repr may hold an address.
    plain = {k: type(v).__qualname__ if callable(v) else repr(v) for k, v in values.items()}
    return zlib.crc32(f"{type(method).__name__}{sorted(plain.items())}".encode())
