"""Independent references in NumPy float64, written from the papers' formulas, and edge-case inputs for comparisons."""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import torch
from torch import Tensor, nn

from gradzip import _C
from gradzip.methods.base.transform import transform_shape

SIZES = (0, 1, 2, 8, 31, 32, 33, 63, 64, 65, 129, 1000, 32767, 32768, 32769, 100003)
LARGE = 1000003
U = 2.0**-24  # unit roundoff of float32
FLT_MAX = float(np.finfo(np.float32).max)

# The same examples in every run, none kept on disk.
examples = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)


# --- inputs


def arrays(n: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 arrays of n elements that cover different edge cases, by name."""
    rng = np.random.default_rng([n, seed])
    normal = rng.standard_normal(n)
    one_hot, mostly_zero = np.zeros(n), np.where(rng.random(n) < 0.02, normal, 0.0)
    infinite, nan = normal.copy(), normal.copy()
    if n:
        one_hot[n // 2] = -3.0
        infinite[rng.integers(n, size=3)] = np.inf, -np.inf, np.inf
        nan[rng.integers(n, size=3)] = np.nan, -np.inf, np.nan
    found = {
        "normal": normal,
        "laplace": rng.laplace(size=n),
        "heavy-tailed": rng.standard_t(1.5, size=n),
        "zeros": np.where(np.arange(n) % 2, 0.0, -0.0),
        "equal": np.where(np.arange(n) % 3, 0.25, -0.25),
        "few values": rng.integers(-2, 3, size=n).astype(float),
        "one-hot": one_hot,
        "mostly zero": mostly_zero,
        "denormal": normal * 1e-40,
        "periodic": np.sin(np.arange(n) * (2 * np.pi / 64)) * (1 + np.arange(n) % 5),
        "infinite": infinite,
        "NaN": nan,
    }
    return {name: values.astype(np.float32) for name, values in found.items()}


def sliced(array: np.ndarray, offset: int = 1) -> Tensor:
    """The array as a tensor that begins `offset` items into a larger one, so that it is aligned to an item only."""
    array = np.array(array, order="C")
    values = torch.from_numpy(array)
    whole = torch.full((array.size + offset + 3,), 77, dtype=values.dtype)
    part = whole[offset : offset + array.size]
    part.copy_(values.reshape(-1))
    return part.view(array.shape)


def as_tensor(data: bytes) -> Tensor:
    """A uint8 tensor with a copy of the bytes, which may be none."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def padded(nbytes: int) -> int:
    """The length of a payload of that many bytes."""
    return -(-nbytes // 16) * 16


class Guarded:
    """Memory for a result, with guard bytes on both sides that detect writes out of bounds."""

    def __init__(self, numel: int, dtype: torch.dtype, offset: int = 1) -> None:
        # By NumPy, on this thread: torch's threads would wait for busy cores.
        self._bytes = torch.from_numpy(np.full((numel + 2 * 128) * dtype.itemsize, 0xA5, np.uint8))
        whole = self._bytes.view(dtype)
        self.out = whole[offset : offset + numel]
        self._fences = whole[:offset].view(torch.uint8), whole[offset + numel :].view(torch.uint8)

    def intact(self) -> bool:
        return all(bool((fence == 0xA5).all()) for fence in self._fences)


# --- running


def bits_of(result: Any) -> Any:
    """A value that is equal if and only if two results have the same bits, NaN and -0.0 included."""
    if isinstance(result, Tensor):
        return (
            str(result.dtype),
            tuple(result.shape),
            result.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(result, (tuple, list)):
        return [bits_of(part) for part in result]
    return struct.pack("<d", result) if isinstance(result, float) else result


def same_everywhere(f: Callable[[], Any]) -> Any:
    """Run f at every SIMD level on 1 and 2 threads, assert that all results have the same bits, and return one."""
    before = _C.simd(), torch.get_num_threads()
    results = {}
    try:
        for level in _C.simd_levels():
            for threads in (1, 2):
                _C.set_simd(level)
                torch.set_num_threads(threads)
                results[level, threads] = f()
    finally:
        _C.set_simd(before[0])
        torch.set_num_threads(before[1])
    first = next(iter(results.values()))
    expected = bits_of(first)
    different = [setting for setting, result in results.items() if bits_of(result) != expected]
    assert not different, f"{different} differ from {next(iter(results))}"
    return first


# --- select, compact, pack


def by_magnitude(x: np.ndarray) -> np.ndarray:
    """Indices by descending magnitude, NaN first, ties by ascending index."""
    nan = np.isnan(x)
    return np.lexsort((np.arange(x.size), np.where(nan, 0.0, -np.abs(x.astype(np.float64))), ~nan))


def bitmap(mask: np.ndarray) -> np.ndarray:
    """Bit i % 8 of byte i // 8 is mask[i]."""
    return np.packbits(np.asarray(mask, dtype=bool), bitorder="little")


def pack_bits(codes: np.ndarray, bits: int) -> np.ndarray:
    """Bit j of code i is bit i * bits + j of the stream."""
    each = (np.asarray(codes, np.int64)[:, None] >> np.arange(bits)) & 1
    return np.packbits(each.astype(np.uint8).reshape(-1), bitorder="little")


def unpack_bits(packed: np.ndarray, bits: int, numel: int) -> np.ndarray:
    each = np.unpackbits(packed, bitorder="little")[: numel * bits].reshape(numel, bits)
    return (each.astype(np.int64) << np.arange(bits)).sum(axis=1)


# --- range-based floats (HPDC'20, section 3.2.1)


def range_number(t: Any, mantissa: int) -> np.ndarray:
    """The t-th number >= 0 (the 0th is 0) of those with `mantissa` bits of mantissa and the exponents of float32."""
    exponent, fraction = np.divmod(np.asarray(t, np.int64), 2**mantissa)
    fraction = fraction / 2.0**mantissa
    return np.where(exponent == 0, np.ldexp(fraction, -126), np.ldexp(1 + fraction, exponent - 127))


def nearest_range_number(x: float, mantissa: int) -> int:
    """t of the nearest such number, ties upwards, never infinity."""
    exponent = max(int(np.frexp(x)[1]) - 1, -126) if x else -126
    t = (exponent + 126) * 2**mantissa + int(np.floor(np.ldexp(x, mantissa - exponent) + 0.5))
    return min(t, 255 * 2**mantissa - 1)


class RangeFormat(NamedTuple):
    bits: int
    mantissa: int
    pbase: int
    positive: int
    negative: int

    @property
    def eps(self) -> float:
        return float(range_number(self.pbase, self.mantissa))

    @property
    def codebook(self) -> np.ndarray:
        """The value of every code: zero, the positive ones ascending, the negative ones descending."""

        def numbers(count: int) -> np.ndarray:
            return range_number(self.pbase + np.arange(count), self.mantissa)

        return np.concatenate([[0.0], numbers(self.positive), -numbers(self.negative)])

    def encode(self, x: np.ndarray) -> np.ndarray:
        """Code of the nearest number of the same sign, or zero; ties away from zero; NaN is zero."""
        book = self.codebook
        upper, lower = book[: 1 + self.positive], -np.concatenate([[0.0], book[1 + self.positive :]])

        def nearest(numbers: np.ndarray) -> np.ndarray:
            return np.searchsorted((numbers[1:] + numbers[:-1]) / 2, np.abs(x.astype(np.float64)), side="right")

        return self._signed(x, nearest(upper), nearest(lower))

    def encode_stochastic(self, x: np.ndarray, key: int) -> np.ndarray:
        """Rounds up with the probability that makes it unbiased: draw i rounds x[i], by its low 23 - m bits between two
        numbers, by its high 24 bits between 0 and eps."""
        draws = philox(key, x.size)
        bits = 23 - self.mantissa
        up_from_number = 1.0 - (draws % 2**bits) / 2.0**bits
        up_from_zero = ((draws >> np.uint64(8)) + np.uint64(1)) / 2.0**24
        magnitude = np.abs(x.astype(np.float64))

        def choose(count: int) -> np.ndarray:
            numbers = range_number(self.pbase + np.arange(count + 1), self.mantissa)
            below = np.clip(np.searchsorted(numbers, magnitude, side="right") - 1, 0, max(0, count - 1))
            share = (magnitude - numbers[below]) / (numbers[np.minimum(below + 1, count)] - numbers[below] + 1e-300)
            index = np.minimum(1 + below + (share >= up_from_number), count)
            small = (magnitude > 0) & (magnitude >= (up_from_zero * self.eps).astype(np.float32))
            return np.where(magnitude >= self.eps, index, small & (count > 0))

        return self._signed(x, choose(self.positive), choose(self.negative))

    def _signed(self, x: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        codes = np.where(np.signbit(x), np.where(down > 0, self.positive + down, 0), up)
        return np.where(np.isnan(x), 0, codes)


def range_format(bits: int, mantissa: int, vmin: float, vmax: float) -> RangeFormat:
    """The paper's search for eps, by bisection: the smallest for which all numbers from eps to max and from -eps to
    min, and zero, have a code."""
    up = nearest_range_number(float(np.float32(vmax)), mantissa)
    down = nearest_range_number(-float(np.float32(vmin)), mantissa)

    def counts(t: int) -> tuple[int, int]:
        return max(0, up - t + 1), max(0, down - t + 1)

    too_small, fits = 0, max(up, down) + 1
    while fits - too_small > 1:
        t = (too_small + fits) // 2
        if sum(counts(t)) <= 2**bits - 1:
            fits = t
        else:
            too_small = t
    return RangeFormat(bits, mantissa, fits, *counts(fits))


def philox(key: int, n: int) -> np.ndarray:
    """The first n 32-bit draws of Philox4x32-10 (Salmon et al., SC'11): counters 0, 1, ... give four each."""
    mask, low = np.uint64(0xFFFFFFFF), np.uint64(32)
    zero = np.zeros(-(-n // 4), np.uint64)
    c0, c1, c2, c3 = np.arange(zero.size, dtype=np.uint64), zero, zero, zero
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (b >> low) ^ c1 ^ np.uint64(k0), b & mask, (a >> low) ^ c3 ^ np.uint64(k1), a & mask
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).reshape(-1)[:n]


# --- transforms of short blocks


def dct_matrix(*shape: int) -> np.ndarray:
    """The orthonormal DCT-II along every axis of an array of this shape: C[k, i] ~ cos(pi (2 i + 1) k / (2 N))."""
    whole = np.eye(1)
    for n in shape:
        k, i = np.arange(n)[:, None], np.arange(n)
        angle = (2 * i + 1) * k % (4 * n) * (np.pi / (2 * n))
        whole = np.kron(whole, np.sqrt(np.where(k, 2, 1) / n) * np.cos(angle))
    return whole


def float32_energy(re: np.ndarray, im: np.ndarray) -> np.ndarray:
    """re^2 + im^2, each operation rounded to 24 bits, exponents unlimited."""

    def rounded(x: np.ndarray) -> np.ndarray:
        mantissa, exponent = np.frexp(x)
        return np.ldexp(np.rint(mantissa * 2**24), exponent - 24)

    re, im = re.astype(np.float64), im.astype(np.float64)
    return rounded(rounded(re * re) + rounded(im * im))


class BlockTransform(NamedTuple):
    """A transform of rows: a DCT-II of arrays of this shape, a real Fourier transform of shape[0] numbers, or none of
    pairs of numbers. A row of coefficients is real; those of the last two kinds are pairs (re, im)."""

    kind: str  # "dct", "fourier" or "pairs"
    shape: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return 2 if self.kind == "pairs" else int(np.prod(self.shape))

    @property
    def group(self) -> int:
        return 1 if self.kind == "dct" else 2

    @property
    def tile_rows(self) -> int:
        """The largest power of two of rows that have 8192 elements at most."""
        return int(2 ** np.floor(np.log2(8192 / self.length)))

    def cut(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whole rows, and the elements after the last one."""
        whole = x.size // self.length * self.length
        return x[:whole].reshape(-1, self.length), x[whole:]

    def forward(self, rows: np.ndarray) -> np.ndarray:
        if self.kind == "dct":
            return rows @ dct_matrix(*self.shape).T
        if self.kind == "pairs" or not rows.size:
            return rows
        bins = np.fft.rfft(rows, norm="ortho")
        first = bins[:, 0].real + 1j * bins[:, -1].real
        return np.concatenate([first[:, None], np.sqrt(2) * bins[:, 1:-1]], axis=1).view(np.float64)

    def inverse(self, coefficients: np.ndarray) -> np.ndarray:
        if self.kind == "dct":
            return coefficients @ dct_matrix(*self.shape)
        if self.kind == "pairs" or not coefficients.size:
            return coefficients
        pairs = np.ascontiguousarray(coefficients, np.float64).view(np.complex128)
        bins = np.concatenate([pairs[:, :1].real, pairs[:, 1:] / np.sqrt(2), pairs[:, :1].imag], axis=1)
        return np.fft.irfft(bins, n=self.length, norm="ortho")

    def arrange(self, rows: np.ndarray, tail: np.ndarray) -> np.ndarray:
        """Coefficients in the order of the kernels: tile by tile, real parts first, plane by plane; then the tail."""
        padded = np.concatenate([tail, np.zeros(-tail.size % self.group, tail.dtype)]).reshape(-1, self.group).T
        tiles = [np.zeros(0, rows.dtype)]
        for first in range(0, len(rows) + (tail.size > 0), self.tile_rows):
            some = rows[first : first + self.tile_rows]
            planes = (
                some.reshape(len(some), self.length // self.group, self.group)
                .transpose(2, 1, 0)
                .reshape(self.group, -1)
            )
            last = first + self.tile_rows > len(rows)
            tiles.append(np.concatenate([planes, padded], axis=1).reshape(-1) if last else planes.reshape(-1))
        return np.concatenate(tiles)

    def tiles(self, coefficients: np.ndarray, n: int) -> list[np.ndarray]:
        """The tiles of what `arrange` returns for n elements: views of (group, number of groups)."""
        step = self.tile_rows * self.length
        sizes = [-(-min(step, n - first) // self.group) for first in range(0, n, step)]
        ends = np.cumsum([self.group * size for size in sizes], dtype=int)
        return [coefficients[end - self.group * size : end].reshape(self.group, size) for size, end in zip(sizes, ends)]

    def restore(self, coefficients: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """The inverse of `arrange`."""
        rows, tail, left = [np.zeros((0, self.length), coefficients.dtype)], coefficients[:0], n // self.length
        for tile in self.tiles(coefficients, n):
            count = min(left, self.tile_rows)
            left -= count
            whole = count * self.length // self.group
            planes = tile[:, :whole].reshape(self.group, self.length // self.group, count)
            rows.append(planes.transpose(2, 1, 0).reshape(count, self.length))
            tail = tile[:, whole:].T.reshape(-1)
        return np.concatenate(rows), tail[: n % self.length]

    def order(self, coefficients: np.ndarray, n: int) -> np.ndarray:
        """The groups of coefficients (float32, arranged) by descending magnitude; of equal ones, the first first."""
        keys = [t[0] if self.group == 1 else float32_energy(*t) for t in self.tiles(coefficients, n)]
        return by_magnitude(np.concatenate(keys))

    def take(self, coefficients: np.ndarray, n: int, mask: np.ndarray) -> np.ndarray:
        """The coefficients of the groups in the mask: of every tile, real parts first."""
        ends = np.cumsum([t.shape[1] for t in self.tiles(coefficients, n)])
        parts = zip(self.tiles(coefficients, n), np.split(mask, ends[:-1]))
        return np.concatenate([tile[:, kept].reshape(-1) for tile, kept in parts])

    def add(self, total: np.ndarray, n: int, mask: np.ndarray, values: np.ndarray) -> None:
        """Add what `take` returns to the arranged coefficients `total`."""
        first = position = 0
        for tile in self.tiles(total, n):
            kept = mask[first : first + tile.shape[1]]
            count = self.group * int(kept.sum())
            tile[:, kept] += values[position : position + count].reshape(self.group, -1)
            first, position = first + tile.shape[1], position + count


# --- coded bitmaps (csrc/common/bitmap_code.h)


def rice(gaps: list[int], k: int) -> bytes:
    """gap >> k zeros, a one, the low k bits, lowest first; without zero bytes at the end."""
    text = "".join("0" * (g >> k) + "1" + "".join(str(g >> i & 1) for i in range(k)) for g in gaps)
    data = bytes(int(text[i : i + 8][::-1], 2) for i in range(0, len(text), 8))
    return data.rstrip(b"\0")


def encode_bitmap(mask: np.ndarray, segment: int = 1024) -> bytes:
    table, body = b"", b""
    for begin in range(0, len(mask), segment):
        part = mask[begin : begin + segment]
        inverted = bool(2 * part.sum() > len(part))
        at = np.flatnonzero(part ^ inverted)
        gaps = (np.diff(at, prepend=-1) - 1).tolist()
        size, count = len(part), len(at)
        k = next(k for k in range(16) if (54 * count) << k >= 13 * (2 * size - count)) if count else 0
        data, plain = rice(gaps, k), rice(gaps, 0)
        if len(data) >= len(plain):
            data, k = plain, 0
        table += (len(data) | k << 10 | inverted << 14).to_bytes(2, "little")
        body += data
    return table + body


def decode_bitmap(data: bytes, numel: int, segment: int = 1024) -> np.ndarray | None:
    """The mask, or None if the bytes are not a stream of one."""
    segments = -(-numel // segment)
    mask, at = [], 2 * segments
    if len(data) < at:
        return None
    for s in range(segments):
        entry, size = int.from_bytes(data[2 * s : 2 * s + 2], "little"), min(segment, numel - s * segment)
        nbytes, k, inverted = entry & 1023, entry >> 10 & 15, entry >> 14 & 1
        if entry >> 15 or nbytes > -(-size // 8) or at + nbytes > len(data):
            return None
        text = "".join(f"{byte:08b}"[::-1] for byte in data[at : at + nbytes])
        at += nbytes
        part, position, i = np.zeros(size, bool), 0, 0
        while (one := text.find("1", i)) >= 0:
            position += (one - i << k) + int("0" + text[one + 1 : one + 1 + k][::-1], 2)
            if position >= size:
                return None
            part[position] = True
            position += 1
            i = one + 1 + k
        mask.append(part ^ bool(inverted))
    return np.concatenate([*mask, np.zeros(0, bool)]) if at == len(data) else None


# --- FFTRange (HPDC'20, section 3) and DCTRange


class Basis(NamedTuple):
    """An orthonormal basis of the gradients of `numel` elements."""

    blocks: BlockTransform
    numel: int
    rows: tuple[int, int] | None = None  # number and length of FFTs, whose pairs `blocks` arranges

    @property
    def size(self) -> int:
        """The number of elements that `blocks` transforms."""
        return self.numel if self.rows is None else self.rows[0] * 2 * ((self.rows[1] + 1) // 2)

    @property
    def groups(self) -> int:
        return -(-self.size // self.blocks.group)

    @property
    def segment(self) -> int:
        """Of the coded bitmap: for real coefficients, rows of a tile, in whole words."""
        if self.blocks.group == 2:
            return 1024
        rows = self.numel // self.blocks.length
        return max(64, min(1024, self.blocks.tile_rows, rows - rows % 64))

    def num_kept(self, theta: float) -> int:
        return max(1, round((1 - theta) * self.groups))

    def coefficients(self, x: np.ndarray) -> np.ndarray:
        """float64, in the order of a payload's bitmap (of each tile: real parts first)."""
        x = x.reshape(-1).astype(np.float64)
        rows, tail = self.blocks.cut(x if self.rows is None else fft_pairs(x, *self.rows))
        return self.blocks.arrange(self.blocks.forward(rows), tail)

    def elements(self, coefficients: np.ndarray) -> np.ndarray:
        rows, tail = self.blocks.restore(coefficients, self.size)
        x = np.concatenate([self.blocks.inverse(rows).reshape(-1), tail])
        return x if self.rows is None else fft_elements(x, *self.rows)[: self.numel]

    def largest(self, coefficients: np.ndarray, k: int) -> np.ndarray:
        """The mask of the k groups with the most energy."""
        energy = np.concatenate([(tile**2).sum(0) for tile in self.blocks.tiles(coefficients, self.size)])
        mask = np.zeros(self.groups, bool)
        mask[np.argsort(-energy, kind="stable")[:k]] = True
        return mask

    def take(self, coefficients: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return self.blocks.take(coefficients, self.size, mask)

    def put(self, mask: np.ndarray, values: np.ndarray) -> np.ndarray:
        """The coefficients of which `take` returns `values`; the others are 0."""
        total = np.zeros(self.groups * self.blocks.group)
        self.blocks.add(total, self.size, mask, values)
        return total

    def best(self, x: np.ndarray, k: int) -> np.ndarray:
        """The best approximation of x by k groups: the codec without quantization."""
        coefficients = self.coefficients(x)
        mask = self.largest(coefficients, k)
        return self.elements(self.put(mask, self.take(coefficients, mask))).reshape(x.shape)


def fft_pairs(x: np.ndarray, rows: int, length: int) -> np.ndarray:
    """Frequencies of x, padded to rows of that length. Bins between the first and the last one stand for two, so they
    are multiplied by sqrt(2). The imaginary part of the first pair is the last bin, if it is real, or 0."""
    padded = np.zeros(rows * length)
    padded[: x.size] = x
    bins = np.fft.rfft(padded.reshape(rows, length), norm="ortho")
    pairs = np.sqrt(2) * bins[:, : (length + 1) // 2]
    pairs[:, 0] = bins[:, 0].real + (1j * bins[:, -1].real if length % 2 == 0 else 0)
    return pairs.reshape(-1).view(np.float64)


def fft_elements(pairs: np.ndarray, rows: int, length: int) -> np.ndarray:
    """The inverse of `fft_pairs`, with the padding."""
    pairs = np.ascontiguousarray(pairs).view(np.complex128).reshape(rows, -1)
    bins = np.zeros((rows, length // 2 + 1), complex)
    bins[:, : pairs.shape[1]] = pairs / np.sqrt(2)
    bins[:, 0] = pairs[:, 0].real
    if length % 2 == 0:
        bins[:, -1] = pairs[:, 0].imag
    return np.fft.irfft(bins, n=length, norm="ortho").reshape(-1)


def fft_basis(numel: int, block: int | None) -> Basis:
    """Of FFTRange."""
    if block in (8, 16, 32, 64, 128, 256, 512, 1024):
        return Basis(BlockTransform("fourier", (block,)), numel)
    return Basis(BlockTransform("pairs"), numel, transform_shape(numel, block))


def dct_basis(numel: int, *lengths: int) -> Basis:
    return Basis(BlockTransform("dct", lengths), numel)


class CodecPayload(NamedTuple):
    """A payload of FFTRange or DCTRange, parsed by its documented layout alone."""

    magic: bytes
    version: int
    method: int
    digest: int
    numel: int
    nbytes: int
    checksum: int
    flags: int
    k: int
    format: RangeFormat
    basis: Basis
    mask: np.ndarray
    coefficients: np.ndarray  # float64, in the order of the mask
    index: bytes  # the bitmap as it is sent

    @property
    def elements(self) -> np.ndarray:
        return self.basis.elements(self.coefficients)


HEADER = struct.Struct("<2sBBIQQII8sIHBB")


def _read(payload: Tensor, basis_of: Callable[..., Basis]) -> CodecPayload:
    """Header; codes; coded bitmap; padding. basis_of(numel, *lengths): of the lengths that the payload claims."""
    data = payload.numpy().tobytes()
    *header, fields, pbase, positive, mantissa, bits = HEADER.unpack_from(data)
    number = RangeFormat(bits, mantissa, pbase, positive, 2**bits - 1 - positive)
    body = np.frombuffer(data, np.uint8, offset=HEADER.size)
    k, *axes, padding = struct.unpack("<I3BB", fields)
    basis = basis_of(header[4], *(n + 1 for n in axes if n))
    count = k * basis.blocks.group
    nbytes = -(-count * number.bits // 8)
    index = body[nbytes : body.size - padding].tobytes()
    mask = decode_bitmap(index, basis.groups, basis.segment)
    assert mask is not None
    values = number.codebook[unpack_bits(body[:nbytes], number.bits, count)]
    return CodecPayload(*header, k, number, basis, mask, basis.put(mask, values), index)


def read_fft_payload(payload: Tensor, block: int | None) -> CodecPayload:
    return _read(payload, lambda numel: fft_basis(numel, block))


def read_dct_payload(payload: Tensor) -> CodecPayload:
    return _read(payload, dct_basis)


# --- payloads


def checksum(payload: bytes) -> int:
    """The checksum of a payload, with its own field as zero (csrc/common/payload.h)."""
    words = np.frombuffer(payload[:24] + bytes(4) + payload[28:], "<u8")
    x = words + np.arange(1, words.size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    total = int((x ^ (x >> np.uint64(29))).sum(dtype=np.uint64))
    return (total ^ (total >> 32)) & 0xFFFFFFFF


# --- gradients


def correlated(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers with correlated neighbours and heavy tails, as in real gradients."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, size=int(np.prod(shape)) + 4) + 0.1
    x = sum(x[i : x.size - 4 + i] * w for i, w in enumerate((0.2, 0.5, 1.0, 0.5, 0.2))) * 1e-3
    return torch.tensor(x.reshape(shape), dtype=torch.float32)


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


@functools.cache
def resnet20_gradients() -> dict[str, Tensor]:
    """Gradients of a ResNet-20's convolutions (1024 elements and more) on a batch of handwritten digits, by name."""
    from sklearn.datasets import load_digits

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            *(_Block(inputs, outputs) for inputs, outputs in itertools.pairwise(widths)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )
    digits = load_digits()
    images = torch.tensor(digits.images[:128], dtype=torch.float32).unsqueeze(1) / 8 - 1
    nn.functional.cross_entropy(model(images), torch.tensor(digits.target[:128])).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.dim() == 4 and p.numel() >= 1024}


# --- optimizers


class MomentumSGD:
    """SGD with weight decay, and momentum on the gradient and on the decay.

    Args:
        start: the parameters, by name.
        momenta: the momentum of the gradient, and that of the decay, by name.
    """

    def __init__(self, start: dict[str, Tensor], momenta: dict[str, tuple[float, float]]) -> None:
        self.parameters = {name: np.asarray(p.detach(), np.float64).copy() for name, p in start.items()}
        self.momenta = momenta
        self.velocities = dict.fromkeys(start, 0.0)
        self.decays = dict.fromkeys(start, 0.0)

    def step(self, grads: dict[str, Any], lr: float, weight_decays: dict[str, float]) -> None:
        for name, p in self.parameters.items():
            of_gradient, of_decay = self.momenta[name]
            self.velocities[name] = of_gradient * self.velocities[name] + np.asarray(grads[name], np.float64)
            self.decays[name] = of_decay * self.decays[name] + weight_decays[name] * p
            p -= lr * (self.velocities[name] + self.decays[name])
