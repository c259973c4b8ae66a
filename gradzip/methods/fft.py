"""FFT-based gradient sparsification with range-based floats."""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..gather import GatherCompressor
from ..registry import register
from ..schedule import Theta, check_theta, theta_at
from ..state import Key
from .transform import inverse_transform, row_chunks, transform_shape

_COUNT = struct.Struct("<Q")  # k; the header's other 8 bytes hold the range float


@register("fft-range", number=1, example="theta=0.5,error_feedback=True")
@dataclass
class FFTRange(GatherCompressor):
    """Sends the largest frequencies of the gradient as N-bit floats fitted to their range.

    The gradient is cut into rows of at most `block` elements, and each row is transformed by a real FFT. Of the C bins
    of all rows, the k = round((1 - theta) C) largest in magnitude are kept, and their real and imaginary parts coded as
    range-based floats of N bits. The ranks' bins are added up in the frequency domain, so a step needs one inverse
    transform for any world size.

    Args:
        theta: fraction of the frequencies that is dropped, in [0, 1), or a schedule step -> theta.
        bits: N, 2 to 16.
        mantissa: mantissa bits m, 1 to N. None chooses, for each payload, the m with the least expected squared error.
        value_range: range of the floats: r for (-r, r), or (min, max). Values beyond it are clamped, and counted in
            `clamped`. None fits the range to each payload. (The paper fixes it.)
        block: length of the longest transform. None transforms the whole gradient at once.
        error_feedback: add what was not sent to the next gradient.
        seed: of stochastic rounding.
        rounding: "nearest" or "stochastic". Stochastic rounding is unbiased up to the largest value that has a code. A
            fitted range ends within half a step of that value, a relative 2^-(m+1).

    Payload: header; status bitmap of the C bins; 2 k range floats: 48 + C / 8 + 2 k N / 8 bytes, padded to 16. C is
    n / 2 + 1 for each row of n elements. At theta = 0.85 and N = 10 this is 16 times less than float32.

    Deterministic for a seed; all ranks need the same FFT library for the same bits. Encoding does not synchronise a
    CUDA device.

    Source: Wang et al., FFT-based Gradient Sparsification for the Distributed Training of Deep Neural Networks, HPDC
    2020, figure 3.
    """

    per_bucket = True

    theta: Theta = 0.85
    bits: int = 10
    mantissa: int | None = None
    value_range: float | tuple[float, float] | None = None
    block: int | None = 4096
    error_feedback: bool = False
    seed: int = 0
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_theta(self.theta)
        ops.check_format(self.bits, self.mantissa)
        if self.block is not None and not (isinstance(self.block, int) and self.block >= 2):
            raise ValueError(f"FFTRange: got block = {self.block!r}, expected None or an integer >= 2")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"FFTRange: got rounding = {self.rounding!r}, expected 'nearest' or 'stochastic'")
        _limits(self.value_range)
        self.clamped: int | Tensor = 0  # values clamped to a fixed value_range so far; a 0-dim tensor on CUDA

    def encode(self, grad: Tensor, key: Key) -> Tensor:
        numel = grad.numel()
        rows, length = transform_shape(numel, self.block)
        bins = length // 2 + 1
        total = rows * bins
        k = max(1, round((1.0 - theta_at(self.theta, key.step)) * total))
        scratch = functools.partial(self.workspace.empty, device=grad.device)

        signal = grad.reshape(-1)
        if rows * length != numel:
            signal = scratch("signal", (rows * length,), torch.float32)
            signal[:numel] = grad.reshape(-1)
            signal[numel:] = 0
        # Largest magnitudes of the signal and of the kept bins, on the gradient's device: reading them would wait.
        magnitudes = scratch("magnitudes", (2,), torch.float32)
        amax = ops.abs_max_tensor(signal, out=magnitudes[:1])
        spectrum = scratch("spectrum", (rows, bins), torch.complex64)
        power = scratch("power", (rows, bins), torch.float32)
        for chunk in row_chunks(rows, length, grad.device):
            torch.fft.rfft(signal.view(rows, length)[chunk], norm="ortho", out=spectrum[chunk])
            ops.spectrum_power(spectrum[chunk], length, amax, out=power[chunk])

        bitmap_end = ops.bitmap_nbytes(total)
        codes_end = bitmap_end + ops.packed_nbytes(2 * k, self.bits)
        payload = ops.new_payload(codes_end, grad.device)
        body = payload[ops.HEADER_NBYTES :]
        bitmap = ops.bitmap(power, ops.select(power, k), out=body[:bitmap_end])
        kept = ops.compact_values(spectrum, bitmap, k, out=scratch("kept", (k,), torch.complex64))
        values = torch.view_as_real(kept)
        number = ops.RangeFloat.fit(values, self.bits, self.mantissa, _limits(self.value_range))
        noise = key.bits if self.rounding == "stochastic" else None
        self.clamped = self.clamped + number.encode_packed(values, body[bitmap_end:codes_end], noise)
        # The transform may overflow even if the gradient is finite.
        ops.abs_max_tensor(values, out=magnitudes[1:])
        return self.seal(payload, numel, magnitudes, _COUNT.pack(k), number)

    def decode_add(self, payload: ops.Payload, out: Tensor, weight: float) -> None:
        (k,) = _COUNT.unpack(payload.fields[:8])
        number = ops.RangeFloat.from_wire(payload.fields[8:])
        bitmap_end = ops.bitmap_nbytes(out.numel())
        codes_end = bitmap_end + ops.packed_nbytes(2 * k, number.bits)
        spare = payload.body.numel() - codes_end
        if not (1 <= k <= out.numel() and number.bits == self.bits and 0 <= spare < ops.PAYLOAD_ALIGN):
            raise ops.PayloadError(
                f"corrupt payload: it claims {k} of {out.numel()} bins in {number.bits} bits, "
                f"which does not fit its {payload.body.numel()} bytes"
            )
        ops.spectrum_decode_add(out, payload.body[:bitmap_end], payload.body[bitmap_end:codes_end], k, number, weight)

    def accumulator(self, numel: int, device: torch.device) -> Tensor:
        rows, length = transform_shape(numel, self.block)
        return self.workspace.empty("sum", (rows, length // 2 + 1), torch.complex64, device).zero_()

    def finish(self, out: Tensor, numel: int) -> Tensor:
        rows, length = transform_shape(numel, self.block)
        signal = self.workspace.empty("signal", (rows, length), torch.float32, out.device)
        inverse_transform(out, signal)
        return signal.view(-1)[:numel]


def _limits(value_range: float | tuple[float, float] | None) -> tuple[float, float] | None:
    """(min, max) in float32, or None. Raises ValueError."""
    if value_range is None:
        return None
    pair = value_range if isinstance(value_range, tuple) else (value_range, value_range)
    if len(pair) == 2 and all(isinstance(v, (int, float)) for v in pair):
        low, high = pair if isinstance(value_range, tuple) else (-pair[0], pair[0])
        # As float32, which values are compared with: 1e-60 rounds to 0, and 1e39 to infinity.
        low, high = torch.tensor([low, high], dtype=torch.float32, device="cpu").tolist()
        if -math.inf < low <= 0 <= high < math.inf and low < high:
            return low, high
    raise ValueError(f"FFTRange: got value_range = {value_range!r}, expected r > 0, or (min <= 0, max >= 0)")
