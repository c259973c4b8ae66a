"""The passes of low-rank compression over a gradient, fused with error feedback.

M is n x m, its factors P n x r and Q m x r. Vogels et al., PowerSGD, NeurIPS 2019, Algorithms 1 and 2; Zhang et al.,
ACP-SGD, ICDCS 2023, Algorithm 2. Each sum runs in one fixed order, of fused multiply-adds, so results have the same
bits for any number of threads, SIMD level or device: ranks that expand the same factors get the same gradient. The one
exception is `low_rank_project`, whose sums run in another order on CUDA. All tensors are float32, unless said
otherwise, and on one device; nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _native


def _matrix(
    x: Tensor, what: str, rows: int | None = None, columns: int | None = None, device: torch.device | None = None,
    dtype: _native.Dtypes = torch.float32,
) -> Tensor:  # fmt: skip
    x = _native.check(x, dtype, what, device=device)
    if x.dim() != 2 or rows not in (None, x.shape[0]) or columns not in (None, x.shape[1]):
        expected = f"({'n' if rows is None else rows}, {'r' if columns is None else columns})"
        raise ValueError(f"{what}: got shape {tuple(x.shape)}, expected {expected}")
    return x


def _in_place(x: Tensor, what: str, rows: int, columns: int, device: torch.device) -> Tensor:
    _native.in_place(x, torch.float32, what, device=device)
    return _matrix(x, what, rows, columns)


def _output(out: Tensor | None, what: str, rows: int, columns: int, device: torch.device) -> Tensor:
    if out is None:
        return torch.empty(rows, columns, dtype=torch.float32, device=device)
    return _in_place(out, what, rows, columns, device)


# A matrix to project: m, e or None, factor, and whether to transpose. An average to apply: m, e, sent_p, sent_q, p, q.
Projection = tuple[Tensor, Tensor | None, Tensor, bool]
AverageUpdate = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor]


def low_rank_project(
    m: Tensor, e: Tensor | None, factor: Tensor, out: Tensor | None = None, transpose: bool = False
) -> Tensor:
    """Compute e += m, then return e @ factor, or eᵀ @ factor with `transpose`, in one pass over m and e.

    m, e: (n, m); e is changed in place; if e is None, m itself is projected, which may be float16 or bfloat16. factor:
    (m, r), or (n, r) with `transpose`. Returns (n, r), or (m, r) with `transpose`, in `out` if given. The factor must
    not overlap out.

    >>> m, e = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0]])
    >>> low_rank_project(m, e, torch.tensor([[1.0], [10.0]])).tolist(), e.tolist()
    ([[31.0]], [[1.0, 3.0]])
    """
    return _project([(m, e, factor, transpose)], out)[0]


def low_rank_project_all(projections: Sequence[Projection]) -> list[Tensor]:
    """The results of `low_rank_project` for several matrices, with the same bits, in one call.

    projections: (m, e, factor, transpose) of each. No e may overlap another tensor.

    >>> m, n = torch.ones(2, 3), torch.ones(4, 2)
    >>> p, q = low_rank_project_all([(m, None, torch.ones(3, 1), False), (n, None, torch.ones(4, 1), True)])
    >>> p.tolist(), q.tolist()
    ([[3.0], [3.0]], [[4.0], [4.0]])
    """
    return _project(projections, None)


def _project(projections: Sequence[Projection], out: Tensor | None) -> list[Tensor]:
    table = _native.Table("<QqQqqQqqQ")  # struct Projection of csrc/common/low_rank.h
    outs, changed = [], []
    for m, e, factor, transpose in projections:
        m = _matrix(m, "low_rank_project: m", device=table.device, dtype=_native.FLOATS if e is None else torch.float32)
        rows, columns = m.shape
        if e is not None:
            changed.append(_in_place(e, "low_rank_project: e", rows, columns, m.device))
        factor = _matrix(factor, "low_rank_project: factor", rows if transpose else columns, device=m.device)
        rank = factor.shape[1]
        if rank == 0:
            raise ValueError("low_rank_project: factor: got 0 columns, expected at least 1")
        outs.append(_output(out, "low_rank_project: out", columns if transpose else rows, rank, m.device))
        table.add(m, _native.FLOATS.index(m.dtype), e, rows, columns, factor, rank, transpose, outs[-1])
    _native.check_distinct(changed, "low_rank_project: e")
    table.run("low_rank_project")
    return outs


def low_rank_apply_average_all(updates: Sequence[AverageUpdate], number: Tensor | None = None) -> None:
    """Set e = m - sent_p @ sent_qᵀ (the new residual), then m = p @ qᵀ (the average gradient), each in one pass.

    updates: (m, e, sent_p, sent_q, p, q) of each matrix. m, e: (n, m), in place; e is not read, and may be None: m,
    which may be float16 or bfloat16 then, is not read either, and rounded once.
    sent_p, p: (n, r); sent_q, q: (m, r). The factors sent may be p and q themselves; if both are, one product is
    computed. m gets the bits of `low_rank_expand(p, q)`. No m or e may overlap another tensor.

    number: float32, 1 element. If it is inf or NaN, all e stay as they are.

    >>> m, e = torch.tensor([[31.0, 7.0]]), torch.empty(1, 2)
    >>> sent_p, sent_q = torch.tensor([[3.0]]), torch.tensor([[10.0], [2.0]])
    >>> low_rank_apply_average_all([(m, e, sent_p, sent_q, torch.ones(1, 1), torch.ones(2, 1))])
    >>> m.tolist(), e.tolist()
    ([[1.0, 1.0]], [[1.0, 1.0]])
    """
    table = _native.Table("<QqQQQQQQqqqQ")  # struct AverageUpdate of csrc/common/low_rank.h
    changed = []
    for m, e, sent_p, sent_q, p, q in updates:
        dtypes = _native.FLOATS if e is None else torch.float32
        changed.append(_native.in_place(m, dtypes, "low_rank_apply_average: m", device=table.device))
        m = _matrix(m, "low_rank_apply_average: m", dtype=dtypes)
        rows, columns = m.shape
        if e is not None:
            changed.append(_in_place(e, "low_rank_apply_average: e", rows, columns, m.device))
        p = _matrix(p, "low_rank_apply_average: p", rows, device=m.device)
        rank = p.shape[1]
        q = _matrix(q, "low_rank_apply_average: q", columns, rank, m.device)
        sent_p = _matrix(sent_p, "low_rank_apply_average: sent_p", rows, rank, m.device)
        sent_q = _matrix(sent_q, "low_rank_apply_average: sent_q", columns, rank, m.device)
        if number is not None:
            number = _native.check(number, torch.float32, "low_rank_apply_average: number", 1, m.device)
        table.add(m, _native.FLOATS.index(m.dtype), m, e, sent_p, sent_q, p, q, rows, columns, rank, number)
    _native.check_distinct(changed, "low_rank_apply_average: m, e")
    table.run("low_rank_apply_average")


def low_rank_subtract(e: Tensor, p: Tensor, q: Tensor) -> None:
    """Compute e -= p @ qᵀ in one pass. e: (n, m), in place; p: (n, r); q: (m, r)."""
    p = _matrix(p, "low_rank_subtract: p")
    q = _matrix(q, "low_rank_subtract: q", columns=p.shape[1], device=p.device)
    e = _in_place(e, "low_rank_subtract: e", p.shape[0], q.shape[0], p.device)
    _expand(p, q, e.data_ptr(), e)


def low_rank_expand(p: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Return p @ qᵀ: (n, m), in `out` if given. p: (n, r); q: (m, r).

    An element is fused multiply-adds over the columns in order, from 0.
    """
    p = _matrix(p, "low_rank_expand: p")
    q = _matrix(q, "low_rank_expand: q", columns=p.shape[1], device=p.device)
    out = _output(out, "low_rank_expand: out", p.shape[0], q.shape[0], p.device)
    _expand(p, q, 0, out)
    return out


def _expand(p: Tensor, q: Tensor, minuend: int, out: Tensor) -> None:
    _native.run("low_rank_expand", p, p.data_ptr(), q.data_ptr(), *out.shape, p.shape[1], minuend, out.data_ptr())
