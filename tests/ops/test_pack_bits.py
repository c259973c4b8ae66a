import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from gradzip import ops
from reference import LARGE, SIZES, Guarded, examples, pack_bits, same_everywhere, sliced, unpack_bits


def codes_of(n: int, bits: int) -> np.ndarray:
    """Random codes of the full width, including the least and the largest."""
    codes = np.random.default_rng([n, bits]).integers(0, 2**bits, size=n)
    codes[: n // 3] = 2**bits - 1
    codes[n // 3 : n // 2] = 0
    return codes.astype(np.uint32).view(np.int32)


@pytest.mark.parametrize("bits", range(1, 33))
def test_equals_numpy(bits):
    for n in SIZES:
        if n > 1000 and bits not in (1, 3, 8, 10, 13, 16, 17, 31, 32):
            continue
        codes = codes_of(n, bits)
        nbytes = ops.packed_nbytes(n, bits)
        assert nbytes == -(-n * bits // 8)
        fenced, tensor = Guarded(nbytes, torch.uint8), sliced(codes)

        def pack(fenced=fenced, tensor=tensor):
            ops.pack_bits(tensor, bits, out=fenced.out)
            assert fenced.intact()
            return fenced.out.clone()

        packed = same_everywhere(pack)
        assert np.array_equal(packed.numpy(), pack_bits(codes.view(np.uint32), bits))
        assert torch.equal(ops.pack_bits(tensor, bits), packed)
        stream = sliced(packed.numpy())
        unpacked = same_everywhere(lambda stream=stream, n=n: ops.unpack_bits(stream, bits, n))
        assert np.array_equal(unpacked.numpy(), codes)
        assert unpacked.dtype == torch.int32


@pytest.mark.parametrize("bits", [5, 10])
def test_large(bits):
    codes = codes_of(LARGE, bits)
    packed = same_everywhere(lambda: ops.pack_bits(torch.from_numpy(codes), bits))
    assert np.array_equal(packed.numpy(), pack_bits(codes, bits))
    assert np.array_equal(ops.unpack_bits(packed, bits, LARGE).numpy(), codes)


@examples
@given(st.data())
def test_round_trip(data):
    bits = data.draw(st.integers(1, 32))
    codes = np.array(data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=600)), np.uint32)
    packed = ops.pack_bits(torch.from_numpy(codes.view(np.int32).copy()), bits)
    assert np.array_equal(packed.numpy(), pack_bits(codes, bits))
    assert np.array_equal(ops.unpack_bits(packed, bits, codes.size).numpy().view(np.uint32), codes)


@examples
@given(stream=st.binary(min_size=1, max_size=100), bits=st.integers(1, 32), spare=st.integers(0, 7))
def test_any_stream_unpacks(stream, bits, spare):
    """Unpacks and packs to the same bytes, except for bits past the last code."""
    n = max(0, 8 * len(stream) - spare) // bits
    if ops.packed_nbytes(n, bits) != len(stream):
        return
    packed = np.frombuffer(stream, np.uint8)
    codes = ops.unpack_bits(torch.tensor(packed), bits, n)
    assert np.array_equal(codes.numpy().view(np.uint32), unpack_bits(packed, bits, n))
    assert np.array_equal(ops.pack_bits(codes, bits).numpy(), pack_bits(codes.numpy(), bits))


def test_higher_bits_are_dropped_at_every_width():
    codes = codes_of(1000, 32)
    for bits in range(1, 33):
        packed = ops.pack_bits(torch.from_numpy(codes), bits)
        assert np.array_equal(packed.numpy(), pack_bits(codes, bits))


def test_golden_bytes():
    """The wire format."""
    codes = torch.tensor([1, 2, 3, 1023, 512, 0, 7, 8, 9], dtype=torch.int32)
    assert ops.pack_bits(codes, 10).numpy().tobytes().hex() == "010830c0ff00027000020900"
    assert ops.pack_bits(codes, 3).tolist() == [0b11010001, 0b00001110, 0b00011100, 0b001]


def test_any_shape_and_strides():
    codes = torch.arange(12, dtype=torch.int32).view(3, 4)
    assert torch.equal(ops.pack_bits(codes, 4), ops.pack_bits(codes.view(-1), 4))
    assert torch.equal(ops.pack_bits(codes.t(), 4), ops.pack_bits(codes.t().contiguous(), 4))
    assert ops.unpack_bits(ops.pack_bits(codes, 8).repeat_interleave(2)[::2], 8, 12).tolist() == list(range(12))


@pytest.mark.parametrize("bits", [0, -1, 33, 64])
def test_wrong_bits(bits):
    with pytest.raises(ValueError, match=f"pack_bits: got bits = {bits}, expected 1 to 32"):
        ops.pack_bits(torch.zeros(4, dtype=torch.int32), bits)
    with pytest.raises(ValueError, match=f"unpack_bits: got bits = {bits}, expected 1 to 32"):
        ops.unpack_bits(torch.zeros(4, dtype=torch.uint8), bits, 4)


@pytest.mark.parametrize("codes", [[1], None, torch.zeros(4, dtype=torch.int64), torch.zeros(4)])
def test_wrong_codes(codes):
    with pytest.raises(ValueError, match="pack_bits: codes: got .*, expected"):
        ops.pack_bits(codes, 4)


@pytest.mark.parametrize("packed", [[1], None, torch.zeros(4, dtype=torch.int8), torch.zeros(4)])
def test_wrong_stream(packed):
    with pytest.raises(ValueError, match="unpack_bits: packed: got .*, expected"):
        ops.unpack_bits(packed, 4, 8)


@pytest.mark.parametrize("nbytes", [0, 12, 14, 1000])
def test_truncated_and_extended_streams(nbytes):
    with pytest.raises(ops.PayloadError, match=f"got {nbytes} bytes, expected 13 for 10 codes of 10 bits"):
        ops.unpack_bits(torch.zeros(nbytes, dtype=torch.uint8), 10, 10)


def test_wrong_output():
    codes = torch.zeros(4, dtype=torch.int32)
    for out in (torch.zeros(3, dtype=torch.uint8), torch.zeros(2), torch.zeros(4, dtype=torch.uint8)[::2], [0, 0]):
        with pytest.raises(ValueError, match="pack_bits: out: got .*, expected"):
            ops.pack_bits(codes, 4, out=out)


def test_negative_size():
    with pytest.raises(ValueError, match="got .*-1.*expected"):
        ops.unpack_bits(torch.empty(0, dtype=torch.uint8), 4, -1)
