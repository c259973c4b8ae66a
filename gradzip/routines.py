"""Running methods: routines, which yield collectives and local work and are sent the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .collectives import Collective, ToHost
from .traffic import Traffic


@dataclass(frozen=True)
class Local:
    """Work of this rank alone, done in one call for all routines that ask for it at the same time. No collective.

    Result: this routine's item of what `function` returns.

    Args:
        function: called with the list of the arguments of all these routines; returns a result for each.
        device: on which the work is done. Requests for different devices are not joined.
        argument: of this routine.
        traffic: counts the time.
    """

    function: Callable[[list[Any]], Sequence[Any]]
    device: torch.device
    argument: Any
    traffic: Traffic | None = None


def run_local(requests: Sequence[Local]) -> Sequence[Any]:
    """The results of requests for the same function, in one call."""
    start = time.perf_counter()
    results = requests[0].function([request.argument for request in requests])
    if requests[0].traffic is not None:
        requests[0].traffic.seconds += time.perf_counter() - start
    return results


# A running method: yields collectives and local work, is sent their results, returns the average.
Routine = Generator[Collective | Local, Any, Any]


def jointly(function: Callable[[list[Any]], Sequence[Any]], device: torch.device, argument: Any) -> Routine:
    """Coroutine: local work that is joined with that of other routines on a device.

    On a CPU it is done at once, since averages share memory.
    """
    if device.type == "cpu":
        return function([argument])[0]
    return (yield Local(function, device, argument))


@dataclass(frozen=True)
class Done:
    """The end of a routine, with what it returned."""

    result: Any


def step(routine: Generator[Any, Any, Any], result: Any = None) -> Any:
    """Send a routine the result of what it has yielded last; return what it yields next, or `Done`.

    result: None starts the routine.
    """
    try:
        return routine.send(result)
    except StopIteration as stop:
        return Done(stop.value)


def advance(routine: Generator[Any, Any, Any], result: Any = None) -> Any:
    """Like `step`, but do local work at once: return the next collective, or `Done`."""
    while isinstance(item := step(routine, result), Local):
        (result,) = run_local([item])
    return item


def at_once(routine: Routine) -> Any:
    """Run a routine without collectives, and return its result. Waits for the device where it asks for `ToHost`."""
    result = None
    while not isinstance(item := advance(routine, result), Done):
        assert isinstance(item, ToHost)
        result = item.tensor.cpu()
    return item.result


def timed(routine: Routine, traffic: Traffic) -> Routine:
    """The same routine; adds the time that it takes between its collectives to `traffic.seconds`."""
    result = None
    while True:
        start = time.perf_counter()
        try:
            item = step(routine, result)
        finally:
            traffic.seconds += time.perf_counter() - start
        if isinstance(item, Done):
            return item.result
        result = yield replace(item, traffic=traffic) if isinstance(item, Local) else item
