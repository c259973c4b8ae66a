"""Kernels of natural compression, compared with NumPy."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import philox
from gradzip import ops
from gradzip.ops import PayloadError, natural_decode_sum, natural_encode, natural_nbytes
from reference import LARGE, SIZES, Guarded, arrays, as_tensor, examples, pack_bits, same_everywhere, sliced

KEY = 0x0123_4567_89AB_CDEF


def powers(x: np.ndarray, key: int) -> np.ndarray:
    """Finite numbers of x rounded at random to a power of two next to them, by the definition, in float64."""
    magnitude = np.abs(x.astype(np.float64))
    below = 2.0 ** np.floor(np.log2(magnitude, out=np.full(x.size, -200.0), where=magnitude >= 2.0**-126))
    below = np.where(magnitude < 2.0**-126, 0.0, below)
    above = np.where(below == 0, 2.0**-126, 2 * below)
    share = (magnitude - below) / (above - below)
    drawn = philox.words(key, x.size).astype(np.float64) < share * 2.0**32
    return np.copysign(np.minimum(np.where(drawn, above, below), 2.0**127), x)


def in_torch(x: torch.Tensor, key: int) -> torch.Tensor:
    """The stream of other primitives: the mantissa is the probability of the next exponent."""
    bits = x.view(-1).view(torch.int32)
    up = ops.unpack_bits(ops.bernoulli((bits & 0x7FFFFF).float() * 2.0**-23, key), 1, x.numel())
    codes = (bits >> 23) + up
    return ops.pack_bits(codes - ((codes & 255) == 255).int(), 9)


def decode(*payloads, numel):
    natural_decode_sum(payloads, out := torch.empty(numel))
    return out


@pytest.mark.parametrize("n", [*SIZES, LARGE])
def test_powers_of_two(n):
    """At every SIMD level and number of threads, in one pass over memory of exactly n elements."""
    for name, array in arrays(n).items() if n < 2000 else [("heavy-tailed", arrays(n)["heavy-tailed"])]:
        x, out = sliced(array), Guarded(natural_nbytes(n), torch.uint8)

        def run(x=x, out=out):
            packed, most = natural_encode(x, KEY, out.out)
            return packed.clone(), most

        packed, most = same_everywhere(run)
        assert out.intact() and torch.equal(most.view(torch.int32), ops.abs_max_tensor(x).view(torch.int32)), name
        assert torch.equal(packed, in_torch(x, KEY)), name
        finite = np.isfinite(array)
        wanted = powers(np.where(finite, array, 0), KEY).astype(np.float32)
        codes = wanted.view(np.uint32) >> 23
        if finite.all():
            assert np.array_equal(packed.numpy(), pack_bits(codes.astype(np.int64), 9)), name
        assert np.array_equal(decode(packed, numel=n).numpy()[finite], wanted[finite]), name


@pytest.mark.parametrize("ranks", [0, 1, 2, 3, 8])
def test_sum_of_ranks(ranks):
    """One rounding for each product and sum, in rank order."""
    weight = np.float32(1 / 3)
    for n in (*SIZES, LARGE) if ranks == 3 else SIZES[::2]:
        payloads = [natural_encode(sliced(arrays(n, rank)["laplace"]), KEY + rank)[0] for rank in range(ranks)]
        out, start = Guarded(n, torch.float32), arrays(n, 9)["normal"]

        def run(payloads=payloads, out=out, start=start):
            natural_decode_sum([sliced(payload.numpy()) for payload in payloads], out.out.fill_(7), 1 / 3)
            added = torch.empty(start.size).copy_(torch.from_numpy(start))
            natural_decode_sum(payloads, added, 1 / 3, add=True)
            return out.out.clone(), added

        total, added = same_everywhere(run)
        expected, onto = np.zeros(n, np.float32), start.copy()
        for payload in payloads:
            value = decode(payload, numel=n).numpy()
            expected += weight * value
            onto += weight * value
        assert out.intact() and np.array_equal(total.numpy(), expected) and np.array_equal(added.numpy(), onto)


def test_the_sum_has_the_bits_of_torch():
    """Of numbers far from the smallest float: torch rounds a product and a sum once."""
    n, payloads = 10_000, [natural_encode(torch.randn(10_000), rank)[0] for rank in range(5)]
    natural_decode_sum(payloads, total := torch.empty(n), 1 / 5)
    expected = torch.zeros(n)
    for payload in payloads:
        expected.add_((ops.unpack_bits(payload, 9, n) << 23).view(torch.float32), alpha=1 / 5)
    assert torch.equal(total.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("value", [1e-39, 9e-39, 2.0**-126, 1.5e-38, 0.3, -5.0, 1.6e38])
def test_unbiased(value):
    """The mean of many draws, within five standard errors, and the bound of the variance."""
    many, exact = 1 << 16, float(np.float32(value))
    got = decode(natural_encode(torch.full((many,), value), 3)[0], numel=many).double() / exact
    below = 2.0 ** np.floor(np.log2(abs(exact))) if abs(exact) >= 2.0**-126 else 0.0
    gap = (below or 2.0**-126) / abs(exact)
    p = (1 - below / abs(exact)) / gap
    assert abs(got.mean().item() - 1) <= 5 * gap * (p * (1 - p) / many) ** 0.5
    assert below == 0 or got.var().item() <= (1 + 5 / many**0.5) / 8


def test_the_largest_magnitudes_are_rounded_down():
    packed, most = natural_encode(torch.full((9,), -3e38))
    assert most == np.float32(3e38) and (decode(packed, numel=9) == -(2.0**127)).all()


def test_keys_differ_and_draws_belong_to_elements():
    x = torch.full((5000,), 1.5)
    one, other = (decode(natural_encode(x, key)[0], numel=5000) for key in (1, 2))
    assert 0.4 < (one != other).double().mean() < 0.6
    assert torch.equal(decode(natural_encode(x[:999], 1)[0], numel=999), one[:999])


@examples
@given(data=st.binary(max_size=64), n=st.integers(0, 56))
def test_any_bytes_decode_to_powers_of_two_or_are_refused(data, n):
    out, payload = Guarded(n, torch.float32), as_tensor(data)
    if len(data) != natural_nbytes(n):
        with pytest.raises(PayloadError, match=f"got {len(data)} bytes, expected {natural_nbytes(n)} for {n} elements"):
            natural_decode_sum([payload], out.out)
    elif bool(((ops.unpack_bits(payload, 9, n) & 255) == 255).any()):
        with pytest.raises(PayloadError, match="got the exponent of infinity"):
            natural_decode_sum([payload], out.out)
    else:
        natural_decode_sum([payload], out.out)
        mantissa, _ = np.frexp(np.abs(out.out.numpy()))
        assert np.isin(mantissa, (0, 0.5)).all()
    assert out.intact()


@pytest.mark.parametrize("n", [1, 8, 33, 100_003])
def test_invalid_exponents_are_found_in_any_element(n):
    """With the index of the first such payload."""
    payloads = [natural_encode(torch.randn(n), rank)[0] for rank in range(4)]
    for at in {0, n // 2, n - 1}:
        codes = [ops.unpack_bits(payload, 9, n) for payload in payloads]
        for rank, code in ((3, 255), (1, 511)):
            codes[rank][at] = code
            with pytest.raises(PayloadError, match="got the exponent of infinity") as refused:
                natural_decode_sum([ops.pack_bits(c, 9) for c in codes], torch.empty(n))
            assert refused.value.index == rank


def test_errors():
    x = torch.randn(100)
    for arguments, message in [
        ((x, -1), "got key = -1, expected an integer from 0"),
        ((x.double(),), "got torch.float64, expected torch.float32"),
        ((x, 0, torch.empty(112, dtype=torch.uint8)), "out: got 112 elements, expected 113"),
    ]:
        with pytest.raises(ValueError, match=message):
            natural_encode(*arguments)
    packed, _ = natural_encode(x)
    with pytest.raises(ValueError, match="out: got strides"):
        natural_decode_sum([packed], torch.empty(200)[::2])
    with pytest.raises(PayloadError, match="got 112 bytes, expected 113 for 100 elements") as refused:
        natural_decode_sum([packed, packed[1:]], torch.empty(100))
    assert refused.value.index == 1
