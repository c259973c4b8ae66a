"""Block-scaled integers of 8 or 4 bits: a fixed compression ratio, one pass to encode, small errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..collectives import AllToAll, Gather, ToHost
from ..compressor import Compressor
from ..registry import register
from ..routines import Routine
from ..state import VECTOR, Key, State


class _Average(NamedTuple):
    """An average that is not decoded yet."""

    payloads: list[Tensor]  # of the shards, in rank order
    max_abs: float  # an upper bound of its magnitudes


@register("block-float")
@dataclass
class BlockFloat(Compressor):
    """Rounds each element to a multiple of a step that neighbouring elements share.

    A block is `block` consecutive elements of the gradient. With s = 2^(bits - 1) - 1, its step is the largest
    magnitude / s, and an element x is sent as the integer

        stochastic    floor(x / step + u), u uniform in [0, 1)
        nearest       x / step rounded to nearest

    With p ranks, one step of training is:

        1. Each rank encodes gradient + residual, cut into p shards of equally many blocks, and keeps the error as its
           residual. All-to-all: rank i receives shard i from all ranks.
        2. Rank i decodes and averages them, adds its own residual of the shard's average, encodes the sum, and keeps
           the error. All-gather: all ranks decode the same p shards.

    So elements are rounded twice. The error is below 1 step of the rank's own block and 1 of the average's block, 1/2
    and 1/2 with "nearest". An element at the largest magnitude is sent with bits = 8 to 0.8 %, with 4 to 14 %.

    "stochastic" is unbiased, but for x / step being cut to 16 bits below the point: the expectation of an element is
    off by less than 2^-16 steps. "nearest" has half the largest error and is biased: without error feedback, elements
    that stay below half a step are never sent.

    Args:
        bits: 8 or 4, of an integer.
        block: a multiple of 32 up to 4096. A smaller block has smaller steps, and more of them are sent.
        rounding: "stochastic" or "nearest".
        error_feedback: add both errors to the next gradient.
        seed: of the random numbers u.

    Payload: for each block, its step (float32) and its integers: 4 + block bits / 8 bytes, for 32 bits an element a
    ratio of 3.94 with bits = 8 and 7.76 with 4. No header: lengths follow from the shape. A rank sends 2 (p - 1) / p
    payloads, as in an all-reduce. If an element is not finite, the step of its block is NaN, in the average too.

    Deterministic for a seed. On a device, waits once, for a bound of the average's magnitudes; nothing else depends on
    the host.

    Source of the exchange: Wang, Qin, Jacobs, Wu, Holmes, Yao, Rajbhandari, Ruwase, Yan, Yang, He, ZeRO++: Extremely
    Efficient Collective Communication for Giant Model Training, 2023, section 3.3 (qgZ). Stochastic rounding: Alistarh,
    Grubic, Li, Tomioka, Vojnovic, QSGD, NeurIPS 2017, section 3.1, with the largest magnitude as the norm.
    """

    bits: int = 8
    block: int = 256
    rounding: str = "stochastic"
    error_feedback: bool = True
    seed: int = 0

    rounds = 2
    joins = True
    exchange = "scatter_reduce"  # as of the methods that have a choice

    rank_local = (*Compressor.rank_local, "owner_start")
    shard_local = (*Compressor.shard_local, "owner_start")

    def __post_init__(self) -> None:
        super().__post_init__()
        ops.check_block_float(self.bits, self.block, "BlockFloat")
        if self.rounding not in ("stochastic", "nearest"):
            raise ValueError(f"BlockFloat: got rounding = {self.rounding!r}, expected 'stochastic' or 'nearest'")

    def joined_shape(self, shape: torch.Size) -> tuple[int, ...]:
        return VECTOR

    def add_residual(self, grad: Tensor, state: State) -> Routine:
        if self.error_feedback:
            return grad  # `reduce` adds the residual as it encodes
        return (yield from super().add_residual(grad, state))

    def reduce(self, grad: Tensor, state: State) -> Routine:
        key, numel = state.key(self.seed), grad.numel()
        blocks = -(-numel // (self.block * state.size))  # of a shard
        payload = self._encode(grad, key, blocks * state.size, state.residual if self.error_feedback else None)
        if state.size > 1:
            nbytes = payload.numel() // state.size
            received = yield AllToAll(payload, (nbytes,) * state.size, same_length=True)
            start = min(numel, state.rank * blocks * self.block)
            shard = grad.new_empty(min(numel - start, blocks * self.block))
            residual = getattr(state, "owner_residual", None) if self.error_feedback else None
            ops.block_float_decode_sum(received, shard, self.bits, self.block, 1.0 / state.size, residual)
            payload = self._encode(shard, key._replace(name=f"{key.name}[owner]"), blocks)
            if self.error_feedback:
                state.owner_residual, state.owner_start = shard, start
        payloads = yield Gather(payload, same_length=True)
        step = ops.block_float_max_step(payloads, self.bits, self.block)
        if ops.on_device(step):
            step = yield ToHost(step)
        return _Average(payloads, float(step) * 2 ** (self.bits - 1))

    def _encode(self, x: Tensor, key: Key, blocks: int, residual: Tensor | None = None) -> Tensor:
        """The payload of x + residual. With error feedback, replaces x by the error."""
        return ops.block_float_encode(
            x,
            self.bits,
            self.block,
            key.bits if self.rounding == "stochastic" else None,
            blocks=blocks,
            residual=residual,
            error=x if self.error_feedback else None,
        )

    def max_abs_bound(self, average: _Average, limit: float) -> float:
        if average.max_abs <= limit:
            return average.max_abs
        # Not finite, or so close to the limit that only the decoded elements can tell.
        nbytes = sum(payload.numel() for payload in average.payloads)
        numel = nbytes // ops.block_float_nbytes(1, self.bits, self.block) * self.block
        decoded = self.new_average(numel, average.payloads[0].device)
        ops.block_float_decode(average.payloads, decoded, self.bits, self.block)
        return ops.abs_max(decoded)

    def apply_average(self, grad: Tensor, corrected: Tensor, average: _Average, state: State) -> None:
        if self.error_feedback:
            self.store_residual(corrected, state)  # `reduce` has left the error there
        in_place = grad.dtype == torch.float32 and grad.is_contiguous()
        decoded = grad.view(-1) if in_place else self.new_average(grad.numel(), grad.device)
        ops.block_float_decode(average.payloads, decoded, self.bits, self.block)
        if not in_place:
            grad.copy_(decoded.view(grad.shape))
