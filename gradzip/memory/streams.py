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

    @contextlib.contextmanager
    def on(self, gradient: Tensor) -> Iterator[None]:
        """Run the block on the home stream of the gradient's device.

        The first call for a device makes the current stream its home stream. The home stream waits for the current one,
        and at the end of the block the current stream waits for the home stream. The host does not wait.
        """
        device = gradient.device
        if device.type != "cuda":
            yield
            return
        current = torch.cuda.current_stream(device)
        home = self._streams.setdefault(device, current)
        with _between(current, home):
            if current != home:
                use_on_current_stream(gradient)  # the stream that owns it need not wait for the end of the step
            yield

    @contextlib.contextmanager
    def on_all(self) -> Iterator[None]:
        """Run the block on the home streams of all devices so far, as `on`."""
        with contextlib.ExitStack() as stack:
            for device, home in self._streams.items():
                stack.enter_context(_between(torch.cuda.current_stream(device), home))
            yield


@contextlib.contextmanager
def _between(current: torch.cuda.Stream, home: torch.cuda.Stream) -> Iterator[None]:
    """Run the block on `home`, after the work queued on `current`. Then make `current` wait for it."""
    if current == home:
        yield
        return
    home.wait_stream(current)
    try:
        with torch.cuda.stream(home):
            yield
    finally:
        current.wait_stream(home)


def use_on_current_stream(tensor: Tensor) -> Tensor:
    """Keep a tensor's memory, which another stream may own, until the work of the current stream is done."""
    if tensor.device.type == "cuda" and not tensor.is_sparse:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor
