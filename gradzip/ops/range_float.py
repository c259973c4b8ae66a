"""The range-based N-bit float (HPDC'20, section 3.2.1)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import _native, replays
from .arrays import takes_arrays
from .errors import PayloadError
from .pack_bits import packed_nbytes

_FLT_MAX = 3.4028234663852886e38
_FLT_MAX_BITS = 0x7F7FFFFF
WORDS = np.dtype(  # struct RangeFloat of csrc/common/range_float.h
    [
        ("pbase", "<u4"), ("positive", "<u4"), ("negative", "<u4"), ("mantissa", "<i4"), ("bits", "<i4"),
        ("vmin", "<f4"), ("vmax", "<f4"),
    ]
)  # fmt: skip
BAD_CODES = "got another format than one of these bits, or a code that it does not have"
_WIRE_FIELDS = ("pbase", "positive", "mantissa", "bits")
_WIRE = np.dtype(list(zip(_WIRE_FIELDS, ("<u4", "<u2", "u1", "u1"))))


def _word(name: str, doc: str | None = None) -> Any:
    """A property that is a field of a format's words."""
    return property(lambda self: self._words.cpu().numpy().view(WORDS)[name].item(), doc=doc)


class RangeFloat:
    """A float of `bits` bits, `mantissa` of them mantissa, that covers exactly [vmin, vmax].

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

    # `fit` on CUDA leaves all but the number of bits in device memory: reading a property waits for the device.
    __slots__ = ("_bits", "_words")

    def __init__(self, bits: int, mantissa: int, vmin: float, vmax: float) -> None:
        check_format(bits, mantissa, required=True)
        _check_range(vmin, vmax)
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        self._bits = bits
        self._words = self._fit(nothing, bits, mantissa, vmin, vmax)

    @classmethod
    def _of_words(cls, words: Tensor, bits: int) -> RangeFloat:
        self = object.__new__(cls)
        self._bits = bits
        self._words = words
        return self

    def _words_on(self, device: torch.device) -> Tensor:
        return self._words.to(device, non_blocking=True)  # pageable memory is read before the call returns

    @classmethod
    @takes_arrays
    def fit(
        cls, x: Tensor, bits: int, mantissa: int | None = None, value_range: tuple[float, float] | None = None
    ) -> RangeFloat:
        """Return a format for the values x.

        x: any shape, float32. value_range: (vmin, vmax), or None for the range of x. mantissa: None for the one with
        the least expected squared error on the histogram of x. Deterministic. Does not wait for the device.
        """
        check_format(bits, mantissa)
        x = _native.check(x, torch.float32, "RangeFloat.fit: x")
        if value_range is not None:
            _check_range(*value_range)
        vmin, vmax = (1.0, -1.0) if value_range is None else value_range  # an empty range stands for that of x
        return cls._of_words(cls._fit(x, bits, -1 if mantissa is None else mantissa, vmin, vmax), bits)

    @staticmethod
    def _fit(x: Tensor, bits: int, mantissa: int, vmin: float, vmax: float) -> Tensor:
        words = torch.empty(7, dtype=torch.int32, device=x.device)
        table = _native.Table("<QQq")  # struct RangeFit of csrc/common/range_float_fit.h
        table.add(words, x, x.numel())
        table.run("range_float_fit", bits, mantissa, vmin, vmax)
        return words

    pbase: int = _word("pbase")
    positive: int = _word("positive", "P, the number of positive codes.")
    negative: int = _word("negative", "Q, the number of negative codes.")
    mantissa: int = _word("mantissa")
    vmin: float = _word("vmin")
    vmax: float = _word("vmax")

    @property
    def bits(self) -> int:
        return self._bits

    @property
    def eps(self) -> float:
        """The smallest positive number that has a code."""
        return np.uint32(self.pbase << (23 - self.mantissa)).view(np.float32).item()

    @takes_arrays
    def encode(self, x: Tensor, key: int | None = None) -> Tensor:
        """Return the codes of x.

        x: any shape, float32; key: 64-bit key of the random generator to round stochastically (unbiased up to max),
        None to round to nearest. Returns int32 of the same shape. NaN becomes 0. Deterministic. Does not wait for the
        device.
        """
        x = _native.check(x, torch.float32, "RangeFloat.encode: x")
        codes = torch.empty(x.shape, dtype=torch.int32, device=x.device)
        words = self._words_on(x.device)
        arguments = (words.data_ptr(), x.data_ptr(), x.numel(), key is not None, key or 0, codes.data_ptr())
        _native.run_count("range_float_encode", x, *arguments)
        return codes

    @takes_arrays
    def encode_packed(self, x: Tensor, out: Tensor, key: int | None = None) -> int | Tensor:
        """Write the codes of x as a bit stream, in one pass over x.

        x and key as for `encode`; out: uint8 of ceil(x.numel() * bits / 8), in place. Returns the number of values that
        were outside [vmin, vmax] and were clamped; on CUDA as a 0-dim int64 tensor, so that nothing waits for the
        device.
        """
        x = _native.check(x, torch.float32, "RangeFloat.encode_packed: x")
        nbytes = packed_nbytes(x.numel(), self.bits)
        out = _native.output(out, nbytes, torch.uint8, x.device, "RangeFloat.encode_packed: out")
        outside = torch.zeros((), dtype=torch.int64, device=x.device)
        table = _native.Table("<QQqQQQ")  # struct RangeSource of csrc/common/range_float_fit.h
        table.add(self._words_on(x.device), x, x.numel(), key or 0, out, outside)
        stochastic = key is not None
        table.run("range_float_encode_packed", self._bits, stochastic, replays.address(x, stochastic))
        return outside if outside.is_cuda else int(outside)

    @takes_arrays
    def decode(self, codes: Tensor, wait: bool = True) -> Tensor:
        """Return the values of codes.

        codes: any shape, int32. Returns float32 of the same shape. Deterministic. Raises ValueError for a code above
        P + Q. Waits for the device if the codes are on CUDA; without `wait`, and if the format was not fitted there, it
        does not, and a code above P + Q becomes NaN instead.
        """
        codes = _native.check(codes, torch.int32, "RangeFloat.decode: codes")
        x = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        words = self._words.cpu()
        arguments = (words.data_ptr(), codes.data_ptr(), codes.numel(), x.data_ptr())
        if _native.run_failed("range_float_decode", codes, *arguments, wait=wait):
            raise ValueError(f"RangeFloat.decode: got a code above {self.positive + self.negative}, the last there is")
        return x

    @staticmethod
    @takes_arrays
    def decode_packed(wire: Tensor, packed: Tensor, bits: int, numel: int) -> Tensor:
        """Return the values of a bit stream of codes of the format that `to_wire` wrote, without waiting to know it.

        wire: uint8 of 8, on the device of the codes. packed: what `encode_packed` writes, uint8 of ceil(numel * bits /
        8). bits: those of the format. Returns float32 of `numel`, with the bits of `decode`. Deterministic. Raises
        PayloadError unless `from_wire` accepts the format, it has `bits` bits, and it has all codes. On CUDA, which
        does not wait for the device, values are NaN instead: all of them, or those without a code.

        >>> number, packed = RangeFloat(8, 3, -1.0, 1.0), torch.tensor([0, 5], dtype=torch.uint8)
        >>> wire = torch.frombuffer(bytearray(number.to_wire()), dtype=torch.uint8)
        >>> bool((RangeFloat.decode_packed(wire, packed, 8, 2) == number.decode(packed.int())).all())
        True
        """
        what = "RangeFloat.decode_packed"
        contents = f"{numel} codes of {bits} bits"
        packed = _native.check_nbytes(packed, packed_nbytes(numel, bits), contents, f"{what}: packed")
        wire = _native.check(wire, torch.uint8, f"{what}: wire", _WIRE.itemsize, packed.device)
        x = torch.empty(numel, dtype=torch.float32, device=packed.device)
        table = _native.Table("<QQqQ")  # struct RangeCodes of csrc/common/range_float_fit.h
        table.add(wire, packed, numel, x)
        if table.run_failed("range_float_decode_packed", bits):
            raise PayloadError(f"corrupt range float: {BAD_CODES}")
        return x

    def to_wire(self) -> bytes:
        """Return the 8 bytes from which a peer decodes. Waits for the device if the format was fitted on CUDA."""
        return np.array([(self.pbase, self.positive, self.mantissa, self.bits)], _WIRE).tobytes()

    @classmethod
    def from_wire(cls, data: bytes) -> RangeFloat:
        """Read what `to_wire` wrote. Raises PayloadError unless every code decodes to a finite number."""
        if len(data) != _WIRE.itemsize:
            raise PayloadError(f"corrupt range float: got {len(data)} bytes, expected {_WIRE.itemsize}")
        words = words_of_wire(data)
        return cls._of_words(torch.from_numpy(words.view(np.int32)), int(words["bits"][0]))

    def __repr__(self) -> str:
        return f"RangeFloat(bits={self.bits}, mantissa={self.mantissa}, vmin={self.vmin}, vmax={self.vmax})"


def words_of_wire(data: bytes) -> np.ndarray:
    """Read several formats that `RangeFloat.to_wire` wrote, one after the other.

    Returns a struct RangeFloat for each, of dtype `WORDS`. Raises PayloadError, with its `index`, for the first one of
    which not every code decodes to a finite number.
    """
    wires = np.frombuffer(data, _WIRE)
    pbase, positive, mantissa, bits = [wires[name].astype(np.int64) for name in _WIRE_FIELDS]
    codes = (1 << np.minimum(bits, 16)) - 1
    sizes = (bits >= 2) & (bits <= 16) & (mantissa >= 1) & (mantissa <= bits) & (pbase >= 1) & (positive <= codes)
    room = (_FLT_MAX_BITS >> (23 - np.minimum(mantissa, 16))) - pbase + 1  # numbers from eps to the largest float
    valid = sizes & (positive <= room)
    if not valid.all():
        i = int(valid.argmin())
        got = f"N={bits[i]}, m={mantissa[i]}, pbase={pbase[i]}, P={positive[i]}"
        beyond = f"{positive[i]} numbers from pbase={pbase[i]} pass the largest float"
        raise PayloadError(f"corrupt range float: {beyond if sizes[i] else got}", i)
    words = np.empty(len(wires), WORDS)
    words["pbase"], words["positive"], words["mantissa"], words["bits"] = pbase, positive, mantissa, bits
    words["negative"] = np.maximum(0, np.minimum(codes - positive, room))
    words["vmin"] = words["vmax"] = math.nan
    return words


def check_format(bits: int, mantissa: int | None, required: bool = False) -> None:
    """Raise ValueError unless `bits` and `mantissa` are valid; a mantissa of None is, unless `required`."""
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
