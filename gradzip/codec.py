"""Stateless codecs: from gradients to payloads, and back to their average."""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from . import ops
from .collectives import ToHost
from .compressor import Compressor
from .routines import Local, Routine, at_once
from .state import Key, State


@dataclass
class Codec(Compressor):
    """A method that is a stateless codec: `encode` and `decode_add`. `GatherCompressor` adds the exchange."""

    # Whether the lengths of payloads on a device follow from the shape of the gradient and the step alone, so that all
    # ranks send as many bytes, and none needs to know how many the others send.
    fixed_nbytes = False

    number: ClassVar[int]  # of the method in payload headers, set by `register`
    seed = 0  # methods that draw random numbers declare it as a hyper-parameter

    @abstractmethod
    def encode(self, grad: Tensor, key: Key) -> Tensor:
        """The sealed payload (uint8) of a gradient (contiguous float32). key: of the random draws, if any."""

    def encoded(self, grad: Tensor, key: Key) -> Routine:
        """`encode` as a coroutine, for codecs that encode several gradients in one call (`Local`)."""
        yield from ()
        return self.encode(grad, key)

    def encode_average(self, average: Tensor, key: Key) -> Tensor:
        """The payload of a shard's average, which its owner sends to all ranks."""
        return self.encode(average, key)

    @abstractmethod
    def decode_add(self, payload: ops.Payload, out: Tensor, weight: float) -> None:
        """Add `weight` times the decoded payload to `out`, which `accumulator` made.

        Raises:
            PayloadError: `encode` of this codec cannot have written the payload.
        """

    def accumulator(self, numel: int, device: torch.device) -> Tensor:
        """Zeros to which the payloads of a gradient of `numel` elements are added."""
        return self.new_average(numel, device).zero_()

    def finish(self, out: Tensor, numel: int) -> Tensor:
        """The gradient (float32, flat) from an accumulator. The next call may reuse its memory."""
        return out

    def decode(self, payloads: list[Tensor], numel: int) -> Tensor:
        """The average of payloads, added in order: float32, flat. On a CPU, the next call reuses its memory.

        Waits for the device, once, unless the payloads are inspected.
        """
        inspect(payloads)
        out = self.accumulator(numel, payloads[0].device)
        for rank, buffer in enumerate(payloads):
            with attribute_payload_errors(payload_source(rank, len(payloads))):
                payload = self.open(buffer, numel)
                if payload.flags & ops.NON_FINITE:
                    out.fill_(math.nan)
                else:
                    self.decode_add(payload, out, 1.0 / len(payloads))
        return self.finish(out, numel)

    def combine(self, payloads: list[Tensor], numel: int, state: State) -> Routine:
        """Coroutine: the average from the payloads of all ranks, as `decode`, for `reduce` to return.

        May keep in the state what the residual needs.
        """
        return (yield from self.with_max_abs(self.decode(payloads, numel)))

    def decode_shard(self, payloads: list[Tensor], numel: int) -> Tensor:
        """The average of a shard from the payloads of all ranks, as `decode`, for its owner to encode."""
        return self.decode(payloads, numel)

    # --- payload headers

    def open(self, payload: Tensor, numel: int) -> ops.Payload:
        """Check the header of a payload for a gradient of `numel` elements. Raises PayloadError."""
        return ops.open_payload(payload, method=self.number, digest=self.digest, numel=numel)

    def seal(
        self,
        payload: Tensor,
        numel: int,
        finite: bool | Tensor,
        fields: bytes,
        range_float: ops.RangeFloat | None = None,
        scale: Tensor | None = None,
        stream: ops.Stream | None = None,
    ) -> Tensor:
        """Write the header of a payload whose body is complete. Returns the payload. Arguments: those of `to_seal`."""
        return ops.seal_payloads([self.to_seal(payload, numel, finite, fields, range_float, scale, stream)])[0]

    def to_seal(
        self,
        payload: Tensor,
        numel: int,
        finite: bool | Tensor,
        fields: bytes,
        range_float: ops.RangeFloat | None = None,
        scale: Tensor | None = None,
        stream: ops.Stream | None = None,
    ) -> ops.Seal:
        """A payload whose body is complete, for `ops.seal_payloads`.

        Args:
            finite: whether the gradient is finite, or magnitudes (float32) that are finite if it is.
            fields: 16 bytes of the method's own; 8 if there is a `range_float`, which takes the other 8.
            scale: a float32 number that replaces the first 4 bytes of the fields.
            stream: the last section, if the body has more room for it than it takes.
        """
        magnitudes = finite if isinstance(finite, Tensor) else None
        return ops.Seal(
            payload,
            method=self.number,
            digest=self.digest,
            numel=numel,
            flags=0 if magnitudes is not None or finite else ops.NON_FINITE,
            magnitudes=magnitudes,
            fields=fields,
            number=range_float,
            scale=scale,
            stream=stream,
        )

    def non_finite(self, grad: Tensor) -> Tensor:
        """The payload of a gradient that is not finite: a header with a flag."""
        return self.seal(ops.new_payload(0, grad.device), grad.numel(), False, bytes(16))


def inspected(payloads: list[Tensor]) -> Routine:
    """Coroutine: inspect payloads on a device, so that opening them does not wait."""
    if not ops.on_device(payloads[0]):
        return
    table = yield Local(ops.inspect_payloads, payloads[0].device, payloads)
    if table is not None:
        ops.attach_inspections(payloads, (yield ToHost(table)))


def inspect(payloads: list[Tensor]) -> None:
    """The same at once: waits for the device."""
    at_once(inspected(payloads))


def payload_source(rank: int, size: int) -> str:
    """The source of a payload, for errors."""
    return f"from rank {rank} of {size}"


@contextlib.contextmanager
def attribute_payload_errors(source: str) -> Iterator[None]:
    """Prefix the text of a PayloadError with the payload's source."""
    try:
        yield
    except ops.PayloadError as error:
        raise ops.PayloadError(f"{source}: {error}") from None
