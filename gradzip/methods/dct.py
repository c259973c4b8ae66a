"""Transform coding along the kernels of convolutions, with range-based floats."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..registry import register
from ..schedule import theta_at
from ..state import Key
from .topk import num_kept
from .transform_codec import TransformCodec

# k; the transform's lengths less one; bytes of padding. The header's other 8 bytes hold the range float.
_FIELDS = struct.Struct("<I3BB")


@register("dct-range", number=4, example="theta=0.8")
@dataclass
class DCTRange(TransformCodec):
    """Sends the largest coefficients of a transform chosen by the gradient's shape, as N-bit floats.

    The gradient of a convolution is transformed by a DCT-II along the positions of each kernel: the axes after the
    first two, if each has up to 16 positions, and all of them up to 128. Neighbouring positions see nearly the same
    image, so most of a kernel's energy is in few coefficients. Other gradients stay as they are, because neighbouring
    elements of a matrix have nothing in common. So do the shards of "scatter_reduce" if there are fewer rows than
    ranks. Of the n coefficients, the k = round((1 - theta) n) largest in magnitude are kept, and coded as range-based
    floats of N bits. The ranks' coefficients are added up before they are transformed back.

    Args:
        theta: fraction of the coefficients that is dropped, in [0, 1), or a schedule step -> theta.
        bits: N, 2 to 16. At equal bytes, 6 are best for one layer (docs/transforms.md).
        mantissa: mantissa bits m, 1 to N. None chooses, for each payload, the m with the least expected squared error.
        value_range: range of the floats: r for (-r, r), or (min, max). Values beyond it are clamped, and counted in
            `clamped`. None fits the range to each payload.
        block: length of DCTs along rows of the flat gradient, for gradients without kernels: a power of two from 8 to
            256. None leaves these gradients as they are.
        error_feedback: add what was not sent to the next gradient. It is worth points of accuracy (docs/transforms.md).
        seed: of stochastic rounding.
        rounding: "nearest" or "stochastic".

    Payload: header; k range floats; coded status bitmap: 48 + ceil(k N / 8) + I bytes, padded to 16. The bitmap has the
    first coefficient of many kernels, then their second one, and so on, and each run of them is coded for its own
    density (gradzip/ops/bitmap_code.py). I is 0.63 n / 8 bytes at theta = 0.85 if all coefficients have the same
    density, and less otherwise; at most n / 8 and 2 for each segment of 64 to 1024 elements.

    Deterministic for a seed: the same bits on every device. Encoding synchronises a CUDA device, because the length of
    the bitmap depends on the data.

    Source: the coding of Wang et al., HPDC 2020 (`FFTRange`), with the transform of Ahmed, Natarajan, Rao, Discrete
    Cosine Transform, IEEE Transactions on Computers, 1974.
    """

    bits: int = 6
    block: int | None = None
    error_feedback: bool = True
    seed: int = 0
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        super().__post_init__()
        lengths = (8, 16, 32, 64, 128, 256)
        if self.block is not None and not (isinstance(self.block, int) and self.block in lengths):
            raise ValueError(f"DCTRange: got block = {self.block!r}, expected None or one of {lengths}")

    def transform_for(self, shape: torch.Size) -> ops.Transform:
        """The transform of a gradient of that shape: the lengths of its kernels, if it has any, decide."""
        kernel = tuple(n for n in shape[2:] if n > 1)
        if kernel and ops.Transform.kernel_exists(*kernel):
            return ops.Transform.dct(*kernel)
        return ops.Transform.dct() if self.block is None else ops.Transform.dct(self.block)

    def encode(self, grad: Tensor, key: Key) -> Tensor:
        numel, transform = grad.numel(), self.transform_for(grad.shape)
        k = num_kept(theta_at(self.theta, key.step), numel)
        if k >= 1 << 32:
            raise ValueError(f"DCTRange: got {k} coefficients to send, expected less than 2^32: give a larger theta")
        bitmap, values = self.select(grad.reshape(-1), transform, k)
        segment = transform.segment(numel)
        space = (ops.bitmap_code_capacity(numel, segment),)
        stream = ops.bitmap_code_encode(
            bitmap, numel, segment, out=self.workspace.empty("stream", space, torch.uint8, grad.device)
        )
        codes_end = ops.packed_nbytes(k, self.bits)
        stream_end = codes_end + stream.numel()
        payload = ops.new_payload(stream_end, grad.device)
        body = payload[ops.HEADER_NBYTES :]
        body[codes_end:stream_end] = stream
        number = self.quantize(values, body[:codes_end], key)
        axes = (*transform.lengths, 1, 1, 1)[:3]
        fields = _FIELDS.pack(k, *(n - 1 for n in axes), body.numel() - stream_end)
        return self.seal(payload, numel, ops.abs_max_tensor(values), fields, number)

    def part(self, payload: ops.Payload, numel: int) -> tuple[ops.Transform, ops.TransformPart]:
        k, *axes, padding = _FIELDS.unpack(payload.fields[:8])
        number = self.format_of(payload)
        lengths = tuple(n + 1 for n in axes if n > 0)
        if not ops.Transform.dct_exists(*lengths):
            raise ops.PayloadError(f"corrupt payload: it claims kernels of {lengths}, which no transform is for")
        if not 1 <= k <= numel:
            raise ops.PayloadError(f"corrupt payload: it claims {k} of {numel} coefficients")
        codes_end = ops.packed_nbytes(k, self.bits)
        stream_nbytes = payload.body.numel() - codes_end - padding
        if padding >= ops.PAYLOAD_ALIGN or stream_nbytes < 0:
            raise ops.PayloadError(f"corrupt payload: its {payload.body.numel()} bytes do not hold {k} coefficients")
        packed, stream = payload.sections(codes_end, stream_nbytes)
        transform = ops.Transform.dct(*lengths)
        bitmap = ops.bitmap_code_decode(stream, numel, k, transform.segment(numel))
        return transform, ops.TransformPart(bitmap, packed, k, number)
