"""One bit per sign, and the vote of several workers.

Bernstein, Wang, Azizzadenesheli, Anandkumar, signSGD: Compressed Optimisation for Non-Convex Problems, ICML 2018.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _native
from .bitmap import bitmap_nbytes
from .errors import PayloadError
from .weighted_sum import WeightedSum, decode_sums

_MOST_VOTERS = 65535


def pack_signs(x: Tensor, key: int = 0, out: Tensor | None = None) -> Tensor:
    """Return the signs of x: bit i % 8 of byte i // 8 is set if element i is negative.

    x: n elements, any shape, float32, float16 or bfloat16. Returns uint8 of ceil(n / 8), in `out` if given; spare bits
    are 0.

    0, -0 and NaN have no sign: a fair coin decides, coin i being bit i % 32 of draw i // 32 of `key`. So zeros are not
    biased to either sign, on average over elements, steps and ranks (give each its own key). Deterministic. Does not
    wait for the device.

    >>> pack_signs(torch.tensor([-1.0, 2.0, -3.0])).tolist()
    [5]
    """
    x = _native.check(x, _native.FLOATS, "pack_signs: x")
    out = _native.output(out, bitmap_nbytes(x.numel()), torch.uint8, x.device, "pack_signs: out")
    _pack([(x, key, out)], None)
    return out


def pack_signs_all(sources: Sequence[tuple[Tensor, int, Tensor]]) -> list[Tensor]:
    """Pack the signs of several tensors, and compute their statistics, in one call and one read.

    sources: (x, key, out) of each, as in `pack_signs`, all on one device. Returns for each two float32 numbers on the
    device, adjacent in memory: max \\|x\\| with the bits of `abs_max_tensor`, and mean \\|x\\|: the sum by
    ``bucket_norms(x, norm="l1")`` over n, infinite if that sum is the largest float, 0 for an empty tensor.

    >>> out = torch.empty(1, dtype=torch.uint8)
    >>> pack_signs_all([(torch.tensor([-1.0, 2.0, -3.0]), 0, out)]), out
    ([tensor([3., 2.])], tensor([5], dtype=torch.uint8))
    """
    if not sources:
        return []
    statistics = torch.empty(2 * len(sources), dtype=torch.float32, device=sources[0][0].device)
    _pack(sources, statistics)
    return list(statistics.split(2))


def _pack(sources: Sequence[tuple[Tensor, int, Tensor]], statistics: Tensor | None) -> None:
    table = _native.Table("<QqqQQ")  # struct SignsSource of csrc/common/signs.h
    for x, key, out in sources:
        x = _native.check(x, _native.FLOATS, "pack_signs: x", device=table.device)
        _native.in_place(out, torch.uint8, "pack_signs: out", bitmap_nbytes(x.numel()), x.device)
        dtype, key = _native.FLOATS.index(x.dtype), _native.check_key(key, "pack_signs")
        table.add(x, dtype, x.numel(), key, out)
    table.run("signs_pack", table.replays, _native.address(statistics))


def majority(packed: Sequence[Tensor], numel: int, key: int = 0, out: Tensor | None = None) -> Tensor:
    """Return the majority of the votes, sign by sign.

    packed: 1 to 65535 tensors, uint8 of ceil(numel / 8) each, as from `pack_signs`. Returns uint8 of the same size, in
    `out` if given. Ties, which an even number of voters can have, go to coin i of `key` (as in `pack_signs`): all ranks
    must give the same key, which must differ from the keys they packed with. Raises PayloadError if the size of a vote
    is wrong. Deterministic and independent of the order of the votes. Does not wait for the device.

    >>> majority([torch.tensor([b], dtype=torch.uint8) for b in (0b0011, 0b0101, 0b1111)], 4).tolist()
    [7]
    """
    [(winner, _)] = majority_all([(packed, numel, key)], count=False)
    if out is None:
        return winner
    _native.in_place(out, torch.uint8, "majority: out", winner.numel(), winner.device).view(-1).copy_(winner)
    return out


def majority_all(votes: Sequence[tuple[Sequence[Tensor], int, int]], count: bool = True) -> list[tuple[Tensor, Tensor]]:
    """Take several votes of the same number of voters, in one call.

    votes: (packed, numel, key) of each, as in `majority`, all on one device. Returns for each the majority and, unless
    `count` is false, for each voter the number of its signs that differ from it: int64 on the device; those of all
    votes are adjacent in memory.

    >>> ballots = [torch.tensor([b], dtype=torch.uint8) for b in (0b0011, 0b0101, 0b1111)]
    >>> majority_all([(ballots, 4, 0)])
    [(tensor([7], dtype=torch.uint8), tensor([1, 1, 1]))]
    """
    if not votes:
        return []
    voters = len(votes[0][0])
    ballots = _native.Table("<Q")
    for packed, numel, _ in votes:
        if not 1 <= len(packed) <= _MOST_VOTERS:
            raise ValueError(f"majority: got {len(packed)} voters, expected 1 to {_MOST_VOTERS}")
        if len(packed) != voters:
            raise ValueError(f"majority: got {len(packed)} voters, expected {voters} as in the first vote")
        for i, ballot in enumerate(packed):
            ballot = _native.check(ballot, torch.uint8, f"majority: voter {i}", device=ballots.device)
            if ballot.numel() != bitmap_nbytes(numel):
                raise PayloadError(
                    f"majority: got {ballot.numel()} bytes from voter {i}, expected {bitmap_nbytes(numel)} for "
                    f"{numel} signs"
                )
            ballots.add(ballot)
    rooms = [-(-bitmap_nbytes(numel) // 16) * 16 for _, numel, _ in votes]  # aligned: kernels store whole words
    memory = torch.empty(sum(rooms), dtype=torch.uint8, device=ballots.device)
    winners = []
    table = _native.Table("<qQQ")  # struct SignsVote of csrc/common/signs.h
    for (_, numel, key), room in zip(votes, memory.split_with_sizes(rooms)):
        winners.append(room[: bitmap_nbytes(numel)])
        table.add(numel, _native.check_key(key, "majority"), winners[-1])
    against = torch.empty(len(votes) * voters if count else 0, dtype=torch.int64, device=ballots.device)
    table.run("signs_majority", ballots.address, voters, table.replays, against.data_ptr() if count else 0)
    return list(zip(winners, against.split(voters) if count else [against] * len(winners)))


def signs_decode_add(packed: Tensor, out: Tensor, scale: float = 1.0) -> None:
    """Add scale * sign to each element of `out`.

    packed: uint8 of ceil(n / 8), as from `pack_signs` or `majority`; out: n elements, float32, in place. Deterministic.
    Raises PayloadError, with out unchanged, if the size is wrong; any bits are valid signs. Does not wait for the
    device.
    """
    signs_decode_add_all([WeightedSum(out, [(packed, scale)])])


def signs_decode_add_all(sums: Sequence[WeightedSum]) -> None:
    """Compute several sums of terms, scale * sign, in one call and one pass over each `out`.

    sums: their terms are (packed, scale). A sum that is not added to `out` may be float16 or bfloat16: it is rounded
    once. All tensors are on one device. The terms of a sum are added in order, with the bits of as many calls of
    `signs_decode_add`. Raises PayloadError, with nothing changed, if the size of a term is wrong.

    >>> out = torch.empty(3)
    >>> terms = [(torch.tensor([bits], dtype=torch.uint8), 0.5) for bits in (1, 3)]
    >>> signs_decode_add_all([WeightedSum(out, terms, add=False)])
    >>> out.tolist()
    [-1.0, 0.0, 1.0]
    """
    decode_sums("signs_decode_add", sums, "<QQd", _term, fails=False)  # struct SignsTerm


def _term(packed: Tensor, out: Tensor, scale: float) -> tuple[Tensor, None, float]:
    n = out.numel()
    what = "signs_decode_add: packed"
    return _native.check_nbytes(packed, bitmap_nbytes(n), f"{n} signs", what, out.device), None, scale
