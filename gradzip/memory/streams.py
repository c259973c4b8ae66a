"""One CUDA stream for all work of a compressor on a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


class HomeStreams:
    """The home stream of a compressor on each device: the only one on which its states and workspaces are used.

    Front ends are called on several streams: hooks on those of autograd's nodes, the end of a step on that of
    `backward()` or `step()`. Torch's allocator reuses freed memory in the order of the stream that allocated it. Memory
    that one stream alone uses can therefore be freed at any time.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __reduce__(self) -> tuple[type[HomeStreams], tuple[()]]:
        return HomeStreams, ()  # streams belong to one process

    def on(self, gradient: Tensor) -> contextlib.AbstractContextManager[None] | None:
        """A context that runs a block on the home stream of the gradient's device; None on that stream, or on a CPU.

        The first call for a device makes the current stream its home stream. The home stream waits for the current one,
        and at the end of the block the current stream waits for the home stream. The host does not wait.
        """
        if not gradient.is_cuda:
            return None
        current = torch.cuda.current_stream(gradient.device)
        home = self._streams.setdefault(gradient.device, current)
        return None if current == home else _between(current, home, gradient)

    def follow(self, gradient: Tensor) -> None:
        """Have the home stream of a gradient's device wait for the current one, for later work on the gradient."""
        current = torch.cuda.current_stream(gradient.device)
        home = self._streams.setdefault(gradient.device, current)
        if current != home:
            home.wait_stream(current)
            gradient.record_stream(home)

    @contextlib.contextmanager
    def on_all(self) -> Iterator[None]:
        """Run the block on the home streams of all devices so far, as `on`."""
        with contextlib.ExitStack() as stack:
            for device, home in self._streams.items():
                if (current := torch.cuda.current_stream(device)) != home:
                    stack.enter_context(_between(current, home))
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
