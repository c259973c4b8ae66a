"""One bit per element: Sign-SGD and 1-bit SGD."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from ctypes import c_float
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..collectives import Routine, ToHost
from ..gather import GatherCompressor, attribute_payload_errors, inspect, payload_source
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

    def encode(self, grad: Tensor, key: Key) -> Tensor:
        numel = grad.numel()
        magnitude, scale = ops.abs_max_tensor(grad), None
        if self.error_feedback or not self.majority:
            total = ops.bucket_norms(grad, norm="l1")
            # `bucket_norms` limits a sum that overflows to the largest float, so the mean would be wrong.
            magnitude = torch.where(total >= torch.finfo(torch.float32).max, math.inf, magnitude)
            scale = (total.double() / numel).float()
        if ops.known_non_finite(magnitude):
            return self.non_finite(grad)
        payload = ops.new_payload(ops.bitmap_nbytes(numel), grad.device)
        body = payload[ops.HEADER_NBYTES :]
        ops.pack_signs(grad, key.bits, out=body[: ops.bitmap_nbytes(numel)])
        fields = _BALLOT.pack(1.0, key._replace(rank="shared").bits)
        return self.seal(payload, numel, magnitude, fields, scale=scale)

    def decode_add(self, payload: ops.Payload, out: Tensor, weight: float) -> None:
        signs, scale, _ = _ballot(payload, out.numel())
        ops.signs_decode_add(signs, out, weight * scale)

    def decode(self, payloads: list[Tensor], numel: int) -> Tensor:
        vote = self._vote(payloads, numel)
        if vote is None:
            return super().decode(payloads, numel)
        return self._decode_vote(vote, vote.scale([ops.bitmap_count(bits, numel) for bits in self._against(vote)]))

    def combine(self, payloads: list[Tensor], numel: int, state: State) -> Routine:
        vote = self._vote(payloads, numel)
        if vote is None:
            return (yield from self.with_max_abs(super().decode(payloads, numel)))
        counts = [ops.bitmap_count_tensor(bits, numel) for bits in self._against(vote)]
        if counts and ops.on_device(vote.winner):
            counts = list((yield ToHost(torch.cat(counts))))
        scale = vote.scale([int(count) for count in counts])
        if self.error_feedback:
            state.vote = vote, scale  # until `subtract_transmitted`
        return (yield from self.with_max_abs(self._decode_vote(vote, scale), abs(c_float(scale).value)))

    def decode_shard(self, payloads: list[Tensor], numel: int) -> Tensor:
        # With error feedback, encoding the mean is the vote, and the owner's residual holds what it loses.
        return super().decode(payloads, numel) if self.error_feedback else self.decode(payloads, numel)

    def subtract_transmitted(self, state: State) -> None:
        assert state.residual is not None
        if getattr(state, "vote", None) is None:
            for payload, part in self.transmitted_parts(state):
                self.decode_add(self.open(payload, part.numel()), part, -1.0)
            return
        # Add m - S v, too. In place, one sum for each rank, without a tensor for m.
        (vote, scale), state.vote = state.vote, None
        residual, size = state.residual.view(-1), len(vote.scales)
        for rank, (signs, own) in enumerate(zip(vote.signs, vote.scales)):
            ops.signs_decode_add(signs, residual, own * (1.0 / size - (rank == state.rank)))
        ops.signs_decode_add(vote.winner, residual, -scale)

    def _vote(self, payloads: list[Tensor], numel: int) -> _Vote | None:
        """The vote; None if the result is the mean: without `majority`, of one payload, or if one is not finite."""
        if not self.majority or len(payloads) == 1:
            return None
        inspect(payloads)
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
        return _Vote(signs, scales, winner, numel)

    def _against(self, vote: _Vote) -> Iterator[Tensor]:
        """Of each rank, where it voted otherwise. None without error feedback, which alone needs to know."""
        return (signs ^ vote.winner for signs in vote.signs if self.error_feedback)

    def _decode_vote(self, vote: _Vote, scale: float) -> Tensor:
        out = self.accumulator(vote.numel, vote.winner.device)
        ops.signs_decode_add(vote.winner, out, scale)
        return self.finish(out, vote.numel)


class _Vote(NamedTuple):
    """The majority vote of the ranks' signs, which are packed."""

    signs: tuple[Tensor, ...]  # of each rank
    scales: tuple[float, ...]  # of each rank
    winner: Tensor
    numel: int

    def scale(self, against: list[int]) -> float:
        """S, from the number of votes of each rank against the winner; 1 without error feedback."""
        if not against:
            return 1.0
        agreements = [1 - 2 * count / self.numel for count in against]
        return math.fsum(s * a for s, a in zip(self.scales, agreements)) / len(self.scales)


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

    Deterministic for a seed.

    Source: Seide, Fu, Droppo, Li, Yu, 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
    Distributed Training of Speech DNNs, Interspeech 2014, section 3.
    """

    error_feedback = True
    fixed_nbytes = True

    seed: int = 0

    def bypasses(self, grad: Tensor) -> bool:
        return super().bypasses(grad) or _nbytes(grad.shape[0], grad.numel()) >= 4 * grad.numel()

    def encode(self, grad: Tensor, key: Key) -> Tensor:
        numel, rows = grad.numel(), grad.shape[0] if grad.dim() > 1 else 1  # 1-D: a shard, a piece of the flat gradient
        magnitude = ops.abs_max_tensor(grad)
        if ops.known_non_finite(magnitude):
            return self.non_finite(grad)
        payload = ops.new_payload(8 * rows + ops.bitmap_nbytes(numel), grad.device)
        means, signs = payload[ops.HEADER_NBYTES :][: 8 * rows + ops.bitmap_nbytes(numel)].tensor_split([8 * rows])
        ops.one_bit_packed(grad.reshape(rows, -1), key.bits, out=signs, means=means.view(torch.float32))
        return self.seal(payload, numel, magnitude, _ROWS.pack(rows))

    def decode_add(self, payload: ops.Payload, out: Tensor, weight: float) -> None:
        (rows,) = _ROWS.unpack(payload.fields)
        if not (1 <= rows <= out.numel() and out.numel() % rows == 0):
            raise ops.PayloadError(f"corrupt payload: it claims {rows} rows of {out.numel()} elements")
        means, signs = payload.sections(8 * rows, ops.bitmap_nbytes(out.numel()))
        ops.one_bit_decode_add(signs, means.view(torch.float32).view(rows, 2), out.view(rows, -1), weight)


def _nbytes(rows: int, numel: int) -> int:
    return ops.HEADER_NBYTES + 8 * rows + ops.bitmap_nbytes(numel)
