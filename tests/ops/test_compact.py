import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from gradzip import ops
from reference import LARGE, SIZES, Guarded, arrays, bitmap, examples, same_everywhere, sliced

u8 = torch.uint8


def masks(n: int) -> list[np.ndarray]:
    rng = np.random.default_rng(n)
    alternating = np.arange(n) % 2 == 0
    blocks = (np.arange(n) // 64) % 3 == 0
    return [rng.random(n) < share for share in (0.0, 0.02, 0.15, 0.5, 0.98, 1.0)] + [alternating, blocks]


@pytest.mark.parametrize("n", [*SIZES, LARGE])
def test_compact_equals_numpy(n):
    for kind, x in arrays(n).items():
        tensor, magnitudes = sliced(x), np.abs(x)
        for threshold in {0.0, 1e-40, 0.25, 1.0, float(np.max(magnitudes, initial=0.0, where=np.isfinite(x)))}:
            mask = ~(magnitudes < np.float32(threshold))  # NaN is largest, so it is kept
            values, bits = same_everywhere(lambda tensor=tensor, t=threshold: ops.compact(tensor, t))
            assert np.array_equal(values.numpy(), x[mask], equal_nan=True), (kind, threshold)
            assert np.array_equal(bits.numpy(), bitmap(mask)), (kind, threshold)


def test_threshold_may_be_a_tensor_and_minus_zero():
    x = torch.linspace(-1, 1, 100)
    for threshold in (0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)):
        assert torch.equal(ops.compact(x, threshold)[0], x[x.abs() >= 0.5])
    values, bits = same_everywhere(lambda: ops.compact(x, -0.0))
    assert torch.equal(values, x)
    assert bits.tolist() == bitmap(np.ones(100)).tolist()


def test_infinite_threshold():
    x = torch.tensor([1.0, -torch.inf, 3e38, torch.inf])
    assert ops.compact(x, torch.inf)[0].tolist() == [-torch.inf, torch.inf]


@pytest.mark.parametrize("threshold", [-1.0, -1e-45, float("nan"), -float("inf")])
def test_wrong_threshold(threshold):
    with pytest.raises(ValueError, match="compact: got threshold .*, expected a number >= 0"):
        ops.compact(torch.ones(3), threshold)


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize("n", [*SIZES, LARGE])
def test_values_and_expand_equal_numpy(n, dtype):
    rng = np.random.default_rng(n)
    x = (rng.standard_normal(n) + (1j * rng.standard_normal(n) if dtype is np.complex64 else 0)).astype(dtype)
    tensor = sliced(x)
    for mask in masks(n)[:: 3 if n == LARGE else 1]:
        bits, count = sliced(bitmap(mask)), int(mask.sum())
        packed, unpacked = Guarded(count, tensor.dtype), Guarded(n, tensor.dtype)

        def both(bits=bits, count=count, packed=packed, unpacked=unpacked):
            ops.compact_values(tensor, bits, count, out=packed.out)
            ops.expand(packed.out, bits, n, out=unpacked.out)
            assert packed.intact() and unpacked.intact()
            return packed.out.clone(), unpacked.out.clone()

        values, dense = same_everywhere(both)
        assert np.array_equal(values.numpy(), x[mask])
        assert np.array_equal(dense.numpy(), np.where(mask, x, 0))
        assert torch.equal(ops.compact_values(tensor, bits, count), values)
        assert torch.equal(ops.expand(values, bits, n), dense)


@examples
@given(st.data())
def test_round_trip(data):
    n = data.draw(st.integers(0, 300))
    x = np.array(data.draw(st.lists(st.floats(width=32), min_size=n, max_size=n)), np.float32)
    threshold = data.draw(st.floats(0, width=32))
    values, bits = ops.compact(torch.from_numpy(x), threshold)
    dense = ops.expand(values, bits, n).numpy()
    kept = ~(np.abs(x) < threshold)
    assert np.array_equal(dense, np.where(kept, x, 0), equal_nan=True)


@examples
@given(bits=st.binary(max_size=40), spare=st.integers(0, 7), values=st.integers(0, 330))
def test_any_bitmap_is_expanded_or_refused(bits, spare, values):
    n = max(0, 8 * len(bits) - spare)
    if len(bits) != (n + 7) // 8:
        return
    marked = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[:n]
    bits = torch.tensor(list(bits), dtype=u8)
    fenced = Guarded(n, torch.float32)
    if values == marked.sum():
        ops.expand(torch.ones(values), bits, n, out=fenced.out)
        assert np.array_equal(fenced.out.numpy(), marked)
    else:
        with pytest.raises(ops.PayloadError, match=f"got {values} values, but the bitmap marks"):
            ops.expand(torch.ones(values), bits, n, out=fenced.out)
        room = Guarded(values, torch.float32)
        with pytest.raises(ValueError, match=f"expected {values} bits set"):
            ops.compact_values(torch.ones(n), bits, values, out=room.out)
        assert room.intact()
    assert fenced.intact()


@pytest.mark.parametrize("count", [3, 5])
def test_a_wrong_count(count):
    bits = torch.tensor([0b10110100], dtype=u8)
    with pytest.raises(ValueError, match=f"compact_values: got .* expected {count} bits"):
        ops.compact_values(torch.ones(8), bits, count)


def test_lazily_conjugated_and_negated_tensors():
    """torch keeps x.conj() and -x.imag as flags on the same memory."""
    x = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    bits = torch.tensor([3], dtype=u8)
    assert torch.equal(ops.compact_values(x.conj(), bits, 2), x.conj().resolve_conj())
    assert torch.equal(ops.expand(x.conj(), bits, 2), x.conj().resolve_conj())
    negated = torch._neg_view(torch.tensor([1.0, -2.0]))
    assert ops.compact(negated, 0.0)[0].tolist() == [-1.0, 2.0]


@pytest.mark.parametrize("x", [[1.0], None, torch.ones(8, dtype=torch.float64), torch.ones(8, dtype=torch.complex128)])
def test_wrong_values(x):
    bits = torch.zeros(1, dtype=u8)
    with pytest.raises(ValueError, match="compact: x: got .*, expected torch.float32|got .*, expected a torch tensor"):
        ops.compact(x, 1.0)
    with pytest.raises(ValueError, match="compact_values: x: got .*, expected"):
        ops.compact_values(x, bits, 0)
    with pytest.raises(ValueError, match="expand: values: got .*, expected"):
        ops.expand(x, bits, 8)


@pytest.mark.parametrize("bits", [None, torch.zeros(2, dtype=u8), torch.zeros(0, dtype=u8), torch.zeros(1)])
def test_wrong_bitmap(bits):
    with pytest.raises(ValueError, match="compact_values: bitmap: got .*, expected"):
        ops.compact_values(torch.ones(8), bits, 0)
    with pytest.raises(ValueError, match="expand: bitmap: got .*, expected"):
        ops.expand(torch.ones(0), bits, 8)


def test_wrong_output():
    bits = torch.tensor([1], dtype=u8)
    for out in (torch.empty(2), torch.empty(1, dtype=torch.float64), [0.0]):
        with pytest.raises(ValueError, match="compact_values: out: got .*, expected"):
            ops.compact_values(torch.ones(8), bits, 1, out=out)
    for out in (torch.empty(7), torch.empty(16)[::2], torch.empty(8, dtype=torch.complex64)):
        with pytest.raises(ValueError, match="expand: out: got .*, expected"):
            ops.expand(torch.ones(1), bits, 8, out=out)


def test_negative_sizes():
    with pytest.raises(ValueError, match="got .*-1.*expected"):
        ops.compact_values(torch.ones(8), torch.zeros(1, dtype=u8), -1)
    with pytest.raises(ValueError, match="got .*-1.*expected"):
        ops.expand(torch.empty(0), torch.empty(0, dtype=u8), -1)
