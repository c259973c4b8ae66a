import functools
import math

import numpy as np
import pytest
import torch

from gradzip import _C, ops
from reference import (
    BlockTransform,
    Guarded,
    RangeFormat,
    U,
    arrays,
    as_tensor,
    bitmap,
    dct_matrix,
    pack_bits,
    range_format,
    same_everywhere,
    sliced,
)

Transform = ops.Transform

SHAPES = [(), *((n,) for n in range(2, 17))]
SHAPES += [(2, 3), (3, 3), (5, 5), (7, 7), (11, 11), (8, 16), (3, 3, 3), (3, 5, 7), (8, 4, 4)]
SHAPES += [(32,), (64,), (128,), (256,)]
# By name: the transform and its reference.
KINDS = {f"dct{shape}": (Transform.dct(*shape), BlockTransform("dct", shape)) for shape in SHAPES}
KINDS |= {f"fourier{2**i}": (Transform.fourier(2**i), BlockTransform("fourier", (2**i,))) for i in range(3, 11)}
KINDS["pairs"] = Transform.pairs(), BlockTransform("pairs")
SOME = ["dct()", "dct(3, 3)", "dct(7, 7)", "dct(256,)", "fourier8", "fourier1024", "pairs"]

every_kind = pytest.mark.parametrize("kind", KINDS)
some_kinds = pytest.mark.parametrize("kind", SOME)


def sizes(reference: BlockTransform) -> list[int]:
    length, tile = reference.length, reference.tile_rows * reference.length
    found = [0, 1, length - 1, length, length + 1, 17 * length, tile - 1, tile, tile + 1, 2 * tile + 22 * length - 1]
    return sorted(set(found))


@functools.cache
def array(n: int, name: str) -> np.ndarray:
    return arrays(n)[name]


def heavy_tailed(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([n, seed]).standard_t(3, size=n).astype(np.float32)


def coefficients_of(x: torch.Tensor, transform: ops.Transform) -> torch.Tensor:
    """The kernel, with an output between fences."""
    fenced = Guarded(-(-x.numel() // transform.group) * transform.group, torch.float32)
    _C.transform(x.data_ptr(), x.numel(), transform.code, fenced.out.data_ptr(), torch.get_num_threads())
    assert fenced.intact()
    return fenced.out


def elements_of(coefficients: torch.Tensor, transform: ops.Transform, n: int) -> torch.Tensor:
    fenced = Guarded(n, torch.float32)
    _C.transform_inverse(coefficients.data_ptr(), n, transform.code, fenced.out.data_ptr(), torch.get_num_threads())
    assert fenced.intact()
    return fenced.out


# --- Transform


@every_kind
def test_groups_and_segments(kind):
    transform, reference = KINDS[kind]
    assert (transform.length, transform.group) == (reference.length, reference.group)
    for n in sizes(reference):
        assert transform.groups(n) == -(-n // reference.group)
        # Bitmaps of real coefficients have whole segments in every plane of a tile, if its rows suffice.
        segment = transform.segment(n)
        assert segment % 64 == 0 and 64 <= segment <= 1024
        if reference.group == 2:
            assert segment == 1024
        elif n // reference.length >= reference.tile_rows >= 64:
            assert reference.tile_rows % segment == 0


def test_a_code_for_each():
    assert len({transform.code for transform, _ in KINDS.values()}) == len(KINDS)
    assert all(0 <= transform.code < 2**32 for transform, _ in KINDS.values())


@pytest.mark.parametrize(
    "lengths",
    [(0,), (1,), (-2,), (17,), (48,), (512,), (32, 2), (2, 32), (3, 1), (12, 11), (6, 5, 5), (2, 2, 2, 2), (32.0,)],
)
def test_there_is_no_such_dct(lengths):
    assert not Transform.dct_exists(*lengths)
    with pytest.raises(ValueError, match=r"Transform.dct: got lengths .*, expected up to three of 2 to 16"):
        Transform.dct(*lengths)


@pytest.mark.parametrize("length", [-8, 0, 1, 2, 4, 9, 24, 1023, 2048])
def test_there_is_no_such_fourier_transform(length):
    assert not Transform.fourier_exists(length)
    with pytest.raises(ValueError, match=f"Transform.fourier: got length {length}, expected a power of two from 8"):
        Transform.fourier(length)


def test_those_that_exist():
    assert all(Transform.dct_exists(*shape) for shape in SHAPES)
    assert [n for n in range(-1, 3000) if Transform.fourier_exists(n)] == [2**i for i in range(3, 11)]


# --- transform, transform_inverse
#
# Rounding, to first order in u. A sum of N products of a matrix with the sums and differences of an axis: for each
# term, one rounding of its factor, one of its sum, one of its product and at most N / 2 of the sums; and so for every
# axis. The error is that times the sum of the magnitudes of the products. A product of complex numbers is off by at
# most sqrt(5) u (Brent, Percival and Zimmermann, 2007), its rounded factor by u and a sum by u, relative to the norm of
# the row: that for each stage of a fast Fourier transform, once more with three other roundings for real data, and a
# product for the DCT.


def off_by(reference: BlockTransform, rows: np.ndarray, inverse: bool = False) -> np.ndarray:
    """A bound on the errors of a transform of these rows."""
    if reference.kind == "pairs" or reference.length == 1:
        return np.zeros((len(rows), 1))
    if reference.kind == "dct" and reference.length <= 128 and max(reference.shape) <= 16:
        matrix = np.abs(dct_matrix(*reference.shape))
        roundings = sum(n // 2 + 4 for n in reference.shape)
        least = 1e-15 * np.linalg.norm(rows, axis=1, keepdims=True)  # the reference itself rounds
        return roundings * 1.001 * U * (np.abs(rows) @ (matrix if inverse else matrix.T)) + least
    stages = math.log2(reference.length / 2)
    roundings = stages * (math.sqrt(5) + 2) + math.sqrt(5) + 5 + (math.sqrt(5) + 1) * (reference.kind == "dct")
    return roundings * 1.001 * U * np.linalg.norm(rows, axis=1, keepdims=True)


def assert_within(reference: BlockTransform, got: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> None:
    error = got.astype(np.float64) - expected
    if bound.shape[1] == 1:  # of the norm of a row
        error = np.linalg.norm(error, axis=1, keepdims=True)
    assert np.all(np.abs(error) <= bound)
    # The reference is another computation, in double precision.
    assert len(error) < 17 or error.any() or not bound.any()


@every_kind
def test_transform_equals_numpy(kind):
    transform, reference = KINDS[kind]
    for n in sizes(reference):
        x = heavy_tailed(n)
        tensor = sliced(x)
        got = same_everywhere(lambda tensor=tensor: coefficients_of(tensor, transform))
        assert torch.equal(ops.transform(tensor, transform), got)
        rows, tail = reference.restore(got.numpy(), n)
        # Bit by bit: the last element without a partner has the imaginary part 0.
        assert np.array_equal(reference.arrange(rows, tail), got.numpy())
        before, after_last_row = reference.cut(x)
        assert np.array_equal(tail, after_last_row)
        before = before.astype(np.float64)
        assert_within(reference, rows, reference.forward(before), off_by(reference, before))


@every_kind
def test_inverse_equals_numpy(kind):
    transform, reference = KINDS[kind]
    for n in sizes(reference):
        rows, tail = reference.cut(heavy_tailed(n, seed=1))
        coefficients = sliced(reference.arrange(rows, tail))
        got = same_everywhere(lambda c=coefficients, n=n: elements_of(c, transform, n))
        assert torch.equal(ops.transform_inverse(coefficients, transform, n), got)
        after, after_last_row = reference.cut(got.numpy())
        assert np.array_equal(after_last_row, tail)
        rows = rows.astype(np.float64)
        assert_within(reference, after, reference.inverse(rows), off_by(reference, rows, inverse=True))


@every_kind
def test_inverse_of_the_transform(kind):
    """The identity. The energy of the coefficients is that of the elements (Parseval)."""
    transform, reference = KINDS[kind]
    n = 100 * reference.length + reference.length // 2
    x = heavy_tailed(n, seed=2)
    coefficients = ops.transform(torch.from_numpy(x), transform)
    back = ops.transform_inverse(coefficients, transform, n).numpy()
    rows, tail = reference.cut(x.astype(np.float64))
    got, got_tail = reference.cut(back)
    assert np.array_equal(got_tail, tail)
    there = np.linalg.norm(off_by(reference, rows), axis=1, keepdims=True)
    back_again = np.linalg.norm(off_by(reference, reference.forward(rows), inverse=True), axis=1, keepdims=True)
    assert_within(reference, got, rows, there + back_again)
    got_norm, norm = coefficients.double().norm().item(), np.linalg.norm(x.astype(np.float64))
    assert abs(got_norm - norm) <= np.linalg.norm(there) + 1e-12 * norm


@pytest.mark.parametrize("kind", ["dct(3, 3)", "dct(16,)", "dct(256,)", "fourier64", "fourier1024"])
@pytest.mark.parametrize("value", [1.0, 3e-39, 1e35])
def test_a_constant_has_one_coefficient(kind, value):
    """Each row: sqrt(length) times the constant, and 0 but for rounding, at any scale."""
    transform, reference = KINDS[kind]
    x = torch.full((33 * reference.length,), value)
    rows, _ = reference.restore(ops.transform(x, transform).numpy().astype(np.float64), x.numel())
    first = value * math.sqrt(reference.length)
    off = 30 * U * first + 2.0**-149 * reference.length
    assert np.all(np.abs(rows[:, 0] - first) <= off)
    assert np.all(np.abs(rows[:, 1:]) <= off)


@some_kinds
def test_a_tile_does_not_depend_on_others(kind):
    """Not even if they are not finite."""
    transform, reference = KINDS[kind]
    tile = reference.tile_rows * reference.length
    x = torch.from_numpy(heavy_tailed(3 * tile))
    expected = ops.transform(x[tile : 2 * tile], transform)
    x[:tile], x[2 * tile :] = math.nan, math.inf
    got = ops.transform(x, transform)
    assert torch.equal(got[tile : 2 * tile], expected)
    assert torch.equal(
        ops.transform_inverse(got, transform, 3 * tile)[tile : 2 * tile].isfinite().all(), torch.tensor(True)
    )
    assert not got[:tile].isfinite().any() or transform.length == 1


def test_transform_of_a_view():
    transform = Transform.dct(3, 3)
    x = torch.randn(60, 30)
    assert torch.equal(ops.transform(x.t(), transform), ops.transform(x.t().contiguous(), transform))


@pytest.mark.parametrize("x", [None, [1.0], torch.zeros(4, dtype=torch.float64)])
def test_wrong_input(x):
    transform = Transform.dct(2)
    with pytest.raises(ValueError, match="transform: x: got .*, expected"):
        ops.transform(x, transform)
    with pytest.raises(ValueError, match="transform_inverse: coefficients: got .*, expected"):
        ops.transform_inverse(x, transform, 4)
    with pytest.raises(ValueError, match="transform_select: x: got .*, expected"):
        ops.transform_select(x, transform, 1)


@pytest.mark.parametrize("kind, numel, expected", [("dct(3,)", 5, 5), ("fourier8", 5, 6), ("pairs", 4, 4)])
def test_wrong_number_of_coefficients(kind, numel, expected):
    transform, _ = KINDS[kind]
    ops.transform_inverse(torch.zeros(expected), transform, numel)
    for wrong in (0, expected - 1, expected + 1):
        match = f"transform_inverse: coefficients: got {wrong} elements, expected {expected}"
        with pytest.raises(ValueError, match=match):
            ops.transform_inverse(torch.zeros(wrong), transform, numel)


# --- transform_select


class Selected:
    """The reference selection from the coefficients of the library itself."""

    def __init__(self, x: np.ndarray, kind: str) -> None:
        self.transform, self.reference = KINDS[kind]
        self.x, self.coefficients = sliced(x), ops.transform(torch.from_numpy(x), self.transform).numpy()
        self.groups = self.transform.groups(x.size)
        with np.errstate(invalid="ignore", over="ignore"):
            self.order = self.reference.order(self.coefficients, x.size)

    def expected(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        mask = np.zeros(self.groups, bool)
        mask[self.order[:k]] = True
        return bitmap(mask), self.reference.take(self.coefficients, self.x.numel(), mask)

    def run(self, k: int, scratch_numel: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        scratch = Guarded(scratch_numel, torch.float32)
        bits, values = Guarded(-(-self.groups // 8), torch.uint8), Guarded(k * self.transform.group, torch.float32)
        got = ops.transform_select(self.x, self.transform, k, bits.out, values.out, scratch.out)
        assert got[0] is bits.out and got[1] is values.out
        assert bits.intact() and values.intact() and scratch.intact()
        return got

    def check(self, k: int, scratch_numel: int = 0, everywhere: bool = True) -> None:
        expected = self.expected(k)
        got = same_everywhere(lambda: self.run(k, scratch_numel)) if everywhere else self.run(k, scratch_numel)
        assert np.array_equal(got[0].numpy(), expected[0])
        assert np.array_equal(got[1].numpy(), expected[1])


@every_kind
def test_selection_of_few_elements(kind):
    _, reference = KINDS[kind]
    tile = reference.tile_rows * reference.length
    for n in (1, 2, reference.length + 1, 5 * reference.length + 1, tile + 3 * reference.length - 1):
        for x in (heavy_tailed(n), array(n, "few values")):
            selected = Selected(x, kind)
            for k in sorted({1, -(-selected.groups * 2 // 5), selected.groups}):
                selected.check(k, everywhere=n <= tile or 1 < k < selected.groups)


@some_kinds
@pytest.mark.parametrize("name", ["zeros", "equal", "one-hot", "mostly zero", "denormal", "periodic"])
def test_selection_of_edge_cases(kind, name):
    selected = Selected(array(9001, name), kind)
    for k in (1, selected.groups // 7, selected.groups - 1):
        selected.check(k, everywhere=k > 1)


def test_equal_magnitudes_keep_the_first():
    """In the order of the coefficients, across tiles."""
    x = np.where(np.arange(30000) % 2, 1.0, -1.0).astype(np.float32)
    for kind in ("dct()", "pairs"):
        selected = Selected(x, kind)
        for k in (1, 8191, 8192, 8193, selected.groups - 1):
            bits, values = selected.run(k)
            assert np.flatnonzero(np.unpackbits(bits.numpy(), bitorder="little")).tolist() == list(range(k))
            assert values.abs().eq(1).all()
    ties = x.copy()
    ties[[5, 8192, 20000]] = 2.0, -3.0, 2.0
    selected = Selected(ties, "dct()")
    assert selected.order[:5].tolist() == [8192, 5, 20000, 0, 1]
    for k in (1, 2, 3, 4, 9000):
        selected.check(k)


LARGE = {
    kind: 133_333 if KINDS[kind][0].group == 1 else 270_001
    for kind in ("dct(3, 3)", "fourier64", "dct()", "dct(64,)", "fourier1024", "pairs")
}  # more than 2^17 groups: candidates are found with a sample


def every_scratch(selected: Selected, k: int) -> None:
    floats = 1 if selected.transform.group == 1 else 3
    selected.check(k, floats * (k + k // 2))
    for scratch in (0, floats * k - 1, floats * selected.groups):
        selected.check(k, scratch, everywhere=False)


@pytest.mark.parametrize("kind", ["dct(3, 3)", "fourier64"])
@pytest.mark.parametrize(
    "name", ["laplace", "heavy-tailed", "zeros", "equal", "few values", "mostly zero", "denormal", "periodic"]
)
def test_selection_with_a_sample(kind, name):
    selected = Selected(array(LARGE[kind], name), kind)
    for k in (selected.groups // 7, 33):
        every_scratch(selected, k)


@pytest.mark.parametrize("kind", ["dct()", "dct(64,)", "fourier1024", "pairs"])
@pytest.mark.parametrize("name", ["normal", "mostly zero"])
def test_selection_with_a_sample_of_other_kinds(kind, name):
    selected = Selected(array(LARGE[kind], name), kind)
    every_scratch(selected, selected.groups // 7)
    selected.check(1, everywhere=False)
    selected.check(selected.groups - 1, everywhere=False)


@pytest.mark.parametrize("kind", LARGE)
def test_room_for_half_as_many_again_is_enough(kind):
    """Candidates are kept in the scratch memory: at least k, and few others."""
    selected = Selected(array(LARGE[kind], "laplace"), kind)
    k = selected.groups // 7
    scratch = torch.full((3 * k // 2 * (1 if selected.transform.group == 1 else 3),), math.nan)
    ops.transform_select(selected.x, selected.transform, k, scratch=scratch)
    candidates = int((~scratch.isnan()).sum()) // (1 if selected.transform.group == 1 else 3)
    assert k <= candidates < 3 * k // 2


def sampled_rows(rows: int, transform: ops.Transform) -> np.ndarray:
    """Where transform_select looks: runs of 16 elements, or rows, by steps of the golden ratio."""
    step, run = 0x9E3779B97F4A7C15, max(1, 16 // transform.length)
    runs = 32768 * transform.group // (16 * transform.length) * -(-16 // run)
    first = [(i * step % 2**64) * (rows - run) >> 64 for i in range(runs)]
    return np.unique(np.add.outer(first, np.arange(run)))


SAMPLED = ("dct()", "fourier1024", "pairs")


@pytest.mark.parametrize("lengths", [(2,), (3,), (5,), (6,), (7,), (3, 3), (11,)])
def test_rows_of_any_length_are_sampled(lengths):
    """The selection from a sample is that from all coefficients, which needs no scratch memory."""
    transform = ops.Transform.dct(*lengths)
    x = torch.from_numpy(heavy_tailed(140_000))
    for k in (1500, 30_000):
        selections = [ops.transform_select(x, transform, k, scratch=torch.empty(n)) for n in (0, 80_000)]
        assert all(map(torch.equal, *selections))


@pytest.mark.parametrize("kind", SAMPLED)
@pytest.mark.parametrize("seen", [1e3, 1e-3, 0.0])
def test_a_sample_that_misleads(kind, seen):
    """All large values, or none, are in the rows that are sampled."""
    transform, reference = KINDS[kind]
    x = heavy_tailed(LARGE[kind])
    rows, _ = reference.cut(x)
    rows[sampled_rows(len(rows), transform)] *= np.float32(seen)
    selected = Selected(x, kind)
    for share in (0.01, 0.2, 0.4):
        every_scratch(selected, int(share * selected.groups))


@pytest.mark.parametrize("kind", SAMPLED)
@pytest.mark.parametrize("outlier", [1e10, 1e30, math.inf])
@pytest.mark.parametrize("in_sample", [False, True])
def test_an_outlier(kind, outlier, in_sample):
    """The selection does not depend on the scratch memory."""
    transform, reference = KINDS[kind]
    x = 1e-8 * heavy_tailed(LARGE[kind])
    rows, _ = reference.cut(x)
    seen = sampled_rows(len(rows), transform)
    rows[seen[40] if in_sample else np.setdiff1d(np.arange(100, 200), seen)[0], 0] = outlier
    k = transform.groups(x.size) // 7
    first, second = (
        ops.transform_select(torch.from_numpy(x), transform, k, scratch=torch.empty(numel))[0] for numel in (0, 6 * k)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("kind", ["dct(3, 3)", "fourier16", "fourier1024", "pairs"])
@pytest.mark.parametrize("amax", [1e-42, 1e-38, 1e-30, 1e-20, 1e20, 1e30, 1e38])
def test_selection_at_any_scale(kind, amax):
    """Energies neither overflow nor underflow."""
    _, reference = KINDS[kind]
    for n in (3001, 270_001) if amax in (1e-42, 1e38) and reference.group == 2 else (3001,):
        x = np.random.default_rng(n).uniform(-1, 1, n) * amax / math.sqrt(reference.length)
        selected = Selected(x.astype(np.float32), kind)
        k = selected.groups // 5
        selected.check(k, 6 * k, everywhere=n < 10000)


@pytest.mark.parametrize("kind", [*SOME, "fourier64"])
@pytest.mark.parametrize("name", ["infinite", "NaN"])
@pytest.mark.parametrize("n", [3000, 270_000])
def test_what_is_not_finite_is_selected_first(kind, name, n):
    """So that it is sent, and detected."""
    transform, reference = KINDS[kind]
    x = array(n, name)
    coefficients = ops.transform(torch.from_numpy(x), transform).numpy()
    finite = np.concatenate([np.isfinite(tile).all(axis=0) for tile in reference.tiles(coefficients, n)])
    count = int((~finite).sum())
    assert 1 <= count <= 3 * transform.length
    tensor = sliced(x)
    for k in (1, count, count + 5):
        bits = same_everywhere(lambda k=k: ops.transform_select(tensor, transform, k)[0]).numpy()
        marked = np.unpackbits(bits, bitorder="little")[: finite.size].astype(bool)
        assert marked.sum() == k
        assert np.all(marked[~finite]) if k >= count else not np.any(marked & finite)
        values = ops.transform_select(tensor, transform, k)[1].numpy()
        assert np.array_equal(values, reference.take(coefficients, n, marked), equal_nan=True)


@pytest.mark.parametrize("k", [0, -1, 6])
def test_k_out_of_range(k):
    with pytest.raises(ValueError, match=f"transform_select: got k = {k}, expected 1 to 5"):
        ops.transform_select(torch.zeros(9), Transform.pairs(), k)
    with pytest.raises(ValueError, match="expected 1 to 0"):
        ops.transform_select(torch.zeros(0), Transform.pairs(), 1)


def test_wrong_outputs():
    x, transform = torch.zeros(20), Transform.fourier(8)
    good = {"bitmap": torch.zeros(2, dtype=torch.uint8), "values": torch.zeros(6), "scratch": torch.zeros(9)}
    ops.transform_select(x, transform, 3, **good)
    wrong = [
        ("bitmap", torch.zeros(3, dtype=torch.uint8)), ("bitmap", torch.zeros(2)), ("values", torch.zeros(3)),
        ("values", torch.zeros(12)[::2]), ("values", torch.zeros(6, dtype=torch.float64)),
        ("scratch", torch.zeros(18)[::2]), ("scratch", torch.zeros(9, dtype=torch.int32)),
    ]  # fmt: skip
    for name, tensor in wrong:
        with pytest.raises(ValueError, match=f"transform_select: {name}: got .*, expected"):
            ops.transform_select(x, transform, 3, **{**good, name: tensor})


# --- transform_decode

FORMATS = [(2, 1), (3, 3), (5, 2), (8, 3), (10, 5), (13, 7), (16, 12)]  # bits, mantissa


class Coded:
    """A part with random codes: the tensors, and what they stand for."""

    def __init__(self, rng: np.random.Generator, groups: int, group: int, share: float, bits: int, mantissa: int):
        low, high = -float(rng.uniform(0, 2)), float(rng.uniform(1, 2))
        number, self.number = ops.RangeFloat(bits, mantissa, low, high), range_format(bits, mantissa, low, high)
        self.mask = rng.random(groups) < share
        count = int(self.mask.sum())
        codes = rng.integers(0, 2**bits, size=count * group)  # those that no number has are zero
        self.values = codebook(self.number)[codes]
        packed = sliced(pack_bits(codes, bits)) if count else torch.zeros(0, dtype=torch.uint8)
        self.part = ops.TransformPart(sliced(bitmap(self.mask)), packed, count, number)


def codebook(number: RangeFormat) -> np.ndarray:
    known = number.codebook.astype(np.float32)
    return np.concatenate([known, np.zeros(2**number.bits - known.size, np.float32)])


def sum_of(coded: list[Coded], reference: BlockTransform, n: int, weight: float) -> np.ndarray:
    """float32 sums, in order."""
    total = np.zeros(-(-n // reference.group) * reference.group, np.float32)
    for each in coded:
        reference.add(total, n, each.mask, np.float32(weight) * each.values)
    return total


def check_wires(parts, transform, before, weight, add):
    """Parts whose formats are read from the wire, as a peer reads them."""
    wires = [as_tensor(b"1" * (i % 8) + part.number.to_wire())[i % 8 :] for i, part in enumerate(parts)]
    parts = [part._replace(number=ops.RangeFloat.from_wire(part.number.to_wire())) for part in parts]
    expected, out = before.clone(), before.clone()
    ops.transform_decode(parts, transform, expected, weight, add)
    bitmaps, packed = [part.bitmap for part in parts], [part.packed for part in parts]
    where = ops.groups.addresses(bitmaps), ops.groups.addresses(packed), ops.groups.numels(packed)
    k, bits = [part.k for part in parts], np.array([part.number.bits for part in parts])
    table = ops.groups.transform_parts(*where, k, bits, ops.groups.addresses(wires))
    assert ops.groups.transform_decode(table, transform.code, [out], weight, add) == 0
    assert torch.equal(out, expected)
    # Formats of other bits fail.
    last = min(len(parts), 16) - 1
    table["format"]["bits"][last] += 1
    assert ops.groups.transform_decode(table[: last + 1], transform.code, [out], weight, add) == last + 1
    assert torch.equal(out, expected)


def check_decode(kind: str, coded: list[Coded], n: int, weight: float, add: bool, everywhere: bool = True) -> None:
    transform, reference = KINDS[kind]
    before = heavy_tailed(n, seed=3)
    parts = [each.part for each in coded]

    def decode() -> torch.Tensor:
        fenced = Guarded(n, torch.float32)
        fenced.out.copy_(torch.from_numpy(before))
        assert ops.transform_decode(parts, transform, fenced.out, weight, add) is None
        assert fenced.intact()
        return fenced.out

    got = same_everywhere(decode) if everywhere else decode()
    check_wires(parts, transform, torch.from_numpy(before), weight, add)
    sums = [sum_of(coded[i : i + 16], reference, n, weight) for i in range(0, len(coded), 16)]
    # Bit by bit: each sum is transformed back and added.
    expected = torch.from_numpy(before).clone() if add else torch.zeros(n)
    for each in sums:
        expected += ops.transform_inverse(torch.from_numpy(each), transform, n)
    assert torch.equal(got, expected)
    # And without the library.
    exact, bound = (before.astype(np.float64) if add else np.zeros(n)), np.zeros(n)
    for each in sums:
        rows, tail = reference.restore(each.astype(np.float64), n)
        exact += np.concatenate([reference.inverse(rows).reshape(-1), tail])
        off = np.broadcast_to(off_by(reference, rows, inverse=True), rows.shape).reshape(-1)
        bound += np.concatenate([off, np.zeros(tail.size)])
    additions = (len(sums) if add else len(sums) - 1) * U * 2 * (np.abs(exact) + np.abs(before) + bound + 40)
    assert np.all(np.abs(got.numpy() - exact) <= bound + additions)


@every_kind
def test_decode_equals_numpy(kind):
    transform, reference = KINDS[kind]
    rng = np.random.default_rng(reference.length)
    for n in sizes(reference)[1:]:
        shares = (0.0, 0.2, 1.0) if n < 1000 else (0.2, 0.9)
        coded = [Coded(rng, transform.groups(n), transform.group, share, 10, 5) for share in shares]
        check_decode(kind, coded, n, 1 / 3, n % 2 == 0)


@pytest.mark.parametrize("kind", ["dct()", "dct(3, 3)", "fourier64"])
@pytest.mark.parametrize("bits, mantissa", FORMATS)
def test_decode_of_every_format(kind, bits, mantissa):
    transform, _ = KINDS[kind]
    rng = np.random.default_rng(bits)
    for n in (1, 7, 65, 17001):
        coded = [Coded(rng, transform.groups(n), transform.group, share, bits, mantissa) for share in (0.15, 1.0)]
        check_decode(kind, coded, n, -0.5, False)


@pytest.mark.parametrize("kind", ["dct()", "dct(5, 5)", "dct(32,)", "fourier8"])
@pytest.mark.parametrize("count", [1, 2, 16, 17, 40])
@pytest.mark.parametrize("add", [False, True])
def test_decode_of_many_parts(kind, count, add):
    transform, _ = KINDS[kind]
    n, rng = 8700, np.random.default_rng(count)
    formats = [FORMATS[i % len(FORMATS)] for i in range(count)]
    coded = [Coded(rng, transform.groups(n), transform.group, 0.3, *each) for each in formats]
    check_decode(kind, coded, n, 1 / count, add, everywhere=count in (1, 17))


def one_part(mask: list[int], count: int, bits: int = 8, group: int = 1) -> ops.TransformPart:
    packed = torch.full(((count * group * bits + 7) // 8,), 9, dtype=torch.uint8)
    return ops.TransformPart(torch.tensor(mask, dtype=torch.uint8), packed, count, ops.RangeFloat(bits, 1, -1.0, 1.0))


@pytest.mark.parametrize("wrong", [one_part([0b10110100], c) for c in (0, 3, 5, 8)], ids=lambda part: str(part.k))
@pytest.mark.parametrize("index", [0, 1, 15])
@pytest.mark.parametrize("add", [False, True])
def test_a_wrong_count_leaves_the_output_unchanged(wrong, index, add):
    """Of the parts that are added up with that one."""
    good = one_part([0b10110100], 4)
    parts = [good] * index + [wrong] + [good] * (15 - index)
    out, expected = torch.ones(8), torch.ones(8)
    assert ops.transform_decode(parts, Transform.dct(2), out, 1.0, add) == index
    assert torch.equal(out, expected)
    # Sixteen at a time: here the first sixteen are right.
    assert ops.transform_decode([good] * 16 + parts, Transform.dct(2), out, 1.0, add) == 16 + index
    ops.transform_decode([good] * 16, Transform.dct(2), expected, 1.0, add)
    assert torch.equal(out, expected)


def test_the_first_wrong_count_is_named():
    good, wrong = one_part([0b11], 2), one_part([0b11], 1)
    for parts, index in (([wrong], 0), ([good, wrong, good, wrong], 1), ([good] * 20 + [wrong] * 9, 20)):
        out = torch.zeros(6)
        assert same_everywhere(lambda p=parts, o=out: ops.transform_decode(p, Transform.dct(), o, 1.0)) == index


@pytest.mark.parametrize("kind, n, good, bad", [
    ("dct()", 3, 0b101, 0b1100), ("fourier8", 5, 0b110, 0b1001), ("pairs", 6, 0b11, 0b1001), ("dct(3,)", 7, 0b11, 0x81),
])  # fmt: skip
def test_bits_past_the_end_are_refused(kind, n, good, bad):
    """Encoders write 0 there. Both have two bits set."""
    transform, _ = KINDS[kind]
    out = torch.ones(n)
    assert ops.transform_decode([one_part([bad], 2, group=transform.group)], transform, out, 1.0) == 0
    assert torch.equal(out, torch.ones(n))
    # A bit past the end beside the right number of bits.
    assert ops.transform_decode([one_part([good | 0x80], 2, group=transform.group)], transform, out, 1.0) == 0
    assert torch.equal(out, torch.ones(n))
    assert ops.transform_decode([one_part([good], 2, group=transform.group)], transform, out, 1.0) is None


@pytest.mark.parametrize("kind", ["dct()", "pairs"])
def test_wrong_counts_of_several_tiles(kind):
    transform, _ = KINDS[kind]
    n = 40_000
    coded = Coded(np.random.default_rng(0), transform.groups(n), transform.group, 0.2, 7, 2)
    for flipped in (0, 1500, coded.mask.size // 8 - 1):
        bits = coded.part.bitmap.clone()
        bits[flipped] ^= 1
        out = torch.full((n,), 5.0)
        part = coded.part._replace(bitmap=bits)
        assert same_everywhere(lambda p=part, o=out: ops.transform_decode([p], transform, o, 1.0)) == 0
        assert out.eq(5).all()


@pytest.mark.parametrize("nbytes, count", [(1, 1), (3, 1), (0, 1), (2, 2), (2, -1), (2, 0)])
def test_truncated_codes(nbytes, count):
    part = one_part([1], 1)._replace(packed=torch.zeros(nbytes, dtype=torch.uint8), k=count)
    with pytest.raises(ValueError, match=f"transform_decode: packed: got {nbytes} elements, expected {2 * count}"):
        ops.transform_decode([part], Transform.pairs(), torch.ones(8), 1.0)


def test_no_parts():
    with pytest.raises(ValueError, match="transform_decode: got no parts, expected at least one"):
        ops.transform_decode([], Transform.dct(), torch.ones(8), 1.0)


def test_wrong_parts():
    good, out = one_part([0b11], 2), torch.ones(8)
    wrong = [("bitmap", [None, torch.zeros(0, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8), torch.zeros(1)])]
    wrong += [("packed", [None, torch.zeros(2), torch.zeros(2, dtype=torch.int32)])]
    for name, tensors in wrong:
        for tensor in tensors:
            for parts in ([good._replace(**{name: tensor})], [good] * 20 + [good._replace(**{name: tensor})]):
                with pytest.raises(ValueError, match=f"transform_decode: {name}: got .*, expected"):
                    ops.transform_decode(parts, Transform.dct(), out, 1.0)
    assert torch.equal(out, torch.ones(8))  # all parts are looked at before any is added


@pytest.mark.parametrize("out", [None, torch.zeros(8, dtype=torch.float64), torch.zeros(16)[::2]])
def test_wrong_output(out):
    with pytest.raises(ValueError, match="transform_decode: out: got .*, expected"):
        ops.transform_decode([one_part([0b11], 2)], Transform.dct(), out, 1.0)


@some_kinds
def test_decode_of_what_was_selected(kind):
    """Encoding and decoding: the error is the energy that was dropped, and that of the codes."""
    transform, _ = KINDS[kind]
    n = 10_001
    x = torch.from_numpy(heavy_tailed(n, seed=4))
    k = transform.groups(n) // 4
    bits, values = ops.transform_select(x, transform, k)
    number = ops.RangeFloat.fit(values, 16, 12)
    codes = number.encode(values)
    out = torch.empty(n)
    part = ops.TransformPart(bits, ops.pack_bits(codes, 16), k, number)
    assert ops.transform_decode([part], transform, out, 1.0) is None
    coefficients = ops.transform(x, transform).double()
    dropped = (coefficients**2).sum() - (values.double() ** 2).sum()
    coding = (number.decode(codes) - values).double().norm().item()
    error = (out - x).double().norm().item()
    assert error == pytest.approx(math.sqrt(dropped.item() + coding**2), rel=1e-4)
