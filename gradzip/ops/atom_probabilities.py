"""Which atoms to keep, and how likely (ATOMO).

Wang, Sievert, Charles, Liu, Wright, Papailiopoulos, ATOMO: Communication-efficient Learning via Atomic Sparsification,
NeurIPS 2018, Algorithm 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import _native


def atom_probabilities(atoms: Tensor, budget: float, out: Tensor | None = None) -> Tensor:
    """p_i = min(1, c \\|a_i\\|) with c such that the p_i add up to `budget`: the least variance for so many atoms.

    atoms: coefficients, any shape and order, float32 or float64; budget: how many to keep on average, > 0. Returns
    probabilities of the same shape and dtype, `out` (flat, of as many elements) where given. Atoms that are 0 have p =
    0, all others p = 1 where the budget reaches for them. Equal magnitudes have equal p. Computed in double, by a few
    reads of memory: nothing is sorted. Deterministic. ValueError for atoms that are not finite; on CUDA, where nothing
    waits for the device to know, all p become NaN instead.

    >>> atom_probabilities(torch.tensor([8.0, 1.0, -2.0, 1.0, 0.0]), 2)
    tensor([1.0000, 0.2500, 0.5000, 0.2500, 0.0000])
    """
    dtype = torch.float64 if isinstance(atoms, Tensor) and atoms.dtype == torch.float64 else torch.float32
    atoms = _native.check(atoms, dtype, "atom_probabilities: atoms")
    if not (budget > 0 and math.isfinite(budget)):
        raise ValueError(f"atom_probabilities: got budget = {budget}, expected a finite number > 0")
    p = _native.output(out, atoms.numel(), dtype, atoms.device, "atom_probabilities: out").view(atoms.shape)
    n, kernel = atoms.numel(), f"atom_probabilities_{'double' if dtype == torch.float64 else 'float'}"
    if _native.run(kernel, atoms, atoms.data_ptr(), n, budget, p.data_ptr(), workspace_for=n):
        raise ValueError("atom_probabilities: got an atom that is inf or NaN, expected finite numbers")
    return p
