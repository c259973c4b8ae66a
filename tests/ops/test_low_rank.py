import ctypes
import ctypes.util
import functools
import itertools
import math

import numpy as np
import pytest
import torch

import gradzip.ops._native as native
from gradzip import ops

SHAPES = [(1, 1), (1, 31), (3, 33), (4, 32), (5, 1025), (31, 16), (130, 65), (700, 40), (9, 3000), (2100, 7)]
RANKS = [1, 4, 7, 17, 32, 40, 64]  # tiles of 1 to 4 registers, and several of them


def close(result, a, b, minuend=None):
    """Check result = a @ b to within the rounding of a float sum in any order, n eps (|a| @ |b|), or minuend - a @ b,
    which is rounded once more: eps (|minuend| + |a| @ |b|)."""
    a, b = a.double().numpy(), b.double().numpy()
    exact, size = a @ b, np.abs(a) @ np.abs(b)
    bound = (a.shape[1] + 1) * 2.0**-24 * size
    if minuend is not None:
        minuend = minuend.double().numpy()
        exact, bound = minuend - exact, bound + 2.0**-24 * (np.abs(minuend) + size)
    assert (np.abs(result.double().numpy() - exact) <= bound + 1e-40).all()


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("r", RANKS)
@pytest.mark.parametrize("n, c", SHAPES)
def test_project(simd, threads, n, c, r):
    for transpose in (False, True):
        m, e = torch.randn(n, c), torch.randn(n, c)
        factor = torch.randn(n if transpose else c, r)
        out = torch.full((c if transpose else n, r), float("nan"))
        corrected = m + e
        assert ops.low_rank_project(m, e, factor, out=out, transpose=transpose) is out
        assert torch.equal(e, corrected)
        close(out, corrected.t() if transpose else corrected, factor)
        plain = ops.low_rank_project(corrected, None, factor, transpose=transpose)
        assert torch.equal(plain, out)


@pytest.mark.parametrize("r", RANKS)
@pytest.mark.parametrize("n, c", SHAPES)
def test_expand_and_subtract(simd, threads, n, c, r):
    p, q, e = torch.randn(n, r), torch.randn(c, r), torch.randn(n, c)
    out = ops.low_rank_expand(p, q)
    close(out, p, q.t())
    after = e.clone()
    ops.low_rank_subtract(after, p, q)
    assert torch.equal(after, e - out)


def test_expand_is_fused_multiply_adds_in_order(simd):
    """What all ranks compute alike is rounded once for each product: by fmaf of the C library."""
    fma = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fma.argtypes, fma.restype = [ctypes.c_float] * 3, ctypes.c_float
    n, c, r = 7, 37, 5  # whole tiles and parts of them
    p, q = torch.randn(n, r), torch.randn(c, r)
    wanted = [
        functools.reduce(lambda total, k: fma(q[j, k], p[i, k], total), range(r), 0.0)
        for i, j in itertools.product(range(n), range(c))
    ]
    assert torch.equal(ops.low_rank_expand(p, q).view(-1), torch.tensor(wanted))
    assert not torch.equal(sum(p[:, k, None] * q[:, k] for k in range(r)).view(-1), torch.tensor(wanted))


@pytest.mark.parametrize("n, c", SHAPES)
def test_small_ranks_have_the_bits_of_larger_ones(simd, threads, n, c):
    """Kernels for few columns of factors sum in the order of the one for any number, but for rows times one column."""
    m, p, q = torch.randn(n, c), torch.randn(n, 5), torch.randn(c, 5)
    project = functools.partial(ops.low_rank_project, m, None)
    for r in (1, 2, 3, 4):
        for factor, transpose in ((q, False), (p, True)):
            if r > 1 or transpose:
                few = project(factor[:, :r].contiguous(), transpose=transpose)
                assert torch.equal(few, project(factor, transpose=transpose)[:, :r])
        few = ops.low_rank_expand(p[:, :r].contiguous(), q[:, :r].contiguous())
        assert torch.equal(few, ops.low_rank_expand(p * (torch.arange(5) < r), q))


@pytest.mark.parametrize("r", RANKS)
@pytest.mark.parametrize("n, c", SHAPES)
def test_apply_average(simd, threads, n, c, r):
    corrected, p, q = torch.randn(n, c), torch.randn(n, r), torch.randn(c, r)
    for sent_p in (p, torch.randn(n, r)):
        for sent_q in (q, torch.randn(c, r)):
            m, e = corrected.clone(), torch.full((n, c), float("nan"))
            ops.low_rank_apply_average_all([(m, e, sent_p, sent_q, p, q)])
            close(m, p, q.t())
            close(e, sent_p, sent_q.t(), minuend=corrected)
            assert torch.equal(m, ops.low_rank_expand(p, q))
            assert torch.equal(e, corrected - ops.low_rank_expand(sent_p, sent_q))
            # The same bits whether the factors sent are p and q or copies.
            again, residual = corrected.clone(), torch.empty(n, c)
            ops.low_rank_apply_average_all([(again, residual, sent_p.clone(), sent_q.clone(), p, q)])
            assert torch.equal(again, m) and torch.equal(residual, e)


@pytest.mark.parametrize("number", [0.0, 3e38, -1.0, float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("n, c", SHAPES)
def test_a_number_that_is_not_finite_keeps_what_was_left(n, c, number, threads):
    """Of all matrices of a table. The averages are written anyway, and alone if there is no e."""
    shapes, r = [(n, c), (c, n)], 4
    ms, before = ([torch.randn(shape) for shape in shapes] for _ in range(2))
    ps, qs, sent = ([torch.randn(shape[i], r) for shape in shapes] for i in (0, 1, 0))
    es, wanted, got = ([x.clone() for x in some] for some in (before, ms, ms))
    ops.low_rank_apply_average_all(list(zip(got, es, sent, qs, ps, qs)), torch.tensor([number]))
    left = [torch.empty_like(e) for e in es]
    ops.low_rank_apply_average_all(list(zip(wanted, left, sent, qs, ps, qs)))
    kept = left if math.isfinite(number) else before
    assert all(map(torch.equal, got + es, wanted + kept)) and not torch.equal(left[0], before[0])
    alone = [m.clone() for m in ms]
    ops.low_rank_apply_average_all([(m, None, *factors) for m, *factors in zip(alone, sent, qs, ps, qs)])
    assert all(map(torch.equal, alone, wanted))


@pytest.mark.parametrize("columns", [1024, 1025])
def test_large_matrices_have_the_bits_of_their_rows(simd, threads, columns):
    n, r = 4100, 3  # more than 2^22 elements: whole lines are written past the cache
    corrected, p, sent_p, q = (torch.randn(s) for s in ((n, columns), (n, r), (n, r), (columns, r)))
    m, e = corrected.clone(), torch.full((n, columns), float("nan"))
    ops.low_rank_apply_average_all([(m, e, sent_p, q, p, q)])
    product = ops.low_rank_expand(p, q)
    for rows in (slice(0, 2001), slice(2001, n)):
        gradient, residual = corrected[rows].clone(), torch.empty_like(corrected[rows])
        ops.low_rank_apply_average_all([(gradient, residual, sent_p[rows], q, p[rows], q)])
        assert torch.equal(gradient, m[rows]) and torch.equal(residual, e[rows])
    assert torch.equal(product, m)


@pytest.mark.parametrize("r", [1, 22])
def test_bits_depend_on_neither_threads_nor_simd_level(simd, r):
    generator = torch.Generator().manual_seed(1)
    n, c = 702, 530  # parts of the rows and columns that are computed together
    m, e, p, q, sent_p = (torch.randn(s, generator=generator) for s in ((n, c), (n, c), (n, r), (c, r), (n, r)))

    def run():
        gradient, residual = m.clone(), torch.empty_like(e)
        ops.low_rank_apply_average_all([(gradient, residual, sent_p, q, p, q)])
        return (
            ops.low_rank_project(m, e.clone(), q),
            ops.low_rank_project(m, e.clone(), p, transpose=True),
            ops.low_rank_expand(p, q),
            gradient,
            residual,
        )

    native.kernels().set_simd("scalar")
    reference = run()
    native.kernels().set_simd(simd)
    before = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert all(torch.equal(a, b) for a, b in zip(run(), reference))
    torch.set_num_threads(before)


def test_nothing_is_written_out_of_bounds():
    whole, other = torch.zeros(40, 33), torch.zeros(40, 33)
    m, e, p, q = whole[3:7], other[3:7], torch.ones(4, 2), torch.ones(33, 2)
    ops.low_rank_project(torch.ones(4, 33), m, q)
    ops.low_rank_subtract(m, p, q)
    assert whole.abs().sum() == 4 * 33 and (m == -1).all()
    ops.low_rank_apply_average_all([(m, e, p, -q, p, q)])
    assert whole.abs().sum() == 8 * 33 and (m == 2).all()
    assert other.abs().sum() == 4 * 33 and (e == 1).all()


def test_non_finite_values_do_not_spread():
    m = torch.randn(9, 50)
    m[4, 20] = float("inf")
    p = ops.low_rank_project(m, torch.zeros(9, 50), torch.rand(50, 3))
    assert torch.isinf(p[4]).all() and torch.isfinite(p[:4]).all() and torch.isfinite(p[5:]).all()


@pytest.mark.parametrize("n, c", [(0, 5), (5, 0), (0, 0)])
def test_empty(n, c):
    assert torch.equal(ops.low_rank_project(torch.ones(n, c), torch.ones(n, c), torch.ones(c, 2)), torch.zeros(n, 2))
    transposed = ops.low_rank_project(torch.ones(n, c), None, torch.ones(n, 2), transpose=True)
    assert torch.equal(transposed, torch.zeros(c, 2))
    p, q = torch.ones(n, 2), torch.ones(c, 2)
    assert ops.low_rank_expand(p, q).shape == (n, c)
    ops.low_rank_apply_average_all([(torch.ones(n, c), torch.ones(n, c), p, q, p, q)])


def test_errors():
    m, e, q = torch.zeros(4, 6), torch.zeros(4, 6), torch.zeros(6, 2)
    with pytest.raises(ValueError, match=r"factor: got shape \(4, 2\), expected \(6, r\)"):
        ops.low_rank_project(m, e, torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"e: got shape \(6, 4\), expected \(4, 6\)"):
        ops.low_rank_project(m, torch.zeros(6, 4), q)
    with pytest.raises(ValueError, match=r"e: got strides \(1, 4\), expected a contiguous tensor"):
        ops.low_rank_project(m, torch.zeros(6, 4).t(), q)
    with pytest.raises(ValueError, match="m: got torch.float16, expected torch.float32"):
        ops.low_rank_project(m.half(), e, q)
    with pytest.raises(ValueError, match=r"out: got shape \(6, 2\), expected \(4, 2\)"):
        ops.low_rank_project(m, e, q, out=torch.zeros(6, 2))
    with pytest.raises(ValueError, match=r"q: got shape \(6, 2\), expected \(n, 3\)"):
        ops.low_rank_subtract(e, torch.zeros(4, 3), q)
    with pytest.raises(ValueError, match="factor: got 0 columns, expected at least 1"):
        ops.low_rank_project(m, e, torch.zeros(6, 0))
    p = torch.zeros(4, 2)
    with pytest.raises(ValueError, match=r"sent_p: got shape \(4, 3\), expected \(4, 2\)"):
        ops.low_rank_apply_average_all([(m, e, torch.zeros(4, 3), q, p, q)])
    with pytest.raises(ValueError, match=r"sent_q: got shape \(4, 2\), expected \(6, 2\)"):
        ops.low_rank_apply_average_all([(m, e, p, p, p, q)])
    with pytest.raises(ValueError, match=r"e: got shape \(6, 4\), expected \(4, 6\)"):
        ops.low_rank_apply_average_all([(m, torch.zeros(6, 4), p, q, p, q)])
    with pytest.raises(ValueError, match=r"m: got strides \(1, 4\), expected a contiguous tensor"):
        ops.low_rank_apply_average_all([(torch.zeros(6, 4).t(), e, p, q, p, q)])
    with pytest.raises(ValueError, match="number: got 2 elements, expected 1"):
        ops.low_rank_apply_average_all([(m, e, p, q, p, q)], torch.zeros(2))
    with pytest.raises(ValueError, match="number: got torch.float64, expected torch.float32"):
        ops.low_rank_apply_average_all([(m, e, p, q, p, q)], torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ValueError, match="number: got a tensor on meta, expected one on the CPU"):
        ops.low_rank_apply_average_all([(m, e, p, q, p, q)], torch.zeros(1, device="meta"))


def test_tables_have_the_bits_of_single_matrices(simd, threads):
    shapes = [(5, 1025), (0, 7), (130, 65), (1100, 1000), (31, 16), (9, 3000), (64, 64)]  # one is split over threads
    ranks, transposes = [3, 4, 1, 4, 7, 70, 4], [False, True, True, False, False, True, True]
    ms, es = ([torch.randn(shape) for shape in shapes] for _ in range(2))
    factors = [torch.randn(shape[not t], r) for shape, r, t in zip(shapes, ranks, transposes)]
    single = [e.clone() for e in es]
    wanted = [ops.low_rank_project(m, e, f, transpose=t) for m, e, f, t in zip(ms, single, factors, transposes)]
    got = ops.low_rank_project_all([(m, e, f, t) for m, e, f, t in zip(ms, es, factors, transposes)])
    assert all(torch.equal(a, b) for a, b in zip(got + es, wanted + single, strict=True))
    plain = ops.low_rank_project_all([(m, None, f, t) for m, f, t in zip(ms, factors, transposes)])
    for a, m, f, t in zip(plain, ms, factors, transposes):
        assert torch.equal(a, ops.low_rank_project(m, None, f, transpose=t))

    ps, qs = ([torch.randn(shape[i], r) for shape, r in zip(shapes, ranks)] for i in range(2))
    sent = [p if i % 2 else torch.randn_like(p) for i, p in enumerate(ps)]
    copies = [m.clone() for m in ms]
    for arguments in zip(copies, single, sent, qs, ps, qs):
        ops.low_rank_apply_average_all([arguments])
    ops.low_rank_apply_average_all(list(zip(ms, es, sent, qs, ps, qs)))
    assert all(torch.equal(a, b) for a, b in zip(ms + es, copies + single, strict=True))


def test_bad_tables_are_refused_before_anything_changes():
    m, e, factor = torch.ones(2, 3), torch.zeros(2, 3), torch.ones(3, 1)
    for bad, message in (
        ((m, e, torch.ones(2, 1), False), r"low_rank_project: factor: got shape \(2, 1\), expected \(3, r\)"),
        ((m, torch.zeros(3, 2), factor, False), r"low_rank_project: e: got shape \(3, 2\), expected \(2, 3\)"),
        ((m, e, factor, False), "low_rank_project: e: got the same matrix more than once, expected distinct ones"),
        ((m.double(), None, factor, False), "low_rank_project: m: got torch.float64, expected torch.float32"),
        ((m.to("meta"), None, factor, False), "low_rank_project: m: got a tensor on meta, expected one on the CPU"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.low_rank_project_all([(m, e, factor, False), bad])
    update = (m, e, torch.ones(2, 1), torch.ones(3, 1), torch.ones(2, 1), torch.ones(3, 1))
    for table in ([update, update], [update, (m, *update[1:])]):
        with pytest.raises(ValueError, match="low_rank_apply_average: m, e: got the same matrix more than once"):
            ops.low_rank_apply_average_all(table)
    assert torch.equal(m, torch.ones(2, 3)) and torch.equal(e, torch.zeros(2, 3))
    assert ops.low_rank_project_all([]) == [] and ops.low_rank_apply_average_all([]) is None
