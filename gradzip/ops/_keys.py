"""Keys of the counter-based generator (csrc/common/philox.h)."""

from __future__ import annotations


def check_key(key: int, what: str) -> int:
    """`key`, if it is an integer of 64 bits; ValueError."""
    if not (isinstance(key, int) and 0 <= key < 1 << 64):
        raise ValueError(f"{what}: got key = {key!r}, expected an integer from 0 to 2**64 - 1")
    return key
