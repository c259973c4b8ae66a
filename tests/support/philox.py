"""Philox4x32-10 in NumPy, from the paper (Salmon et al., SC'11), and the draws that primitives derive from it."""

import numpy as np


def words(key: int, count: int, first: int = 0) -> np.ndarray:
    """Draws first to first + count - 1 of a key, as uint32: word i % 4 of the block with counter i // 4 is draw i."""
    index = np.arange(first, first + count, dtype=np.uint64)
    counter, low = index // np.uint64(4), np.uint64(0xFFFFFFFF)
    c = [counter & low, counter >> np.uint64(32), np.zeros_like(counter), np.zeros_like(counter)]
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (b >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]),
            b & low,
            (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]),
            a & low,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.choose((index % np.uint64(4)).astype(np.int64), c).astype(np.uint32)


def uniform(key: int, count: int) -> np.ndarray:
    """Draws as numbers in [0, 1) of 24 bits."""
    return (words(key, count) >> 8) * 2.0**-24


def coins(key: int, count: int) -> np.ndarray:
    """Single bits: bit i % 32 of draw i // 32."""
    each = words(key, -(-count // 32))
    return (each[np.arange(count) // 32] >> (np.arange(count, dtype=np.uint32) % 32)) & 1 == 1


def negative(x: np.ndarray, key: int) -> np.ndarray:
    """Whether each sign bit is set: x < 0, and a coin if x has no sign."""
    return np.where((x == 0) | np.isnan(x), coins(key, x.size), x < 0)
