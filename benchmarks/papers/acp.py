"""The claims of the ACP-SGD paper: ratios and buffers of known networks, and approximation of captured gradients.

Source: Zhang, Zhang, Shi, Chu, Li, Evaluation and Optimization of Gradient Compression for Distributed Deep Learning,
ICDCS 2023.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gradzip
from benchmarks.common.results import RESULTS
from benchmarks.papers.accuracy import CONDITIONS, LONG, LONGER, behind, points
from benchmarks.papers.capture import STAGES, Captured
from benchmarks.papers.fft import vector_of
from benchmarks.papers.results import Row, Study, percent
from gradzip.cli.models import MODELS

TITLE = "ACP-SGD, ICDCS 2023"
NEEDS = {"resnet20": "ResNet-20"}

Shape = tuple[int, ...]
MIB = 1 << 20
BUFFER = 25 * MIB  # of PyTorch DDP
APPROXIMATED = STAGES[1:]  # larger ranks do not compress the first stage
RANK, RANKS = 4, (1, 2, 4, 8, 16)
SERIES = 100  # steps
STEPS = RESULTS / "training_cpu.json"


class Network(NamedTuple):
    """A line of table I. parameters: in millions."""

    title: str
    rank: int
    parameters: float
    ratio: float


TABLE_1 = {
    "resnet50": Network("ResNet-50", 4, 25.6, 67),
    "resnet152": Network("ResNet-152", 4, 60.2, 53),
    "bert-base": Network("BERT-Base", 32, 110.1, 16),
    "bert-large": Network("BERT-Large", 32, 336.2, 21),
}


def study(captured: Mapping[str, Captured]) -> Study:
    picture: dict[str, Any] = {}
    snapshots = captured["resnet20"].snapshots
    series = {name: captured["resnet20"].series[name][:SERIES] for name in APPROXIMATED}
    rows = [
        *table_1(),
        *other_ratios(vector_of(snapshots[max(snapshots)])),
        *buffers(),
        *small_tensors(picture),
        *approximation(series, picture),
        *training(),
    ]
    return Study(rows, picture)


# Arithmetic of shapes


def shapes_of(model: str) -> list[Shape]:
    """The shapes of the parameters, in the order of the forward pass. BERT has its heads of pre-training.

    The numbers of parameters in table I show that. The word predictor shares the matrix of the word embeddings.
    """
    shapes = [parameter.shape for parameter in MODELS[model]()]
    if model.startswith("bert"):
        vocabulary, width = shapes[0]
        shapes += [(width, width), (width,), (width,), (width,), (vocabulary,), (2, width), (2,)]
    return shapes


def factors(shape: Shape, rank: int) -> tuple[int, int] | None:
    """Numbers in P and in Q; None if the parameter is averaged as it is, because both are not smaller."""
    numel = math.prod(shape)
    rows, columns = shape[0], numel // shape[0]
    return None if len(shape) < 2 or (rows + columns) * rank >= numel else (rows * rank, columns * rank)


def sent(shapes: Iterable[Shape], rank: int, factor: int) -> list[int]:
    """Numbers that ACP-SGD sends of each parameter in a step. factor: 0 for P, 1 for Q."""
    return [math.prod(shape) if (pair := factors(shape, rank)) is None else pair[factor] for shape in shapes]


def powersgd_ratio(shapes: Sequence[Shape], rank: int) -> float:
    """Numbers of the gradient for each number that Power-SGD sends: both factors, and what is averaged as it is."""
    numbers = sum(math.prod(shape) if (pair := factors(shape, rank)) is None else sum(pair) for shape in shapes)
    return sum(map(math.prod, shapes)) / numbers


def acpsgd_ratio(shapes: Sequence[Shape], rank: int) -> float:
    """The same for ACP-SGD, on average over steps that send P and steps that send Q."""
    return 2 * sum(map(math.prod, shapes)) / sum(sum(sent(shapes, rank, factor)) for factor in (0, 1))


def num_buffers(nbytes: Iterable[float], capacity: float) -> int:
    """The number of buffers into which DDP joins gradients, from the last to the first: one is full at `capacity`."""
    number, filled = 0, 0.0
    for size in reversed(list(nbytes)):
        filled += size
        if filled >= capacity:
            number, filled = number + 1, 0.0
    return number + (filled > 0)


def table_1() -> Iterator[Row]:
    for model, network in TABLE_1.items():
        shapes = shapes_of(model)
        parameters, ratio = sum(map(math.prod, shapes)) / 1e6, powersgd_ratio(shapes, network.rank)
        yield Row(
            f"{network.title}: parameters, and ratio of Power-SGD with rank {network.rank}", "table I",
            f"{network.parameters} M, {network.ratio:g} ×", f"{parameters:.1f} M, {ratio:.1f} ×",
            None, "computed from the shapes",
        )  # fmt: skip
    ratio = acpsgd_ratio(shapes_of("bert-large"), 256)
    yield Row(
        "BERT-Large: ratio of ACP-SGD with rank 256", "§V-E", "5.4 ×", f"{ratio:.1f} ×", None,
        "twice Power-SGD's, because a step sends one factor",
    )  # fmt: skip


def other_ratios(vector: Tensor) -> Iterator[Row]:
    for name, method, paper, remark in (
        ("Sign-SGD", gradzip.SignSGD(), 32, ""),
        ("Top-k, 0.1 %", gradzip.TopK(theta=0.999), 1000, "the paper counts values only, and calls that optimistic"),
    ):
        ratio = 4 * vector.numel() / gradzip.roundtrip(method, vector)[1]
        of = f"payload of {vector.numel() / 1e6:.2f} M gradients, with header"
        remark = f"{of}; {remark}" if remark else of
        yield Row(f"Ratio of {name}", "table I", f"{paper} ×", f"{ratio:.1f} ×", None, remark)


def buffers() -> Iterator[Row]:
    shapes = shapes_of("resnet50")
    whole = [4 * math.prod(shape) for shape in shapes]
    p, q = ([4 * n for n in sent(shapes, RANK, factor)] for factor in (0, 1))
    rates = [sum(of) / sum(whole) for of in (p, q)]
    yield Row(
        "ResNet-50, rank 4: size and compression rate of P and of Q", "§IV-B", "0.63 MB, 0.64 %; 1.04 MB, 1.07 %",
        "; ".join(f"{sum(of) / MIB:.2f} MB, {percent(rate, 2)}" for of, rate in zip((p, q), rates)),
        None, "biases and norms included; MB of 2^20 bytes",
    )  # fmt: skip
    numbers = [num_buffers(of, BUFFER * rate) for of, rate in zip((whole, p, q), (1.0, *rates))]
    yield Row(
        "ResNet-50: scaled by these rates, 25 MB make as many buffers of P and Q as of gradients", "§IV-B", "4, 4, 4",
        ", ".join(map(str, numbers)), None, "gradients, P, Q; filled as DDP fills them",
    )  # fmt: skip


def small_tensors(picture: dict[str, Any]) -> Iterator[Row]:
    """Figure 5."""
    picture["tensors"] = {}
    for model, limit in (("resnet50", 10**4), ("bert-base", 10**5)):
        shapes, network = shapes_of(model), TABLE_1[model]
        numels = {"M": [math.prod(shape) for shape in shapes]}
        numels |= {name: sent(shapes, network.rank, factor) for factor, name in enumerate("PQ")}
        picture["tensors"][network.title] = {name: sorted(of) for name, of in numels.items()}
        small = {name: sum(n < limit for n in of) / len(of) for name, of in numels.items()}
        yield Row(
            f"{network.title}: more tensors have less than {limit:.0e} elements".replace("e+0", "e"), "fig. 5",
            "30 % more", ", ".join(f"{percent(small[name])} of {name}" for name in numels),
            None, "computed from the shapes",
        )  # fmt: skip


# Approximation


class Fit(NamedTuple):
    """How a method follows successive gradients.

    Args:
        error: relative, of the later half of the steps.
        drift: relative, of the sum of all averages.
        nbytes: per step.
    """

    error: float
    drift: float
    nbytes: float


def follow(method: gradzip.Compressor, series: Mapping[str, Tensor]) -> Fit:
    group = gradzip.LocalGroup(method, 1)
    lost = whole = drift = total = 0.0
    steps = 0
    for name, gradients in series.items():
        steps, wrong = len(gradients), torch.zeros_like(gradients[0])
        for step, gradient in enumerate(gradients):
            difference = gradient - group.average([gradient], name)[0]
            wrong += difference
            if step >= steps // 2:
                lost += difference.square().sum().item()
                whole += gradient.square().sum().item()
        drift += wrong.square().sum().item()
        total += gradients.sum(0).square().sum().item()
    return Fit(math.sqrt(lost / whole), math.sqrt(drift / total), group.bytes_sent / steps)


def best_error(series: Mapping[str, Tensor], rank: int) -> float:
    """The least error of any approximation of that rank, of the later half of the steps (Eckart, Young)."""
    lost = whole = 0.0
    for gradients in series.values():
        energies = torch.linalg.svdvals(gradients[len(gradients) // 2 :].flatten(2).double()).square()
        lost, whole = lost + energies[:, rank:].sum().item(), whole + energies.sum().item()
    return math.sqrt(lost / whole)


def training() -> Iterator[Row]:
    """Figure 6 and table III, of ends of training and times of steps that other benchmarks have measured."""
    yield Row(
        "It ends as accurate as S-SGD and Power-SGD", "fig. 6", "very close: 94.1 %, 94.6 %",
        f"{points('acpsgd', LONG)} points; Power-SGD {points('powersgd', LONG)}", behind("acpsgd", LONG) <= 0.5,
        f"{LONGER}; VGG-16 and ResNet-18 after 300 epochs in the paper; hit if within half a point",
    )  # fmt: skip
    ms: dict[str, dict[str, float]] = {}
    for row in json.loads(STEPS.read_text())["rows"]:
        if (row["rate"], row["ranks"]) == ("1gbit", 2) and "ms" in row:
            ms.setdefault(row["model"], {})[row["variant"]] = row["ms"]
    times = [(of["ddp:acpsgd"], of["ddp"], of["ddp-powersgd"]) for of in ms.values()]
    yield Row(
        "Its steps are faster than those of S-SGD and of torch's Power-SGD", "table III",
        "4.06 × and 1.51 ×", "; ".join(f"{sgd / acp:.2f} × and {power / acp:.2f} ×" for acp, sgd, power in times),
        all(1.1 * acp < min(sgd, power) for acp, sgd, power in times),
        f"{', '.join(ms)}: two CPU ranks at 1 Gb/s, one round (`{STEPS.name}`); the paper's are 32 GPUs at 10 Gb/s; "
        "hit if all by a tenth",
    )  # fmt: skip


def approximation(series: Mapping[str, Tensor], picture: dict[str, Any]) -> Iterator[Row]:
    """Error against rank, and what reuse and error feedback are good for (figures 7 and 11)."""
    numel = sum(gradients[0].numel() for gradients in series.values())
    plain = {
        "ACP-SGD": lambda rank: gradzip.ACPSGD(rank=rank, error_feedback=False),
        "Power-SGD": lambda rank: gradzip.PowerSGD(rank=rank, error_feedback=False),
        "ACP-SGD without reuse": lambda rank: gradzip.ACPSGD(rank=rank, error_feedback=False, reuse=False),
    }
    fits = {label: {rank: follow(make(rank), series) for rank in RANKS} for label, make in plain.items()}
    best = {rank: best_error(series, rank) for rank in RANKS}
    picture["ranks"] = list(RANKS)
    picture["errors"] = {label: [fit.error for fit in of.values()] for label, of in fits.items()}
    picture["errors"]["best possible"] = list(best.values())
    picture["ratios"] = {label: [4 * numel / fit.nbytes for fit in of.values()] for label, of in fits.items()}
    acp, power, fresh = (of[RANK] for of in fits.values())
    plainly = "no error feedback"
    yield Row(
        "Its error is about that of Power-SGD", "§IV-A", "as a complete step of power iteration",
        f"{acp.error:.3f} against {power.error:.3f}", acp.error <= 1.1 * power.error,
        f"relative error, rank {RANK}, {plainly}; best possible {best[RANK]:.3f}; hit if at most 10 % above",
    )  # fmt: skip
    fed = follow(gradzip.ACPSGD(rank=RANK), series)
    steps = len(next(iter(series.values())))
    for claim, variant, remark in (
        (
            "Reuse of the last factor is a key part of it",
            "reuse=false",
            f"relative error {acp.error:.3f}, without {fresh.error:.3f}, {plainly}",
        ),
        (
            "Error feedback is a key part of it",
            "error_feedback=false",
            f"relative error of the sum of {steps} averages {fed.drift:.3f}, without {acp.drift:.3f}",
        ),
    ):
        yield Row(
            claim, "fig. 7", "accuracy falls without it",
            f"{points('acpsgd')} points, without {points(f'acpsgd:{variant}')}",
            behind(f"acpsgd:{variant}") - behind("acpsgd") >= 1, f"{CONDITIONS}; hit if a point; {remark}",
        )  # fmt: skip
