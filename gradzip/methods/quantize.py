"""Unbiased stochastic rounding to a few levels: QSGD and TernGrad."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..collectives.routines import Local, Routine
from ..memory.state import VECTOR, Key, State
from .base.bucket_codec import BucketCodec
from .base.gather import GatherCompressor, attribute_payload_errors, inspected, payload_source
from .base.registry import register

_STREAM = struct.Struct("<QB7x")  # length of the coded levels in bytes; whether they are Elias-coded
_SCALE = struct.Struct("<f12x")
_SCALE_AT = ops.HEADER_NBYTES - _SCALE.size  # its offset in a payload


@register("qsgd", number=16, examples=["", "coding=packed", "coding=always_elias", "bits=8,norm=max,bucket=7"])
@dataclass
class QSGD(GatherCompressor):
    """Rounds each element at random to a multiple of norm / s, where norm is that of its bucket.

    With s = 2^(bits - 1) - 1 and u_i uniform in [0, 1), g_i is decoded as

        norm * sign(g_i) * level_i / s,    level_i = floor(s |g_i| / norm + u_i)

    Unbiased. The variance is (norm / s)^2 sum f_i (1 - f_i), where f_i is the fractional part of s |g_i| / norm.

    Args:
        bits: bits of a level, 2 to 16, sign included. The papers' "1-bit QSGD" has s = 1, signs and zeros: it is
            ``bits=2`` here.
        bucket: number of neighbouring elements that share a norm. Front ends compress the gradients of a bucket as one
            vector, as the paper does, so elements of two gradients may share a norm.
        norm: "l2", as in the paper's theory (most levels are 0), or "max", as in its experiments (less variance, more
            bytes).
        coding: "packed" codes each level in `bits` bits. "elias" codes runs of zeros, and levels, in Elias gamma code,
            if that is shorter than "packed". On a device "elias" is "packed", because the host would have to wait for
            the length of each payload in the backward pass. "always_elias" waits, which may pay on slow networks.
        seed: of the u_i.

    Payload: header; a float32 norm for each bucket; levels. 48 + 4 ceil(n / bucket) + n bits / 8 bytes, padded to 16;
    at most that with Elias codes.

    Deterministic for a seed. Waits for a CUDA device with coding="always_elias" only.

    Source: Alistarh, Grubic, Li, Tomioka, Vojnovic, QSGD: Communication-Efficient SGD via Gradient Quantization and
    Encoding, NeurIPS 2017, sections 3.1 and 3.2.
    """

    bits: int = 4
    bucket: int = 512
    norm: str = "l2"
    coding: str = "elias"
    seed: int = 0

    unbiased = True

    def __post_init__(self) -> None:
        super().__post_init__()
        ops.check_quantizer(self.bits, self.bucket, self.norm, 0, "QSGD")
        if self.coding not in ("elias", "packed", "always_elias"):
            raise ValueError(f"QSGD: got coding = {self.coding!r}, expected 'elias', 'packed' or 'always_elias'")

    @property
    def fixed_nbytes(self) -> bool:  # type: ignore[override]
        return self.coding != "always_elias"

    def joined_shape(self, shape: torch.Size) -> tuple[int, ...]:
        return VECTOR

    def encode(self, grad: Tensor, key: Key) -> Tensor:
        numel, magnitude = grad.numel(), ops.abs_max_tensor(grad)
        if ops.known_non_finite(magnitude):
            return self.non_finite(grad)
        arguments = (grad, self.bits, self.bucket, self.norm, key.bits)
        norms_end = 4 * ops.num_buckets(numel, self.bucket)
        packed_nbytes = ops.packed_nbytes(numel, self.bits)
        if self.coding == "always_elias" or (self.coding == "elias" and not ops.on_device(grad)):
            space = self.workspace.empty("stream", (ops.elias_capacity(numel, self.bits),), torch.uint8, grad.device)
            stream, norms = ops.elias_quantize(*arguments, out=space)
            if stream.numel() <= packed_nbytes:
                payload = ops.new_payload(norms_end + stream.numel(), grad.device)
                body = payload[ops.HEADER_NBYTES :]
                body[:norms_end] = norms.view(torch.uint8)
                body[norms_end : norms_end + stream.numel()] = stream
                fields = _STREAM.pack(stream.numel(), True)
                return self.seal([ops.Seal(payload, numel, fields, magnitudes=magnitude)])[0]
        payload = ops.new_payload(norms_end + packed_nbytes, grad.device)
        body = payload[ops.HEADER_NBYTES :]
        norms = body[:norms_end].view(torch.float32)
        ops.quantize_packed(*arguments, out=body[norms_end : norms_end + packed_nbytes], norms=norms)
        fields = _STREAM.pack(packed_nbytes, False)
        return self.seal([ops.Seal(payload, numel, fields, magnitudes=magnitude)])[0]

    def decode_add(self, payload: ops.Payload, out: Tensor, weight: float) -> None:
        nbytes, elias = _STREAM.unpack(payload.fields)
        norms, stream = payload.sections(4 * ops.num_buckets(out.numel(), self.bucket), nbytes)
        decode_add = ops.elias_decode_add if elias else ops.quantize_decode_add
        decode_add(stream, norms.view(torch.float32), out, self.bits, self.bucket, weight)


@register("terngrad", number=17, examples=["", "shared_scale=False"])
@dataclass
class TernGrad(BucketCodec):
    """Rounds each element at random to -scale, 0 or scale.

    The gradient is clipped, c_i = sign(g_i) min(|g_i|, clip * sigma), and decoded as

        scale * sign(g_i) * Bernoulli(|c_i| / scale),    scale = max |c_i|

    The expectation is c, and the variance sum |c_i| (scale - |c_i|).

    Args:
        clip: clip magnitudes at clip * sigma; None does not clip. sigma^2 is the second moment, mean(g^2). With the
            paper's central moment, a constant gradient would be clipped to 0.
        shared_scale: use the maximum over all ranks as the scale ("scaler sharing"), gathered in a first round. False
            uses each rank's own scale.
        seed: of the Bernoulli draws.

    Payload: header, which holds the scale; five elements to a byte, 1.6 bits for each: 48 + ceil(n / 5) bytes, padded
    to 16. 48 bytes more with `shared_scale`.

    Deterministic for a seed.

    Source: Wen, Xu, Yan, Wu, Wang, Chen, Li, TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
    Learning, NeurIPS 2017.
    """

    clip: float | None = 2.5
    shared_scale: bool = True
    seed: int = 0

    fixed_nbytes = True

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.clip is None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared_scale:
            if self.exchange != "gather":
                raise ValueError(
                    f"TernGrad: got exchange = {self.exchange!r} with shared_scale=True, expected shared_scale=False: "
                    "each partition has its own scale"
                )
            self.rounds = 2
        if self.clip is not None and not (isinstance(self.clip, (int, float)) and self.clip > 0):
            raise ValueError(f"TernGrad: got clip = {self.clip!r}, expected None or a number > 0")

    def reduce(self, grad: Tensor, state: State) -> Routine:
        if not self.shared_scale:
            return (yield from super().reduce(grad, state))
        numel, device = grad.numel(), grad.device
        largest = yield Local(self._largest_all, device, grad)
        headers = yield self.gather((yield Local(self._headers, device, (largest, numel))))
        # On a device, headers are inspected with the payloads: the host need not wait for the scales.
        later = ops.on_device(grad)
        with attribute_payload_errors(f"TernGrad, parameter {state.name!r}"):
            if later or self._all_finite(headers, numel):
                scale = yield Local(_shared_scales, device, headers)
                state.payload = yield Local(self._pack_all, device, (grad, state.key(self.seed), largest, scale))
            else:  # both rounds all the same: ranks with another chunk of the gradient do not see these headers
                state.payload = self.non_finite(grad)
            payloads = yield self.gather(state.payload)
            yield from inspected([*headers, *payloads])
            if self._all_finite(headers, numel):
                return (yield from self.combine(payloads, numel, state))
        nan = torch.full((numel,), math.nan, dtype=torch.float32, device=device)
        return (yield from self.with_max_abs(nan, math.nan))

    def _all_finite(self, headers: list[Tensor], numel: int) -> bool:
        """Whether the gradients of all ranks are finite. Raises PayloadError for an invalid header."""
        finite = True
        for rank, header in enumerate(headers):
            with attribute_payload_errors(payload_source(rank, len(headers))):
                opened = self.open(header, numel)
                if opened.flags & ops.NON_FINITE:
                    finite = False
                else:
                    _scale(opened)
        return finite

    def encode_all(self, gradients: list[tuple[Tensor, Key]]) -> list[Tensor]:
        largest = self._largest_all([grad for grad, _ in gradients])
        return self._pack_all([(grad, key, most, most) for (grad, key), most in zip(gradients, largest)])

    def encode_average(self, average: Tensor, key: Key) -> Tensor:
        # Ranks have clipped before. Clipping again would take a third of a sparse gradient, whose sigma is small.
        largest = ops.abs_max_tensor(average)
        return self._pack_all([(average, key, largest, largest)])[0]

    def _largest_all(self, gradients: list[Tensor]) -> list[Tensor]:
        """max |c_i| of each clipped gradient, as float32. Not finite if the gradient is not, or its norm overflows."""
        largest = ops.abs_max_all(gradients)
        if self.clip is None:
            return largest
        norms = _norms(gradients)
        roots = [math.sqrt(grad.numel()) for grad in gradients]
        clips = self.clip * torch.cat(torch._foreach_div(norms.double().split(1), roots))
        clipped = torch.minimum(torch.cat(largest).double(), clips).float()
        return list(torch.where(norms >= torch.finfo(torch.float32).max, math.inf, clipped).split(1))

    def _headers(self, of: list[tuple[Tensor, int]]) -> list[Tensor]:
        """Payloads without sections, for a first round: each rank's own scale."""
        payloads = ops.new_payloads([0] * len(of), of[0][0].device)
        return self.seal(
            [
                ops.Seal(payload, numel, magnitudes=largest, scale=largest)
                for payload, (largest, numel) in zip(payloads, of)
            ]
        )

    def _pack_all(self, gradients: list[tuple[Tensor, Key, Tensor, Tensor]]) -> list[Tensor]:
        """The payloads of gradients, given the largest magnitudes of the clipped ones, and the scales."""
        sizes = [ops.ternary_nbytes(grad.numel()) for grad, *_ in gradients]
        payloads = ops.new_payloads(sizes, gradients[0][0].device)
        bodies = [payload[ops.HEADER_NBYTES :][:nbytes] for payload, nbytes in zip(payloads, sizes)]
        largest = torch.cat([most for _, _, most, _ in gradients])
        clips = torch.where(largest > 0, largest, math.inf).split(1)  # all is 0: nothing to clip
        ops.ternary_packed_all(
            [(grad, scale, clip, key.bits, body) for (grad, key, _, scale), clip, body in zip(gradients, clips, bodies)]
        )
        return self.seal(
            [
                ops.Seal(payload, grad.numel(), magnitudes=scale, scale=scale)
                for payload, (grad, _, _, scale) in zip(payloads, gradients)
            ]
        )

    def parse(self, payload: ops.Payload, numel: int) -> tuple[Tensor, float]:
        (packed,) = payload.sections(ops.ternary_nbytes(numel))
        return packed, _scale(payload)

    def sum_all(self, sums: list[ops.WeightedSum]) -> None:
        ops.ternary_decode_add_all(sums)


def _norms(gradients: list[Tensor]) -> Tensor:
    """The L2 norms of gradients (float32). On a device, in one call of torch, which adds in another order."""
    if not ops.on_device(gradients[0]):
        return torch.cat([ops.bucket_norms(grad) for grad in gradients])
    return torch.stack(torch._foreach_norm(gradients, dtype=torch.float64)).float()


def _scale(payload: ops.Payload) -> float:
    (scale,) = _SCALE.unpack(payload.fields)
    if not 0 <= scale < math.inf:
        raise ops.PayloadError(f"corrupt payload: its scale is {scale}, expected a finite number >= 0")
    return scale


def _shared_scales(gathered: list[list[Tensor]]) -> list[Tensor]:
    """The largest scale in the headers of all ranks, for each gradient: float32 of 1 element on their device."""
    ranks = len(gathered[0])
    fields = torch.stack([header[_SCALE_AT : _SCALE_AT + 4] for headers in gathered for header in headers])
    return list(fields.view(torch.float32).view(-1, ranks).amax(1).split(1))
