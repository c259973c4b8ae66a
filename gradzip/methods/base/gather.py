"""The base class of methods whose payloads cannot be added: a stateless codec, and the exchange of its payloads."""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ... import ops
from ...collectives import AllToAll, Gather, ToHost
from ...collectives.cost import Link
from ...collectives.routines import Local, Routine, at_once
from ...memory.state import Key, State, split_partitions
from .compressor import Compressor

# The network that exchange="auto" assumes: 1 Gb/s, a latency of 50 us, and half a millisecond to start one more
# collective and wait for it after the backward pass. It is not measured, because all ranks must decide alike.
NOMINAL_BANDWIDTH, NOMINAL_LATENCY, NOMINAL_OPERATION = 1.25e8, 5e-5, 5e-4


@dataclass
class GatherCompressor(Compressor):
    """A method whose payloads cannot be added: a stateless codec, `encode` and `decode_add`, and their exchange.

    Args:
        exchange: how payloads reach all p ranks.

            "gather": encode, all-gather, decode every rank's payload in rank order. A rank receives p - 1 payloads.

            "scatter_reduce": the gradient has a partition for each rank, its owner (`split_partitions`). A rank encodes
            all partitions, and sends each to its owner, by an all-to-all. The owner decodes and averages the payloads
            that it receives, and encodes the average. All ranks gather these. A rank receives 2 (p - 1) / p payloads in
            two rounds, and the average is compressed twice. With error feedback, the owner keeps a residual of the
            second compression.

            "auto": "gather" until the cost model finds "scatter_reduce" faster for a parameter (`scatter_pays`), which
            it never does with 2 ranks; "scatter_reduce" from then on.
    """

    # Not in the digest: payloads do not depend on it.
    exchange: str = field(default="gather", kw_only=True, metadata={"digest": False})

    joins = True

    # Whether payloads on a device have lengths that follow from the gradient's shape and the step. Ranks need not
    # exchange lengths then.
    fixed_nbytes = False

    number: ClassVar[int]  # in payload headers, set by `register`
    seed = 0  # of random draws; methods that draw declare it as a hyper-parameter

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exchange not in ("gather", "scatter_reduce", "auto"):
            raise ValueError(
                f"{type(self).__name__}: got exchange = {self.exchange!r}, expected 'gather', 'scatter_reduce' or "
                "'auto'"
            )
        self.rounds = 1 if self.exchange == "gather" else 2
        self.asymmetric = self.exchange != "gather"
        self.adapts = self.exchange == "auto"

    # --- the codec

    @abstractmethod
    def encode(self, grad: Tensor, key: Key) -> Tensor:
        """Encode a gradient (contiguous float32). Returns the sealed payload (uint8). key: of random draws."""

    def encoded(self, grad: Tensor, key: Key) -> Routine:
        """Coroutine: `encode`. Codecs that encode several gradients in one call (`Local`) override it."""
        yield from ()
        return self.encode(grad, key)

    def encode_average(self, average: Tensor, key: Key) -> Tensor:
        """`encode` for the owner of a partition, who sends its average to all ranks."""
        return self.encode(average, key)

    @abstractmethod
    def decode_add(self, payload: ops.Payload, out: Tensor, weight: float) -> None:
        """Add `weight` times the decoded payload to `out`, the result of `accumulator`.

        Raises:
            PayloadError: `encode` of this codec cannot have written the payload.
        """

    def accumulator(self, numel: int, device: torch.device) -> Tensor:
        """Zeros to which `decode_add` adds the payloads of a gradient of `numel` elements."""
        return self.new_average(numel, device).zero_()

    def finish(self, out: Tensor, numel: int) -> Tensor:
        """The gradient (float32, flat) from an accumulator. The next call may reuse its memory."""
        return out

    def decode(self, payloads: list[Tensor], numel: int) -> Tensor:
        """Average payloads, in order: float32, flat. On a CPU, the next call reuses the memory.

        Waits for the device once, unless the payloads are `inspected`.
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
        """Coroutine: `decode` the payloads of all ranks, for `reduce` to return. May change the state."""
        return (yield from self.with_max_abs(self.decode(payloads, numel)))

    def decode_partition(self, payloads: list[Tensor], numel: int) -> Tensor:
        """`decode` for the owner of a partition, who encodes the average again."""
        return self.decode(payloads, numel)

    # --- payload headers

    def open(self, payload: Tensor, numel: int) -> ops.Payload:
        """Check the header of a payload for a gradient of `numel` elements. Raises PayloadError."""
        return ops.open_payload(payload, method=self.number, digest=self.digest, numel=numel)

    def seal(self, seals: Sequence[ops.Seal]) -> list[Tensor]:
        """Write the headers of payloads whose bodies are complete, in one call. Returns the payloads."""
        return ops.seal_payloads(seals, method=self.number, digest=self.digest)

    def non_finite(self, grad: Tensor) -> Tensor:
        """The payload of a gradient that is not finite: a header with a flag."""
        return self.seal([header_only(grad.numel(), grad.device)])[0]

    # --- the exchange

    def looks(self, average: Tensor) -> bool:
        return True  # the host waits for headers anyway, and a gradient that is not finite has no payload to subtract

    def gather(self, payload: Tensor, alike: bool = True) -> Gather:
        """The all-gather of a payload of this method. alike: whether all ranks encode equally many elements."""
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
            # All ranks see the same lengths, so they choose the same exchange.
            state.payload_nbytes = sum(p.numel() for p in payloads) // len(payloads)
            return (yield from self.combine(payloads, grad.numel(), state))

    def _scatters(self, numel: int, state: State) -> bool:
        if self.exchange == "gather" or not 1 < state.size <= numel:
            return False
        if self.exchange == "scatter_reduce" or getattr(state, "scattered", False):
            return True
        return scatter_pays(getattr(state, "payload_nbytes", 0), state.size)

    def _scatter_reduce(self, grad: Tensor, state: State) -> Routine:
        partitions = split_partitions(grad, state.size)
        key = state.key(self.seed)
        payloads = [self.encode(part, key._replace(name=f"{key.name}[{i}]")) for i, part in enumerate(partitions)]
        state.payload = ops.join_payloads(payloads)
        mine = partitions[state.rank]
        received = yield AllToAll(state.payload, tuple(p.numel() for p in payloads))
        yield from inspected([*received, *payloads])
        average = self.decode_partition(received, mine.numel()).view(mine.shape).clone()
        if (residual := getattr(state, "owner_residual", None)) is not None:
            average.add_(residual)
        payload = self.encode_average(average, key._replace(name=f"{key.name}[owner]"))
        payloads = yield self.gather(payload, alike=len({p.numel() for p in partitions}) == 1)
        yield from inspected(payloads)
        if self.error_feedback:
            state.owner_residual = average.sub_(self.decode([payloads[state.rank]], mine.numel()).view(mine.shape))
        result = grad.new_empty(grad.numel())
        for part, payload in zip(result.split([p.numel() for p in partitions]), payloads):
            part.copy_(self.decode([payload], part.numel()).view(-1))
        return (yield from self.with_max_abs(result))

    # --- error feedback

    def transmitted(self, state: State) -> Tensor:
        assert state.residual is not None
        parts = self.transmitted_parts(state)
        if len(parts) == 1:
            return self.decode([parts[0][0]], state.residual.numel())
        return torch.cat([self.decode([payload], part.numel()).clone() for payload, part in parts])

    def transmitted_parts(self, state: State) -> list[tuple[Tensor, Tensor]]:
        """The payloads that this rank has sent in the current step, each with its part of the residual (flat)."""
        assert state.payload is not None and state.residual is not None
        if not state.scattered:
            return [(state.payload, state.residual.view(-1))]
        partitions = split_partitions(state.residual, state.size)
        payloads = ops.split_payloads(state.payload, len(partitions))
        return [(payload, partition.view(-1)) for payload, partition in zip(payloads, partitions)]


def header_only(numel: int, device: torch.device) -> ops.Seal:
    """What stands for a gradient that is not finite: a header with a flag."""
    return ops.Seal(ops.new_payload(0, device), numel, flags=ops.NON_FINITE)


def scatter_pays(nbytes: float, size: int) -> bool:
    """Whether "scatter_reduce" takes less time than "gather" on the nominal network.

    Args:
        nbytes: of a rank's payload.
        size: the world size.
    """
    link = Link(size, NOMINAL_BANDWIDTH, NOMINAL_LATENCY)
    scattered = link.all_to_all(nbytes) + link.all_gather(nbytes / size) + NOMINAL_OPERATION
    return scattered < link.all_gather(nbytes)


def inspected(payloads: list[Tensor]) -> Routine:
    """Coroutine: inspect payloads on a device, so that opening them does not wait for it."""
    if not ops.on_device(payloads[0]):
        return
    table = yield Local(ops.inspect_payloads, payloads[0].device, payloads)
    if table is not None:
        ops.attach_inspections(payloads, (yield ToHost(table)))


def inspect(payloads: list[Tensor]) -> None:
    """`inspected` at once: waits for the device."""
    at_once(inspected(payloads))


def payload_source(rank: int, size: int) -> str:
    """Describe the source of a payload, for errors."""
    return f"from rank {rank} of {size}"


@contextlib.contextmanager
def attribute_payload_errors(source: str) -> Iterator[None]:
    """Prefix the text of a PayloadError with the payload's source."""
    try:
        yield
    except ops.PayloadError as error:
        raise ops.PayloadError(f"{source}: {error}") from None
