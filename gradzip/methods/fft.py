"""FFT-based gradient sparsification with range-based floats.

Wang et al., FFT-based Gradient Sparsification for the Distributed Training of Deep Neural Networks, HPDC 2020.
"""

from __future__ import annotations

import contextlib
import functools
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..gather import GatherCompressor
from ..registry import register
from ..schedule import Theta, check_theta, theta_at
from ..state import Key

_COUNT = struct.Struct("<Q")  # k, before the range float in the header's fields
_PART = 1 << 20  # elements


@register("fft-range", number=1, example="theta=0.5,error_feedback=True")
@dataclass
class FFTRange(GatherCompressor):
    """Keeps the largest frequencies of the gradient, as N-bit floats fitted to their range (HPDC'20, Figure 3).

    theta: fraction of the frequencies that is dropped, in [0, 1), or a schedule step -> theta.
    bits: N, 2 to 16. mantissa: m, 1 to N; None takes, for every payload, the one with the least expected squared error.
    value_range: None fits the range to every payload; r or (min, max) fixes it, as in the paper, and `clamped` counts
    what lies beyond.
    block: longest transform. A longer gradient is cut into rows of one length, at most that; None transforms it whole.
    rounding: "nearest", or "stochastic", which draws from `seed` and is unbiased, but for values beyond the largest one
    that has a code; a range that is fitted ends within half a step of it, 2^-(m+1) of its size.

    Payload: header; status bitmap of the C bins; real and imaginary parts of the k = round((1 - theta) C) kept bins,
    N bits each. 48 + C/8 + 2kN/8 bytes, C = n/2 + 1 per row: 16 times less than float32 at theta = 0.85, N = 10.

    Peers' bins are added up in the frequency domain, so a step costs one inverse transform whatever the group's size.
    Deterministic; bits of the transform itself depend on the FFT library, as all ranks share.
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
        self.clamped: int | Tensor = 0  # values that a fixed value_range has clamped so far; on CUDA a 0-dim tensor

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
        # Two magnitudes, both on the gradient's device: nothing waits for them there.
        magnitudes = scratch("magnitudes", (2,), torch.float32)
        amax = ops.abs_max_tensor(signal, out=magnitudes[:1])
        spectrum = scratch("spectrum", (rows, bins), torch.complex64)
        power = scratch("power", (rows, bins), torch.float32)
        for part in parts(rows, length, grad.device):
            torch.fft.rfft(signal.view(rows, length)[part], norm="ortho", out=spectrum[part])
            ops.spectrum_power(spectrum[part], length, amax, out=power[part])

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
        # A transform may overflow where the gradient itself does not.
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


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@functools.cache
def transform_shape(numel: int, block: int | None) -> tuple[int, int]:
    """(rows, length) of the real transforms for a gradient of `numel` elements.

    As few rows as `block` allows, all of one length: even, of the factors 2, 3 and 5 (fast everywhere) unless that
    passes `block`, and hardly longer than numel / rows. Padding the last row to `block` instead would send zeros: a
    tensor of 1.1 blocks would cost twice what it should.
    """
    rows = 1 if block is None else -(-numel // block)
    shortest = -(-numel // rows)
    length = _smooth(shortest + shortest % 2)
    return rows, length if block is None or length <= block else shortest


def _smooth(length: int) -> int:
    """The least even number >= length with no prime factor above 5."""
    best = 1 << (length - 1).bit_length()
    five = 1
    while five < best:
        three = five
        while three < best:
            two = max(2, 1 << (-(-length // three) - 1).bit_length())
            best = min(best, three * two)
            three *= 3
        five *= 5
    return best


def parts(rows: int, length: int, device: torch.device) -> list[slice]:
    """Rows that are transformed together: few enough to stay in a processor's cache until the next kernel reads them. A
    device would rather have all at once."""
    step = max(1, _PART // length) if device.type == "cpu" else rows
    return [slice(begin, begin + step) for begin in range(0, rows, step)]


def inverse_transform(spectrum: Tensor, signal: Tensor) -> None:
    """Writes rows of signals, of which `spectrum` has the orthonormal transforms: the same bits on all ranks."""
    rows, length = signal.shape
    for part in parts(rows, length, signal.device):
        # Several rows are dealt out among threads; a long one by itself is cut, and rounds as it is cut.
        with one_thread() if len(signal[part]) == 1 else contextlib.nullcontext():
            torch.fft.irfft(spectrum[part], n=length, norm="ortho", out=signal[part])


def _limits(value_range: float | tuple[float, float] | None) -> tuple[float, float] | None:
    if value_range is None:
        return None
    pair = value_range if isinstance(value_range, tuple) else (value_range, value_range)
    if len(pair) == 2 and all(isinstance(v, (int, float)) for v in pair):
        low, high = pair if isinstance(value_range, tuple) else (-pair[0], pair[0])
        # As float32, which is what values are compared with: 1e-60 is 0 there, 1e39 infinite.
        low, high = torch.tensor([low, high], dtype=torch.float32, device="cpu").tolist()
        if -math.inf < low <= 0 <= high < math.inf and low < high:
            return low, high
    raise ValueError(f"FFTRange: got value_range = {value_range!r}, expected r > 0, or (min <= 0, max >= 0)")
