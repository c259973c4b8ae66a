"""One CUDA stream for all work of a compressor on a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class HomeStreams:
    """The home stream of a compressor on each device: the only one on which its states and workspaces are used.

    Front ends are called on several streams: hooks on those of autograd's nodes, the end of a step on that of
    `backward()` or `step()`. Torch's allocator reuses freed memory in the order of the stream that allocated it. Memory
    that one stream alone uses can therefore be freed at any time.
    """

    def __init__(self) -> None:
        self.homes: dict[torch.device, torch.cuda.Stream] = {}  # by device

    def __reduce__(self) -> tuple[type[HomeStreams], tuple[()]]:
        return HomeStreams, ()  # streams belong to one process

    def on(self, gradient: Tensor) -> contextlib.AbstractContextManager[Any]:
        """Run a block without autograd and autocast, on the home stream of the gradient's device.

        The first call for a device makes the current stream its home stream. The home stream waits for the current one,
        and at the end of the block the current stream waits for the home stream. The host does not wait.
        """
        if gradient.is_cuda:
            current = torch.cuda.current_stream(gradient.device)
            home = self.homes.setdefault(gradient.device, current)
            if current != home:
                return _together(no_autocast(gradient.device), _between(current, home, gradient))
        return no_autocast(gradient.device)

    def follow(self, gradient: Tensor) -> None:
        """Have the home stream of a gradient's device wait for the current one, for later work on the gradient."""
        current = torch.cuda.current_stream(gradient.device)
        home = self.homes.setdefault(gradient.device, current)
        if current != home:
            home.wait_stream(current)
            gradient.record_stream(home)

    def on_all(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Run a block as `on` does, on the home streams of all devices so far. device: of the autocast."""
        others = []
        for of_home, home in self.homes.items():
            if (current := torch.cuda.current_stream(of_home)) != home:
                others.append(_between(current, home))
        return _together(no_autocast(device), *others) if others else no_autocast(device)


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Disable autograd and autocast: a method must compute in its own types, whatever the backward pass runs in."""
    # A backward pass has disabled autograd. Entering contexts for nothing costs as much as a small gradient.
    needed: list[contextlib.AbstractContextManager[Any]] = [torch.no_grad()] if torch.is_grad_enabled() else []
    if torch.is_autocast_enabled(device.type):
        needed.append(torch.autocast(device.type, enabled=False))
    return _together(*needed) if needed else _NOTHING


_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def _together(*contexts: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextlib.contextmanager
def _between(current: torch.cuda.Stream, home: torch.cuda.Stream, gradient: Tensor | None = None) -> Iterator[None]:
    """Run the block on `home`, after the work queued on `current`. Then make `current` wait for it.

    gradient: a tensor that the block uses, whose owner need not wait for the end of the step.
    """
    home.wait_stream(current)
    try:
        with torch.cuda.stream(home):
            if gradient is not None:
                use_on_current_stream(gradient)
            yield
    finally:
        current.wait_stream(home)


def use_on_current_stream(tensor: Tensor) -> Tensor:
    """Keep a tensor's memory, which another stream may own, until the work of the current stream is done."""
    if tensor.device.type == "cuda" and not tensor.is_sparse:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor
