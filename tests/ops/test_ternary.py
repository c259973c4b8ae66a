import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import philox
from gradzip.ops import (
    PayloadError,
    WeightedSum,
    quantize,
    ternary_decode_add,
    ternary_decode_add_all,
    ternary_nbytes,
    ternary_packed,
    ternary_packed_all,
)
from reference import FLT_MAX, LARGE, SIZES, Guarded, arrays, as_tensor, examples, same_everywhere, sliced

KEY = 0x0F1E_2D3C_4B5A_6978


def trits_of(packed: np.ndarray, n: int) -> np.ndarray:
    """Decode by the documented layout alone."""
    trits = []
    for begin in range(0, n, 320):
        count = min(320, n - begin)
        block = packed[begin // 5 : begin // 5 + -(-count // 5)].astype(int)
        digits = np.concatenate([block // 3**k % 3 for k in range(5)])
        assert not digits[count:].any()
        trits.append(digits[:count])
    return np.array([0, 1, -1])[np.concatenate(trits)] if trits else np.zeros(0, int)


@pytest.mark.parametrize("n", [*SIZES, 4, 5, 319, 320, 321, LARGE])
def test_trits(n):
    names = arrays(n) if n < 1000 else ("heavy-tailed", "NaN")
    for name in names:
        array = arrays(n)[name]
        x, out = sliced(array), Guarded(ternary_nbytes(n), torch.uint8)
        finite = np.nan_to_num(array, nan=0.0, posinf=FLT_MAX, neginf=-FLT_MAX).astype(np.float64)
        scale, clip = float(np.float32(min(2.0, np.abs(finite).max(initial=0)))), 1.5

        def run(x=x, out=out, scale=scale, clip=clip):
            total = torch.ones(x.numel())
            packed = ternary_packed(x, scale, clip, KEY, out.out)
            ternary_decode_add(packed, scale, total, 0.5)
            return packed.clone(), total

        packed, total = same_everywhere(run)
        assert packed.numel() == -(-n // 5) and out.intact()
        trits = trits_of(packed.numpy(), n)
        p = np.minimum(np.abs(finite), clip) / scale if scale else np.zeros(n)
        u = philox.uniform(KEY, n)
        sure = np.abs(u - p) > 2.0**-22
        assert np.array_equal(trits[sure], (np.sign(finite) * (u < p))[sure]), name
        assert np.array_equal(total.numpy(), np.float32(1) + np.float32(0.5 * scale) * trits.astype(np.float32))


def test_unbiased():
    x = torch.linspace(-3, 3, 60)
    many = 4000
    total = torch.zeros(60 * many)
    ternary_decode_add(ternary_packed(x.repeat(many), 2.5, 2.5, 3), 2.5, total)
    p = x.clamp(-2.5, 2.5).double().abs() / 2.5
    error = total.view(many, 60).double().mean(0) - x.clamp(-2.5, 2.5).double()
    assert (error.abs() <= 5 * 2.5 * (p * (1 - p) / many).sqrt() + 1e-6).all()


def test_a_constant_gradient_does_not_collapse():
    total = torch.zeros(1000)
    ternary_decode_add(ternary_packed(torch.full((1000,), -0.1), 0.1), 0.1, total)
    assert torch.equal(total, torch.full((1000,), -0.1))


def test_equals_qsgd_with_one_level():
    """ATOMO, section 4: scaled by the largest magnitude, both draw sign(x) with probability |x| / max."""
    x = torch.randn(10000)
    codes, norms = quantize(x, 2, 10000, "max", KEY)
    packed = ternary_packed(x, norms.item(), key=KEY)
    assert np.array_equal(trits_of(packed.numpy(), 10000), codes.numpy())


def test_tables():
    """Several tensors in one call have the bits of each alone; terms are added in order."""
    sizes = [320, 1, 0, 100_003, 5121, 319]
    rng = np.random.default_rng(4)
    sources = [
        (sliced(rng.normal(size=n).astype(np.float32)), 2.0, 1.5 if i % 2 else None, KEY + i,
         torch.empty(ternary_nbytes(n), dtype=torch.uint8)) for i, n in enumerate(sizes)
    ]  # fmt: skip

    def pack():
        ternary_packed_all(sources)
        return torch.cat([out for *_, out in sources])

    same_everywhere(pack)
    expected, sums = [], []
    for i, (x, scale, clip, key, packed) in enumerate(sources):
        assert torch.equal(packed, ternary_packed(x, scale, clip, key))
        terms = [((packed, 2.0), 0.5), ((packed, 0.3), -1.0), ((packed, 1.0), 0.1)][: 1 + i % 3]
        one_by_one = torch.ones(x.numel()) * (i % 2)
        for (term, its_scale), weight in terms:
            ternary_decode_add(term, its_scale, one_by_one, weight)
        expected.append(one_by_one)
        sums.append((x.numel(), terms, i % 2))

    def run():
        outs = [torch.full((n,), float(before)) for n, _, before in sums]
        ternary_decode_add_all([WeightedSum(out, t, add=before > 0) for out, (_, t, before) in zip(outs, sums)])
        return torch.cat(outs)

    assert torch.equal(same_everywhere(run), torch.cat(expected))
    assert ternary_packed_all([]) is None and ternary_decode_add_all([]) is None


@pytest.mark.parametrize("byte, scale", [(243, 1.0), (1, -1.0), (1, float("inf"))])
def test_a_corrupt_term_of_a_table_is_named(byte, scale):
    good, bad = (torch.tensor([value], dtype=torch.uint8) for value in (1, byte))
    outs = [torch.zeros(3), torch.zeros(3)]
    with pytest.raises(PayloadError, match="corrupt payload") as raised:
        terms = [((good, 1.0), 1.0), ((bad, scale), 1.0)]
        ternary_decode_add_all([WeightedSum(outs[0], terms[:1]), WeightedSum(outs[1], terms)])
    assert raised.value.index == 2 and not torch.cat(outs).any()


@examples
@given(st.binary(max_size=80), st.integers(0, 400))
def test_any_bytes_are_decoded_or_refused(data, n):
    out = Guarded(n, torch.float32)
    out.out.zero_()
    packed = as_tensor(data)
    if len(data) == ternary_nbytes(n) and max(data, default=0) <= 242:
        ternary_decode_add(packed, 2.0, out.out)
        assert set(out.out.tolist()) <= {-2.0, 0.0, 2.0}
    else:
        with pytest.raises(PayloadError):
            ternary_decode_add(packed, 2.0, out.out)
        assert not out.out.any()
    assert out.intact()


def test_errors():
    x = torch.ones(11)
    packed = ternary_packed(x, 1.0)
    for f, error, message in [
        (lambda: ternary_packed(x, float("nan")), ValueError, "got scale = nan, expected a finite number >= 0"),
        (lambda: ternary_packed(x, -1.0), ValueError, "got scale = -1.0"),
        (lambda: ternary_packed(x, 1.0, 0.0), ValueError, "got clip = 0.0, expected None or a number > 0"),
        (lambda: ternary_packed(x.double(), 1.0), ValueError, "got torch.float64, expected torch.float32"),
        (lambda: ternary_decode_add(packed[:2], 1.0, x), PayloadError, "got 2 bytes, expected 3 for 11 elements"),
        (lambda: ternary_decode_add(packed, float("inf"), x), PayloadError, "its scale is inf"),
        (lambda: ternary_decode_add(packed * 0 + 243, 1.0, x), PayloadError, "got a byte above 242"),
    ]:
        with pytest.raises(error, match=message):
            f()
