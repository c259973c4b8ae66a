"""Which atoms to keep, and with which probability (ATOMO).

Wang, Sievert, Charles, Liu, Wright, Papailiopoulos, ATOMO: Communication-efficient Learning via Atomic Sparsification,
NeurIPS 2018, Algorithm 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import _native


def atom_probabilities(atoms: Tensor, budget: float, out: Tensor | None = None) -> Tensor:
    """Return p_i = min(1, c \\|a_i\\|) with c such that sum p_i = `budget`: the least variance for that many atoms.

    atoms: coefficients, any shape and order, float32 or float64; budget: expected number of atoms to keep, > 0. Returns
    probabilities of the same shape and dtype, in `out` (flat, as many elements) if given. Zero atoms have p = 0; all
    others have p = 1 if the budget suffices for them. Equal magnitudes have equal p. Computed in double, without
    sorting. Deterministic. Raises ValueError if an atom is not finite; on CUDA, which does not wait for the device, all
    p become NaN instead.

    >>> atom_probabilities(torch.tensor([8.0, 1.0, -2.0, 1.0, 0.0]), 2)
    tensor([1.0000, 0.2500, 0.5000, 0.2500, 0.0000])
    """
    dtype = torch.float64 if isinstance(atoms, Tensor) and atoms.dtype == torch.float64 else torch.float32
    atoms = _native.check(atoms, dtype, "atom_probabilities: atoms")
    if not (budget > 0 and math.isfinite(budget)):
        raise ValueError(f"atom_probabilities: got budget = {budget}, expected a finite number > 0")
    p = _native.output(out, atoms.numel(), dtype, atoms.device, "atom_probabilities: out").view(atoms.shape)
    kernel = "atom_probabilities_double" if dtype == torch.float64 else "atom_probabilities_float"
    if _native.run_failed(kernel, atoms, atoms.data_ptr(), atoms.numel(), budget, p.data_ptr()):
        raise ValueError("atom_probabilities: got an atom that is inf or NaN, expected finite numbers")
    return p
