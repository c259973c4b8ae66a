"""Sparsification by magnitude.

Aji, Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017; Stich, Cordonnier, Jaggi, Sparsified
SGD with Memory, NeurIPS 2018. Sampled selection: Zhang, Shi, Chu, Li, ACP-SGD, ICDCS 2023, section III.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..gather import GatherCompressor
from ..registry import register
from ..schedule import Theta, check_theta, theta_at
from ..state import Key, State

_COUNT = struct.Struct("<Q")  # k, before the range float in the header's fields


def num_kept(theta: float, numel: int) -> int:
    """How many elements a sparsifier keeps: the nearest integer to (1 - theta) * numel, at least 1."""
    return max(1, round((1.0 - theta) * numel))


@dataclass
class SparseCodec(GatherCompressor):
    """Payloads of some elements and where they are.

    Header; k values (float32, or range floats of `bits` bits); their coded indices (gradzip/ops/index_code.py).
    """

    bits = 32

    def pack(self, indices: Tensor, values: Tensor, numel: int) -> Tensor:
        """The sealed payload of k elements: indices int32, ascending; values float32."""
        values_end = ops.packed_nbytes(values.numel(), self.bits)
        codes_end = values_end + ops.index_code_nbytes(indices, numel)
        payload = ops.new_payload(codes_end, values.device)
        body = payload[ops.HEADER_NBYTES :]
        fields, number = _COUNT.pack(values.numel()), None
        if self.bits == 32:
            fields += b"\0" * 8
            body[:values_end].view(torch.float32).copy_(values)
        else:
            # A mantissa of its own for each payload: the values of a sparse gradient span few octaves.
            number = ops.RangeFloat.fit(values, self.bits)
            number.encode_packed(values, body[:values_end])
        ops.index_code_encode(indices, numel, out=body[values_end:codes_end])
        # The largest elements are among those kept: what is not finite too.
        return self.seal(payload, numel, math.isfinite(ops.abs_max(values)), fields, number)

    def unpack(self, payload: ops.Payload, numel: int) -> tuple[Tensor, Tensor]:
        """(coded indices, values float32) of at most `numel` elements; PayloadError."""
        (k,) = _COUNT.unpack(payload.fields[:8])
        # Before there is memory for them: at 2 bits, values take 16 times the bytes that claim to hold them.
        if k > numel:
            raise ops.PayloadError(f"corrupt payload: it claims {k} values of {numel} elements")
        values_end = ops.packed_nbytes(k, self.bits)
        if values_end > payload.body.numel():
            raise ops.PayloadError(
                f"corrupt payload: it claims {k} values, but {payload.body.numel()} bytes do not hold them"
            )
        stream, _ = ops.index_code_open(payload.body[values_end:])
        if payload.body.numel() - values_end - stream.numel() >= ops.PAYLOAD_ALIGN:
            raise ops.PayloadError(f"corrupt payload: its {k} values and indices do not fill it")
        packed = payload.body[:values_end]
        if self.bits == 32:
            values = packed.view(torch.float32)
        else:
            number = ops.RangeFloat.from_wire(payload.fields[8:])
            if number.bits != self.bits:
                raise ops.PayloadError(f"corrupt payload: it claims {number.bits} bits, expected {self.bits}")
            try:
                values = number.decode(ops.unpack_bits(packed, self.bits, k))
            except ValueError as error:
                raise ops.PayloadError(f"corrupt payload: {error}") from None
        return stream, values

    def decode_add(self, payload: ops.Payload, out: Tensor, weight: float) -> None:
        stream, values = self.unpack(payload, out.numel())
        ops.index_code_decode_add(stream, values, out, weight)

    def subtract_transmitted(self, state: State) -> None:
        # In place of the general way, which decodes to a dense tensor: the same bits, k elements touched.
        for payload, part in self.transmitted_parts(state):
            self.decode_add(self.open(payload, part.numel()), part, -1.0)


@register("topk", number=2, example="theta=0.9,exchange=scatter_reduce")
@dataclass
class TopK(SparseCodec):
    """Keeps the elements of largest magnitude: the best approximation by so many, with the squared error of the rest.

    theta: fraction of the elements that is dropped, in [0, 1), or a schedule step -> theta.
    select: "exact" keeps k = round((1 - theta) n) of the n elements, ties to the lower index; "sampled" finds a
    threshold on a random sample and keeps what reaches it, within 10 % of k (and of mostly zeros only what is not 0).
    bits: 32 sends values as they are, 2 to 16 as range-based floats fitted to every payload.
    error_feedback: what is not sent is added to the next gradient; without it Top-k does not converge.
    seed: of samples.

    Payload: header; k values, `bits` bits each; their coded indices: 48 + ceil(bits k / 8) + I bytes, padded to 16. I
    is 12 bytes and the smaller of a bitmap, ceil(n / 8), and Rice-coded gaps, 1.02 bytes per index at theta = 0.99.

    Deterministic. Payloads are added into the average one after the other, k elements of each.
    """

    per_bucket = True

    theta: Theta = 0.99
    select: str = "exact"
    bits: int = 32
    error_feedback: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_theta(self.theta)
        if self.select not in ("exact", "sampled"):
            raise ValueError(f"TopK: got select = {self.select!r}, expected 'exact' or 'sampled'")
        if not (isinstance(self.bits, int) and (self.bits == 32 or 2 <= self.bits <= 16)):
            raise ValueError(f"TopK: got bits = {self.bits!r}, expected 32 (float32), or 2 to 16 (range floats)")

    def encode(self, grad: Tensor, key: Key) -> Tensor:
        flat = grad.reshape(-1)
        k = num_kept(theta_at(self.theta, key.step), flat.numel())
        if self.select == "sampled":
            selection, k = ops.select_sampled(flat, k, key.bits)
            marks = ops.bitmap(flat, selection)
            indices, values = ops.bitmap_indices(marks, flat.numel(), k), ops.compact_values(flat, marks, k)
        else:
            indices, values = ops.topk_abs(flat, k)
        return self.pack(indices, values, flat.numel())
