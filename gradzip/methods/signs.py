"""One bit per element: Sign-SGD and 1-bit SGD."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..gather import GatherCompressor, attribute_payload_errors
from ..registry import register
from ..state import Key

_VOTE = struct.Struct("<f4xQ")  # scale, key of the coins that decide ties
_ROWS = struct.Struct("<Q8x")


@register("signsgd", number=18)
@dataclass
class SignSGD(GatherCompressor):
    """Signs, by majority vote or averaged.

    Bernstein, Wang, Azizzadenesheli, Anandkumar, signSGD: Compressed Optimisation for Non-Convex Problems, ICML 2018
    (majority vote: Algorithm 2); Karimireddy, Rebjock, Stich, Jaggi, Error Feedback Fixes SignSGD and other Gradient
    Compression Schemes, ICML 2019 (Algorithm 1).

    Rank i sends signs b_i = sign(g_i), with error feedback of the corrected gradient, and s_i = mean |g_i|. What comes
    out, for N ranks:

        majority, error_feedback      mean_i(s_i) * sign(sum_i b_i)
        majority                      sign(sum_i b_i): 1 or -1, whatever the gradient's size, so choose the learning
                                      rate accordingly (about that of Adam)
        error_feedback, or neither    mean_i(s_i * b_i)

    The residual is what this rank's own signs left, g_i - s_i b_i, so that what a rank sent and its residual add up to
    its gradients. Averages and mean residual add up to the mean gradients without `majority`; a vote is not the mean of
    what the ranks sent. Where a vote is a tie a fair coin decides, the same on all ranks; a zero's sign is a coin of
    the rank's own.

    Payload: header, which holds s_i; a bit for each element. 48 + ceil(n / 8) bytes, padded to 16.
    """

    majority: bool = True
    error_feedback: bool = True
    seed: int = 0

    def encode(self, grad: Tensor, key: Key) -> Tensor:
        numel = grad.numel()
        scaled = self.error_feedback or not self.majority
        total = ops.bucket_norms(grad, norm="l1").item() if scaled else float(numel)
        # The sum is cut off at the largest float, where the mean cannot be told from it.
        if not math.isfinite(ops.abs_max(grad)) or total >= torch.finfo(torch.float32).max:
            return self.non_finite(grad)
        payload = ops.new_payload(ops.bitmap_nbytes(numel), grad.device)
        body = payload[ops.HEADER_NBYTES :]
        ops.pack_signs(grad, key.bits, out=body[: ops.bitmap_nbytes(numel)])
        return self.seal(payload, numel, True, _VOTE.pack(total / numel, key._replace(rank="shared").bits))

    def decode_add(self, payload: ops.Payload, out: Tensor, weight: float) -> None:
        signs, scale, _ = _ballot(payload, out.numel())
        ops.signs_decode_add(signs, out, weight * scale)

    def decode(self, payloads: list[Tensor], numel: int) -> Tensor:
        if not self.majority or len(payloads) == 1:
            return super().decode(payloads, numel)
        ballots = []
        for rank, buffer in enumerate(payloads):
            with attribute_payload_errors(f"from rank {rank} of {len(payloads)}"):
                payload = self.open(buffer, numel)
                if payload.flags & ops.NON_FINITE:
                    return torch.full((numel,), math.nan, dtype=torch.float32, device=buffer.device)
                ballots.append(_ballot(payload, numel))
        votes, scales, coins = zip(*ballots)
        out = self.accumulator(numel, payloads[0].device)
        # Everyone tosses the first rank's coins: they are the same, unless a rank has counted its steps otherwise.
        ops.signs_decode_add(ops.majority(votes, numel, coins[0]), out, math.fsum(scales) / len(scales))
        return self.finish(out, numel)


def _ballot(payload: ops.Payload, numel: int) -> tuple[Tensor, float, int]:
    (signs,) = payload.sections(ops.bitmap_nbytes(numel))
    scale, coins = _VOTE.unpack(payload.fields)
    if not 0 <= scale < math.inf:
        raise ops.PayloadError(f"corrupt payload: its scale is {scale}, expected a finite number >= 0")
    return signs, scale, coins


@register("onebit", number=19)
@dataclass
class OneBitSGD(GatherCompressor):
    """Signs, and for every output unit the means of its positive and of its negative elements; always error feedback.

    Seide, Fu, Droppo, Li, Yu, 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
    Training of Speech DNNs, Interspeech 2014, section 3.

    An element is quantized by the threshold 0 and decoded as the mean, over its column, of the values on its side of
    it: the two values that leave the least squared error. The paper's layers compute W^T x, so that a column of W
    belongs to an output unit. PyTorch's compute W x: here it is a row, and of a convolution's kernel a filter,
    grad[i]. Zeros have no sign; a coin decides.

    Payload: header; two float32 for each row; a bit for each element. 48 + 8 rows + ceil(n / 8) bytes, padded to 16.
    Gradients with rows too short for that to be less than the gradient itself go uncompressed.
    """

    error_feedback = True

    seed: int = 0

    def bypasses(self, grad: Tensor) -> bool:
        return super().bypasses(grad) or _nbytes(grad.shape[0], grad.numel()) >= 4 * grad.numel()

    def encode(self, grad: Tensor, key: Key) -> Tensor:
        numel, rows = grad.numel(), grad.shape[0] if grad.dim() > 1 else 1  # a shard may be a piece of a row
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
