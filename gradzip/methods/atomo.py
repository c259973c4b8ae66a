"""Unbiased sparsification of a gradient's atoms: singular values, elements or frequencies."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..memory.state import Key
from ..ops import tensors as ops
from .base.compressor import INDEXED_NUMEL, is_number
from .base.gather import CodedSum, GatherCompressor
from .base.registry import register
from .base.threads import one_thread
from .base.transform import inverse_transform, spectra, transform_shape

_MATRICES = struct.Struct("<QQ")  # rows, atoms
_ENTRIES = struct.Struct("<fII4x")  # magnitude of drawn atoms; how many atoms are certain (p = 1), how many drawn
_BLOCK = 4096  # longest transform
_THREADS_NUMEL = 1 << 18  # decompose smaller matrices in one thread, which is faster


@register(
    "atomo",
    number=20,
    examples=[
        "",
        "atoms=entry,budget=100",
        "atoms=fourier,budget=50",
        "budget=l2",
        "atoms=entry,budget=max",
    ],
)
@dataclass
class ATOMO(GatherCompressor):
    """Sends random atoms of the gradient, scaled so that the average is unbiased.

    Atom i of the decomposition g = sum_i lambda_i a_i is sent with probability p_i, as (lambda_i / p_i) a_i. The
    variance is sum lambda_i^2 (1 / p_i - 1). Algorithm 1 finds the p with the least variance for sum p_i = budget.
    Atoms are drawn independently. If none is drawn, peers decode 0.

    Args:
        atoms: the kind of decomposition.

            "svd": singular values with their vectors. The gradient [x, y, k, k] of a convolution is viewed as a matrix
            of xy / 2 rows and 2 k^2 columns (section 6), or of x rows and y k^2 columns if xy is odd or k = 1.

            "entry": elements.

            "fourier": sines and cosines in rows of at most 4096 elements, an orthonormal basis.

        budget: expected number of atoms sent, > 0, for each gradient (or partition of a gradient). If the budget covers
            all atoms that are not 0, the result is exact. For "entry" and "fourier" an atom is a single number, so use
            a far larger budget than for "svd".

            "l2" or "max": p_i = |lambda_i| / ||lambda||_q, with q = 2 or infinity: the optimal p for the budget
            ||lambda||_1 / ||lambda||_q (Theorem 5). With "entry" this is 1-bit QSGD, or TernGrad without clipping. With
            "l2", at most sqrt(n) of n elements are sent: choose the learning rate for that variance.
        seed: of the draws.

    Payload, "svd": header; for each atom, the left vector times sigma / p, and the right vector, as float32: 48 + 4
    atoms (rows + columns) bytes, padded to 16. A gradient bypasses compression if the payload of `budget` atoms (of one
    atom with "l2" or "max") is not smaller than its 4 n bytes.

    Payload, "entry" and "fourier": header; float32 values of the atoms with p = 1, and their indices; indices of the
    drawn atoms, and a sign for each: 48 + 4 certain + drawn / 8 bytes and two streams of coded indices
    (gradzip/ops/index_code.py), padded to 16. All drawn atoms have the same magnitude lambda_i / p_i, in the header.

    Deterministic for a seed; "svd" and "fourier" depend on the LAPACK and FFT libraries. Encoding synchronises a CUDA
    device, because the host must know how many atoms were drawn.

    Source: Wang, Sievert, Charles, Liu, Wright, Papailiopoulos, ATOMO: Communication-efficient Learning via Atomic
    Sparsification, NeurIPS 2018.
    """

    atoms: str = "svd"
    budget: float | str = 3
    seed: int = 0

    unbiased = True
    vectors = False  # each gradient is decomposed by itself

    def groups_by(self, shape: torch.Size) -> None:
        return None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("atoms", self.atoms in ("svd", "entry", "fourier"), "'svd', 'entry' or 'fourier'")
        budget: Any = self.budget
        valid = 0 < budget < math.inf if is_number(budget) else budget in ("l2", "max")
        self.check("budget", valid, "a finite number > 0, 'l2' or 'max'")

    @property
    def max_numel(self) -> float:  # type: ignore[override]
        return math.inf if self.atoms == "svd" else INDEXED_NUMEL

    def bypasses(self, grad: Tensor) -> bool:
        if super().bypasses(grad) or self.atoms != "svd":
            return super().bypasses(grad)
        rows, columns = matrix_shape(grad.shape)
        expected = 1.0 if isinstance(self.budget, str) else min(float(self.budget), rows, columns)
        return ops.HEADER_NBYTES + 4 * expected * (rows + columns) >= 4 * grad.numel()

    def probabilities(self, atoms: Tensor) -> Tensor:
        """The probability p of each atom, from its coefficient lambda: float32, of the same shape."""
        if not isinstance(self.budget, str):
            return ops.atom_probabilities(atoms, self.budget)
        norm = ops.bucket_norms(atoms, norm=self.budget)
        return atoms.abs() / norm if norm > 0 else torch.zeros_like(atoms)

    def encode(self, grad: Tensor, key: Key) -> Tensor:
        if not math.isfinite(ops.abs_max(grad)):
            return self.non_finite(grad.numel(), grad.device)
        if self.atoms == "svd":
            return self._encode_matrix(grad, key)
        coefficients = grad.reshape(-1) if self.atoms == "entry" else self._transform(grad)
        return self._encode_entries(grad, coefficients, key)

    def decode_add(self, payload: ops.Payload, out: Tensor, weight: float) -> None:
        if self.atoms == "svd":
            self._add_matrix(payload, out, weight)
        else:
            self._add_entries(payload, out, weight)

    def sum_all(self, sums: Sequence[CodedSum]) -> None:
        if self.atoms != "fourier":
            super().sum_all(sums)
            return
        for coded in sums:  # add coefficients, and transform their sum
            (out,) = coded.outs
            rows, length = transform_shape(out.numel(), _BLOCK)
            total = self.workspace.empty("sum", (rows * 2 * (length // 2 + 1),), torch.float32, out.device)
            super().sum_all([coded._replace(outs=[total], add=False)])
            spectrum = torch.view_as_complex(total.view(rows, -1, 2))
            spectrum[:, 1 : (length + 1) // 2] *= math.sqrt(0.5)
            inverse_transform(spectrum, out, coded.add, length, self.workspace)

    # --- singular values

    def _encode_matrix(self, grad: Tensor, key: Key) -> Tensor:
        rows, columns = matrix_shape(grad.shape)
        with one_thread() if grad.numel() < _THREADS_NUMEL else contextlib.nullcontext():
            left, sigma, right = torch.linalg.svd(grad.view(rows, columns), full_matrices=False)
        if not math.isfinite(ops.abs_max(sigma)):  # sigma may overflow even if the gradient is finite
            return self.non_finite(grad.numel(), grad.device)
        # Singular values that are 0 up to rounding are not atoms.
        sigma[sigma <= sigma[0] * (max(rows, columns) * torch.finfo(torch.float32).eps)] = 0
        p = self.probabilities(sigma)
        drawn = ops.bernoulli(p, key.bits)
        kept = ops.bitmap_indices(drawn, sigma.numel(), ops.bitmap_count(drawn, sigma.numel())).long()
        left = left[:, kept] * (sigma[kept] / p[kept])
        if not math.isfinite(ops.abs_max(left)):
            return self.non_finite(grad.numel(), grad.device)
        atoms = kept.numel()
        payload = ops.new_payload(4 * atoms * (rows + columns), grad.device)
        body = payload[ops.HEADER_NBYTES :][: 4 * atoms * (rows + columns)].view(torch.float32)
        body[: atoms * rows].view(rows, atoms).copy_(left)
        body[atoms * rows :].view(columns, atoms).copy_(right[kept].t())
        return self.seal(ops.Seal(payload, grad.numel(), _MATRICES.pack(rows, atoms)))

    def _add_matrix(self, payload: ops.Payload, out: Tensor, weight: float) -> None:
        rows, atoms = _MATRICES.unpack(payload.fields)
        if not (1 <= rows <= out.numel() and out.numel() % rows == 0):
            raise ops.PayloadError(f"corrupt payload: it claims {rows} rows of {out.numel()} elements")
        columns = out.numel() // rows
        if atoms > min(rows, columns):  # more would only cost time: each is a product as large as the gradient
            raise ops.PayloadError(f"corrupt payload: it claims {atoms} atoms of a matrix of {rows} x {columns}")
        left, right = payload.sections(4 * atoms * rows, 4 * atoms * columns)
        if atoms:
            left, right = left.view(torch.float32).view(rows, atoms), right.view(torch.float32).view(columns, atoms)
            ops.low_rank_subtract(out.view(rows, columns), left * -weight, right)

    # --- elements of an orthonormal basis

    def _encode_entries(self, grad: Tensor, coefficients: Tensor, key: Key) -> Tensor:
        if not math.isfinite(ops.abs_max(coefficients)):  # a transform may overflow even if the gradient is finite
            return self.non_finite(grad.numel(), grad.device)
        p = self.probabilities(coefficients)
        certain = ops.compact(p, 1.0)[1]
        drawn = ops.bernoulli(p, key.bits) ^ certain
        numbers = [ops.bitmap_count(bits, p.numel()) for bits in (certain, drawn)]
        values, signs = [ops.compact_values(coefficients, bits, k) for bits, k in zip((certain, drawn), numbers)]
        magnitude = 0.0
        if numbers[1]:
            # |lambda| / p is the same for all drawn atoms up to rounding. Take it where rounding is least.
            most = signs.abs().argmax()
            magnitude = (signs[most].abs().double() / ops.compact_values(p, drawn, numbers[1])[most].double()).item()
            if magnitude > torch.finfo(torch.float32).max:
                return self.non_finite(grad.numel(), grad.device)
        sections = [
            values.view(torch.uint8),
            *(ops.index_code_encode(bits, p.numel()) for bits, k in zip((certain, drawn), numbers) if k),
            ops.pack_signs(signs),
        ]
        joined = torch.cat(sections)
        payload = ops.new_payload(joined.numel(), grad.device)
        payload[ops.HEADER_NBYTES : ops.HEADER_NBYTES + joined.numel()] = joined
        return self.seal(ops.Seal(payload, grad.numel(), _ENTRIES.pack(magnitude, *numbers)))

    def _add_entries(self, payload: ops.Payload, out: Tensor, weight: float) -> None:
        magnitude, certain, drawn = _ENTRIES.unpack(payload.fields)
        if not 0 <= magnitude < math.inf:
            raise ops.PayloadError(f"corrupt payload: its magnitude is {magnitude}, expected a finite number >= 0")
        if certain + drawn > out.numel():
            raise ops.PayloadError(f"corrupt payload: it claims {certain} + {drawn} atoms of {out.numel()}")
        nbytes = [4 * certain]
        for k in (certain, drawn):
            nbytes.append(ops.index_code_open(payload.body[sum(nbytes) :])[0].numel() if k else 0)
        values, where, drawn_where, signs = payload.sections(*nbytes, ops.bitmap_nbytes(drawn))
        if certain:
            ops.index_code_decode_add(where, values.view(torch.float32), out, weight)
        if drawn:
            magnitudes = torch.zeros(drawn, dtype=torch.float32, device=out.device)
            ops.signs_decode_add(signs, magnitudes, magnitude)
            ops.index_code_decode_add(drawn_where, magnitudes, out, weight)

    def _transform(self, grad: Tensor) -> Tensor:
        """Coefficients of the cosines and sines: flat, rows * bins * 2 numbers."""
        rows, length = transform_shape(grad.numel(), _BLOCK)
        spectrum = self.workspace.empty("spectrum", (rows, length // 2 + 1), torch.complex64, grad.device)
        for chunk, of_chunk in spectra(grad, _BLOCK, self.workspace):
            spectrum[chunk] = of_chunk
        # An interior bin of a real transform stands for itself and its conjugate.
        spectrum[:, 1 : (length + 1) // 2] *= math.sqrt(2.0)
        return torch.view_as_real(spectrum).view(-1)


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """(rows, columns) of the matrix whose singular values are the atoms of a gradient of that shape."""
    kernel, numel = math.prod(shape[2:]), math.prod(shape)
    if kernel > 1 and numel // kernel % 2 == 0:
        return numel // kernel // 2, 2 * kernel
    return (shape[0] if len(shape) > 1 else 1), math.prod(shape[1:] if len(shape) > 1 else shape)
