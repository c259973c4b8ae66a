"""The base class of codecs that send the largest coefficients of a transform, as range-based floats."""

from __future__ import annotations

import math
import struct
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...memory.state import Key
from ...ops import groups
from ...ops import tensors as ops
from ..topk import num_kept
from .error_feedback import ErrorFeedback
from .gather import CodedSum, GatherCompressor
from .schedule import Theta, check_theta, theta_at

# k; the transform's lengths less one; bytes of padding. The header's other 8 bytes hold the range float.
_FIELDS = struct.Struct("<I3BB")
_ROW = np.dtype([("k", "<u4"), ("axes", "u1", 3), ("padding", "u1"), ("number", "V8")])  # the same for NumPy


class CodedParts(NamedTuple):
    """Payloads of one gradient, parsed: selected coefficients, and their status bitmaps, still coded."""

    transform: ops.Transform
    bodies: Sequence[Tensor]
    k: np.ndarray  # of each payload, int64
    codes_end: np.ndarray  # bytes of the coefficients' codes, which begin the body
    stream_nbytes: np.ndarray  # bytes of the bitmap's stream, which follows
    formats: np.ndarray  # of the codes: struct RangeFloat


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
        count = transform.groups(x.numel())
        k = num_kept(theta_at(self.theta, key.step), count)
        if k >= 1 << 32:
            raise ValueError(
                f"{type(self).__name__}: got {k} coefficients to send, expected less than 2^32: give a larger theta"
            )
        bitmap, values = self._select(x, transform, k)
        segment = transform.segment(x.numel())
        codes_end = ops.packed_nbytes(values.numel(), self.bits)
        # On a device, room for the longest stream, so that nothing waits to learn its length.
        room = ops.bitmap_code_capacity(count, segment, k if ops.on_device(x) else None)
        end = codes_end + room
        payload = ops.new_payload(end + -end % ops.PAYLOAD_ALIGN, grad.device)  # `seal` writes the padding
        body = payload[ops.HEADER_NBYTES :]
        nbytes = groups.bitmap_code_write(bitmap, count, segment, body[codes_end:end])
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
        empty = self.workspace.empty
        bitmap = empty("bitmap", (ops.bitmap_nbytes(transform.groups(x.numel())),), torch.uint8, x.device)
        values = empty("values", (k * transform.group,), torch.float32, x.device)
        candidates = ops.transform_scratch_numel(x.numel(), transform, k, x.device)
        scratch = empty("candidates", (candidates,), torch.float32, x.device)
        groups.transform_select(x, transform.code, k, bitmap, values, scratch)
        return bitmap, values

    def _quantize(self, values: Tensor, out: Tensor, key: Key) -> ops.RangeFloat:
        """Write the codes of values to `out`. Returns their format."""
        number = groups.range_float_fit(values, self.bits, self.mantissa, self._limits())
        noise = key.bits if self.rounding == "stochastic" else None
        clamped = groups.range_float_encode(values, number, self.bits, noise, out)
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

    def parse(self, payloads: Sequence[ops.Payload], numel: int) -> CodedParts:
        """Parse payloads of a gradient of `numel` elements, all at once.

        Raises:
            PayloadError: `encode` of this codec cannot have written one; `index` of the exception is its number.
        """
        rows = np.frombuffer(b"".join([payload.fields for payload in payloads]), _ROW)
        formats = ops.words_of_wire(rows["number"].tobytes())
        bits, axes = formats["bits"], rows["axes"]
        _expect(bits == self.bits, lambda i: f"it claims {bits[i]} bits, expected {self.bits}")

        def lengths(i: int) -> tuple[int, ...]:
            return tuple([n + 1 for n in axes[i].tolist() if n > 0])

        def claim(i: int) -> str:
            known = self.transform_with_lengths(lengths(i)) is not None
            return f"it claims kernels of {lengths(i)}, " + (
                f"those before it of {lengths(0)}" if known else "which no transform is for"
            )

        transform = self.transform_with_lengths(lengths(0))
        if transform is None:
            raise ops.PayloadError(f"corrupt payload: {claim(0)}", 0)
        _expect((axes == axes[0]).all(axis=1), claim)
        k, groups = rows["k"].astype(np.int64), transform.groups(self.signal_numel(numel))
        _expect((k >= 1) & (k <= groups), lambda i: f"it claims {k[i]} of {groups} coefficients")
        bodies = [payload.body for payload in payloads]
        nbytes, padding = np.array([body.numel() for body in bodies]), rows["padding"].astype(np.int64)
        codes_end = -(-k * (transform.group * self.bits) // 8)
        stream_nbytes = nbytes - codes_end - padding
        fits = (padding < ops.PAYLOAD_ALIGN) & (stream_nbytes >= 0)
        _expect(fits, lambda i: f"its {nbytes[i]} bytes do not hold {k[i]} coefficients")
        return CodedParts(transform, bodies, k, codes_end, stream_nbytes, formats)

    def sum_all(self, sums: Sequence[CodedSum]) -> None:
        for coded in sums:
            (out,) = coded.outs
            self._sum(self.parse(coded.payloads, out.numel()), out.view(-1), coded.weight, coded.add)

    def _sum(self, parts: CodedParts, out: Tensor, weight: float, add: bool) -> None:
        transform, n, ends = parts.transform, self.signal_numel(out.numel()), parts.codes_end.tolist()
        streams = groups.addresses([body[end:] for body, end in zip(parts.bodies, ends)])
        bitmaps, corrupt = groups.bitmap_code_decode(
            streams, parts.stream_nbytes, parts.k, transform.groups(n), transform.segment(n), out
        )
        if corrupt:
            i = corrupt - 1
            got = f"{parts.stream_nbytes[i]} bytes that are not a bitmap of {transform.groups(n)} elements"
            raise ops.PayloadError(f"corrupt bitmap: got {got} with {parts.k[i]} set", i)
        begins = bitmaps.data_ptr() + bitmaps.shape[1] * np.arange(len(ends))
        packed = groups.addresses([body[:end] for body, end in zip(parts.bodies, ends)])
        table = groups.transform_parts(begins, packed, parts.codes_end, parts.k, parts.formats)
        self.inverse(table, transform, out, weight, add)

    def inverse(
        self, parts: np.ndarray, transform: ops.Transform, out: Tensor, weight: float, add: bool = False
    ) -> None:
        """Write weight * the inverse transform of the sum of the parts to `out`, or add it.

        parts: a table of `groups.transform_parts`.
        """
        # Cannot fail: `bitmap_code_decode` has checked that a bitmap has as many bits set as its part coefficients. On
        # CUDA it has not: `out` becomes NaN if one has another number.
        groups.transform_decode(parts, transform.code, out, weight, add)


def _expect(valid: np.ndarray, problem: Callable[[int], str]) -> None:
    """Raise PayloadError for the first payload that is not valid. problem: describes it."""
    if not valid.all():
        i = int(valid.argmin())
        raise ops.PayloadError(f"corrupt payload: {problem(i)}", i)
