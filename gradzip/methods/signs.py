"""One bit per element: Sign-SGD and 1-bit SGD."""

from __future__ import annotations

import math
import struct
from ctypes import c_float
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..collectives import ToHost
from ..collectives.routines import Routine, at_once, jointly
from ..memory.state import Key, State
from .base.bucket_codec import BucketCodec
from .base.error_feedback import ErrorFeedback
from .base.registry import register

_BALLOT = struct.Struct("<f4xQ")  # scale, key of the coins
_ROWS = struct.Struct("<Q8x")


@register("signsgd", number=18, examples=["", "majority=False", "error_feedback=False"])
@dataclass
class SignSGD(ErrorFeedback, BucketCodec):
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

    Payload: header, which holds s_i; one bit for each element: 48 + ceil(n / 8) bytes, padded to 16.

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

    def encode_all(self, gradients: list[tuple[Tensor, Key]]) -> list[Tensor]:
        numels = [grad.numel() for grad, _ in gradients]
        payloads = ops.new_payloads([ops.bitmap_nbytes(n) for n in numels], gradients[0][0].device)
        bodies = [p[ops.HEADER_NBYTES :][: ops.bitmap_nbytes(n)] for p, n in zip(payloads, numels)]
        statistics = ops.pack_signs_all([(grad, key.bits, body) for (grad, key), body in zip(gradients, bodies)])
        scaled = self.error_feedback or not self.majority
        seals = []
        for (grad, key), payload, numbers in zip(gradients, payloads, statistics):
            largest, scale = numbers.split(1)
            fields = _BALLOT.pack(1.0, key._replace(rank="shared").bits)
            magnitudes, scale_sent = (numbers, scale) if scaled else (largest, None)
            seals.append(ops.Seal(payload, grad.numel(), fields, magnitudes=magnitudes, scale=scale_sent))
        return self.seal(seals)

    def parse(self, payload: ops.Payload, numel: int) -> _Ballot:
        (signs,) = payload.sections(ops.bitmap_nbytes(numel))
        scale, coins = _BALLOT.unpack(payload.fields)
        if not 0 <= scale < math.inf:
            raise ops.PayloadError(f"corrupt payload: its scale is {scale}, expected a finite number >= 0")
        return _Ballot(signs, scale, coins)

    def sum_all(self, sums: list[ops.WeightedSum]) -> None:
        scaled = [[(ballot.signs, weight * ballot.scale) for ballot, weight in one.terms] for one in sums]
        ops.signs_decode_add_all([one._replace(terms=terms) for one, terms in zip(sums, scaled)])

    def decoded(self, payloads: list[Tensor], numel: int) -> Routine:
        return (yield from self._combine(payloads, numel))[0]

    def combine(self, payloads: list[Tensor], numel: int, state: State) -> Routine:
        average, vote = yield from self._combine(payloads, numel)
        if vote is None:
            return (yield from self.with_max_abs(average))
        if self.error_feedback:
            state.vote = vote  # until `corrections`
        return (yield from self.with_max_abs(average, abs(c_float(vote.winner.scale).value)))

    def decode_partition(self, payloads: list[Tensor], numel: int) -> Tensor:
        # With error feedback, encoding the mean is the vote, and the owner's residual holds its error.
        if not self.error_feedback:
            return self.decode(payloads, numel)
        return at_once(super().decoded(payloads, numel))

    def corrections(self, state: State) -> list[ops.WeightedSum]:
        vote: _Vote | None = getattr(state, "vote", None)
        if vote is None:
            return super().corrections(state)
        # Also add m - S v, in place: one term for each rank, without a tensor for m.
        state.vote = None
        assert state.residual is not None
        size = len(vote.ballots)
        terms = [(ballot, 1.0 / size - (rank == state.rank)) for rank, ballot in enumerate(vote.ballots)]
        return [ops.WeightedSum(state.residual.view(-1), [*terms, (vote.winner, -1.0)], add=True)]

    def _combine(self, payloads: list[Tensor], numel: int) -> Routine:
        """Coroutine: the average, and the vote. The vote is None if the average is the mean.

        The average is the mean without `majority`, for one payload, and if a payload is not finite.
        """
        device = payloads[0].device
        ballots = yield from self.parsed(payloads, numel)
        if not self.majority or len(ballots) == 1 or None in ballots:
            return (yield from self.mean(ballots, numel, device)), None
        winner, against = yield from jointly(self._vote_all, device, (ballots, numel))
        scale = 1.0
        if self.error_feedback:
            if ops.on_device(against):
                against = yield ToHost(against)
            agreements = [1 - 2 * count / numel for count in against.tolist()]
            scale = math.fsum(ballot.scale * a for ballot, a in zip(ballots, agreements)) / len(ballots)
        vote = _Vote(ballots, _Ballot(winner, scale, 0))
        return (yield from self.mean([vote.winner], numel, device)), vote

    def _vote_all(self, votes: list[tuple[list[_Ballot], int]]) -> list[tuple[Tensor, Tensor]]:
        # All ranks use rank 0's coins, in case ranks have counted steps differently.
        taken = [([ballot.signs for ballot in ballots], numel, ballots[0].coins) for ballots, numel in votes]
        return ops.majority_all(taken, count=self.error_feedback)


class _Ballot(NamedTuple):
    """The signs of a rank, or of the majority."""

    signs: Tensor  # packed
    scale: float
    coins: int  # key of the coins that decide ties


class _Vote(NamedTuple):
    """A majority vote."""

    ballots: list[_Ballot]  # of each rank
    winner: _Ballot


@register("onebit", number=19)
@dataclass
class OneBitSGD(ErrorFeedback, BucketCodec):
    """Sends the signs of the gradient, and the means of the positive and of the negative elements of each row.

    An element is decoded as the mean of the elements of its row with the same sign, which minimises the squared error.
    A row is one output unit: grad[i], which is a filter of a convolution. (The paper's layers compute W^T x, so its
    output units are columns of W.) Error feedback is always on.

    Args:
        seed: of the coins that are taken as the signs of zeros.

    Payload: header; two float32 means for each row; one bit for each element: 48 + 8 rows + ceil(n / 8) bytes, padded
    to 16. A gradient bypasses compression if its rows are so short that this is not less than its 4 n bytes.

    Deterministic for a seed.

    Source: Seide, Fu, Droppo, Li, Yu, 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
    Distributed Training of Speech DNNs, Interspeech 2014, section 3.
    """

    error_feedback = True
    fixed_nbytes = True

    seed: int = 0

    def bypasses(self, grad: Tensor) -> bool:
        return super().bypasses(grad) or _nbytes(grad.shape[0], grad.numel()) >= 4 * grad.numel()

    def encode_all(self, gradients: list[tuple[Tensor, Key]]) -> list[Tensor]:
        # A 1-D gradient is a partition: a piece of the flat gradient.
        matrices = [grad.reshape(grad.shape[0] if grad.dim() > 1 else 1, -1) for grad, _ in gradients]
        sizes = [(8 * len(x), ops.bitmap_nbytes(x.numel())) for x in matrices]
        payloads = ops.new_payloads([sum(size) for size in sizes], matrices[0].device)
        bodies = [p[ops.HEADER_NBYTES :][: sum(size)].split(size) for p, size in zip(payloads, sizes)]
        largest = ops.one_bit_packed_all(
            [
                (x, key.bits, signs, means.view(torch.float32))
                for x, (_, key), (means, signs) in zip(matrices, gradients, bodies)
            ]
        )
        return self.seal(
            [
                ops.Seal(payload, x.numel(), _ROWS.pack(len(x)), magnitudes=most)
                for payload, x, most in zip(payloads, matrices, largest)
            ]
        )

    def parse(self, payload: ops.Payload, numel: int) -> tuple[Tensor, Tensor]:
        (rows,) = _ROWS.unpack(payload.fields)
        if not (1 <= rows <= numel and numel % rows == 0):
            raise ops.PayloadError(f"corrupt payload: it claims {rows} rows of {numel} elements")
        means, signs = payload.sections(8 * rows, ops.bitmap_nbytes(numel))
        return signs, means.view(torch.float32)

    def sum_all(self, sums: list[ops.WeightedSum]) -> None:
        ops.one_bit_decode_add_all(sums)


def _nbytes(rows: int, numel: int) -> int:
    return ops.HEADER_NBYTES + 8 * rows + ops.bitmap_nbytes(numel)
