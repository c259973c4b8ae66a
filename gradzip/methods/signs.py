"""One bit per element: Sign-SGD and 1-bit SGD."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..gather import GatherCompressor, attribute_payload_errors, payload_source
from ..registry import register
from ..state import Key, State

_BALLOT = struct.Struct("<f4xQ")  # scale, key of the coins that decide ties
_ROWS = struct.Struct("<Q8x")


@register("signsgd", number=18)
@dataclass
class SignSGD(GatherCompressor):
    """Sends the signs of the gradient, and takes their majority vote or averages them.

    Rank i sends the signs b_i = sign(g_i) and the scale s_i = mean |g_i|. With error feedback, g_i is the gradient plus
    residual. The result is:

        majority, error_feedback      S v, where v = sign(sum_i b_i), S = mean_i(s_i a_i), a_i = mean(b_i v)
        majority                      v
        error_feedback, or neither    m = mean_i(s_i b_i)

    S v is the multiple of v that is nearest to m: a_i is the mean over the elements, between -1 and 1, so S is smaller
    the less the ranks agree. The residual is g_i - s_i b_i, plus m - S v with `majority`. All ranks know what the vote
    has lost of the mean, m - S v, so all add it to their next gradients. Averages and mean residual then add up to the
    mean gradients.

    With `majority` alone, elements are 1 or -1 for gradients of any size: choose the learning rate accordingly, about
    that of Adam.

    With exchange="scatter_reduce" and error feedback, the owner of a shard sends the signs of m plus its own residual,
    so a rank's vote counts in proportion to its scale.

    Args:
        majority: take the majority vote of the ranks' signs. Ties are decided by a fair coin, the same on all ranks.
        error_feedback: add what was not sent to the next gradient.
        seed: of the coins that decide ties, and of those that each rank takes as the signs of its zeros.

    Payload: header, which holds s_i; one bit for each element: 48 + ceil(n / 8) bytes, padded to 16.

    Deterministic for a seed. Encoding synchronises a CUDA device, to read the scale; so does a vote with error
    feedback, to read a_i.

    Source: Bernstein, Wang, Azizzadenesheli, Anandkumar, signSGD: Compressed Optimisation for Non-Convex Problems, ICML
    2018, Algorithm 2 (majority vote); Karimireddy, Rebjock, Stich, Jaggi, Error Feedback Fixes SignSGD and other
    Gradient Compression Schemes, ICML 2019, Algorithm 1; residual of the average: Zheng, Huang, Kwok,
    Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback, NeurIPS 2019, Algorithm 2.
    """

    majority: bool = True
    error_feedback: bool = True
    seed: int = 0

    def encode(self, grad: Tensor, key: Key) -> Tensor:
        numel = grad.numel()
        scaled = self.error_feedback or not self.majority
        total = ops.bucket_norms(grad, norm="l1").item() if scaled else float(numel)
        # `bucket_norms` limits a sum that overflows to the largest float, so the mean would be wrong.
        if not math.isfinite(ops.abs_max(grad)) or total >= torch.finfo(torch.float32).max:
            return self.non_finite(grad)
        payload = ops.new_payload(ops.bitmap_nbytes(numel), grad.device)
        body = payload[ops.HEADER_NBYTES :]
        ops.pack_signs(grad, key.bits, out=body[: ops.bitmap_nbytes(numel)])
        return self.seal(payload, numel, True, _BALLOT.pack(total / numel, key._replace(rank="shared").bits))

    def decode_add(self, payload: ops.Payload, out: Tensor, weight: float) -> None:
        signs, scale, _ = _ballot(payload, out.numel())
        ops.signs_decode_add(signs, out, weight * scale)

    def decode(self, payloads: list[Tensor], numel: int) -> Tensor:
        vote = self._vote(payloads, numel)
        return super().decode(payloads, numel) if vote is None else self._decode_vote(vote, numel)

    def combine(self, payloads: list[Tensor], numel: int, state: State) -> Tensor:
        vote = self._vote(payloads, numel)
        if vote is None:
            return super().decode(payloads, numel)
        if self.error_feedback:
            state.vote = vote  # until `subtract_transmitted`
        return self._decode_vote(vote, numel)

    def decode_shard(self, payloads: list[Tensor], numel: int) -> Tensor:
        # With error feedback, encoding the mean is the vote, and the owner's residual holds what it loses.
        return super().decode(payloads, numel) if self.error_feedback else self.decode(payloads, numel)

    def subtract_transmitted(self, state: State) -> None:
        assert state.residual is not None
        vote: _Vote | None = getattr(state, "vote", None)
        if vote is None:
            for payload, part in self.transmitted_parts(state):
                self.decode_add(self.open(payload, part.numel()), part, -1.0)
            return
        # Add m - S v, too. In place, one sum for each rank, without a tensor for m.
        residual, size = state.residual.view(-1), len(vote.scales)
        for rank, (signs, scale) in enumerate(zip(vote.signs, vote.scales)):
            ops.signs_decode_add(signs, residual, scale * (1.0 / size - (rank == state.rank)))
        ops.signs_decode_add(vote.winner, residual, -vote.scale)
        state.vote = None

    def _vote(self, payloads: list[Tensor], numel: int) -> _Vote | None:
        """The vote; None if the result is the mean: without `majority`, of one payload, or if one is not finite."""
        if not self.majority or len(payloads) == 1:
            return None
        ballots = []
        for rank, buffer in enumerate(payloads):
            with attribute_payload_errors(payload_source(rank, len(payloads))):
                payload = self.open(buffer, numel)
                if payload.flags & ops.NON_FINITE:
                    return None
                ballots.append(_ballot(payload, numel))
        signs, scales, coins = zip(*ballots)
        # Use rank 0's coins on all ranks, in case a rank has counted its steps differently.
        winner = ops.majority(signs, numel, coins[0])
        if not self.error_feedback:
            return _Vote(signs, scales, winner, 1.0)
        agreements = [1 - 2 * ops.bitmap_count(ballot ^ winner, numel) / numel for ballot in signs]
        scale = math.fsum(s * a for s, a in zip(scales, agreements)) / len(scales)
        return _Vote(signs, scales, winner, scale)

    def _decode_vote(self, vote: _Vote, numel: int) -> Tensor:
        out = self.accumulator(numel, vote.winner.device)
        ops.signs_decode_add(vote.winner, out, vote.scale)
        return self.finish(out, numel)


class _Vote(NamedTuple):
    """The majority vote of the ranks' signs, which are packed."""

    signs: tuple[Tensor, ...]  # of each rank
    scales: tuple[float, ...]  # of each rank
    winner: Tensor
    scale: float  # of the result


def _ballot(payload: ops.Payload, numel: int) -> tuple[Tensor, float, int]:
    (signs,) = payload.sections(ops.bitmap_nbytes(numel))
    scale, coins = _BALLOT.unpack(payload.fields)
    if not 0 <= scale < math.inf:
        raise ops.PayloadError(f"corrupt payload: its scale is {scale}, expected a finite number >= 0")
    return signs, scale, coins


@register("onebit", number=19)
@dataclass
class OneBitSGD(GatherCompressor):
    """Sends the signs of the gradient, and the means of the positive and of the negative elements of each row.

    An element is quantized at the threshold 0, and decoded as the mean of the elements of its row with the same sign.
    These two values minimise the squared error. A row is one output unit: grad[i], which is a filter of a convolution.
    (The paper's layers compute W^T x, so its output units are columns of W.) Error feedback is always on.

    Args:
        seed: of the coins that are taken as the signs of zeros.

    Payload: header; two float32 means for each row; one bit for each element: 48 + 8 rows + ceil(n / 8) bytes, padded
    to 16. Gradients bypass compression if their rows are so short that this is not less than 4 n bytes.

    Deterministic for a seed. Encoding synchronises a CUDA device, to see whether the gradient is finite.

    Source: Seide, Fu, Droppo, Li, Yu, 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
    Distributed Training of Speech DNNs, Interspeech 2014, section 3.
    """

    error_feedback = True

    seed: int = 0

    def bypasses(self, grad: Tensor) -> bool:
        return super().bypasses(grad) or _nbytes(grad.shape[0], grad.numel()) >= 4 * grad.numel()

    def encode(self, grad: Tensor, key: Key) -> Tensor:
        numel, rows = grad.numel(), grad.shape[0] if grad.dim() > 1 else 1  # 1-D: a shard, a piece of the flat gradient
        if not math.isfinite(ops.abs_max(grad)):
            return self.non_finite(grad)
        payload = ops.new_payload(8 * rows + ops.bitmap_nbytes(numel), grad.device)
        means, signs = payload[ops.HEADER_NBYTES :][: 8 * rows + ops.bitmap_nbytes(numel)].tensor_split([8 * rows])
        ops.one_bit_packed(grad.reshape(rows, -1), key.bits, out=signs, means=means.view(torch.float32))
        return self.seal(payload, numel, True, _ROWS.pack(rows))

    def decode_add(self, payload: ops.Payload, out: Tensor, weight: float) -> None:
        (rows,) = _ROWS.unpack(payload.fields)
        if not (1 <= rows <= out.numel() and out.numel() % rows == 0):
            raise ops.PayloadError(f"corrupt payload: it claims {rows} rows of {out.numel()} elements")
        means, signs = payload.sections(8 * rows, ops.bitmap_nbytes(out.numel()))
        ops.one_bit_decode_add(signs, means.view(torch.float32).view(rows, 2), out.view(rows, -1), weight)


def _nbytes(rows: int, numel: int) -> int:
    return ops.HEADER_NBYTES + 8 * rows + ops.bitmap_nbytes(numel)
