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
    """Bytes of the gradients for each byte that is handed to collectives."""
    plain, compressed = (fmean(run["payload_bytes"][-1] for run in runs(file)[name]) for name in ("none", method))
    return plain / compressed


def points(method: str, file: str = SHORT) -> str:
    """The difference from no compression, as the papers give it."""
    return f"{-behind(method, file):+.2f}".replace("-", "−")
