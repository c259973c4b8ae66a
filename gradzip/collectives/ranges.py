"""Ranges of a training step, which `torch.profiler` shows by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

import torch
from torch.autograd.profiler import record_function

P = ParamSpec("P")
T = TypeVar("T")


def ranged(name: Literal["encode", "exchange", "decode", "commit"]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: a profiler that runs shows calls as the range ``gradzip::name``.

    encode: methods up to their first collectives. exchange: the host waits for collectives. decode: methods from there
    on. commit: optimizers are told, and states are completed or rolled back.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> T:
            if not torch.autograd._profiler_enabled():
                return function(*args, **keywords)
            with record_function(f"gradzip::{name}"):
                return function(*args, **keywords)

        return call

    return decorate
