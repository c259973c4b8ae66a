"""Methods whose payloads cannot be added: stateless codecs, and how their payloads reach all ranks."""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import ops
from .collectives import AllToAll, Gather, ToHost
from .compressor import Compressor
from .cost import Link
from .routines import Done, Local, Routine, advance
from .state import Key, State, split_shards

# The network that exchange="auto" assumes. All ranks must decide alike, so it is not measured: 1 Gb/s with a latency of
# 50 us, and half a millisecond to start one more collective and wait for it after the backward pass.
NOMINAL_BANDWIDTH, NOMINAL_LATENCY, NOMINAL_OPERATION = 1.25e8, 5e-5, 5e-4


@dataclass
class GatherCompressor(Compressor):
    """A method that is a stateless codec: `encode` and `decode_add`.

    Args:
        exchange: how payloads reach all p ranks.

            "gather": encode, all-gather, decode every rank's payload in rank order. A rank receives p - 1 payloads.

            "scatter_reduce": every rank encodes one shard for each rank (a block of rows; a piece of the flat gradient
            if there are fewer rows than ranks) and sends it to the shard's owner. The owner decodes and averages what
            it receives, encodes the average, and all ranks gather the results. A rank receives 2 (p - 1) / p payloads
            in two rounds, and the average is compressed twice. With error feedback, the owner keeps a residual of the
            second compression.

            "auto": "gather", until the cost model finds "scatter_reduce" faster for a parameter (`scatter_pays`);
            "scatter_reduce" from then on. With 2 ranks it never is.
    """

    # Payloads do not depend on the exchange.
    exchange: str = field(default="gather", kw_only=True, metadata={"digest": False})

    joins = True

    # Whether the lengths of payloads on a device follow from the shape of the gradient and the step alone, so that all
    # ranks send as many bytes, and none needs to know how many the others send.
    fixed_nbytes = False

    number: ClassVar[int]  # of the method in payload headers, set by `register`
    seed = 0  # methods that draw random numbers declare it as a hyper-parameter

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exchange not in ("gather", "scatter_reduce", "auto"):
            raise ValueError(
                f"{type(self).__name__}: got exchange = {self.exchange!r}, expected 'gather', 'scatter_reduce' or "
                "'auto'"
            )
        self.rounds = 1 if self.exchange == "gather" else 2
        self.adapts = self.exchange == "auto"

    # --- the codec

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

    # --- the exchange

    def gather(self, payload: Tensor, alike: bool = True) -> Gather:
        """The all-gather of a payload of this method. alike: whether all ranks encoded as many elements."""
        return Gather(payload, same_length=alike and self.fixed_nbytes and ops.on_device(payload))

    def reduce(self, grad: Tensor, state: State) -> Routine:
        state.scattered = self._scatters(grad.numel(), state)
        with attribute_payload_errors(f"{type(self).__name__}, parameter {state.name!r}"):
            if state.scattered:
                return (yield from self._scatter_reduce(grad, state))
            state.payload = yield from self.encoded(grad, state.key(self.seed))
            payloads = yield self.gather(state.payload)
            yield from inspected(payloads)
            if ops.on_device(state.payload):
                state.payload = payloads[state.rank]  # the same bytes, inspected
            # All ranks see the same lengths, and decide alike.
            state.payload_nbytes = sum(p.numel() for p in payloads) // len(payloads)
            return (yield from self.combine(payloads, grad.numel(), state))

    def _scatters(self, numel: int, state: State) -> bool:
        if self.exchange == "gather" or not 1 < state.size <= numel:
            return False
        if self.exchange == "scatter_reduce" or getattr(state, "scattered", False):
            return True
        return scatter_pays(getattr(state, "payload_nbytes", 0), state.size)

    def _scatter_reduce(self, grad: Tensor, state: State) -> Routine:
        shards = split_shards(grad, state.size)
        key = state.key(self.seed)
        payloads = [self.encode(shard, key._replace(name=f"{key.name}[{i}]")) for i, shard in enumerate(shards)]
        state.payload = ops.join_payloads(payloads)
        mine = shards[state.rank]
        received = yield AllToAll(state.payload, tuple(p.numel() for p in payloads))
        yield from inspected([*received, *payloads])
        average = self.decode_shard(received, mine.numel()).view(mine.shape).clone()
        if (residual := getattr(state, "owner_residual", None)) is not None:
            average.add_(residual)
        payload = self.encode_average(average, key._replace(name=f"{key.name}[owner]"))
        payloads = yield self.gather(payload, alike=len({s.numel() for s in shards}) == 1)
        yield from inspected(payloads)
        if self.error_feedback:
            state.owner_residual = average.sub_(self.decode([payloads[state.rank]], mine.numel()).view(mine.shape))
        result = grad.new_empty(grad.numel())
        for part, shard, payload in zip(result.split([s.numel() for s in shards]), shards, payloads):
            part.copy_(self.decode([payload], shard.numel()).view(-1))
        return (yield from self.with_max_abs(result))

    # --- error feedback

    def transmitted(self, state: State) -> Tensor:
        assert state.residual is not None
        parts = self.transmitted_parts(state)
        if len(parts) == 1:
            return self.decode([parts[0][0]], state.residual.numel())
        return torch.cat([self.decode([payload], part.numel()).clone() for payload, part in parts])

    def transmitted_parts(self, state: State) -> list[tuple[Tensor, Tensor]]:
        """(payload, its part of the residual, flat) for each payload that this rank sent in the current step."""
        assert state.payload is not None and state.residual is not None
        if not state.scattered:
            return [(state.payload, state.residual.view(-1))]
        shards = split_shards(state.residual, state.size)
        return [(p, s.view(-1)) for p, s in zip(ops.split_payloads(state.payload, len(shards)), shards)]


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


def at_once(routine: Routine) -> Any:
    """Run a routine without collectives, and return its result. Waits for the device where it asks for `ToHost`."""
    result = None
    while not isinstance(item := advance(routine, result), Done):
        assert isinstance(item, ToHost)
        result = item.tensor.cpu()
    return item.result


def scatter_pays(nbytes: float, size: int) -> bool:
    """Whether "scatter_reduce" takes less time than "gather" on the nominal network.

    Args:
        nbytes: of a rank's payload.
        size: the world size.
    """
    link = Link(size, NOMINAL_BANDWIDTH, NOMINAL_LATENCY)
    scattered = link.all_to_all(nbytes) + link.all_gather(nbytes / size) + NOMINAL_OPERATION
    return scattered < link.all_gather(nbytes)


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
