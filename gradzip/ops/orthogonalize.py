"""Orthonormal columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _native


def orthogonalize_(matrices: Tensor | Sequence[Tensor]) -> None:
    """Make the columns of each matrix orthonormal, in place: one call for all of a model's matrices.

    matrices: (n, r) each, float32, contiguous, not overlapping, all on one device. If n >= r, the columns become Q of
    a QR decomposition with a positive diagonal of R: they span the same space, and \\|QᵀQ - I\\| <= 1e-6 sqrt(r) at any
    scale. Never NaN: a column that depends on those before it (sine of the angle below 2^-23), is zero, or holds a
    non-finite number is replaced, after all others are done, by the coordinate axis farthest from their span (the first
    of several), made orthonormal to it; or by zeros if no dimension is left (r > n).

    Deterministic: the same bits at every SIMD level and, unless columns depend on each other, on CUDA devices, so that
    ranks on different processors keep the same factors. Does not wait for the device. Raises ValueError for another
    shape, dtype or device, or for the same matrix twice.

    Method: Cholesky QR in double, Q = A R^-1 with RᵀR = AᵀA, a second time if R is ill-conditioned (Fukaya et al.,
    CholeskyQR2, ScalA'14); Gram-Schmidt, twice, if Cholesky's pivots vanish.

    >>> q = torch.tensor([[3.0, 6.0], [4.0, 8.0]])
    >>> orthogonalize_(q)
    >>> [[round(x, 4) for x in row] for row in q.tolist()]
    [[0.6, 0.8], [0.8, -0.6]]
    """
    matrices = [matrices] if isinstance(matrices, Tensor) else list(matrices)
    table = _native.Table("<Qqq")  # struct Matrix of csrc/common/orthogonalize.h
    for matrix in matrices:
        _native.in_place(matrix, torch.float32, "orthogonalize_", device=table.device)
        if matrix.dim() != 2:
            raise ValueError(f"orthogonalize_: got a tensor of shape {tuple(matrix.shape)}, expected (n, r)")
        table.add(matrix, *matrix.shape)
    _native.check_distinct(matrices, "orthogonalize_")
    table.run("orthogonalize")
