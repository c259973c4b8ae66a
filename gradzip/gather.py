"""Methods whose payloads cannot be added: how the payloads of a codec reach all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import ops
from .codec import Codec, attribute_payload_errors, inspected
from .collectives import AllToAll, Gather
from .cost import Link
from .routines import Routine
from .state import State, split_shards

# The network that exchange="auto" assumes. All ranks must decide alike, so it is not measured: 1 Gb/s with a latency of
# 50 us, and half a millisecond to start one more collective and wait for it after the backward pass.
NOMINAL_BANDWIDTH, NOMINAL_LATENCY, NOMINAL_OPERATION = 1.25e8, 5e-5, 5e-4


@dataclass
class GatherCompressor(Codec):
    """A codec whose payloads cannot be added, so that ranks gather them.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exchange not in ("gather", "scatter_reduce", "auto"):
            raise ValueError(
                f"{type(self).__name__}: got exchange = {self.exchange!r}, expected 'gather', 'scatter_reduce' or "
                "'auto'"
            )
        self.rounds = 1 if self.exchange == "gather" else 2
        self.adapts = self.exchange == "auto"

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


def scatter_pays(nbytes: float, size: int) -> bool:
    """Whether "scatter_reduce" takes less time than "gather" on the nominal network.

    Args:
        nbytes: of a rank's payload.
        size: the world size.
    """
    link = Link(size, NOMINAL_BANDWIDTH, NOMINAL_LATENCY)
    scattered = link.all_to_all(nbytes) + link.all_gather(nbytes / size) + NOMINAL_OPERATION
    return scattered < link.all_gather(nbytes)
