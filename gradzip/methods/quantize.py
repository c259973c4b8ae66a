"""Gradients rounded at random to a few levels, without bias: QSGD and TernGrad."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..collectives import Gather, Routine
from ..gather import GatherCompressor, attribute_payload_errors
from ..registry import register
from ..state import Key, State

_STREAM = struct.Struct("<QB7x")  # bytes of the levels, whether they are Elias-coded
_SCALE = struct.Struct("<f12x")


@register("qsgd", number=16)
@dataclass
class QSGD(GatherCompressor):
    """Levels -s to s of the norm of their bucket, s = 2^(bits - 1) - 1.

    Alistarh, Grubic, Li, Tomioka, Vojnovic, QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding,
    NeurIPS 2017, sections 3.1 and 3.2.

    g_i becomes norm * sign(g_i) * level / s with level = floor(s |g_i| / norm + u_i), u_i uniform in [0, 1). Unbiased,
    with variance (norm / s)^2 sum f_i (1 - f_i), f_i the fraction of s |g_i| / norm.
    bits: 2 to 16, sign included. bucket: elements that share a norm. norm: "l2", as in the theory (most levels are then
    0), or "max", as in the paper's experiments (less variance, more bytes).
    coding: "elias", as runs of zeros and levels in Elias gamma code, where that is shorter than "packed": `bits` bits.

    Payload: header; a float32 norm for each bucket; levels. 48 + 4 ceil(n / bucket) + n bits / 8 bytes, padded to 16,
    and with "elias" at most that.
    """

    bits: int = 4
    bucket: int = 512
    norm: str = "l2"
    coding: str = "elias"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        ops.check_quantizer(self.bits, self.bucket, self.norm, 0, "QSGD")
        if self.coding not in ("elias", "packed"):
            raise ValueError(f"QSGD: got coding = {self.coding!r}, expected 'elias' or 'packed'")

    def encode(self, grad: Tensor, key: Key) -> Tensor:
        numel = grad.numel()
        if not math.isfinite(ops.abs_max(grad)):
            return self.non_finite(grad)
        arguments = (grad, self.bits, self.bucket, self.norm, key.bits)
        norms_end = 4 * ops.num_buckets(numel, self.bucket)
        packed_nbytes = ops.packed_nbytes(numel, self.bits)
        if self.coding == "elias":
            space = self.workspace.empty("stream", (ops.elias_capacity(numel, self.bits),), torch.uint8, grad.device)
            stream, norms = ops.elias_quantize(*arguments, out=space)
            if stream.numel() <= packed_nbytes:
                payload = ops.new_payload(norms_end + stream.numel(), grad.device)
                body = payload[ops.HEADER_NBYTES :]
                body[:norms_end] = norms.view(torch.uint8)
                body[norms_end : norms_end + stream.numel()] = stream
                return self.seal(payload, numel, True, _STREAM.pack(stream.numel(), True))
        payload = ops.new_payload(norms_end + packed_nbytes, grad.device)
        body = payload[ops.HEADER_NBYTES :]
        norms = body[:norms_end].view(torch.float32)
        ops.quantize_packed(*arguments, out=body[norms_end : norms_end + packed_nbytes], norms=norms)
        return self.seal(payload, numel, True, _STREAM.pack(packed_nbytes, False))

    def decode_add(self, payload: ops.Payload, out: Tensor, weight: float) -> None:
        nbytes, elias = _STREAM.unpack(payload.fields)
        norms, stream = payload.sections(4 * ops.num_buckets(out.numel(), self.bucket), nbytes)
        decode_add = ops.elias_decode_add if elias else ops.quantize_decode_add
        decode_add(stream, norms.view(torch.float32), out, self.bits, self.bucket, weight)


@register("terngrad", number=17)
@dataclass
class TernGrad(GatherCompressor):
    """-1, 0 or 1 times one number.

    Wen, Xu, Yan, Wu, Wang, Chen, Li, TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning,
    NeurIPS 2017.

    g_i becomes scale * sign(g_i) * Bernoulli(|c_i| / scale): unbiased about the clipped gradient c, with variance
    sum |c_i| (scale - |c_i|).
    clip: magnitudes are cut off at clip * sigma; None does not. sigma^2 is the second moment, mean(g^2): about the
    mean, as in the paper, it would be 0 for a constant gradient, and all of it cut off.
    shared_scale: scale = max |c_i| over the ranks, for which a first round gathers everyone's (scaler sharing); False
    takes each rank's own.

    Payload: header, which holds the scale; five elements to a byte. 48 + ceil(n / 5) bytes, padded to 16, and with
    shared_scale 48 more: 1.6 bits an element.
    """

    clip: float | None = 2.5
    shared_scale: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared_scale:
            if self.exchange != "gather":
                raise ValueError(
                    f"TernGrad: got exchange = {self.exchange!r} with shared_scale=True, expected shared_scale=False: "
                    "shards have scales of their own"
                )
            self.rounds = 2
        if self.clip is not None and not (isinstance(self.clip, (int, float)) and self.clip > 0):
            raise ValueError(f"TernGrad: got clip = {self.clip!r}, expected None or a number > 0")

    def reduce(self, grad: Tensor, state: State) -> Routine:
        if not self.shared_scale:
            return (yield from super().reduce(grad, state))
        numel, largest = grad.numel(), self._largest(grad)
        headers = yield Gather(
            self.seal(ops.new_payload(0, grad.device), numel, True, _SCALE.pack(largest))
            if math.isfinite(largest)
            else self.non_finite(grad)
        )
        scale = 0.0
        with attribute_payload_errors(f"TernGrad, parameter {state.name!r}"):
            for rank, header in enumerate(headers):
                with attribute_payload_errors(f"from rank {rank} of {len(headers)}"):
                    opened = self.open(header, numel)
                    if opened.flags & ops.NON_FINITE:
                        # On every rank: nobody waits for a second round.
                        return torch.full((numel,), math.nan, dtype=torch.float32, device=grad.device)
                    scale = max(scale, _scale(opened))
            state.payload = self._encode(grad, state.key(self.seed), largest, scale)
            payloads = yield Gather(state.payload)
            return self.decode(payloads, numel)

    def encode(self, grad: Tensor, key: Key) -> Tensor:
        return self._encode_by_itself(grad, key, self._largest(grad))

    def encode_average(self, average: Tensor, key: Key) -> Tensor:
        # What ranks sent was cut off. Cut off once more, sparse gradients, whose sigma is small, would lose a third.
        return self._encode_by_itself(average, key, ops.abs_max(average))

    def _encode_by_itself(self, grad: Tensor, key: Key, largest: float) -> Tensor:
        return self._encode(grad, key, largest, largest) if math.isfinite(largest) else self.non_finite(grad)

    def _largest(self, grad: Tensor) -> float:
        """The largest magnitude when those above clip * sigma are cut off, as a float32; not finite if that is not, or
        if the norm, which sigma comes from, reaches the largest float."""
        largest = ops.abs_max(grad)
        if self.clip is None or not math.isfinite(largest):
            return largest
        norm = ops.bucket_norms(grad).item()
        if norm >= torch.finfo(torch.float32).max:
            return math.inf
        sigma = norm / math.sqrt(grad.numel())
        return torch.tensor(min(largest, self.clip * sigma), dtype=torch.float32, device="cpu").item()

    def _encode(self, grad: Tensor, key: Key, largest: float, scale: float) -> Tensor:
        nbytes = ops.ternary_nbytes(grad.numel())
        payload = ops.new_payload(nbytes, grad.device)
        body = payload[ops.HEADER_NBYTES :]
        ops.ternary_packed(grad, scale, largest or None, key.bits, out=body[:nbytes])
        return self.seal(payload, grad.numel(), True, _SCALE.pack(scale))

    def decode_add(self, payload: ops.Payload, out: Tensor, weight: float) -> None:
        (packed,) = payload.sections(ops.ternary_nbytes(out.numel()))
        ops.ternary_decode_add(packed, _scale(payload), out, weight)


def _scale(payload: ops.Payload) -> float:
    (scale,) = _SCALE.unpack(payload.fields)
    if not 0 <= scale < math.inf:
        raise ops.PayloadError(f"corrupt payload: its scale is {scale}, expected a finite number >= 0")
    return scale
