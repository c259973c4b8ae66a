import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from gradzip.ops import (
    PayloadError,
    elias_capacity,
    elias_decode,
    elias_decode_add,
    elias_decode_sum,
    elias_encode,
    elias_quantize,
    packed_nbytes,
    quantize,
    quantize_decode_add,
    quantize_decode_sum,
    quantize_packed,
)
from mutation import mutate
from reference import LARGE, SIZES, Guarded, arrays, examples, resnet20_gradients, same_everywhere, sliced

CHUNK = 4096


def gamma(v: int) -> str:
    """Elias' gamma code, first bit first: the length in unary, then the bits below the top one, lowest first."""
    digits = f"{v:b}"
    return "0" * (len(digits) - 1) + "1" + digits[:0:-1]


def reference_encode(codes) -> bytes:
    chunks = []
    for begin in range(0, len(codes), CHUNK):
        text, zeros = "", 0
        for code in codes[begin : begin + CHUNK]:
            if code:
                text += gamma(zeros + 1) + ("1" if code < 0 else "0") + gamma(abs(int(code)))
                zeros = 0
            else:
                zeros += 1
        if zeros:
            text += gamma(zeros + 1)
        text += "0" * (-len(text) % 8)
        chunks.append(bytes(int(text[i : i + 8][::-1], 2) for i in range(0, len(text), 8)))
    return b"".join(len(c).to_bytes(2, "little") for c in chunks) + b"".join(chunks)


def levels(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(n)
    dense = rng.integers(1, 65536, n) * rng.choice([-1, 1], n)
    return {
        "qsgd": rng.integers(-1, 2, n) * (rng.random(n) < 0.3) * rng.geometric(0.7, n),
        "zeros": np.zeros(n),
        "largest": np.full(n, -65535),
        "dense": dense,
        "sparse": dense * (rng.random(n) < 1e-3),
        "the last one": np.where(np.arange(n) == n - 1, 7, 0),
    }


@pytest.mark.parametrize("n", [*SIZES, 4095, 4096, 4097, LARGE])
def test_round_trip(n):
    for name, array in levels(n).items():
        if n > 40000 and name not in ("qsgd", "dense"):
            continue
        codes = sliced(array.astype(np.int32))
        out = Guarded(elias_capacity(n), torch.uint8)
        buffer = same_everywhere(lambda c=codes, o=out: elias_encode(c, o.out).clone())
        if n <= 40000:
            assert buffer.numpy().tobytes() == reference_encode(array.astype(int)), name
        assert torch.equal(same_everywhere(lambda b=buffer, n=n: elias_decode(b, n)), codes), name
        assert out.intact()


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("bits, bucket", [(2, 512), (4, 512), (4, 7), (4, 10000), (8, 64), (16, 4096)])
def test_fused_is_quantize_then_encode(bits, bucket, norm):
    for n in (0, 1, 33, 4097, 100003):
        x = sliced(arrays(n)["heavy-tailed"])
        out = Guarded(elias_capacity(n, bits), torch.uint8)

        def run(x=x, out=out):
            buffer, norms = elias_quantize(x, bits, bucket, norm, 7, out.out)
            total = torch.ones(x.numel())
            elias_decode_add(buffer, norms, total, bits, bucket, 0.3)
            return buffer.clone(), norms, total

        buffer, norms, total = same_everywhere(run)
        codes, expected_norms = quantize(x, bits, bucket, norm, 7)
        assert torch.equal(buffer, elias_encode(codes)) and torch.equal(norms, expected_norms) and out.intact()
        packed, _ = quantize_packed(x, bits, bucket, norm, 7)
        expected = torch.ones(n)
        quantize_decode_add(packed, norms, expected, bits, bucket, 0.3)
        assert torch.equal(total, expected)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("ranks", [0, 1, 2, 3, 8, 33])
@pytest.mark.parametrize("bits, bucket", [(2, 512), (4, 7), (16, 40000)])
def test_sum_of_ranks(bits, bucket, ranks, add):
    """The bits of packed levels, also of the signs of zeros."""
    for n in (0, 1, 33, 4097, 20000):
        xs = [sliced(arrays(n, seed)["heavy-tailed"]) for seed in range(ranks)]
        terms = [elias_quantize(x, bits, bucket, "l2", seed) for seed, x in enumerate(xs)]
        packed = [quantize_packed(x, bits, bucket, "l2", seed) for seed, x in enumerate(xs)]
        start = torch.randn(n) if add else torch.zeros(n)
        expected = start.clone()
        if add:
            for one in packed:
                quantize_decode_add(*one, expected, bits, bucket, -1 / 3)
        else:
            quantize_decode_sum(packed, expected, bits, bucket, -1 / 3)
        out = Guarded(n, torch.float32)

        def run(terms=terms, start=start, out=out):
            elias_decode_sum(terms, out.out.copy_(start if add else start + 7), bits, bucket, -1 / 3, add)
            return out.out.clone()

        assert torch.equal(same_everywhere(run).view(torch.int32), expected.view(torch.int32)) and out.intact()


def test_sums_of_invalid_terms_are_refused():
    """With the index of the first one whose norms or sizes are wrong, else of the first one with a wrong chunk."""
    n = 20000
    good = [elias_quantize(torch.randn(n), 4, key=key) for key in range(4)]

    def refused(changes, unchanged):
        terms, out = list(good), torch.ones(n)
        for index, term in changes.items():
            terms[index] = term
        with pytest.raises(PayloadError) as error:
            elias_decode_sum(terms, out, 4)
        assert not unchanged or (out == 1).all()
        return error.value.index

    stream, norms = good[0]
    last, first = stream.clone(), stream.clone()
    last[-8:] = 0  # too many zeros for a code
    first[2 * 5 :][:8] = 0
    bad_norms = norms.clone()
    bad_norms[-1] = -1.0
    assert refused({1: (last, norms), 3: (first, norms)}, unchanged=False) == 1
    assert refused({1: (first, norms), 3: (last, norms)}, unchanged=False) == 1
    assert refused({1: (first, norms), 2: (stream[:-1], norms), 3: (stream, bad_norms)}, unchanged=True) == 2
    assert refused({2: (stream, bad_norms), 3: (stream[:-1], norms)}, unchanged=True) == 2
    assert refused({3: (stream, norms[1:])}, unchanged=True) == 3


def test_long_streams():
    """Bytes move to their place while later levels are coded."""
    n = 5_000_001
    codes = (torch.randint(-3, 4, (n,)) * (torch.rand(n) < 0.1)).int()
    buffer = same_everywhere(lambda: elias_encode(codes))
    assert torch.equal(elias_decode(buffer, n), codes)
    out = Guarded(buffer.numel(), torch.uint8)
    assert torch.equal(elias_encode(codes, out.out), buffer) and out.intact()
    with pytest.raises(ValueError, match=f"out: got {buffer.numel() - 1} bytes"):
        elias_encode(codes, out.out[:-1])
    assert out.intact()


def test_real_gradients_cost_well_under_four_bits():
    """4-bit QSGD, l2 norm, buckets of 512, with the table: below half of the size of packed codes."""
    gradient = torch.cat([g.reshape(-1) for g in resnet20_gradients().values()])
    buffer, _ = elias_quantize(gradient, 4, 512, "l2", 1)
    assert 0.5 < buffer.numel() * 8 / gradient.numel() < 1.9
    assert 2 * buffer.numel() < packed_nbytes(gradient.numel(), 4)


def test_capacity_suffices_for_the_worst_case():
    for bits in range(2, 18):
        top = 2 ** (bits - 1) - 1
        for pattern in ([top], [0, top], [top, 0], [0, 0, top], [0]):
            codes = torch.tensor(pattern * 5000, dtype=torch.int32)[:9999]
            assert elias_encode(codes).numel() <= elias_capacity(codes.numel(), bits)


def try_to_read(data: bytes, n: int, bits: int) -> None:
    """Levels are bounded, or the stream is refused; nothing is written past the outputs."""
    top = 2 ** (bits - 1) - 1
    buffer = sliced(np.frombuffer(data, np.uint8))
    out = Guarded(n, torch.float32)
    out.out.zero_()
    try:
        codes = elias_decode(buffer, n, top)
    except PayloadError:
        with pytest.raises(PayloadError, match=f"got {len(data)} bytes that are not a stream of {n} levels"):
            elias_decode_add(buffer, torch.ones(1), out.out, bits, max(1, n))
    else:
        assert n == 0 or int(codes.abs().max()) <= top
        elias_decode_add(buffer, torch.ones(1 if n else 0), out.out, bits, max(1, n))
        assert n == 0 or float(out.out.abs().max()) <= 1.0
    assert out.intact()


@examples
@given(st.binary(max_size=200), st.integers(1, 9000), st.integers(2, 16))
def test_any_bytes(data, n, bits):
    try_to_read(data, n, bits)


@examples
@given(st.data(), st.integers(1, 9000), st.sampled_from([2, 4, 8, 16]))
def test_mutated_streams(data, n, bits):
    x = torch.from_numpy(np.random.default_rng(n).standard_normal(n).astype(np.float32))
    stream = bytearray(elias_quantize(x, bits, 64, "l2", 1)[0].numpy().tobytes())
    mutate(stream, data, most=4)
    try_to_read(bytes(stream), n, bits)


def test_errors():
    x = torch.randn(5000)
    buffer, norms = elias_quantize(x, 4)
    bad = norms.clone()
    bad[0] = float("nan")
    for f, error, message in [
        (lambda: elias_encode(torch.tensor([65536], dtype=torch.int32)), ValueError, "got a level beyond 65535"),
        (lambda: elias_encode(torch.tensor([-(2**31)], dtype=torch.int32)), ValueError, "got a level beyond 65535"),
        (lambda: elias_encode(x), ValueError, "got torch.float32, expected torch.int32"),
        (lambda: elias_quantize(x, 4, out=torch.empty(100, dtype=torch.uint8)), ValueError, "out: got 100 bytes"),
        (lambda: elias_quantize(x, 1), ValueError, "got bits = 1, expected an integer from 2 to 16"),
        (lambda: elias_decode(buffer[:-1], 5000), PayloadError, "bytes that are not a stream of 5000 levels"),
        (lambda: elias_decode(buffer, 4999), PayloadError, "bytes that are not a stream of 4999 levels"),
        (lambda: elias_decode(buffer, 5000, 0), PayloadError, "levels up to 0"),
        (lambda: elias_decode(buffer, 5000, -1), ValueError, "got top = -1, expected 0 to 65535"),
        (lambda: elias_decode_add(buffer, norms[:3], x, 4), PayloadError, "got 3 norms, expected 10"),
        (lambda: elias_decode_add(buffer, bad, x, 4), PayloadError, "a norm that is negative or not finite"),
        (lambda: elias_decode_add(buffer[1:], norms, x, 4), PayloadError, "not a stream of 5000 levels of 4 bits"),
    ]:
        with pytest.raises(error, match=message):
            f()
