"""Little-endian bit streams of fixed-width codes."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native


def packed_nbytes(numel: int, bits: int) -> int:
    """Return the size of a stream of `numel` codes of `bits` bits."""
    return (numel * bits + 7) // 8


def _check_bits(bits: int, what: str) -> None:
    if not 1 <= bits <= 32:
        raise ValueError(f"{what}: got bits = {bits}, expected 1 to 32")


def pack_bits(codes: Tensor, bits: int, out: Tensor | None = None) -> Tensor:
    """Return the low `bits` bits of each code as a bit stream.

    codes: n elements, int32; 1 <= bits <= 32. Returns uint8 of ceil(n * bits / 8), in `out` if given; spare bits are 0.
    Deterministic. Does not wait for the device.

    >>> pack_bits(torch.tensor([1, 2, 3], dtype=torch.int32), 4).tolist()
    [33, 3]
    """
    _check_bits(bits, "pack_bits")
    codes = _native.check(codes, torch.int32, "pack_bits: codes")
    out = _native.output(out, packed_nbytes(codes.numel(), bits), torch.uint8, codes.device, "pack_bits: out")
    _native.run("pack_bits", codes, codes.data_ptr(), codes.numel(), bits, out.data_ptr())
    return out


def unpack_bits(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Return the codes that `pack_bits` packed: int32 of `numel`.

    packed: uint8. Raises PayloadError if its size is not that of `numel` codes. Does not wait for the device.
    """
    _check_bits(bits, "unpack_bits")
    if numel < 0:
        raise ValueError(f"unpack_bits: got numel = {numel}, expected a number >= 0")
    contents = f"{numel} codes of {bits} bits"
    packed = _native.check_nbytes(packed, packed_nbytes(numel, bits), contents, "unpack_bits: packed")
    out = torch.empty(numel, dtype=torch.int32, device=packed.device)
    _native.run("pack_bits_unpack", packed, packed.data_ptr(), numel, bits, out.data_ptr())
    return out
