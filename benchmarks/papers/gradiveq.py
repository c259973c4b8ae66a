"""The claims of the GradiVeQ paper on successive gradients: linear correlation, slices, what a basis loses later.

Source: Yu et al., GradiVeQ: Vector Quantization for Bandwidth-Efficient Gradient Aggregation in Distributed CNN
Training, NeurIPS 2018.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.results import RESULTS
from benchmarks.papers.accuracy import CONDITIONS, behind, fewer, points
from benchmarks.papers.capture import STAGES, STEM, Captured
from benchmarks.papers.results import Row, Study, percent
from gradzip.methods.gradiveq import best_slice_size
from gradzip.methods.pca import dimension, max_dimension

TITLE = "GradiVeQ, NeurIPS 2018"
NEEDS = {"resnet20": "ResNet-20"}

LAMBDA, LAMBDAS = 0.01, (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
SAMPLES = 100  # L_t
SLICED = STAGES[0]  # 3x3, 16 filters of depth 16, as in figure 5
SIZES = range(32, 1153, 32)
WINDOW = 25  # steps
RINGS = RESULTS / "ring_cpu.json"
FIGURE_4_STEPS, FIGURE_4_GRADIENTS = 150, 3


def study(captured: Mapping[str, Captured]) -> Study:
    series = captured["resnet20"].series
    samples = min(SAMPLES, next(iter(series.values())).shape[0] * 2 // 5)
    picture: dict[str, Any] = {}
    rows = [
        *correlation(series, picture),
        *slice_sizes(series[SLICED], samples, picture),
        *later_steps(series, samples, picture),
        *aggregation(),
        whole_runs(),
    ]
    return Study(rows, picture)


# Principal components


def flat(series: Tensor) -> Tensor:
    """Gradients [F, D, H, W] of each step in the paper's layout (figure 3a): F is fastest, then D, W and H."""
    return series.permute(0, *range(3, series.dim()), 2, 1).reshape(len(series), -1).double()


def spectrum(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues of the covariance of samples (n, K), descending, and their vectors as rows; K or n of them."""
    _, sigma, components = torch.linalg.svd(samples - samples.mean(0), full_matrices=False)
    return sigma.square(), components


def kept(eigenvalues: Tensor, samples: int, size: int, loss: float) -> int:
    """d of equation (6)."""
    return min(dimension(eigenvalues, loss), max_dimension(samples, size))


def loss_of(slices: Tensor, means: Tensor, components: Tensor) -> float:
    """The share of the energy of slices (steps, m, K) that components (d, K) and the means of the slices lose.

    With the orthonormal components U: |g - mu - U U^T (g - mu)|^2 = |g - mu|^2 - |U^T (g - mu)|^2.
    """
    rest = slices - means
    lost = rest.square().sum() - (rest @ components.t()).square().sum()
    return max(0.0, lost.item()) / slices.square().sum().item()


# Figure 4


def collocated(series: Tensor) -> Tensor:
    """(positions, steps, F): the gradients of all filters at each position, centred, in figure 4's number of steps."""
    x = series[:FIGURE_4_STEPS].flatten(2).permute(2, 0, 1).double()
    return x - x.mean(1, keepdim=True)


def shuffled(x: Tensor) -> Tensor:
    """The steps of each gradient in an order of its own, which leaves no correlation but by chance."""
    generator = torch.Generator().manual_seed(0)
    return x.gather(1, torch.rand(x.shape, generator=generator).argsort(1))


def held(x: Tensor) -> Tensor:
    """The share of the variance that the first 1, 2, ... components hold, (positions, components)."""
    variances = torch.linalg.svdvals(x).square()
    return variances.cumsum(-1) / variances.sum(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)


def correlation(series: Mapping[str, Tensor], picture: dict[str, Any]) -> Iterator[Row]:
    """Figure 4: gradients at the same position of all filters."""
    stem = collocated(series[STEM])[..., :FIGURE_4_GRADIENTS]
    two, by_chance = (held(x)[:, 1].median().item() for x in (stem, shuffled(stem)))
    yield Row(
        "Three collocated gradients of the first layer are two, with negligible loss", "fig. 4", "3 / 2 = 1.5 ×",
        f"two components hold {percent(two, 1)}", 1 - two <= min(LAMBDA, (1 - by_chance) / 2),
        f"median of positions, {stem.shape[1]} steps; with shuffled steps, which leave no correlation, "
        f"{percent(by_chance, 1)}; hit if 99 %, and the rest is at most half of that with shuffled steps",
    )  # fmt: skip
    picture["held"] = {}
    for name in STAGES:
        x = collocated(series[name])
        curves = {"collocated": held(x), "shuffled": held(shuffled(x))}
        filters = x.shape[-1]
        picture["held"][f"{filters} filters"] = {label: curve.mean(0).tolist() for label, curve in curves.items()}
        number, by_chance = ((curve < 1 - LAMBDA).sum(-1).double().mean().item() + 1 for curve in curves.values())
        yield Row(
            f"The gradients of {filters} filters at a position are linearly correlated", "§1, fig. 4", "strongly",
            f"{number:.1f} components hold 99 %", number < filters / 2,
            f"hit if fewer than half; with shuffled steps {by_chance:.1f}",
        )  # fmt: skip


# Figure 5


def slice_sizes(series: Tensor, samples: int, picture: dict[str, Any]) -> Iterator[Row]:
    """Figure 5: the compressor of the first slice on the other slices of the same steps."""
    unit = series.shape[1] * series.shape[2]
    x = flat(series[:samples])
    ratio: dict[int, float] = {}
    loss: dict[int, float] = {}
    for size in SIZES:
        number = x.shape[1] // size
        slices = x[:, : number * size].reshape(samples, number, size)
        eigenvalues, components = spectrum(slices[:, 0])
        d = kept(eigenvalues, samples, size, LAMBDA)
        ratio[size] = size / d
        loss[size] = loss_of(slices[:, 1:], slices[:, 1:].mean(0), components[:d])
    picture["slices"] = {"sizes": list(SIZES), "ratio": list(ratio.values()), "loss": list(loss.values()), "unit": unit}
    multiples = [size for size in SIZES if size % unit == 0 and size + SIZES.step in loss]
    beside = {size: (loss[size - SIZES.step] + loss[size + SIZES.step]) / 2 for size in multiples}
    yield Row(
        f"The loss drops drastically at slice sizes that are multiples of F D = {unit}", "fig. 5", "picture",
        "; ".join(f"{loss[size]:.2f} at {size}, {beside[size]:.2f} beside" for size in multiples),
        all(loss[size] < 0.8 * beside[size] for size in multiples), "hit if 20 % below the sizes 32 less and more",
    )  # fmt: skip


# Equation (6), and later steps


def later_steps(series: Mapping[str, Tensor], samples: int, picture: dict[str, Any]) -> Iterator[Row]:
    """What a basis loses: of the slices it was computed from, of the other slices, and of later steps."""
    sampled, others, later = ({name: [] for name in STAGES} for _ in range(3))
    windows: dict[str, list[float]] = {}
    compressed = 0
    for name in STAGES:
        x = flat(series[name])
        size = best_slice_size(series[name].shape[1:])
        slices = x.view(len(x), -1, size)
        past, future = slices[:samples], slices[samples:]
        means = past.mean(0)
        eigenvalues, components = spectrum(past[:, 0])
        for loss in LAMBDAS:
            basis = components[: kept(eigenvalues, samples, size, loss)]
            sampled[name].append(loss_of(past[:, :1], means[:1], basis))
            others[name].append(loss_of(past[:, 1:], means[1:], basis))
            later[name].append(loss_of(future, means, basis))
            if loss == LAMBDA:
                compressed += slices.shape[1] * len(basis)
                starts = range(0, len(future) - WINDOW + 1, WINDOW)
                windows[name] = [loss_of(future[i : i + WINDOW], means, basis) for i in starts]
    picture["later"] = {"lambdas": list(LAMBDAS), "sampled": sampled, "others": others, "later": later}
    picture["windows"] = windows
    ratio = sum(series[name][0].numel() for name in STAGES) / compressed
    at = LAMBDAS.index(LAMBDA)
    yield Row(
        "At λ = 0.01, the compression ratio K / d is 8", "§4", "8 at 0.01",
        f"{ratio:.1f} at {max(errors[at] for errors in later.values()):.2f}",
        ratio >= 8 and max(errors[at] for errors in later.values()) <= LAMBDA,
        "and the largest loss in steps after the sampling; convolutions of ResNet-20 with 16, 32 and 64 channels",
    )  # fmt: skip
    for claim, source, found in (
        ("One basis serves all slices of a layer without loss (s = ∞)", "§3, §4", others),
        ("It serves the steps after the sampling", "§1, eq. (6)", later),
    ):
        values = [errors[at] for errors in found.values()]
        shown = f"{min(values):.3f} to {max(values):.3f}"
        yield Row(claim, source, "λ = 0.01", shown, max(values) <= LAMBDA, "lost energy, three convolutions")
    first, last = (statistics.fmean(of_layer[i] for of_layer in windows.values()) for i in (0, -1))
    yield Row(
        "The correlation evolves slowly", "§1", "over 400 steps", f"{first:.2f} at first, {last:.2f} at last",
        last <= 1.1 * first,
        f"energy lost in {WINDOW} steps after the sampling, and at the end of {WINDOW * len(windows[SLICED])}; hit if "
        "it grows by at most 10 %",
    )  # fmt: skip


# Section 4.2


def aggregation() -> Iterator[Row]:
    """The time of a ring all-reduce of compressed segments, as benchmarks/ring has measured it."""
    rows = json.loads(RINGS.read_text())["rows"]
    speedups = {(row["rate"], row["ring"]): row["speedup"] for row in rows}
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    subspace, qsgd = ([speedups[rate, ring] for rate in rates] for ring in ("subspace", "QSGD"))
    cycle = [1 / (0.8 / mine + 0.2 / other) for mine, other in zip(subspace, qsgd)]
    remark = "two CPU ranks at 250 Mb/s and 1 Gb/s, gradients of ResNet-18 (`ring_cpu.json`)"
    yield Row(
        "500 iterations, 100 of them with 4-bit QSGD, aggregate gradients 5.25 times as fast", "§4.2", "5.25 ×",
        " and ".join(f"{speedup:.1f} ×" for speedup in cycle), min(cycle) >= 5.25,
        f"{remark}; learning the bases not included",
    )  # fmt: skip
    quotients = [mine / other for mine, other in zip(subspace, qsgd)]
    yield Row(
        "4-bit QSGD takes almost twice as long as GradiVeQ", "§4.2", "2 ×",
        " and ".join(f"{quotient:.2f} ×" for quotient in quotients), min(quotients) >= 1.5, f"{remark}; hit if 1.5",
    )  # fmt: skip


def whole_runs() -> Row:
    """Section 4.1, of a run whose sampling is not compressed."""
    method = "gradiveq:warmup_steps=10%,sample_steps=5%,compress_steps=20%"
    return Row(
        "It converges in as many iterations", "§4.1", "45 000; top-1 0.676, with GradiVeQ 0.666",
        f"{points(method)} points, {fewer(method):.3g} × fewer bytes", behind(method) <= 1 and fewer(method) >= 4,
        f"{CONDITIONS}, bytes on the wire; ResNet-32 in the paper; hit if within a point, at 4 × fewer bytes",
    )  # fmt: skip
