"""One CUDA stream for all work of a compressor on a device, whichever stream its front end is called on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class HomeStreams:
    """The stream on which a compressor works, by device: the current one when it got its first gradient there.

    Backward hooks run on the streams of autograd's nodes, the end of a step on that of `backward()` or `step()`. They
    differ if a model was wrapped on another stream than it is trained on. Torch's allocator reuses memory in the order
    of the stream on which it was allocated, so what is used on one stream alone may be dropped at any time.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __reduce__(self) -> tuple[type[HomeStreams], tuple[()]]:
        return HomeStreams, ()  # streams belong to one process

    @contextlib.contextmanager
    def on(self, gradient: Tensor) -> Iterator[None]:
        """Run the block on the home stream of the gradient's device.

        The home stream waits for the current one, and at the end of the block the current one for the home stream.
        The first call for a device makes its current stream the home stream. The host does not wait.
        """
        device = gradient.device
        if device.type != "cuda":
            yield
            return
        current = torch.cuda.current_stream(device)
        home = self._streams.setdefault(device, current)
        with _between(current, home):
            if current != home:
                use_on_current_stream(gradient)  # the stream that owns it may not wait for the end of the step
            yield

    @contextlib.contextmanager
    def on_all(self) -> Iterator[None]:
        """The same on the home streams of all devices so far."""
        with contextlib.ExitStack() as stack:
            for device, home in self._streams.items():
                stack.enter_context(_between(torch.cuda.current_stream(device), home))
            yield


@contextlib.contextmanager
def _between(current: torch.cuda.Stream, home: torch.cuda.Stream) -> Iterator[None]:
    """Run the block on `home`, after what is queued on `current`, which then waits for it."""
    if current == home:
        yield
        return
    home.wait_stream(current)
    try:
        with torch.cuda.stream(home):
            yield
    finally:
        current.wait_stream(home)


def home_streams(attachments: dict[str, Any]) -> HomeStreams:
    """The home streams of the compressor with these attachments: its states and workspaces are used on no others."""
    return attachments.setdefault("streams", HomeStreams())


def use_on_current_stream(tensor: Tensor) -> Tensor:
    """Have the allocator keep a tensor's memory, which may be of another stream, until the current one is done."""
    if tensor.device.type == "cuda" and not tensor.is_sparse:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor
