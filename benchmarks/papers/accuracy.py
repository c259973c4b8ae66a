"""Accuracies at the end of training, which the papers' claims of accuracy are compared with.

They are of studies of benchmarks/convergence: ResNet-8, CIFAR-10, four workers; four epochs, all methods and one seed,
or twelve epochs, some methods and two seeds; and what the FFT paper compares with, one seed.
"""

from __future__ import annotations

import functools
import json
from statistics import fmean
from typing import Any

from benchmarks.common.results import RESULTS
from benchmarks.convergence import wire

SHORT, LONG = "convergence_default.json", "convergence_long.json"
FFT, FFT_LONG = "convergence_fft.json", "convergence_fft_long.json"
CONDITIONS, OF_FFT = (f"ResNet-8, 4 epochs, one seed (`{file}`)" for file in (SHORT, FFT))
LONGER = f"ResNet-8, 12 epochs, two seeds (`{LONG}`)"


@functools.cache
def runs(file: str) -> dict[str, list[dict[str, Any]]]:
    """The runs of a study, by method."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in json.loads((RESULTS / file).read_text())["runs"]:
        if run["recipe"] == "images":
            found.setdefault(run["method"], []).append(run)
    return found


def behind(method: str, file: str = SHORT) -> float:
    """Points of test accuracy by which a method ends behind no compression; negative if it ends ahead."""
    plain, compressed = (fmean(run["scores"][-1] for run in runs(file)[name]) for name in ("none", method))
    return plain - compressed


def fewer(method: str, file: str = SHORT) -> float:
    """Bytes that four ranks send each without compression, for each byte that they send with it."""
    plain, compressed = (wire.stored()[file, "images", name]["wire_bytes"]["4"] for name in ("none", method))
    return plain / compressed


def points(method: str, file: str = SHORT) -> str:
    """The difference from no compression, as the papers give it."""
    return f"{-behind(method, file):+.2f}".replace("-", "−")
