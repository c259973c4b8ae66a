"""One bit per sign, and the vote of several workers.

Bernstein, Wang, Azizzadenesheli, Anandkumar, signSGD: Compressed Optimisation for Non-Convex Problems, ICML 2018.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _native
from .bitmap import bitmap_nbytes
from .errors import PayloadError

_MOST_VOTERS = 65535


def pack_signs(x: Tensor, key: int = 0, out: Tensor | None = None) -> Tensor:
    """Return the signs of x: bit i % 8 of byte i // 8 is set if element i is negative.

    x: n elements, any shape, float32. Returns uint8 of ceil(n / 8), in `out` if given; spare bits are 0.

    0, -0 and NaN have no sign: a fair coin decides, coin i being bit i % 32 of draw i // 32 of `key`. So zeros are not
    biased to either sign, on average over elements, steps and ranks (give each its own key). Deterministic. Does not
    wait for the device.

    >>> pack_signs(torch.tensor([-1.0, 2.0, -3.0])).tolist()
    [5]
    """
    _native.check_key(key, "pack_signs")
    x = _native.check(x, torch.float32, "pack_signs: x")
    out = _native.output(out, bitmap_nbytes(x.numel()), torch.uint8, x.device, "pack_signs: out")
    _native.run("signs_pack", x, x.data_ptr(), x.numel(), key, out.data_ptr())
    return out


def majority(packed: Sequence[Tensor], numel: int, key: int = 0, out: Tensor | None = None) -> Tensor:
    """Return the majority of the votes, sign by sign.

    packed: 1 to 65535 tensors, uint8 of ceil(numel / 8) each, as from `pack_signs`. Returns uint8 of the same size, in
    `out` if given. Ties, which an even number of voters can have, go to coin i of `key` (as in `pack_signs`): all ranks
    must give the same key, which must differ from the keys they packed with. Raises PayloadError if the size of a vote
    is wrong. Deterministic and independent of the order of the votes. Does not wait for the device.

    >>> majority([torch.tensor([b], dtype=torch.uint8) for b in (0b0011, 0b0101, 0b1111)], 4).tolist()
    [7]
    """
    _native.check_key(key, "majority")
    if not 1 <= len(packed) <= _MOST_VOTERS:
        raise ValueError(f"majority: got {len(packed)} voters, expected 1 to {_MOST_VOTERS}")
    nbytes = bitmap_nbytes(numel)
    device = packed[0].device if isinstance(packed[0], Tensor) else None
    votes = [_native.check(vote, torch.uint8, f"majority: voter {i}", device=device) for i, vote in enumerate(packed)]
    for i, vote in enumerate(votes):
        if vote.numel() != nbytes:
            raise PayloadError(
                f"majority: got {vote.numel()} bytes from voter {i}, expected {nbytes} for {numel} signs"
            )
    out = _native.output(out, nbytes, torch.uint8, votes[0].device, "majority: out")
    addresses = array("q", [vote.data_ptr() for vote in votes])
    _native.run("signs_majority", out, addresses.buffer_info()[0], len(votes), numel, key, out.data_ptr())
    return out


def signs_decode_add(packed: Tensor, out: Tensor, scale: float = 1.0) -> None:
    """Add scale * sign to each element of `out`.

    packed: uint8 of ceil(n / 8), as from `pack_signs` or `majority`; out: n elements, float32, in place. Deterministic.
    Raises PayloadError, with out unchanged, if the size is wrong; any bits are valid signs. Does not wait for the
    device.
    """
    out = _native.in_place(out, torch.float32, "signs_decode_add: out")
    packed = _native.check(packed, torch.uint8, "signs_decode_add: packed", device=out.device)
    if packed.numel() != bitmap_nbytes(out.numel()):
        raise PayloadError(
            f"signs_decode_add: got {packed.numel()} bytes, expected {bitmap_nbytes(out.numel())} "
            f"for {out.numel()} signs"
        )
    _native.run("signs_decode_add", out, packed.data_ptr(), out.numel(), scale, out.data_ptr())
