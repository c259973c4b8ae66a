"""One bit per element: Sign-SGD and 1-bit SGD."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..collectives import ToHost
from ..collectives.routines import Routine, at_once, jointly
from ..memory.state import Key
from ..ops import groups
from ..ops import tensors as ops
from .base.error_feedback import ErrorFeedback
from .base.gather import CodedSum, GatherCompressor, all_finite, attribute_payload_errors, payload_source
from .base.layout import Layout, bodies, check_scales, layout_of, new_payload
from .base.registry import register

if TYPE_CHECKING:
    from ..averaging.group import Group

_COINS = struct.Struct("<Q8x")  # key of the coins that decide ties


@register("signsgd", number=18, examples=["", "majority=False", "error_feedback=False"])
@dataclass
class SignSGD(ErrorFeedback, GatherCompressor):
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

    Deterministic for a seed. A vote with error feedback waits for a CUDA device, to read a_i.

    Source: Bernstein, Wang, Azizzadenesheli, Anandkumar, signSGD: Compressed Optimisation for Non-Convex Problems, ICML
    2018, Algorithm 2 (majority vote); Karimireddy, Rebjock, Stich, Jaggi, Error Feedback Fixes SignSGD and other
    Gradient Compression Schemes, ICML 2019, Algorithm 1; residual of the average: Zheng, Huang, Kwok,
    Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback, NeurIPS 2019, Algorithm 2.
    """

    majority: bool = True
    error_feedback: bool = True
    seed: int = 0

    fixed_nbytes = True

    vectors = False

    def _layout(self, shapes: Sequence[Sequence[int]]) -> Layout:
        return layout_of(4 * len(shapes), tuple(map(math.prod, shapes)), ops.bitmap_nbytes)

    @property
    def _is_scaled(self) -> bool:
        return self.error_feedback or not self.majority

    def encode_all(self, parts: Sequence[Tensor], key: Key) -> Tensor:
        layout = self._layout([part.shape for part in parts])
        payload = new_payload(layout, parts[0].device)
        body = payload[ops.HEADER_NBYTES :]
        outs = np.uint64(body.data_ptr()) + layout.starts
        statistics = groups.pack_signs(parts, groups.keys_of(key.bits, len(parts)), outs)
        largest, scales = statistics.unbind(1)
        body[: layout.head].view(torch.float32).copy_(scales if self._is_scaled else torch.ones_like(scales))
        fields = _COINS.pack(key._replace(rank="shared").bits)
        magnitudes = statistics if self._is_scaled else largest.contiguous()
        return self.seal(ops.Seal(payload, sum(p.numel() for p in parts), fields, magnitudes=magnitudes))

    def sum_all(self, sums: Sequence[CodedSum]) -> None:
        groups.decode_sums("signs_decode_add", [self._sums(coded) for coded in sums], fails=False)

    def _sums(self, coded: CodedSum, weights: np.ndarray | None = None, winners: _Winners | None = None) -> groups.Sums:
        """A sum of scaled signs.

        Args:
            weights: of the payloads; default: that of the sum.
            winners: of a vote, another term, of weight -1.
        """
        outs, payloads, weight, add = coded
        layout = self._layout([out.shape for out in outs])
        begin = bodies(payloads, layout)
        check_scales(payloads, layout)
        packed = begin + layout.starts[:, None]
        scales = begin + 4 * np.arange(len(outs), dtype=np.uint64)[:, None]
        each = np.broadcast_to(np.full(len(payloads), weight) if weights is None else weights, packed.shape)
        if winners is not None:
            own, scale = winners
            first = layout.starts - layout.starts[0]
            packed = np.column_stack([packed, np.uint64(own.data_ptr()) + first])
            scales = np.column_stack([scales, np.zeros(len(outs), np.uint64)])
            each = np.column_stack([each, -scale])
        return groups.sums(outs, add, (packed, scales), each)

    def combine(self, payloads: Sequence[ops.Payload], group: Group) -> Routine:
        vote = yield from self._vote(payloads, group.parts)
        if vote is None:
            return (yield from super().combine(payloads, group))
        if self.error_feedback:
            group.state.vote = vote  # until `subtract_transmitted`
        flat = self.new_average(group.numel, group.device)
        yield from jointly(self._write_all, group.device, (group.pieces(flat), vote.winners))
        largest = np.abs(vote.winners.scales.astype(np.float32)).max()
        return (yield from self.with_max_abs(group, flat, float(largest)))

    def decode_all(self, payloads: Sequence[ops.Payload], outs: Sequence[Tensor]) -> Routine:
        vote = yield from self._vote(payloads, outs)
        if vote is None:
            yield from super().decode_all(payloads, outs)
        else:
            self._write_all([(outs, vote.winners)])

    def decode_partition(self, payloads: Sequence[ops.Payload], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        # With error feedback, encoding the mean is the vote, and the owner's residual holds its error.
        if not self.error_feedback:
            return super().decode_partition(payloads, shapes)
        outs = self._new_averages(shapes, payloads[0].body.device)
        at_once(super().decode_all(payloads, outs))
        return outs

    def subtract_transmitted(self, of: Sequence[Group]) -> None:
        sums = []
        for group in of:
            vote: _Vote | None = getattr(group.state, "vote", None)
            group.state.vote = None
            if vote is None:
                sums += [self._sums(coded) for coded in self.corrections(group)]
                continue
            # Also add m - S v, in place: one term for each rank, without a tensor for m.
            assert group.state.residual is not None
            weights = np.full(group.size, 1.0 / group.size)
            weights[group.rank] -= 1.0
            coded = CodedSum(group.pieces(group.state.residual), vote.ballots, 1.0, add=True)
            sums.append(self._sums(coded, weights, vote.winners))
        groups.decode_sums("signs_decode_add", sums, fails=False)

    def _vote(self, payloads: Sequence[ops.Payload], parts: Sequence[Tensor]) -> Routine:
        """Coroutine: the majority vote of the ranks; None without `majority`, for one rank, or if one is not finite."""
        if not self.majority or len(payloads) == 1 or not all_finite(payloads):
            return None
        shapes = [part.shape for part in parts]
        layout, ballots = self._layout(shapes), list(payloads)
        check_scales(ballots, layout)
        winners, numbers = yield from jointly(self._count_all, parts[0].device, (ballots, shapes, layout))
        scales = np.ones(len(shapes))
        if self.error_feedback:
            scales = self._scales((yield ToHost(numbers)) if ops.on_device(numbers) else numbers, shapes)
        return _Vote(ballots, _Winners(winners, scales))

    def _scales(self, numbers: Tensor, shapes: Sequence[torch.Size]) -> np.ndarray:
        """S of each part, from what `_count_all` has counted."""
        on_host = numbers.numpy().tobytes()
        parts = len(shapes)
        ranks = len(on_host) // (12 * parts)
        against = np.frombuffer(on_host, np.int64, parts * ranks).reshape(parts, ranks)
        scales = np.frombuffer(on_host, np.float32, offset=8 * parts * ranks).reshape(ranks, parts).T
        agreements = 1 - 2 * against / np.array([[math.prod(shape)] for shape in shapes])
        return np.array([math.fsum(row) / ranks for row in scales.astype(np.float64) * agreements])

    def _count_all(self, of: list[tuple[list[ops.Payload], list[torch.Size], Layout]]) -> list[tuple[Tensor, Tensor]]:
        """The votes of several groups: the signs of the majority, and, as bytes, for each part and rank the number of
        signs that differ from it (int64), and for each rank and part its scale (float32)."""
        votes, numels, keys, starts, nbytes = [], [], [], [], list[int]()
        for ballots, shapes, layout in of:
            # All ranks use rank 0's coins, in case ranks have counted steps differently.
            (coins,) = _COINS.unpack(ballots[0].fields)
            votes.append(bodies(ballots, layout) + layout.starts[:, None])
            numels.append(np.array([math.prod(shape) for shape in shapes]))
            keys.append(groups.keys_of(coins, len(shapes)))
            starts.append(np.uint64(sum(nbytes)) + layout.starts - layout.starts[0])
            nbytes.append(layout.nbytes - int(layout.starts[0]))
        counts = self.error_feedback
        winners, against = groups.majority(
            np.concatenate(votes), np.concatenate(numels), np.concatenate(keys), np.concatenate(starts), sum(nbytes),
            of[0][0][0].body, counts,
        )  # fmt: skip
        numbers = [[own] for own in against.view(-1).view(torch.uint8).split([8 * v.size * counts for v in votes])]
        for own, (ballots, _, layout) in zip(numbers, of):
            own += [ballot.body[: layout.head] for ballot in ballots if counts]
        flat = torch.cat([part for own in numbers for part in own])  # one operation on a device
        return list(zip(winners.split(nbytes), flat.split([sum(part.numel() for part in own) for own in numbers])))

    def _write_all(self, of: list[tuple[Sequence[Tensor], _Winners]]) -> list[None]:
        """Write the majority's signs, times their scales."""
        sums = []
        for outs, (packed, scales) in of:
            layout = self._layout([out.shape for out in outs])
            begin = np.uint64(packed.data_ptr()) + (layout.starts - layout.starts[0])[:, None]
            sums.append(groups.sums(outs, False, (begin, 0), scales[:, None]))
        groups.decode_sums("signs_decode_add", sums, fails=False)
        return [None] * len(of)


class _Winners(NamedTuple):
    """The signs of the majority, packed, and their scales S, float64."""

    packed: Tensor
    scales: np.ndarray


class _Vote(NamedTuple):
    """A majority vote."""

    ballots: list[ops.Payload]  # of each rank
    winners: _Winners


@register("onebit", number=19)
@dataclass
class OneBitSGD(ErrorFeedback, GatherCompressor):
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
    fixed_nbytes = True
    vectors = False

    seed: int = 0

    def bypasses(self, grad: Tensor) -> bool:
        return super().bypasses(grad) or 8 * grad.shape[0] + ops.bitmap_nbytes(grad.numel()) >= 4 * grad.numel()

    def _layout(self, shapes: Sequence[Sequence[int]]) -> tuple[Layout, np.ndarray]:
        """Of the body, and the rows of each part."""
        # A 1-D part is of a partition: a piece of the flat gradient.
        rows = np.array([shape[0] if len(shape) > 1 else 1 for shape in shapes])
        return layout_of(8 * int(rows.sum()), tuple(map(math.prod, shapes)), ops.bitmap_nbytes), rows

    def encode_all(self, parts: Sequence[Tensor], key: Key) -> Tensor:
        layout, rows = self._layout([part.shape for part in parts])
        payload = new_payload(layout, parts[0].device)
        begin = np.uint64(payload.data_ptr() + ops.HEADER_NBYTES)
        keys = groups.keys_of(key.bits, len(parts))
        largest = groups.one_bit_packed(parts, rows, keys, begin + layout.starts, begin + _means_starts(rows))
        return self.seal(ops.Seal(payload, sum(p.numel() for p in parts), magnitudes=largest))

    def sum_all(self, sums: Sequence[CodedSum]) -> None:
        tables, ranks = [], []
        for outs, payloads, weight, add in sums:
            layout, rows = self._layout([out.shape for out in outs])
            begin = bodies(payloads, layout)
            packed, means = begin + layout.starts[:, None], begin + _means_starts(rows)[:, None]
            columns = np.array([out.numel() for out in outs])[:, None] // rows[:, None]
            weights = np.full(packed.shape, weight)
            tables.append(groups.sums(outs, add, (packed, means, columns), weights))
            ranks += [(rank, len(payloads)) for _ in outs for rank in range(len(payloads))]
        if failed := groups.decode_sums("one_bit_decode_add", tables):
            with attribute_payload_errors(payload_source(*ranks[failed - 1])):
                raise ops.PayloadError("corrupt payload: the mean of a row is not finite")


def _means_starts(rows: np.ndarray) -> np.ndarray:
    """Where the means of each part begin in the body."""
    return (8 * (np.cumsum(rows) - rows)).astype(np.uint64)
