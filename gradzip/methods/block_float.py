"""Block-scaled integers of 8, 4 or 2 bits: a fixed compression ratio, one pass to encode, small errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..collectives import AllToAll, Gather, ToHost
from ..collectives.routines import Routine
from ..memory.state import Key
from ..ops import groups
from ..ops import tensors as ops
from .base.error_feedback import ErrorFeedback
from .base.group import Group
from .base.registry import register


class _Average(NamedTuple):
    """An average that is not decoded yet."""

    payloads: list[Tensor]  # of the partitions, in rank order
    max_abs: float  # an upper bound of its magnitudes; 0 if nobody looks


@register(
    "block-float",
    examples=[
        "",
        "bits=4",
        "block=64,rounding=nearest,error_feedback=False",
        "bits=2,block=64,rounding=nearest",
        "bits=4,error_feedback=owner",
    ],
)
@dataclass
class BlockFloat(ErrorFeedback):
    """Rounds each element to a multiple of a step that neighbouring elements share.

    A block is `block` consecutive elements of the gradient. With s = 2^(bits - 1) - 1, its step is the largest
    magnitude / s, and an element x is sent as the integer

        stochastic    floor(x / step + u), u uniform in [0, 1)
        nearest       x / step rounded to nearest

    With 2 bits, the step is a third of the largest magnitude, and an element is sent as the nearest of -3/2, -1/2, 1/2
    and 3/2 steps.

    With p ranks, one step of training is:

        1. Each rank encodes gradient + residual, in p partitions of equally many blocks, and keeps the error as its
           residual. All-to-all: rank i receives partition i from all ranks.
        2. Rank i decodes and averages them, adds its residual of the partition's average, encodes the sum, and keeps
           the error. All-gather: all ranks decode the same p partitions.

    Elements are therefore rounded twice. The error is below 1 step of the rank's own block plus 1 step of the average's
    block; 1/2 and 1/2 with "nearest". The largest element of a block has a relative error below 0.8 % with bits = 8,
    and 14 % with 4. With 2, half of the largest element stays for the next step, and elements above a third of it are
    off by up to 3/2 steps.

    "stochastic" is unbiased, except that x / step is cut to 16 bits below the point: the expectation of an element is
    off by less than 2^-16 steps. "nearest" has half the largest error and is biased: without error feedback, elements
    that stay below half a step are never sent.

    Args:
        bits: size of an integer, 8, 4 or 2. 2 needs rounding = "nearest".
        block: a multiple of 32 up to 4096. Smaller blocks have smaller steps, and more steps are sent.
        rounding: "stochastic" or "nearest".
        error_feedback: add both errors to the next gradient; "owner": that of the average alone, which takes 4 / p
            bytes of memory an element in place of 4 + 4 / p. The ranks' own errors are lost then. "stochastic" makes
            them unbiased and independent, so that most of them cancel in the average. A single rank rounds once, and
            owns what it rounds: its error is kept with either. Within `Hierarchical` with one node of several ranks,
            nothing is rounded.
        seed: of the random numbers u.

    Payload: for each block, its step (float32) and its integers: 4 + block bits / 8 bytes, a ratio of 3.94 to float32
    with bits = 8, 7.76 with 4 and 15.06 with 2. No header: lengths follow from the shape. A rank sends 2 (p - 1) / p
    payloads, as in an all-reduce. If an element is not finite, the step of its block is NaN, also in the average.

    Deterministic for a seed.

    Source of the exchange: Wang, Qin, Jacobs, Wu, Holmes, Yao, Rajbhandari, Ruwase, Yan, Yang, He, ZeRO++: Extremely
    Efficient Collective Communication for Giant Model Training, 2023, section 3.3 (qgZ). Stochastic rounding: Alistarh,
    Grubic, Li, Tomioka, Vojnovic, QSGD, NeurIPS 2017, section 3.1, with the largest magnitude as the norm.
    """

    bits: int = 8
    block: int = 256
    rounding: str = "stochastic"
    error_feedback: bool | Literal["owner"] = True  # type: ignore[assignment]
    seed: int = 0

    rounds = 2
    asymmetric = True
    undone_on_device = remakes = True
    reads_half = writes_half = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.keeps_residual = self.error_feedback is True
        ops.check_block_float(self.bits, self.block, "BlockFloat")
        self.check("error_feedback", self.error_feedback in (True, False, "owner"), "True, False or 'owner'")
        self.check("rounding", self.rounding in ("stochastic", "nearest"), "'stochastic' or 'nearest'")
        if (self.bits, self.rounding) == (2, "stochastic"):
            raise ValueError("BlockFloat: got rounding = 'stochastic' with bits = 2, expected rounding = 'nearest'")

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.rounding == "stochastic" and not self.keeps_residual

    def groups_by(self, shape: torch.Size) -> tuple[int, ...]:
        return self.joined_shape(shape)

    def add_residual(self, group: Group) -> Routine:
        state = group.state
        if getattr(state, "owner_residual", None) is not None and state.owner_ranges != [self._partition(group)[1:]]:
            state.fold_owner_residual()
        if self.keeps_residual:
            group.load_parts()  # `reduce` adds the residual as it encodes
        else:
            yield from super().add_residual(group)

    def holds(self, group: Group) -> bool:
        return self.keeps_residual

    def reduce(self, group: Group) -> Routine:
        state, key = group.state, group.state.key(self.seed)
        blocks, start, stop = self._partition(group)
        like = torch.empty(0, dtype=torch.float32, device=group.device)
        payload = self._encode_own(group, key, blocks * group.size)
        group.release_parts()
        if group.size > 1:
            nbytes = payload.numel() // group.size
            received = yield AllToAll(payload, (nbytes,) * group.size, same_length=True)
            if self.error_feedback:
                partition = state.renewed("owner_residual", like, stop - start)
                former = getattr(state, "owner_residual", None)
            else:
                partition, former = like.new_empty(stop - start), None
            self._check(received, blocks)
            weight = 1.0 / group.size
            groups.block_float_decode(received, group.size, partition, self.bits, self.block, weight, former)
            error = partition if self.error_feedback else None
            payload = self._encode(partition, key._replace(name=f"{key.name}[owner]"), blocks, error)
            if self.error_feedback:
                state.owner_residual, state.owner_ranges = partition, [(start, stop)]
            del received, partition, former, error  # those of all buckets would live until all averages are gathered
        payloads = yield Gather(payload, same_length=True)
        self._check(payloads, blocks)
        if group.may_hold:  # a device has to know if averages are finite before they are decoded
            step = ops.block_float_max_step(payloads, self.bits, self.block)
            group.numbers.append(step.mul_(2.0**self.bits))  # finite if no magnitude is above 2^127
        if not self.looks(group):
            return _Average(payloads, 0.0)
        step = ops.block_float_max_step(payloads, self.bits, self.block)
        if step.is_cuda:
            step = yield ToHost(step)
        return _Average(payloads, float(step) * 2 ** (self.bits - 1))

    def _partition(self, group: Group) -> tuple[int, int, int]:
        """The blocks of a partition, and the range of elements of this rank's."""
        blocks = -(-group.numel // (self.block * group.size))
        each = blocks * self.block
        return blocks, min(group.numel, group.rank * each), min(group.numel, (group.rank + 1) * each)

    def own_ranges(self, group: Group) -> list[tuple[int, int]]:
        keeps = self.error_feedback if group.size > 1 else self.error_feedback == "owner"
        return [self._partition(group)[1:]] if keeps else []

    def _encode_own(self, group: Group, key: Key, blocks: int) -> Tensor:
        """The payload of gradients plus residual, whose error is in the gradients' memory or the next residual then."""
        state, vector = group.state, group.vector
        if self.keeps_residual and state.next_residual is None and not group.holds:
            like = torch.empty(0, dtype=torch.float32, device=group.device)
            state.next_residual = state.renewed("residual", like, group.numel)
        residual = state.residual if self.keeps_residual else None
        error = vector if group.holds else state.next_residual
        if group.size == 1 and self.error_feedback == "owner":  # the gradient is the average
            residual = getattr(state, "owner_residual", None)
            error = state.renewed("owner_residual", torch.empty(0, device=group.device), group.numel)
            state.owner_residual, state.owner_ranges = error, [(0, group.numel)]
        bits = key.bits if self.rounding == "stochastic" else None
        return groups.block_float_encode(vector, self.bits, self.block, bits, blocks, residual, error)

    def _encode(self, x: Tensor, key: Key, blocks: int, error: Tensor | None) -> Tensor:
        """The payload of x. error: memory for its error, which may be x."""
        bits = key.bits if self.rounding == "stochastic" else None
        return groups.block_float_encode(x, self.bits, self.block, bits, blocks, None, error)

    def _check(self, payloads: Sequence[Tensor], blocks: int) -> None:
        """Raise PayloadError unless the payloads have so many blocks each. They have no header."""
        expected = ops.block_float_nbytes(blocks, self.bits, self.block)
        if lengths := set(map(Tensor.numel, payloads)) - {expected}:
            raise ops.PayloadError(
                f"BlockFloat: got payloads of {sorted(lengths)} bytes, expected {expected}: give every rank the same "
                "arguments"
            )

    def remake_error(self, group: Group) -> Routine:
        state = group.state
        yield from group.method.add_residual(group)
        key = state.key(self.seed)._replace(step=state.step - 1)
        self._encode_own(group, key, self._partition(group)[0] * group.size)
        state.residual, state.next_residual = state.next_residual, None

    def max_abs_bound(self, average: _Average, limit: float) -> float:
        if average.max_abs <= limit:
            return average.max_abs
        # Not finite, or so close to the limit that only the decoded elements can tell.
        nbytes = sum(map(Tensor.numel, average.payloads))
        numel = nbytes // ops.block_float_nbytes(1, self.bits, self.block) * self.block
        decoded = self.new_average(numel, average.payloads[0].device)
        ops.block_float_decode(average.payloads, decoded, self.bits, self.block)
        return ops.abs_max(decoded)

    def apply_averages(self, updates: list[tuple[Group, Any]]) -> list[None]:
        if self.keeps_residual:
            self.store_residuals([group for group, _ in updates])  # the errors, which `reduce` has left there
        for group, average in updates:
            target = group.target
            decoded = self.new_average(group.numel, group.device, group.dtype) if target is None else target
            groups.block_float_decode(average.payloads, 1, decoded, self.bits, self.block)
            group.write([decoded])
            del target, decoded  # the next group needs its own memory
        return [None] * len(updates)
