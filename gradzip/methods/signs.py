"""One bit per element: Sign-SGD and 1-bit SGD."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..collectives.routines import Local, Routine, jointly
from ..memory.state import Key, State
from ..ops import groups
from ..ops import tensors as ops
from .base.error_feedback import ErrorFeedback
from .base.gather import CodedSum, Undecoded
from .base.group import Group
from .base.list_codec import Layout, ListCodec
from .base.registry import register

_COINS = struct.Struct("<Q8x")  # key of the coins that decide ties


@register("signsgd", number=18, examples=["", "majority=False", "error_feedback=False"])
@dataclass
class SignSGD(ErrorFeedback, ListCodec):
    """Sends the signs of the gradient, and takes their majority vote or averages them.

    Rank i sends the signs b_i = sign(g_i) and the scale s_i = mean |g_i|. With error feedback, g_i is the gradient plus
    residual. The result is:

        majority, error_feedback      S v, where v = sign(sum_i b_i), S = mean_i(s_i a_i), a_i = mean(b_i v)
        majority                      v
        error_feedback, or neither    m = mean_i(s_i b_i)

    S v is the multiple of v that is nearest to m. a_i is a mean over the elements, between -1 and 1: the less the ranks
    agree, the smaller is S. The residual is g_i - s_i b_i, plus m - S v with `majority`, the error of the vote, which
    all ranks know. The sum of averages and mean residual then equals the sum of mean gradients.

    With `majority` alone, elements are 1 or -1 for gradients of any size: choose the learning rate accordingly, about
    that of Adam.

    With exchange="scatter_reduce" and error feedback, the owner of a partition sends the signs of m plus its own
    residual, so a rank's vote counts in proportion to its scale.

    Args:
        majority: take the majority vote of the ranks' signs. Ties are decided by a fair coin, the same on all ranks.
        error_feedback: add what was not sent to the next gradient.
        seed: of the coins that decide ties, and of those that each rank takes as the signs of its zeros.

    Payload: header; s_i of each gradient of the group, float32; one bit for each element of each gradient. Scales and
    the bits of a gradient are padded to 16 bytes. For one gradient: 64 + ceil(n / 8) bytes, padded to 16.

    Deterministic for a seed.

    Source: Bernstein, Wang, Azizzadenesheli, Anandkumar, signSGD: Compressed Optimisation for Non-Convex Problems, ICML
    2018, Algorithm 2 (majority vote); Karimireddy, Rebjock, Stich, Jaggi, Error Feedback Fixes SignSGD and other
    Gradient Compression Schemes, ICML 2019, Algorithm 1; residual of the average: Zheng, Huang, Kwok,
    Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback, NeurIPS 2019, Algorithm 2.
    """

    majority: bool = True
    error_feedback: bool = True
    seed: int = 0

    kernel = "signs_decode_add"
    code_nbytes = staticmethod(ops.bitmap_nbytes)

    def encode_lists(self, lists: Sequence[Sequence[Tensor]], keys: Sequence[Key]) -> list[Tensor]:
        layout, parts, counts = self.layout(lists), list(itertools.chain(*lists)), list(map(len, lists))
        payloads, begin = self.new_payloads(layout, parts[0].device)
        statistics = groups.pack_signs(parts, groups.keys_of([key.bits for key in keys], counts), begin + layout.codes)
        largest, scales = statistics.unbind(1)
        is_scaled = self.error_feedback or not self.majority
        self.write_numbers(layout, payloads, scales if is_scaled else torch.ones_like(scales))
        fields = [self.fields_of((), key) for key in keys]
        magnitudes = statistics if is_scaled else largest.contiguous()
        return self.seal_all(layout, payloads, fields, magnitudes.split_with_sizes(counts))

    def fields_of(self, shapes: Sequence[torch.Size], key: Key) -> bytes:
        return _COINS.pack(key._replace(rank="shared").bits)

    # --- the vote

    def decode_all(
        self, payloads: Sequence[ops.Payload], outs: Sequence[Tensor], state: State | None = None
    ) -> Routine:
        # The owner of a partition has no state. With error feedback, encoding the mean is the vote, and the owner's
        # residual holds its error.
        if not self.majority or len(payloads) == 1 or (self.error_feedback and state is None):
            return (yield from super().decode_all(payloads, outs))
        vote = None if state is None else vars(state).pop("vote", None)  # of `complete_error`
        if vote is None:
            vote = yield from jointly(self._count_all, outs[0].device, CodedSum(outs, payloads, 1.0))
            if self.error_feedback and state is not None:
                state.vote = vote  # until `subtract_transmitted`
        yield from jointly(self._write_all, outs[0].device, (outs, vote))
        if vote.scales is None or vote.scales.is_cuda:
            return 1.0 if vote.scales is None else None
        return vote.scales.abs().max().item()

    def complete_error(self, group: Group, average: Undecoded) -> Routine:
        if self.majority and len(average) > 1 and not group.state.scattered:
            coded = CodedSum(group.gradients, average, 1.0)
            group.state.vote = yield Local(self._count_all, group.device, coded)  # until `decode_all`
        yield from super().complete_error(group, average)

    def subtract_transmitted(self, of: Sequence[Group]) -> None:
        votes = [(g, vars(g.state).get("vote") if g.commits_late else vars(g.state).pop("vote", None)) for g in of]
        if unvoted := [group for group, vote in votes if vote is None]:
            super().subtract_transmitted(unvoted)
        if voted := [(group.errors, vote) for group, vote in votes if vote]:
            # Also add m - S v, in place: one term for each rank, without a tensor for m.
            outs = [out for residuals, _ in voted for out in residuals]
            sums = [CodedSum(residuals, vote.ballots, 1.0) for residuals, vote in voted]
            packed, numbers = self.columns(self.layout([residuals for residuals, _ in voted]), sums)
            weights = np.full(packed.shape, 1.0 / packed.shape[1])
            weights[:, of[0].rank] -= 1.0
            columns = map(np.column_stack, zip((packed, numbers), self._winners(voted)))
            self.decode_sums(outs, True, list(columns), np.column_stack([weights, np.full(len(outs), -1.0)]))

    def _count_all(self, of: list[CodedSum]) -> list[_Vote]:
        """The votes of several groups."""
        layout, counted = self.layout([coded.outs for coded in of]), self.error_feedback
        ballots = self.bodies(layout, [coded.payloads for coded in of])[layout.body] + layout.codes[:, None]
        # All ranks use rank 0's coins, in case ranks have counted steps differently.
        (coins,) = zip(*[_COINS.unpack(coded.payloads[0].fields) for coded in of])
        keys = groups.keys_of(coins, [len(coded.outs) for coded in of])
        # The winners are where they would be in payloads of theirs.
        starts = layout.codes + np.cumsum([0, *layout.nbytes[:-1]], dtype=np.uint64)[layout.body]
        winners, against = groups.majority(
            ballots, layout.numels, keys, starts, sum(layout.nbytes), of[0].payloads[0].body, counted
        )
        ballots_of, winners_of = [coded.payloads for coded in of], winners.split(layout.nbytes)
        if not counted:
            return [_Vote(*vote, None) for vote in zip(ballots_of, winners_of)]
        heads = [payload.body[:head] for coded, head in zip(of, layout.heads) for payload in coded.payloads]
        of_ranks = torch.cat(heads).view(torch.float32)  # one operation on a device
        own_of = of_ranks.split([len(coded.outs) * len(coded.payloads) for coded in of])
        against_of = against.split([len(coded.outs) for coded in of])
        scales = [_scales(counts, own, coded.outs) for counts, own, coded in zip(against_of, own_of, of)]
        return [_Vote(*vote) for vote in zip(ballots_of, winners_of, scales)]

    def _write_all(self, of: list[tuple[Sequence[Tensor], _Vote]]) -> list[None]:
        """Write the majority's signs, times their scales."""
        columns = [column[:, None] for column in self._winners(of)]
        self.decode_sums([out for outs, _ in of for out in outs], False, columns, 1.0)
        return [None] * len(of)

    def _winners(self, of: Sequence[tuple[Sequence[Tensor], _Vote]]) -> tuple[np.ndarray, np.ndarray]:
        """The addresses of the majority's signs of each part, and of their scales; 0 stands for a scale of 1."""
        layout = self.layout([outs for outs, _ in of])
        begin = groups.addresses([vote.winners for _, vote in of])
        scales = [np.zeros(len(outs), np.uint64) for outs, _ in of]
        for own, (outs, vote) in zip(scales, of):
            if vote.scales is not None:
                own[:] = np.uint64(vote.scales.data_ptr()) + 4 * np.arange(len(outs), dtype=np.uint64)
        return begin[layout.body] + layout.codes, np.concatenate(scales)


class _Vote(NamedTuple):
    """A majority vote."""

    ballots: Sequence[ops.Payload]  # of each rank
    winners: Tensor  # the signs of the majority, packed
    scales: Tensor | None  # S of each part, float32; None: all are 1


def _scales(against: Tensor, own: Tensor, outs: Sequence[Tensor]) -> Tensor:
    """S of each part.

    Args:
        against: for each part and rank, the number of signs that differ from the majority's.
        own: for each rank and part, its scale.
    """
    ranks, numels = against.shape[1], list(map(Tensor.numel, outs))
    shares = torch.stack(torch._foreach_div(list(against.double().unbind()), numels))
    weighted = own.view(ranks, -1).T.double() * (1 - 2 * shares)
    if weighted.is_cuda:
        return (weighted.sum(1) / ranks).float()
    means = [math.fsum(row) / ranks for row in weighted.tolist()]
    return torch.tensor(means, dtype=torch.float32, device=weighted.device)


@register("onebit", number=19)
@dataclass
class OneBitSGD(ErrorFeedback, ListCodec):
    """Sends the signs of the gradient, and the means of the positive and of the negative elements of each row.

    An element is decoded as the mean of the elements of its row with the same sign, which minimises the squared error.
    A row is one output unit: grad[i], which is a filter of a convolution. (The paper's layers compute W^T x, so its
    output units are columns of W.) Error feedback is always on.

    Args:
        seed: of the coins that are taken as the signs of zeros.

    Payload: header; two float32 means for each row of all gradients of the group; one bit for each element of each
    gradient. Means and the bits of a gradient are padded to 16 bytes. A gradient bypasses compression if its rows are
    so short that 8 rows + ceil(n / 8) is not less than its 4 n bytes.

    Deterministic for a seed.

    Source: Seide, Fu, Droppo, Li, Yu, 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
    Distributed Training of Speech DNNs, Interspeech 2014, section 3.
    """

    error_feedback = True
    kernel = "one_bit_decode_add"
    problem = "the mean of a row is not finite"
    has_scales = False
    code_nbytes = staticmethod(ops.bitmap_nbytes)

    seed: int = 0

    def bypasses(self, grad: Tensor) -> bool:
        return super().bypasses(grad) or 8 * grad.shape[0] + ops.bitmap_nbytes(grad.numel()) >= 4 * grad.numel()

    @staticmethod
    def count_numbers(shape: torch.Size) -> int:
        return 2 * (shape[0] if len(shape) > 1 else 1)  # a 1-D part is of a partition: a piece of the flat gradient

    def encode_lists(self, lists: Sequence[Sequence[Tensor]], keys: Sequence[Key]) -> list[Tensor]:
        layout, parts, counts = self.layout(lists), list(itertools.chain(*lists)), list(map(len, lists))
        payloads, begin = self.new_payloads(layout, parts[0].device)
        outs = begin + layout.codes, begin + layout.numbers
        largest = groups.one_bit_packed(
            parts, layout.counts // 2, groups.keys_of([key.bits for key in keys], counts), *outs
        )
        return self.seal_all(layout, payloads, itertools.repeat(bytes(16)), largest.split_with_sizes(counts))

    def columns(self, layout: Layout, sums: Sequence[CodedSum]) -> tuple[np.ndarray, ...]:
        return *super().columns(layout, sums), (layout.numels // (layout.counts // 2))[:, None]
