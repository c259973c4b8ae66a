"""The claims of the FFT paper on captured gradients: sparsification, alpha, distributions, number formats, ratios.

Source: Wang et al., FFT-based Gradient Sparsification for the Distributed Training of Deep Neural Networks, HPDC 2020.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gradzip
from benchmarks.common.gradients import counts
from benchmarks.papers.accuracy import FFT, FFT_LONG, OF_FFT, SHORT, behind, points
from benchmarks.papers.capture import Captured
from benchmarks.papers.results import Row, Study, percent
from gradzip import ops
from gradzip.inspection.cells import Histogram
from gradzip.watch.replay import relative_error

TITLE = "FFT-based gradient sparsification, HPDC 2020"
NEEDS = {"resnet20": "ResNet-20", "alexnet": "AlexNet"}

THETA, THETAS = 0.85, (0.5, 0.7, 0.85, 0.9, 0.95)
WORKERS = (1, 4, 8)
BITS = range(4, 17)
BINS = 61
LAYER = 1 << 31  # a bucket that holds any layer
NORMAL_TAIL = math.erfc(3 / math.sqrt(2))  # of a normal distribution, beyond three standard deviations

Method = Callable[[float], gradzip.Compressor]  # of theta


def fft(theta: float, block: int | None = 64) -> gradzip.Compressor:
    """As in the paper, with 10 bits; but its one transform is `block=None`."""
    return gradzip.FFTRange(theta=theta, block=block)


def topk(theta: float) -> gradzip.Compressor:
    return gradzip.TopK(theta=theta, error_feedback=False)


@dataclass(frozen=True)
class Way:
    """A way to sparsify a gradient. whole: all parameters as one vector; otherwise each layer by itself."""

    label: str
    method: Method
    whole: bool


ONE_FFT = Way("one FFT of the whole gradient", partial(fft, block=None), True)
BLOCKS = Way("FFTs of 64, whole gradient", fft, True)
TOPK = Way("Top-k, whole gradient", topk, True)
LAYER_FFT = Way("one FFT of each layer", partial(fft, block=None), False)
LAYER_BLOCKS = Way("FFTs of 64, each layer", fft, False)
LAYER_TOPK = Way("Top-k, each layer", topk, False)
WAYS = (ONE_FFT, BLOCKS, TOPK, LAYER_FFT, LAYER_BLOCKS, LAYER_TOPK)
PAIRS = (
    (ONE_FFT, TOPK, "one FFT of the whole gradient, as in the paper"),
    (BLOCKS, TOPK, "FFTs of 64 elements, whole gradient"),
    (LAYER_BLOCKS, LAYER_TOPK, "FFTs of 64 elements, each layer by itself"),
)


def study(captured: Mapping[str, Captured]) -> Study:
    snapshots = captured["resnet20"].snapshots
    last = snapshots[max(snapshots)]
    rows: list[Row] = []
    picture: dict[str, Any] = {"steps": list(snapshots), "thetas": list(THETAS)}
    for part in (
        partial(sparsification, captured),
        partial(alpha, snapshots),
        partial(normality, snapshots),
        partial(reconstruction, layers_of(last)),
        partial(formats, layers_of(last)),
        partial(ratios, vector_of(last)),
        final_accuracy,
    ):
        rows += part(picture)
    return Study(rows, picture)


def layers_of(gradients: Mapping[str, Tensor]) -> list[Tensor]:
    """The first worker's gradients that methods compress."""
    return [of_workers[0] for of_workers in gradients.values() if counts(of_workers[0])]


def vector_of(gradients: Mapping[str, Tensor], every: bool = True) -> Tensor:
    """The first worker's gradients as one vector, (1, n): methods do not compress tensors of one dimension.

    every: with those of norms and biases.
    """
    parts = [of_workers[0] for of_workers in gradients.values()] if every else layers_of(gradients)
    return torch.cat([x.reshape(-1) for x in parts]).view(1, -1)


def energy(x: Tensor) -> float:
    return torch.linalg.vector_norm(x, dtype=torch.float64).item() ** 2


def error_of(x: Tensor, seen: Tensor) -> float:
    return relative_error(energy(x - seen), energy(x))


def errors_of(way: Way, gradients: Mapping[str, Tensor], theta: float) -> list[float]:
    """The relative error of each tensor that is compressed by itself."""
    return [loss_by(way, x, theta) for x in ([vector_of(gradients)] if way.whole else layers_of(gradients))]


def loss_by(way: Way, x: Tensor, theta: float) -> float:
    return error_of(x, gradzip.roundtrip(way.method(theta), x)[0])


def sparsification(captured: Mapping[str, Captured], picture: dict[str, Any]) -> Iterator[Row]:
    """Figure 5: FFT against Top-k at the same theta."""
    picture["errors"] = {}
    for model, title in NEEDS.items():
        found = {way: [errors_of(way, g, THETA) for g in captured[model].snapshots.values()] for way in WAYS}
        means = {way: [statistics.fmean(errors) for errors in found[way]] for way in WAYS}
        picture["errors"][model] = {way.label: means[way] for way in WAYS}
        vectors = [vector_of(gradients, every=False) for gradients in captured[model].snapshots.values()]
        for ours, other, how in PAIRS:
            pairs = [pair for a, b in zip(found[ours], found[other]) for pair in zip(a, b)]
            better = sum(mine < theirs for mine, theirs in pairs)
            remark = f"better in {better} of {len(pairs)} layers and steps"
            if ours.whole:
                a, b = (statistics.fmean(loss_by(way, x, THETA) for x in vectors) for way in (ours, other))
                remark = f"without norms and biases: {a:.3f} against {b:.3f}"
            yield compare(f"{title}, θ = {THETA}, {how}", means[ours], means[other], remark)
    snapshots = captured["resnet20"].snapshots
    last = snapshots[max(snapshots)]
    sweep = {way: [statistics.fmean(errors_of(way, last, theta)) for theta in THETAS] for way in WAYS}
    picture["sweep"] = {way.label: errors for way, errors in sweep.items()}
    for ours, other, how in PAIRS[::2]:
        at = f"ResNet-20, θ = {THETAS[0]}, {how}"
        yield compare(at, sweep[ours][:1], sweep[other][:1], f"step {max(snapshots)}")


def compare(where: str, ours: Sequence[float], others: Sequence[float], remark: str) -> Row:
    mine, theirs = statistics.fmean(ours), statistics.fmean(others)
    return Row(
        f"FFT loses less than Top-k: {where}", "§3.1.1, fig. 5", "0.0209 against 0.0246 (0.85 ×)",
        f"{mine:.3f} against {theirs:.3f} ({mine / theirs:.2f} ×)", mine < theirs, remark,
    )  # fmt: skip


def alpha(snapshots: Mapping[int, Mapping[str, Tensor]], picture: dict[str, Any]) -> Iterator[Row]:
    """Figure 12: ‖v̄ − mean v̂‖ / ‖v̄‖ over the layers that are compressed, with the gradients of p workers."""
    picture["alpha"] = {}
    for p in WORKERS:
        values = [alpha_of(gradients, p) for gradients in snapshots.values()]
        picture["alpha"][p] = values
        shown = f"{min(values):.2f} to {max(values):.2f}"
        workers = "1 worker" if p == 1 else f"{p} workers"
        # For one worker, α is the error of an orthonormal transform whose coefficients are dropped: at most 1.
        hit, remark = (
            (None, "ResNet-20; always holds, as the paper says") if p == 1 else (max(values) <= 1, "ResNet-20")
        )
        yield Row(f"Assumption 3.2: α ≤ 1, {workers}", "fig. 12", "0 to 1", shown, hit, remark)


def alpha_of(gradients: Mapping[str, Tensor], p: int) -> float:
    lost = whole = 0.0
    for of_workers in gradients.values():
        if counts(of_workers[0]):
            mean = of_workers[:p].mean(0)
            lost += energy(mean - gradzip.simulate(fft(THETA), list(of_workers[:p]))[0])
            whole += energy(mean)
    return relative_error(lost, whole)


def normality(snapshots: Mapping[int, Mapping[str, Tensor]], picture: dict[str, Any]) -> Iterator[Row]:
    """Figure 4, and section 5: "gradients follow a normal distribution"."""
    tails, kurtoses = [], []
    for gradients in snapshots.values():
        for layer in layers_of(gradients):
            x = layer.double()
            z = (x - x.mean()) / x.std()
            tails.append((z.abs() > 3).double().mean().item())
            kurtoses.append(z.pow(4).mean().item())
    tail = statistics.median(tails)
    yield Row(
        "Gradients follow a normal distribution", "§5, fig. 4",
        f"{percent(NORMAL_TAIL, 2)} beyond 3 σ", percent(tail, 2),
        NORMAL_TAIL / 2 <= tail <= 2 * NORMAL_TAIL,
        f"median of layers and steps; hit if within a factor of 2. Kurtosis {statistics.median(kurtoses):.1f}, where a "
        "normal distribution has 3",
    )  # fmt: skip


def reconstruction(layers: Sequence[Tensor], picture: dict[str, Any]) -> Iterator[Row]:
    """Figure 15: what four methods make of a gradient, each layer compressed by itself."""
    methods = {
        "FFT": fft(THETA), "Top-k": topk(THETA), "QSGD": gradzip.QSGD(bits=3, bucket=LAYER, norm="max"),
        "TernGrad": gradzip.TernGrad(clip=None, shared_scale=False),
    }  # fmt: skip
    wanted = torch.cat([x.reshape(-1) for x in layers])
    picture["histograms"] = {}
    errors: dict[str, float] = {}
    quantiles: dict[str, list[float]] = {}
    for name, method in methods.items():
        sent = torch.cat([gradzip.roundtrip(method, x)[0].reshape(-1) for x in layers])
        errors[name] = error_of(wanted, sent)
        histogram = Histogram.of(wanted, sent, BINS)
        quantiles[name] = histogram.errors
        picture["histograms"][name] = vars(histogram)
    others = zip(*(quantiles[name] for name in methods if name != "FFT"))
    share = statistics.fmean(float(mine < min(theirs)) for mine, theirs in zip(quantiles["FFT"], others))
    yield Row(
        "The quantiles of FFT's errors are smaller than those of Top-k, QSGD and TernGrad", "fig. 15e", "99.7 %",
        percent(share, 1), share >= 0.997,
        "Top-k is exact for 15 % of the elements. Relative errors: "
        + ", ".join(f"{name} {error:.2f}" for name, error in errors.items()),
    )  # fmt: skip


def formats(layers: Sequence[Tensor], picture: dict[str, Any]) -> Iterator[Row]:
    """Figures 7 and 9: range-based floats, IEEE formats and uniform quantization at equal bits."""

    def mean(convert: Callable[[Tensor], Tensor]) -> float:
        return statistics.fmean(error_of(x, convert(x)) for x in layers)

    ranged = {bits: mean(partial(range_float, bits=bits)) for bits in BITS}
    uniform = {bits: mean(partial(uniform_levels, bits=bits)) for bits in BITS}
    halves = {"fp16": mean(partial(cast, dtype=torch.float16)), "bf16": mean(partial(cast, dtype=torch.bfloat16))}
    eights = {
        "E4M3": mean(partial(scaled_cast, dtype=torch.float8_e4m3fn)),
        "E5M2": mean(partial(scaled_cast, dtype=torch.float8_e5m2)),
    }
    unscaled = mean(partial(cast, dtype=torch.float8_e4m3fn))
    picture["formats"] = {
        "bits": list(BITS), "range float": list(ranged.values()), "uniform": list(uniform.values()),
        "casts": {name: [bits, e] for bits, of in ((8, eights), (16, halves)) for name, e in of.items()},
    }  # fmt: skip
    fitted = "fitted to each layer"
    for bits, casts, remark in (
        (8, eights, f"all {fitted}; E4M3 without a scale: {unscaled:.2g}"),
        (10, {}, f"all {fitted}"),
        (16, halves, f"{fitted}, but for fp16 and bf16"),
    ):
        others = {**casts, "uniform": uniform[bits]}
        shown = ", ".join(f"{name} {error:.2g}" for name, error in others.items())
        yield Row(
            f"With {bits} bits, range-based floats lose less than {'IEEE formats and ' * bool(casts)}uniform levels",
            "figs. 7, 9", "picture", f"{ranged[bits]:.2g}; {shown}", ranged[bits] < min(others.values()), remark,
        )  # fmt: skip
    dropped = statistics.fmean(
        error_of(x, gradzip.roundtrip(gradzip.FFTRange(theta=THETA, bits=16), x)[0]) for x in layers
    )
    yield Row(
        "The loss by 10-bit floats is negligible", "§6", "negligible", f"{ranged[10]:.2g}", ranged[10] < dropped / 10,
        f"hit if below a tenth of what θ = {THETA} drops, {dropped:.2f}",
    )  # fmt: skip


def range_float(x: Tensor, bits: int) -> Tensor:
    number = ops.RangeFloat.fit(x, bits)
    return number.decode(number.encode(x))


def uniform_levels(x: Tensor, bits: int) -> Tensor:
    """Rounded to 2^bits - 1 equidistant levels between the largest magnitude and its negative."""
    step = x.abs().max() / (2 ** (bits - 1) - 1)
    return (x / step).round() * step


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()


def scaled_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Scaled so that the largest magnitude is that of the type."""
    scale = torch.finfo(dtype).max / x.abs().max()
    return cast(x * scale, dtype) / scale


def ratios(vector: Tensor, picture: dict[str, Any]) -> Iterator[Row]:
    """Section 4.2: bytes of float32 for each byte of a payload."""

    def ratio(method: gradzip.Compressor) -> float:
        return 4 * vector.numel() / gradzip.roundtrip(method, vector)[1]

    for name, method, paper, remark in (
        ("FFT, θ = 0.85, 10 bits", fft(THETA), 21.3, "the paper leaves out the status bitmap"),
        ("Top-k, θ = 0.85", topk(THETA), 6.67, "the paper leaves out the indices"),
        ("QSGD, 3 bits", gradzip.QSGD(bits=3, bucket=LAYER, norm="max", coding="packed"), 10.6, ""),
        ("TernGrad", gradzip.TernGrad(clip=None, shared_scale=False), 16.0, "1.6 bits for each element, not 2"),
    ):
        yield Row(f"Compression ratio of {name}", "§4.2", f"{paper:g}", f"{ratio(method):.1f}", None, remark)


def final_accuracy(picture: dict[str, Any]) -> Iterator[Row]:
    """Table 2 and figure 14, and figure 13. In the paper ResNet-32 after 180 epochs."""
    plain, noisy = "fft-range:error_feedback=false", {"QSGD": "qsgd:bits=3", "TernGrad": "terngrad:clip=none"}
    others = ", ".join(f"{name} {points(method, FFT)}" for name, method in noisy.items())
    yield Row(
        "FFT with θ = 0.85 ends as accurate as SGD", "table 2, fig. 14", "−0.12 points", f"{points(plain, FFT)} points",
        behind(plain, FFT) <= 0.5, f"{OF_FFT}; hit if within half a point",
    )  # fmt: skip
    yield Row(
        "FFT ends more accurate than QSGD and TernGrad", "table 2, fig. 14", "−0.12; QSGD −3.45, TernGrad −5.21 points",
        f"{points(plain, FFT)}; {others} points",
        all(behind(plain, FFT) < behind(method, FFT) for method in noisy.values()),
        f"{OF_FFT}; QSGD of 3 bits, TernGrad without clipping, as in the paper",
    )  # fmt: skip
    fixed, falling = (f"fft-range:theta={theta},error_feedback=false" for theta in ("0.9", "{0:0.9,50%:0.0}"))
    yield Row(
        "With θ = 0.9, then 0, it ends as accurate as SGD", "thm. 3.5, fig. 13", "as SGD",
        f"{points(falling, FFT_LONG)} points; in 4 epochs {points(falling)}, "
        f"and {points(fixed)} with θ = 0.9 throughout",
        behind(falling, FFT_LONG) <= 0.5,
        f"ResNet-8, 12 epochs, one seed (`{FFT_LONG}`), and 4 (`{SHORT}`); hit if within half a point; six epochs at "
        "θ = 0, in the paper tens",
    )  # fmt: skip
