import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradzip import ops
from reference import same_everywhere


def chosen(n, share, seed=0):
    return torch.from_numpy(np.flatnonzero(np.random.default_rng(seed).random(n) < share).astype(np.int32))


def reference_decode(stream, numel):
    """The format of common/index_code.h, over a string of bits."""
    data = stream.numpy().tobytes()
    coded, count, nbytes = struct.unpack_from("<III", data)
    assert nbytes == len(data)
    bits = lambda part: "".join(f"{byte:08b}"[::-1] for byte in part)  # noqa: E731
    if not coded:
        return [i for i, bit in enumerate(bits(data[12:])[:numel]) if bit == "1"]
    blocks = -(-count // 2048)
    table = [struct.unpack_from("<II", data, 12 + 8 * b) for b in range(blocks)]
    indices, start, begin = [], 0, 12 + 8 * blocks
    for b, (end, end_byte) in enumerate(table):
        block = data[begin : 12 + 8 * blocks + end_byte]
        size, k = min(2048, count - 2048 * b), block[0]
        split = 1 + -(-size * k // 8)
        low, unary = bits(block[1:split]), bits(block[split:])
        above = [len(zeros) for zeros in unary.split("1")[:size]]
        for i in range(size):
            start += (above[i] << k) + int("0" + low[i * k : (i + 1) * k][::-1], 2)
            indices.append(start)
            start += 1
        assert start == end
        begin += len(block)
    return indices


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 5000, 1000003])
def test_round_trip(n):
    for share in (0.0, 0.0001, 0.01, 0.15, 0.5, 1.0):
        indices = chosen(n, share)
        stream = same_everywhere(lambda indices=indices: ops.index_code_encode(indices, n))
        assert stream.numel() <= 12 + (n + 7) // 8
        assert torch.equal(same_everywhere(lambda stream=stream: ops.index_code_decode(stream, n)), indices)
        if n <= 5000 or share == 0.01:
            assert reference_decode(stream, n) == indices.tolist()
        bits = np.zeros(n, bool)
        bits[indices.numpy()] = True
        bitmap = torch.from_numpy(np.packbits(bits, bitorder="little"))
        assert torch.equal(same_everywhere(lambda bitmap=bitmap: ops.index_code_encode(bitmap, n)), stream)
        values, start = torch.randn(indices.numel()), torch.randn(n)

        def add(stream=stream, values=values, start=start):
            out = start.clone()
            ops.index_code_decode_add(stream, values, out, 0.25)
            return out

        expected = start.clone()
        expected[indices.long()] += 0.25 * values
        assert torch.equal(same_everywhere(add), expected)


def test_several_sums_in_one_call():
    """They have the bits of the terms added one by one, in order, and an error names the term."""
    sizes, start = (5000, 1, 0, 33), torch.randn(5000)
    sums, expected = [], []
    for i, n in enumerate(sizes):
        terms = [(chosen(n, share), weight) for share, weight in ((0.5, 0.3), (1.0, -1 / 3), (0.01, 2.0))[: 3 - i % 2]]
        encoded = [((ops.index_code_encode(where, n), torch.randn(len(where))), weight) for where, weight in terms]
        expected.append(start[:n].clone() if i % 2 else torch.zeros(n))
        for (stream, values), weight in encoded:
            ops.index_code_decode_add(stream, values, expected[-1], weight)
        sums.append(ops.WeightedSum(start[:n].clone(), encoded, add=bool(i % 2)))
    ops.index_code_decode_add_all(sums)
    assert all(torch.equal(one.out, total) for one, total in zip(sums, expected))
    (stream, values), weight = sums[3].terms[0]
    wrong = sums[3]._replace(terms=[((stream, torch.cat([values, values])), weight)])
    with pytest.raises(ops.PayloadError, match="corrupt indices") as caught:
        ops.index_code_decode_add_all([sums[0], wrong])
    assert caught.value.index == len(sums[0].terms)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.05, 0.15])
def test_size_is_near_the_entropy(share):
    n = 3_000_000
    indices = chosen(n, share)
    p = indices.numel() / n
    entropy = -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) * n / 8
    nbytes = ops.index_code_encode(indices, n).numel()
    assert entropy < nbytes < 1.06 * entropy
    if share == 0.01:
        assert nbytes / indices.numel() <= 1.03


def test_each_block_has_its_own_parameter():
    """A dense and a sparse part cost as much as each by itself, less than at their mean density."""
    n = 3_000_000
    dense, sparse = chosen(n, 0.15), chosen(n, 0.001)
    apart = ops.index_code_encode(dense, n).numel() + ops.index_code_encode(sparse, n).numel()
    together = ops.index_code_encode(torch.cat([dense, sparse + n]), 2 * n).numel()
    assert 0.99 * apart < together < 1.01 * apart


def test_extremes():
    last = 2**31 - 2
    indices = torch.tensor([0, last], dtype=torch.int32)
    assert ops.index_code_decode(ops.index_code_encode(indices, 2**31 - 1), 2**31 - 1).tolist() == [0, last]


@settings(max_examples=150, deadline=None)
@given(st.sets(st.integers(0, 20000), max_size=300), st.integers(20001, 10**6))
def test_any_set(indices, numel):
    indices = torch.tensor(sorted(indices), dtype=torch.int32)
    stream = ops.index_code_encode(indices, numel)
    assert torch.equal(ops.index_code_decode(stream, numel), indices)


def check_never_harmful(stream, numel):
    """Decodes to ascending indices within bounds, or raises PayloadError."""
    guarded = torch.zeros(numel + 64)
    out = guarded[32 : 32 + numel]
    try:
        indices = ops.index_code_decode(stream, numel)
    except ops.PayloadError:
        count = struct.unpack_from("<I", stream.numpy().tobytes(), 4)[0] if len(stream) >= 8 else 0
        with pytest.raises(ops.PayloadError):
            ops.index_code_decode_add(stream, torch.ones(min(count, numel)), out)
    else:
        assert (indices.diff() > 0).all()
        assert not len(indices) or (indices[0] >= 0 and indices[-1] < numel)
        ops.index_code_decode_add(stream, torch.ones(len(indices)), out)
    assert guarded[:32].sum() == 0 and guarded[32 + numel :].sum() == 0


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_corrupt_streams(data):
    numel = data.draw(st.sampled_from([40, 3000, 90000]))
    share = data.draw(st.sampled_from([0.0, 0.02, 0.2, 0.7]))
    stream = ops.index_code_encode(chosen(numel, share, data.draw(st.integers(0, 9))), numel).clone()
    for _ in range(data.draw(st.integers(1, 4))):
        where = data.draw(st.integers(0, min(stream.numel() - 1, data.draw(st.sampled_from([40, 10**9])))))
        stream[where] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, 3))
    check_never_harmful(stream[: stream.numel() - cut] if cut else stream, numel)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80), st.integers(0, 1), st.integers(0, 60), st.integers(0, 500))
def test_random_streams(body, coded, count, numel):
    stream = struct.pack("<III", coded, count, 12 + len(body)) + body
    check_never_harmful(torch.frombuffer(bytearray(stream), dtype=torch.uint8), numel)


def test_a_stream_within_a_buffer():
    indices = chosen(3000, 0.05)
    stream = ops.index_code_encode(indices, 3000)
    buffer = torch.cat([stream, torch.full((9,), 255, dtype=torch.uint8)])
    opened, count = ops.index_code_open(buffer)
    assert count == indices.numel() and torch.equal(opened, stream)
    with pytest.raises(ops.PayloadError, match=f"got {buffer.numel()} bytes, expected {stream.numel()}"):
        ops.index_code_decode(buffer, 3000)
    with pytest.raises(ops.PayloadError, match=f"got {stream.numel() - 1} bytes, but they claim {stream.numel()}"):
        ops.index_code_open(stream[:-1])


def test_golden():
    """Detects changes of the wire format."""
    stream = ops.index_code_encode(torch.tensor([3, 4, 700, 1000], dtype=torch.int32), 1001)
    assert stream.numpy().tobytes().hex() == GOLDEN


GOLDEN = "01000000040000001a000000e903000006000000080300b72b53"


def test_errors():
    for wrong in ([3, 3], [4, 3], [-1, 2], [5, 100]):
        with pytest.raises(ValueError, match=r"not strictly ascending, or not within \[0, 100\)"):
            ops.index_code_encode(torch.tensor(wrong, dtype=torch.int32), 100)
    with pytest.raises(ValueError, match="indices: got torch.int64, expected torch.int32"):
        ops.index_code_encode(torch.tensor([1]), 100)
    stream = ops.index_code_encode(torch.tensor([1, 2], dtype=torch.int32), 100)
    with pytest.raises(ops.PayloadError, match="got 2 of them, expected 3, one per value"):
        ops.index_code_decode_add(stream, torch.zeros(3), torch.zeros(100))
    with pytest.raises(ops.PayloadError, match="got 2 of them, expected at most 1"):
        ops.index_code_decode(stream, 1)
    with pytest.raises(ValueError, match="expected a contiguous tensor"):
        ops.index_code_decode_add(stream, torch.zeros(2), torch.zeros(10, 10).t())


def spread(draw, numel):
    """Indices that make long streams: runs of equal gaps, of several sizes, in any order."""
    indices, at = [], 0
    while at < numel and len(indices) < 9000:
        gap, run = draw(st.integers(0, 300)), draw(st.integers(1, 3000))
        for _ in range(run):
            at += gap
            if at >= numel:
                break
            indices.append(at)
            at += 1
    return torch.tensor(indices, dtype=torch.int32)


def nbytes_of(indices, numel):
    """The size of the stream, written to as much memory as any takes."""
    return ops.index_code_write(indices, numel, torch.empty(12 + -(-numel // 8), dtype=torch.uint8))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_capacity_suffices_for_any_indices(data):
    numel = data.draw(st.integers(1, 200_000))
    indices = spread(data.draw, numel)
    assert nbytes_of(indices, numel) <= ops.index_code_capacity(len(indices), numel) <= 12 + -(-numel // 8)


def test_capacity_suffices_for_random_indices_and_is_not_much_more():
    for share, most in ((0.0001, 1.08), (0.001, 1.08), (0.01, 1.06), (0.1, 1.10), (0.5, 1.0)):
        indices = chosen(1_000_003, share)
        nbytes = nbytes_of(indices, 1_000_003)
        assert nbytes <= ops.index_code_capacity(len(indices), 1_000_003) <= most * nbytes + 12
    for numel in (0, 1, 100):
        assert ops.index_code_capacity(0, numel) == 12


def test_write_to_more_memory_than_needed():
    indices = chosen(3000, 0.05)
    stream = ops.index_code_encode(indices, 3000)
    out = torch.full((stream.numel() + 20,), 7, dtype=torch.uint8)
    assert ops.index_code_write(indices, 3000, out) == stream.numel()
    assert torch.equal(out[: stream.numel()], stream) and (out[stream.numel() :] == 7).all()
    with pytest.raises(ValueError, match="not strictly ascending"):
        ops.index_code_write(indices.flip(0).contiguous(), 3000, out)
    with pytest.raises(ops.PayloadError, match=f"got {len(indices)} of them, expected {len(indices) - 1}"):
        ops.index_code_decode(stream, 3000, len(indices) - 1)
