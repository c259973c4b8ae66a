import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from gradzip import ops
from mutation import mutate
from reference import Guarded, bitmap, decode_bitmap, encode_bitmap, examples, same_everywhere, sliced

SEGMENT = 1024
SIZES = [0, 1, 7, 63, 64, 65, 1000, 1023, 1024, 1025, 2047, 2049, 131071, 131073]


def masks(n):
    rng = np.random.default_rng(n)
    changing = np.repeat(rng.choice([0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.6, 0.9, 1], n // 300 + 1), 300)[:n]
    yield from (rng.random(n) < p for p in (changing, 0.15, 0.003))
    if n <= 10000:
        yield from (rng.random(n) < p for p in (0, 0.02, 0.06, 0.3, 0.5, 0.7, 0.99, 1))
        yield np.arange(n) == n - 1
        yield np.arange(n) % SEGMENT >= SEGMENT - 200  # longer as codes than as it is
        yield np.arange(n) % SEGMENT < 70


@pytest.mark.parametrize("n", SIZES)
def test_round_trip(n):
    for mask in masks(n):
        plain = sliced(bitmap(mask))
        out = Guarded(ops.bitmap_code_capacity(n), torch.uint8)
        back = Guarded(plain.numel(), torch.uint8)
        stream = same_everywhere(lambda p=plain, o=out: ops.bitmap_code_encode(p, n, out=o.out).clone())
        assert stream.numpy().tobytes() == encode_bitmap(mask)
        count = int(mask.sum())
        stream = sliced(stream.numpy())
        again = same_everywhere(lambda s=stream, b=back, c=count: ops.bitmap_code_decode(s, n, c, out=b.out).clone())
        assert torch.equal(again, plain)
        assert out.intact() and back.intact()
        for other in (count - 1, count + 1):
            with pytest.raises(ops.PayloadError, match=f"not a bitmap of {n} elements with {other} set"):
                ops.bitmap_code_decode(stream, n, other, out=back.out)


@pytest.mark.parametrize("segment", [64, 192, 512])
@pytest.mark.parametrize("n", [1, 64, 191, 512, 5000, 70001])
def test_segments_of_other_sizes(n, segment):
    for mask in masks(n):
        out = Guarded(ops.bitmap_code_capacity(n, segment), torch.uint8)
        assert ops.bitmap_code_capacity(n, segment) == 2 * -(-n // segment) + -(-n // 8)
        plain = torch.from_numpy(bitmap(mask))
        stream = same_everywhere(lambda p=plain, o=out: ops.bitmap_code_encode(p, n, segment, out=o.out).clone())
        assert out.intact() and stream.numpy().tobytes() == encode_bitmap(mask, segment)
        count = int(mask.sum())
        assert torch.equal(same_everywhere(lambda s=stream, c=count: ops.bitmap_code_decode(s, n, c, segment)), plain)


@pytest.mark.parametrize("segment", [0, -64, 32, 100, 1088, 64.0, None])
def test_wrong_segment(segment):
    with pytest.raises(ValueError, match=r"segment = .*, expected a multiple of 64 up to 1024"):
        ops.bitmap_code_encode(torch.zeros(100, dtype=torch.uint8), 800, segment)
    with pytest.raises(ValueError, match=r"segment = .*, expected a multiple of 64 up to 1024"):
        ops.bitmap_code_decode(torch.zeros(2, dtype=torch.uint8), 800, 0, segment)


def entropy(p):
    return -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) if 0 < p < 1 else 0.0


@pytest.mark.parametrize("p", [0.01, 0.05, 0.15, 0.38, 0.5, 0.85, 0.99])
def test_size_is_near_the_entropy(p):
    """Apart from the table: Rice codes are within 4.5 % (0.38 is the worst), and padding is 4 bits a segment."""
    n = 1 << 20
    mask = np.random.default_rng(1).random(n) < p
    bits = 8 * ops.bitmap_code_encode(torch.from_numpy(bitmap(mask)), n).numel() - 16 * n // SEGMENT
    wanted = n * entropy(mask.mean())
    assert 0.999 * wanted <= bits <= (1.045 if p == 0.38 else 1.02) * wanted


def test_segments_adapt_to_their_density():
    """Planes of a segment each cost what they cost by themselves: less than 6 % above their entropy, with the table."""
    shares = [0.6, 0.3, 0.1, 0.05, 0.02, 0.01]
    mask = np.random.default_rng(2).random(600 * SEGMENT) < np.repeat(shares * 100, SEGMENT)
    bits = 8 * ops.bitmap_code_encode(torch.from_numpy(bitmap(mask)), mask.size).numel() / mask.size
    assert 1 < bits / np.mean([entropy(p) for p in shares]) < 1.06


def test_capacity_suffices():
    n = 64 * SEGMENT + 5
    rng = np.random.default_rng(3)
    for mask in (rng.random(n) < 0.45, np.arange(n) % 2, np.arange(n) % SEGMENT > SEGMENT * 0.62):
        stream = ops.bitmap_code_encode(torch.from_numpy(bitmap(mask)), n)
        assert stream.numel() <= ops.bitmap_code_capacity(n) == 2 * 65 + -(-n // 8)


def check_any(data: bytes, n: int) -> None:
    """The result is that of the reference, or the stream is refused; nothing is written past `out`."""
    mask = decode_bitmap(data, n)
    stream = sliced(np.frombuffer(data, np.uint8))
    out = Guarded(-(-n // 8), torch.uint8)
    count = 0 if mask is None else int(mask.sum())

    def run():
        try:
            return ops.bitmap_code_decode(stream, n, count, out=out.out).clone()
        except ops.PayloadError:
            return None

    got = same_everywhere(run)
    assert out.intact()
    assert got is None if mask is None else torch.equal(got, torch.from_numpy(bitmap(mask)))


@examples
@given(st.binary(max_size=200), st.integers(1, 3000), st.integers(0, 9))
def test_any_segments(body, n, seed):
    """Any bytes, behind a table whose sizes add up."""
    rng, segments = np.random.default_rng(seed), -(-n // SEGMENT)
    cuts = [0, *sorted(rng.integers(0, len(body) + 1, segments - 1).tolist()), len(body)]
    sizes = np.diff(cuts)
    entries = sizes | rng.integers(0, 16, segments) << 10 | rng.integers(0, 2, segments) << 14
    check_any(entries.astype("<u2").tobytes() + body, n)


@examples
@given(st.data(), st.integers(1, 5000))
def test_mutated_streams(data, n):
    mask = np.random.default_rng(n).random(n) < data.draw(st.sampled_from([0.01, 0.1, 0.2, 0.3, 0.5, 0.8]))
    stream = bytearray(ops.bitmap_code_encode(torch.from_numpy(bitmap(mask)), n).numpy().tobytes())
    mutate(stream, data, most=3)
    check_any(bytes(stream), n)


@pytest.mark.parametrize("n", [1, 1000, 70001])
def test_several_streams_at_once(n):
    """As one by one. The index is that of the first corrupt stream."""
    plain = [bitmap(mask) for mask in [*masks(n)][:3] * 7]
    streams = [ops.bitmap_code_encode(torch.from_numpy(bits), n) for bits in plain]
    counts = [ops.bitmap_count(torch.from_numpy(bits), n) for bits in plain]
    out = [Guarded(bits.size, torch.uint8) for bits in plain]
    bitmaps, corrupt = ops.bitmap_code_decode_all(streams, n, counts, out=[o.out for o in out])
    assert corrupt is None and all(o.intact() for o in out)
    assert all(np.array_equal(got, bits) for got, bits in zip(bitmaps, plain, strict=True))
    for damaged in (0, 7, 19):
        for others in ([damaged], [damaged, 19]):
            cut = [stream[:-1] if i in others else stream for i, stream in enumerate(streams)]
            assert ops.bitmap_code_decode_all(cut, n, counts)[1] == damaged
            claimed = [count + (i in others) for i, count in enumerate(counts)]
            assert ops.bitmap_code_decode_all(streams, n, claimed)[1] == damaged
    empty = streams[0][:0]
    assert ops.bitmap_code_decode_all([empty, empty], 0, [0, 0])[1] is None
    assert ops.bitmap_code_decode_all([empty, streams[0]], 0, [0, 0])[1] == 1


def test_golden():
    """Detects changes of the wire format."""
    mask = np.zeros(3000, bool)
    mask[[3, 4, 700, 1000]] = True
    mask[1024:2048] = True
    mask[1500] = False
    mask[2048:2200:7] = True
    stream = ops.bitmap_code_encode(torch.from_numpy(bitmap(mask)), 3000)
    assert stream.numpy().tobytes().hex() == GOLDEN


GOLDEN = "051c026411140701e08d2bb90341d3344dd3344dd3344dd3344dd3344d03"


def test_errors():
    bits = torch.zeros(13, dtype=torch.uint8)
    stream = ops.bitmap_code_encode(bits, 100)
    assert stream.numel() == 2
    for f, error, message in [
        (lambda: ops.bitmap_code_encode(bits, 105), ValueError, "bitmap: got 13 elements, expected 14"),
        (lambda: ops.bitmap_code_encode(bits.int(), 100), ValueError, "bitmap: got torch.int32, expected torch.uint8"),
        (lambda: ops.bitmap_code_encode(bits, 100, out=bits), ValueError, "out: got 13 bytes, expected at least 15"),
        (lambda: ops.bitmap_code_decode(stream, 100, 0, out=bits[1:]), ValueError, "out: got 12 elements, expected 13"),
        (lambda: ops.bitmap_code_decode(stream[1:], 100, 0), ops.PayloadError, "got 1 bytes that are not a bitmap"),
        (lambda: ops.bitmap_code_decode(stream, 0, 0), ops.PayloadError, "not a bitmap of 0 elements"),
        (lambda: ops.bitmap_code_decode(stream[:0], 0, 1), ops.PayloadError, "not a bitmap of 0 elements with 1 set"),
    ]:
        with pytest.raises(error, match=message):
            f()


@pytest.mark.parametrize("segment", [64, 192, 1024])
@pytest.mark.parametrize("n", [1, 63, 1024, 1025, 5000, 70001])
def test_capacity_for_a_number_of_bits(n, segment):
    """Segments of the worst density, too: each number of bits set, in the order that makes the longest codes."""
    worst = [np.arange(segment) >= segment - k for k in range(0, segment + 1, max(1, segment // 64))]
    cases = [*masks(n), *(np.resize(tile, n) for tile in worst), np.resize(np.concatenate(worst), n)]
    for mask in cases:
        capacity = ops.bitmap_code_capacity(n, segment, int(mask.sum()))
        stream = ops.bitmap_code_encode(torch.from_numpy(bitmap(mask)), n, segment)
        assert stream.numel() <= capacity <= ops.bitmap_code_capacity(n, segment)


@pytest.mark.parametrize("p, most", [(0.003, 1.7), (0.05, 1.12), (0.15, 1.09), (0.3, 1.09), (0.5, 1.02)])
def test_capacity_for_random_bits(p, most):
    n = 1 << 20
    mask = np.random.default_rng(5).random(n) < p
    stream = ops.bitmap_code_encode(torch.from_numpy(bitmap(mask)), n)
    assert stream.numel() < ops.bitmap_code_capacity(n, count=int(mask.sum())) < most * stream.numel()
