"""Whether a step is skipped, where a device has to tell: the host reads it later, when it need not wait."""

from __future__ import annotations

import atexit
import math
import time
from typing import Any, Protocol
from weakref import WeakSet

from torch import Tensor

from ..ops import tensors as ops


class Verdict:
    """Whether a step is skipped, because an average is not finite. As a truth value, it waits for the device.

    That of a step which is captured as a CUDA graph is of the last replay.

    Args:
        number: float32 of 1 element on the device, which is finite unless the step is skipped.
        magnitudes: of what decides, in any order: all are finite unless the step is skipped. Of one dimension.
    """

    def __init__(self, number: Tensor, magnitudes: Tensor) -> None:
        self.number = number
        self.is_captured = ops.is_capturing(number)  # nothing is copied then
        self._copy = None if self.is_captured else ops.CopyLater(magnitudes)
        self._magnitudes: list[float] | None = None  # once the host has read them
        self._found: Tensor | None = None

    def __bool__(self) -> bool:
        if self._copy is None:
            if ops.is_capturing(self.number):
                raise RuntimeError(
                    "got a step to capture of which the host has to know if it is skipped, expected a method and "
                    "optimizers that do not need it (docs/gpu.md), or compressor.skip_nonfinite(False)"
                )
            return not math.isfinite(self.number)
        return not all(map(math.isfinite, self.magnitudes))

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, (bool(self),)

    @property
    def magnitudes(self) -> list[float]:
        """The magnitudes. Waits for the device, once."""
        if self._magnitudes is None:
            assert self._copy is not None, "nobody reads those of a step that is captured"
            self._magnitudes = self._copy.result().tolist()
        return self._magnitudes

    @property
    def is_known(self) -> bool:
        """Whether the host need not wait for the device to know it."""
        return self._magnitudes is not None or (self._copy is not None and self._copy.is_done())

    @property
    def found(self) -> Tensor:
        """1 if the step is skipped, otherwise 0, in the form of `found_inf` of optimizers."""
        if self._found is None:
            self._found = 1 - self.number.isfinite().float()
        return self._found


class Reader(Protocol):
    """What has something to read of its last step."""

    @property
    def is_readable(self) -> bool:
        """Whether the host need not wait for a device to read it."""

    def read_late(self) -> None:
        """Read it, warn and raise errors. Nothing happens if it was read before."""


_readers: WeakSet[Any] = WeakSet()


def read_later(reader: Reader) -> None:
    """Have a reader read before states are saved, or when the process ends, if it does not before."""
    _readers.add(reader)


def read_all() -> None:
    """Have all readers read. Raises the first error, once all have."""
    errors: list[Exception] = []
    for reader in list(_readers):
        _readers.discard(reader)
        try:
            reader.read_late()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _read_at_exit() -> None:
    """Have those read that need not wait long: a device may wait for a peer that is gone."""
    end = time.monotonic() + _LONGEST_WAIT
    for reader in list(_readers):
        while not reader.is_readable and time.monotonic() < end:
            time.sleep(0.01)
        if not reader.is_readable:
            _readers.discard(reader)
    read_all()


_LONGEST_WAIT = 5.0  # seconds, when the process ends
atexit.register(_read_at_exit)
