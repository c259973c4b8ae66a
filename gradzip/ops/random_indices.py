"""Indices that ranks agree on without sending them."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native, replays


def random_indices(numel: int, k: int, key: int, device: torch.device | str = "cpu") -> Tensor:
    """Return k of the indices below numel, each with probability k / numel: int32, strictly ascending.

    0 <= k <= numel = n < 2^31; key: 64-bit key of the random generator; device: where to draw. Draw i of the key, a
    word w of 32 bits, picks the element at floor(w size / 2^32) of stratum i, [i n / k, (i + 1) n / k); draw k picks a
    shift of 0 to n - 1 in the same way, which is added to all of them, modulo n. They are spread more evenly than
    independent draws, and no sort is needed. Deterministic. Does not wait for the device.

    >>> random_indices(1000, 4, key=1).tolist()
    [144, 317, 598, 893]
    """
    _native.check_key(key, "random_indices")
    if not 0 <= k <= numel:
        raise ValueError(f"random_indices: got k = {k}, expected 0 to {numel} (the number of elements)")
    if numel >= 2**31:
        raise ValueError(f"random_indices: got {numel} elements, expected fewer than 2^31")
    indices = torch.empty(k, dtype=torch.int32, device=device)
    indices = _native.check(indices, torch.int32, "random_indices: device")
    _native.run("random_indices", indices, numel, k, key, replays.address(indices), indices.data_ptr())
    return indices
