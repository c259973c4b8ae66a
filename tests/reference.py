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


class Guarded:
    """Memory for a result, with guard bytes on both sides that detect writes out of bounds."""

    def __init__(self, numel: int, dtype: torch.dtype, offset: int = 1) -> None:
        self._bytes = torch.full(((numel + 2 * 128) * dtype.itemsize,), 0xA5, dtype=torch.uint8)
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


# --- FFTRange (HPDC'20, section 3)


def bin_weights(length: int) -> np.ndarray:
    """The number of frequencies of the full transform that each bin of a real transform represents."""
    weights = np.full(length // 2 + 1, 2.0)
    weights[0] = 1.0
    if length % 2 == 0:
        weights[-1] = 1.0
    return weights


def spectrum(x: np.ndarray, rows: int, length: int) -> np.ndarray:
    padded = np.zeros(rows * length)
    padded[: x.size] = x.reshape(-1)
    return np.fft.rfft(padded.reshape(rows, length), norm="ortho")


def signal(bins: np.ndarray, length: int, numel: int) -> np.ndarray:
    return np.fft.irfft(bins, n=length, norm="ortho").reshape(-1)[:numel]


def kept_bins(bins: np.ndarray, length: int, k: int) -> np.ndarray:
    """Mask of the k bins with the most energy, over all rows."""
    energy = (np.abs(bins) ** 2 * bin_weights(length)).reshape(-1)
    mask = np.zeros(energy.size, dtype=bool)
    mask[np.argsort(-energy, kind="stable")[:k]] = True
    return mask.reshape(bins.shape)


def fft_sparsify(x: np.ndarray, rows: int, length: int, k: int) -> np.ndarray:
    """The best approximation by k bins, flat: FFTRange without quantization."""
    bins = spectrum(x, rows, length)
    return signal(np.where(kept_bins(bins, length, k), bins, 0), length, x.size)


def checksum(payload: bytes) -> int:
    """The checksum of a payload, with its own field as zero (csrc/common/payload.h)."""
    words = np.frombuffer(payload[:24] + bytes(4) + payload[28:], "<u8")
    x = words + np.arange(1, words.size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    total = int((x ^ (x >> np.uint64(29))).sum(dtype=np.uint64))
    return (total ^ (total >> 32)) & 0xFFFFFFFF


class FFTPayload(NamedTuple):
    """An FFTRange payload, parsed by its documented layout alone."""

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
    bins: np.ndarray  # flat, complex128


HEADER = struct.Struct("<2sBBIQQIIQIHBB")


def read_fft_payload(payload: Tensor, total_bins: int) -> FFTPayload:
    data = payload.numpy().tobytes()
    *header, k, pbase, positive, mantissa, bits = HEADER.unpack_from(data)
    body = np.frombuffer(data, np.uint8, offset=HEADER.size)
    marked = np.unpackbits(body[: -(-total_bins // 8)], bitorder="little").astype(bool)
    codes = unpack_bits(body[-(-total_bins // 8) :], bits, 2 * k)
    number = RangeFormat(bits, mantissa, pbase, positive, 2**bits - 1 - positive)
    values = number.codebook[codes]
    bins = np.zeros(total_bins, complex)
    bins[np.flatnonzero(marked)] = values[0::2] + 1j * values[1::2]
    return FFTPayload(*header, k, number, bins)


# --- real gradients


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
