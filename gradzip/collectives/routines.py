"""Routines: running methods, as coroutines that yield collectives and local work, and are sent the results."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .requests import Collective, ToHost


@dataclass
class Local:
    """Local work, done in one call for all routines that yield the same function and device at the same time.

    Result: this routine's item of the list that `function` returns.

    Args:
        function: called with the list of all these routines' arguments; returns a result for each.
        device: of the work.
        argument: of this routine.
    """

    function: Callable[[list[Any]], Sequence[Any]]
    device: torch.device
    argument: Any


# Yields collectives and local work, is sent their results, and returns the average.
Routine = Generator[Collective | Local, Any, Any]


def jointly(function: Callable[[list[Any]], Sequence[Any]], device: torch.device, argument: Any) -> Routine:
    """Coroutine: local work, joined with that of other routines on a device.

    On a CPU it is done at once, because averages share memory there.
    """
    if device.type == "cpu":
        return function([argument])[0]
    return (yield Local(function, device, argument))


@dataclass(frozen=True)
class Done:
    """The end of a routine, with what it returned."""

    result: Any


def step(routine: Generator[Any, Any, Any], result: Any = None) -> Any:
    """Send a routine the result of what it yielded last. Returns what it yields next, or `Done`.

    result: None starts the routine.
    """
    try:
        return routine.send(result)
    except StopIteration as stop:
        return Done(stop.value)


def advance(routine: Generator[Any, Any, Any], result: Any = None) -> Any:
    """Like `step`, but do local work at once. Returns the next collective, or `Done`."""
    while isinstance(item := step(routine, result), Local):
        (result,) = item.function([item.argument])
    return item


def at_once(routine: Routine) -> Any:
    """Run a routine without collectives, and return its result. A `ToHost` waits for the device."""
    result = None
    while not isinstance(item := advance(routine, result), Done):
        assert isinstance(item, ToHost)
        result = item.tensor.cpu()
    return item.result
