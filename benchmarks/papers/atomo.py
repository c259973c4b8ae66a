"""The claims of the ATOMO paper on captured gradients: singular values, theorems 5 and 6, variance at equal bytes.

Source: Wang et al., ATOMO: Communication-efficient Learning via Atomic Sparsification, NeurIPS 2018.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import gradzip
from benchmarks.common.gradients import counts
from benchmarks.papers.accuracy import CONDITIONS, behind, fewer, points
from benchmarks.papers.capture import Captured
from benchmarks.papers.fft import LAYER, energy
from benchmarks.papers.results import Row, Study, percent
from gradzip import ops
from gradzip.methods.atomo import matrix_shape

TITLE = "ATOMO, NeurIPS 2018"
NEEDS = {"resnet18": "ResNet-18"}

# A 3x3 convolution of each stage but the last, whose 2.4 million elements would take as long as all others.
LAYERS = {"4.body.0.weight": "64 channels", "6.body.0.weight": "128 channels", "8.body.0.weight": "256 channels"}
DRAWS = 4
SHARES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)  # of the elements: budgets of entries and frequencies
SPECTRAL_BUDGETS = (0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 4, 6, 8, 12)
Make = Callable[[int], gradzip.Compressor]  # of a seed

# QSGD has one bucket for a layer, as in section 6. 1-bit QSGD has one level of magnitude, b bits have 2^b - 1 levels.
# The `bits` of gradzip's QSGD count the sign, too.
QUANTIZERS: dict[str, Make] = {
    "TernGrad": lambda seed: gradzip.TernGrad(clip=None, shared_scale=False, seed=seed),
    "1-bit QSGD": lambda seed: gradzip.QSGD(bits=2, bucket=LAYER, seed=seed),
    "2-bit QSGD": lambda seed: gradzip.QSGD(bits=3, bucket=LAYER, seed=seed),
    "4-bit QSGD": lambda seed: gradzip.QSGD(bits=5, bucket=LAYER, seed=seed),
    "8-bit QSGD": lambda seed: gradzip.QSGD(bits=9, bucket=LAYER, seed=seed),
}


def study(captured: Mapping[str, Captured]) -> Study:
    snapshots = {
        step: {name: of_workers[0] for name, of_workers in gradients.items() if counts(of_workers[0])}
        for step, gradients in captured["resnet18"].snapshots.items()
    }
    last = snapshots[max(snapshots)]
    layers = {title: last[name] for name, title in LAYERS.items()}
    picture: dict[str, Any] = {}
    rows = [
        *spectra(snapshots, picture),
        *theorem_6(snapshots),
        *theorem_5(layers),
        *variances(layers, picture),
        ends(),
    ]
    return Study(rows, picture)


def ends() -> Row:
    """Tables 3 and 4, of accuracies at the end of training."""
    mine, *others = methods = ("atomo", "qsgd", "terngrad")
    found = [
        f"{type(gradzip.parse(method)).__name__} {points(method)} points, {fewer(method):.3g} × fewer bytes"
        for method in methods
    ]
    better = [behind(mine) < behind(other) or fewer(mine) > fewer(other) for other in others]
    return Row(
        "It reaches an accuracy sooner than QSGD and TernGrad", "tables 3, 4", "up to 2 × and 3 ×",
        "; ".join(found), all(better),
        f"{CONDITIONS}, budget 3, 4 bits, bytes on the wire of 4 ranks; the paper tunes each step size, on 16 nodes; "
        "hit if it ends higher or sends less",
    )  # fmt: skip


def singular_values(x: Tensor) -> Tensor:
    return torch.linalg.svdvals(x.reshape(matrix_shape(x.shape)).double())


def spectra(snapshots: Mapping[int, Mapping[str, Tensor]], picture: dict[str, Any]) -> Iterator[Row]:
    """Figure 1."""
    top = []
    picture["spectra"] = {}
    for step, gradients in snapshots.items():
        for name, x in gradients.items():
            if math.prod(x.shape[2:]) == 1:
                continue
            sigma = singular_values(x)
            top.append((sigma[:3].square().sum() / sigma.square().sum()).item())
            if name in LAYERS:
                picture["spectra"].setdefault(LAYERS[name], {})[step] = (sigma / sigma[0]).tolist()
    share = statistics.median(top)
    yield Row(
        "Singular values of a convolution's gradient decay sharply, and the top three stand out", "fig. 1", "picture",
        f"the top 3 of 18 hold {percent(share)} of the energy", share > 0.5,
        "median of all 3×3 convolutions of ResNet-18 in its first steps; hit if more than half; noise: about 20 %",
    )  # fmt: skip


def theorem_6(snapshots: Mapping[int, Mapping[str, Tensor]]) -> Iterator[Row]:
    """Spectral atoms have less variance than entries for as many numbers if (n + m) |X|_*^2 <= |X|_{1,1}^2."""
    held: list[float] = []
    total = 0
    for gradients in snapshots.values():
        for x in gradients.values():
            rows, columns = matrix_shape(x.shape)
            quotient = ((rows + columns) * singular_values(x).sum() ** 2 / x.double().abs().sum() ** 2).item()
            total += 1
            if quotient <= 1:
                held.append(quotient)
    yield Row(
        "Theorem 6: its condition holds, so that spectral atoms have less variance than entries", "§5, thm. 6",
        "for some networks", f"in {len(held)} of {total} layers and steps", 2 * len(held) > total,
        "ResNet-18; hit if in most. An entry is counted as one number, without its index",
    )  # fmt: skip


def theorem_5(layers: Mapping[str, Tensor]) -> Iterator[Row]:
    """E |L_q(g)|^2 = |g|_1 |g|_q: 1-bit QSGD (q = 2) and TernGrad (q = infinity) are atomic sparsification.

    Measured on these methods themselves, not on ATOMO's entries with the same budget.
    """
    for norm, name in (("l2", "1-bit QSGD"), ("max", "TernGrad")):
        quotients, deviations = [], []
        for x in layers.values():
            energies = [
                gradzip.roundtrip(QUANTIZERS[name](seed), x)[0].double().square().sum() for seed in range(DRAWS)
            ]
            absolute = x.double().abs()
            size = absolute.norm() if norm == "l2" else absolute.max()
            expected = absolute.sum() * size
            p = absolute / size
            quotients.append((sum(energies) / DRAWS / expected).item())
            # |L_q(g)|^2 is |g|_q^2 times the number of atoms drawn, a sum of independent Bernoulli draws.
            deviations.append(((p * (1 - p)).sum() / DRAWS).sqrt().item() / p.sum().item())
        worst = max(abs(quotient - 1) / deviation for quotient, deviation in zip(quotients, deviations))
        yield Row(
            f"Theorem 5: the energy of {name}'s gradients is ‖g‖₁ ‖g‖_q", "§4, thm. 5", "1 ×",
            " ".join(f"{quotient:.3f}" for quotient in quotients) + " ×", None,
            f"a theorem; mean of {DRAWS} draws, three layers; at most {worst:.1f} standard errors from 1",
        )  # fmt: skip


# Variance against bytes


def spectral(x: Tensor, sigma: Tensor, budget: float) -> tuple[float, float]:
    """(bytes, relative variance) that are expected: sum sigma^2 (1 / p - 1) / |x|^2."""
    p = ops.atom_probabilities(sigma, budget)
    p, energies = p[p > 0], sigma[p > 0].square()
    rows, columns = matrix_shape(x.shape)
    nbytes = ops.HEADER_NBYTES + 4 * p.sum().item() * (rows + columns)
    return nbytes, ((energies * (1 / p - 1)).sum() / energies.sum()).item()


def spectral_at(x: Tensor, sigma: Tensor, nbytes: float) -> float:
    """The relative variance of spectral atoms at a number of bytes. 0 if that is enough for all atoms."""
    budget = (nbytes - ops.HEADER_NBYTES) / (4 * sum(matrix_shape(x.shape)))
    return spectral(x, sigma, budget)[1]


def drawn(make: Make, x: Tensor) -> tuple[float, float]:
    """(bytes, relative squared error), means of DRAWS draws."""
    nbytes = lost = 0.0
    for seed in range(DRAWS):
        seen, size = gradzip.roundtrip(make(seed), x)
        nbytes += size / DRAWS
        lost += energy(seen - x) / DRAWS
    return nbytes, lost / energy(x)


def variances(layers: Mapping[str, Tensor], picture: dict[str, Any]) -> Iterator[Row]:
    """Section 1: spectral ATOMO has less variance "for the same communication budget"."""
    against: dict[str, list[float]] = {}  # spectral variance / that of another method, at its bytes
    picture["variance"] = {}
    for title, x in layers.items():
        sigma = singular_values(x)
        curves = {"singular values": [spectral(x, sigma, budget) for budget in SPECTRAL_BUDGETS]}
        for label, atoms in (("entries", "entry"), ("frequencies", "fourier")):
            curves[label] = [drawn(atomo(atoms, share * x.numel()), x) for share in SHARES]
        points = {name: drawn(make, x) for name, make in QUANTIZERS.items()}
        for label, found in [*curves.items(), *((name, [point]) for name, point in points.items())]:
            quotients = [spectral_at(x, sigma, nbytes) / variance for nbytes, variance in found]
            against.setdefault(label, []).append(statistics.median(quotients))
        bits = 8 / x.numel()
        picture["variance"][title] = {
            "curves": {label: [[bits * nbytes, v] for nbytes, v in curve] for label, curve in curves.items()},
            "points": {label: [bits * nbytes, v] for label, (nbytes, v) in points.items()},
        }
    for label in QUANTIZERS:
        yield less(label, "§1", against[label], True, "float32 atoms")
    yield less("entries", "§5", against["entries"], True, f"median of {len(SHARES)} budgets")
    future = f"the paper's future work; median of {len(SHARES)} budgets"
    yield less("Fourier atoms", "§7", against["frequencies"], False, future)


def atomo(atoms: str, budget: float) -> Make:
    return lambda seed: gradzip.ATOMO(atoms=atoms, budget=budget, seed=seed)


def less(label: str, source: str, quotients: list[float], claimed: bool, remark: str = "") -> Row:
    middle = statistics.median(quotients)
    shown = " ".join(f"{quotient:.2f}" for quotient in quotients) + " ×"
    remark = "three layers" + (f", {remark}" if remark else "")
    paper = "less" if claimed else ""
    return Row(
        f"Spectral atoms have less variance than {label}, at equal bytes", source, paper, shown,
        middle < 1 if claimed else None, remark,
    )  # fmt: skip
