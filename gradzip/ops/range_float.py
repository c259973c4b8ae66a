"""The range-based N-bit float (HPDC'20, section 3.2.1)."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from . import _native
from .pack_bits import packed_nbytes
from .payload import PayloadError

_FLT_MAX = 3.4028234663852886e38
_FLT_MAX_BITS = 0x7F7FFFFF
_WORDS = struct.Struct("<IIIiiff")  # struct RangeFloat of csrc/common/range_float.h
_WIRE = struct.Struct("<IHBB")


class RangeFloat:
    """A float of `bits` bits, `mantissa` of them mantissa, that covers [vmin, vmax] and no more.

    With t(x) = bits(\\|x\\|) >> (23 - m) rounded to nearest, code 0 is zero, 1..P are the positive numbers t = pbase,
    pbase + 1, ... and P+1..P+Q the negative ones, P + Q <= 2^N - 1. The closed form
    pbase = ceil((t(max) + t(\\|min\\|) + 2 - (2^N - 1)) / 2) gives eps, the smallest positive number, without a search.
    Relative error at most 2^-(m+1) in [eps, max] (of normal numbers); smaller magnitudes become 0 or eps, whichever is
    nearer; larger ones are clamped.

    bits: 2 to 16. mantissa: 1 to bits. vmin <= 0 <= vmax, finite.

    >>> f = RangeFloat(8, 3, -1.0, 1.0)
    >>> f.decode(f.encode(torch.tensor([0.0, 1.0, -0.3])))
    tensor([ 0.0000,  1.0000, -0.3125])
    """

    # On CUDA, `fit` leaves all but the number of bits in the device's memory: reading a property waits for it.
    __slots__ = ("_bits", "_words")

    def __init__(self, bits: int, mantissa: int, vmin: float, vmax: float) -> None:
        check_format(bits, mantissa, required=True)
        _check_range(vmin, vmax)
        self._bits = bits
        self._words = torch.empty(7, dtype=torch.int32, device="cpu")
        _native.kernels().range_float_make(self._words.data_ptr(), bits, mantissa, vmin, vmax)

    @classmethod
    def _of_words(cls, words: Tensor, bits: int) -> RangeFloat:
        self = object.__new__(cls)
        self._bits = bits
        self._words = words
        return self

    def _words_on(self, device: torch.device) -> Tensor:
        return self._words.to(device, non_blocking=True)

    @classmethod
    def fit(
        cls, x: Tensor, bits: int, mantissa: int | None = None, value_range: tuple[float, float] | None = None
    ) -> RangeFloat:
        """The format for the values x (float32): their range, and the mantissa with the least expected squared error
        on their histogram, where these are not given. Deterministic; on CUDA, nothing waits for it."""
        check_format(bits, mantissa)
        x = _native.check(x, torch.float32, "RangeFloat.fit: x")
        if value_range is not None:
            _check_range(*value_range)
        vmin, vmax = (1.0, -1.0) if value_range is None else value_range  # an empty range stands for that of x
        words = torch.empty(7, dtype=torch.int32, device=x.device)
        arguments = (
            words.data_ptr(),
            x.data_ptr(),
            x.numel(),
            bits,
            -1 if mantissa is None else mantissa,
            vmin,
            vmax,
        )
        if _native.on_cuda(x):
            _native.launch("range_float_fit", x.device, *arguments, workspace_for=x.numel())
        else:
            _native.kernels().range_float_fit(*arguments, _native.threads())
        return cls._of_words(words, bits)

    def _fields(self) -> tuple[int, int, int, int, int, float, float]:
        return _WORDS.unpack(self._words.cpu().numpy().tobytes())

    @property
    def pbase(self) -> int:
        return self._fields()[0]

    @property
    def positive(self) -> int:
        """P, the number of positive codes."""
        return self._fields()[1]

    @property
    def negative(self) -> int:
        """Q, the number of negative codes."""
        return self._fields()[2]

    @property
    def mantissa(self) -> int:
        return self._fields()[3]

    @property
    def bits(self) -> int:
        return self._bits

    @property
    def vmin(self) -> float:
        return self._fields()[5]

    @property
    def vmax(self) -> float:
        return self._fields()[6]

    @property
    def eps(self) -> float:
        """The smallest positive number that has a code."""
        pbase, _, _, mantissa, *_ = self._fields()
        return struct.unpack("<f", struct.pack("<I", pbase << (23 - mantissa)))[0]

    def encode(self, x: Tensor, key: int | None = None) -> Tensor:
        """Codes of x.

        x: any shape, float32; key: 64-bit key of the random generator to round stochastically (unbiased within
        [eps, max] and below eps), None to round to nearest. Returns int32 of the same shape. NaN becomes 0.
        """
        x = _native.check(x, torch.float32, "RangeFloat.encode: x")
        codes = torch.empty(x.shape, dtype=torch.int32, device=x.device)
        words = self._words_on(x.device)
        arguments = (words.data_ptr(), x.data_ptr(), x.numel(), key is not None, key or 0, codes.data_ptr())
        if _native.on_cuda(x):
            outside = torch.zeros(1, dtype=torch.int64, device=x.device)
            _native.launch("range_float_encode", x.device, *arguments, outside.data_ptr())
        else:
            _native.kernels().range_float_encode(*arguments, _native.threads())
        return codes

    def encode_packed(self, x: Tensor, out: Tensor, key: int | None = None) -> int | Tensor:
        """The same in one pass with `pack_bits`; out: uint8 of ceil(x.numel() * bits / 8). Returns how many values lay
        outside [vmin, vmax] and were clamped; on CUDA as a 0-dim int64 tensor, so that nothing waits."""
        x = _native.check(x, torch.float32, "RangeFloat.encode_packed: x")
        nbytes = packed_nbytes(x.numel(), self.bits)
        out = _native.output(out, nbytes, torch.uint8, x.device, "RangeFloat.encode_packed: out")
        words = self._words_on(x.device)
        source, drawing = (words.data_ptr(), x.data_ptr(), x.numel()), (key is not None, key or 0, out.data_ptr())
        if _native.on_cuda(x):
            outside = torch.zeros((), dtype=torch.int64, device=x.device)
            _native.launch("range_float_encode_packed", x.device, *source, self.bits, *drawing, outside.data_ptr())
            return outside
        return _native.kernels().range_float_encode_packed(*source, *drawing, _native.threads())

    def decode(self, codes: Tensor) -> Tensor:
        """Values of codes (int32), float32 of the same shape; ValueError for a code above P + Q (on CUDA, the device is
        waited for to know)."""
        codes = _native.check(codes, torch.int32, "RangeFloat.decode: codes")
        x = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        words = self._words_on(codes.device)
        arguments = (words.data_ptr(), codes.data_ptr(), codes.numel(), x.data_ptr())
        if _native.on_cuda(codes):
            flag = torch.zeros(1, dtype=torch.int32, device=codes.device)
            _native.launch("range_float_decode", codes.device, *arguments, flag.data_ptr())
            failed = int(flag)
        else:
            failed = _native.kernels().range_float_decode(*arguments, _native.threads())
        if failed:
            raise ValueError(f"RangeFloat.decode: got a code above {self.positive + self.negative}, the last there is")
        return x

    def to_wire(self) -> bytes:
        """8 bytes from which a peer decodes."""
        pbase, positive, _, mantissa, bits, *_ = self._fields()
        return _WIRE.pack(pbase, positive, mantissa, bits)

    @classmethod
    def from_wire(cls, data: bytes) -> RangeFloat:
        """What `to_wire` wrote; PayloadError unless every code decodes to a finite number."""
        if len(data) != _WIRE.size:
            raise PayloadError(f"corrupt range float: got {len(data)} bytes, expected {_WIRE.size}")
        pbase, positive, mantissa, bits = _WIRE.unpack(data)
        codes = (1 << bits) - 1
        if not (2 <= bits <= 16 and 1 <= mantissa <= bits and pbase >= 1 and positive <= codes):
            raise PayloadError(f"corrupt range float: N={bits}, m={mantissa}, pbase={pbase}, P={positive}")
        room = (_FLT_MAX_BITS >> (23 - mantissa)) - pbase + 1  # numbers from eps to the largest float
        if positive > room:
            raise PayloadError(f"corrupt range float: {positive} numbers from pbase={pbase} pass the largest float")
        words = _WORDS.pack(pbase, positive, max(0, min(codes - positive, room)), mantissa, bits, math.nan, math.nan)
        return cls._of_words(torch.frombuffer(bytearray(words), dtype=torch.int32), bits)

    def __repr__(self) -> str:
        return f"RangeFloat(bits={self.bits}, mantissa={self.mantissa}, vmin={self.vmin}, vmax={self.vmax})"


def check_format(bits: int, mantissa: int | None, required: bool = False) -> None:
    """ValueError unless there is a range float of so many bits, so many of them mantissa (None: to be chosen)."""
    if not (isinstance(bits, int) and 2 <= bits <= 16):
        raise ValueError(f"range float: got bits = {bits}, expected an integer from 2 to 16")
    if not (isinstance(mantissa, int) and 1 <= mantissa <= bits) and (required or mantissa is not None):
        raise ValueError(
            f"range float: got mantissa = {mantissa}, expected {'' if required else 'None or '}an integer from 1 to "
            f"bits = {bits}"
        )


def _check_range(vmin: float, vmax: float) -> None:
    if not -_FLT_MAX <= vmin <= 0 <= vmax <= _FLT_MAX:
        raise ValueError(f"range float: got the range [{vmin}, {vmax}], expected finite vmin <= 0 <= vmax")
