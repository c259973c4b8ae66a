"""The base class of codecs that send the largest coefficients of a transform, as range-based floats."""

from __future__ import annotations

import functools
import math
import struct
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...memory.state import Key
from ...ops import tensors as ops
from ..topk import num_kept
from .error_feedback import ErrorFeedback
from .gather import CodedSum, GatherCompressor, attribute_payload_errors, parse_all, payload_source
from .schedule import Theta, check_theta, theta_at

# k; the transform's lengths less one; bytes of padding. The header's other 8 bytes hold the range float.
_FIELDS = struct.Struct("<I3BB")


class CodedPart(NamedTuple):
    """A parsed payload: selected coefficients, and their status bitmap, still coded."""

    transform: ops.Transform
    bitmap: Tensor  # a stream of `ops.bitmap_code_encode`
    packed: Tensor
    k: int
    number: ops.RangeFloat

    def decoded(self, bitmap: Tensor) -> ops.TransformPart:
        return ops.TransformPart(bitmap, self.packed, self.k, self.number)


@dataclass
class TransformCodec(ErrorFeedback, GatherCompressor):
    """A codec that transforms a gradient, and keeps the coefficients of largest magnitude as range-based floats.

    The ranks' coefficients are added before they are transformed back, so a step needs one inverse transform for any
    world size. The transform is orthonormal, so the squared error is the sum of the squares of the dropped coefficients
    and of the rounding errors.

    Payload: header; k groups of range floats; the coded status bitmap of all groups (gradzip/ops/bitmap_code.py).
    """

    theta: Theta = 0.85
    bits: int = 10
    mantissa: int | None = None
    value_range: float | tuple[float, float] | None = None

    fixed_nbytes = True
    rounding = "nearest"  # methods declare it as a hyper-parameter

    def __post_init__(self) -> None:
        super().__post_init__()
        check_theta(self.theta)
        ops.check_format(self.bits, self.mantissa)
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(
                f"{type(self).__name__}: got rounding = {self.rounding!r}, expected 'nearest' or 'stochastic'"
            )
        self._limits()
        self._clamped: dict[torch.device, int | Tensor] = {}  # on CUDA, a 0-dim tensor

    @property
    def clamped(self) -> int:
        """Number of values that were clamped to a fixed `value_range` so far. Waits for the devices."""
        return sum(int(count) for count in self._clamped.values())

    @abstractmethod
    def transform_for(self, shape: torch.Size) -> ops.Transform:
        """The transform of a gradient of that shape."""

    @abstractmethod
    def transform_with_lengths(self, lengths: tuple[int, ...]) -> ops.Transform | None:
        """The transform with axes of these lengths, which a payload claims; None if there is none."""

    def signal(self, grad: Tensor) -> Tensor:
        """The input of the transform for a gradient (contiguous float32): flat float32 of `signal_numel` elements."""
        return grad.reshape(-1)

    def signal_numel(self, numel: int) -> int:
        """The size of `signal` for a gradient of `numel` elements."""
        return numel

    # --- encoding

    def encode(self, grad: Tensor, key: Key) -> Tensor:
        transform, x = self.transform_for(grad.shape), self.signal(grad)
        groups = transform.groups(x.numel())
        k = num_kept(theta_at(self.theta, key.step), groups)
        if k >= 1 << 32:
            raise ValueError(
                f"{type(self).__name__}: got {k} coefficients to send, expected less than 2^32: give a larger theta"
            )
        bitmap, values = self._select(x, transform, k)
        segment = transform.segment(x.numel())
        codes_end = ops.packed_nbytes(values.numel(), self.bits)
        # On a device, room for the longest stream, so that nothing waits to learn its length.
        room = ops.bitmap_code_capacity(groups, segment, k if ops.on_device(x) else None)
        end = codes_end + room
        payload = ops.new_payload(end + -end % ops.PAYLOAD_ALIGN, grad.device)  # `seal` writes the padding
        body = payload[ops.HEADER_NBYTES :]
        nbytes = ops.bitmap_code_write(bitmap, groups, segment, body[codes_end:end], k)
        number = self._quantize(values, body[:codes_end], key)
        axes = (*transform.lengths, 1, 1, 1)[:3]
        fields = _FIELDS.pack(k, *(n - 1 for n in axes), 0)
        stream = ops.Stream(codes_end, nbytes, padding_at=_FIELDS.size - 1)
        # Check the kept coefficients, which include those that are not finite: a transform may overflow even if the
        # gradient is finite.
        magnitudes = ops.abs_max_tensor(values)
        return self.seal(ops.Seal(payload, grad.numel(), fields, 0, magnitudes, number, stream=stream))

    def _select(self, x: Tensor, transform: ops.Transform, k: int) -> tuple[Tensor, Tensor]:
        """Select the k largest groups of coefficients of x (flat). Returns their status bitmap and coefficients."""
        scratch = functools.partial(self.workspace.empty, device=x.device)
        candidates = ops.transform_scratch_numel(x.numel(), transform, k, x.device)
        return ops.transform_select(
            x, transform, k,
            bitmap=scratch("bitmap", (ops.bitmap_nbytes(transform.groups(x.numel())),), torch.uint8),
            values=scratch("values", (k * transform.group,), torch.float32),
            scratch=scratch("candidates", (candidates,), torch.float32),
        )  # fmt: skip

    def _quantize(self, values: Tensor, out: Tensor, key: Key) -> ops.RangeFloat:
        """Write the codes of values to `out`. Returns their format."""
        number = ops.RangeFloat.fit(values, self.bits, self.mantissa, self._limits())
        noise = key.bits if self.rounding == "stochastic" else None
        clamped = number.encode_packed(values, out, noise)
        self._clamped[values.device] = self._clamped.get(values.device, 0) + clamped
        return number

    def _limits(self) -> tuple[float, float] | None:
        """The fixed range, in float32, or None. Raises ValueError."""
        if self.value_range is None:
            return None
        pair = self.value_range if isinstance(self.value_range, tuple) else (self.value_range, self.value_range)
        if len(pair) == 2 and all(isinstance(v, (int, float)) for v in pair):
            low, high = pair if isinstance(self.value_range, tuple) else (-pair[0], pair[0])
            # As float32, which values are compared with: 1e-60 rounds to 0, and 1e39 to infinity.
            low, high = torch.tensor([low, high], dtype=torch.float32, device="cpu").tolist()
            if -math.inf < low <= 0 <= high < math.inf and low < high:
                return low, high
        raise ValueError(
            f"{type(self).__name__}: got value_range = {self.value_range!r}, expected r > 0, or (min <= 0, max >= 0)"
        )

    # --- decoding

    def coded_part(self, payload: ops.Payload, numel: int) -> CodedPart:
        """Parse the payload of a gradient of `numel` elements.

        Raises:
            PayloadError: `encode` of this codec cannot have written the payload.
        """
        k, *axes, padding = _FIELDS.unpack(payload.fields[:8])
        number = ops.RangeFloat.from_wire(payload.fields[8:])
        if number.bits != self.bits:
            raise ops.PayloadError(f"corrupt payload: it claims {number.bits} bits, expected {self.bits}")
        lengths = tuple(n + 1 for n in axes if n > 0)
        transform = self.transform_with_lengths(lengths)
        if transform is None:
            raise ops.PayloadError(f"corrupt payload: it claims kernels of {lengths}, which no transform is for")
        signal_numel = self.signal_numel(numel)
        groups = transform.groups(signal_numel)
        if not 1 <= k <= groups:
            raise ops.PayloadError(f"corrupt payload: it claims {k} of {groups} coefficients")
        codes_end = ops.packed_nbytes(k * transform.group, self.bits)
        stream_nbytes = payload.body.numel() - codes_end - padding
        if padding >= ops.PAYLOAD_ALIGN or stream_nbytes < 0:
            raise ops.PayloadError(f"corrupt payload: its {payload.body.numel()} bytes do not hold {k} coefficients")
        packed, stream = payload.sections(codes_end, stream_nbytes)
        return CodedPart(transform, stream, packed, k, number)

    def sum_all(self, sums: Sequence[CodedSum]) -> None:
        for coded in sums:
            (out,) = coded.outs
            flat, payloads = out.view(-1), coded.payloads
            parts = parse_all(coded, functools.partial(self.coded_part, numel=out.numel()))
            transform, n = parts[0].transform, self.signal_numel(out.numel())
            for rank, part in enumerate(parts):
                if part.transform != transform:
                    with attribute_payload_errors(payload_source(rank, len(payloads))):
                        raise ops.PayloadError(
                            f"corrupt payload: it claims {part.transform}, those before it {transform}"
                        )
            groups, segment = transform.groups(n), transform.segment(n)
            streams, counts = [part.bitmap for part in parts], [part.k for part in parts]
            bitmaps, corrupt = ops.bitmap_code_decode_all(streams, groups, counts, segment)
            if corrupt is not None:
                with attribute_payload_errors(payload_source(corrupt, len(payloads))):
                    ops.bitmap_code_decode(streams[corrupt], groups, counts[corrupt], segment)  # raises
            decoded = [part.decoded(bitmap) for part, bitmap in zip(parts, bitmaps)]
            self.inverse(decoded, transform, flat, coded.weight, coded.add)

    def inverse(
        self, parts: list[ops.TransformPart], transform: ops.Transform, out: Tensor, weight: float, add: bool = False
    ) -> None:
        """Write weight * the inverse transform of the sum of the parts to `out`, or add it."""
        # Cannot fail: `bitmap_code_decode` has checked that a bitmap has as many bits set as its part coefficients. On
        # CUDA it has not: `out` becomes NaN if one has another number.
        ops.transform_decode(parts, transform, out, weight, add)
