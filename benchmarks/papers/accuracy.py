"""Accuracies at the end of training, which the papers' claims of accuracy are compared with.

They are of the default study of benchmarks/convergence: ResNet-8, CIFAR-10, four workers, four epochs, one seed.
"""

from __future__ import annotations

import functools
import json
from statistics import fmean

from benchmarks.common.results import RESULTS

FILE = RESULTS / "convergence_default.json"
CONDITIONS = "ResNet-8, 4 epochs, one seed (`convergence_default.json`)"


@functools.cache
def behind(method: str) -> float:
    """Points of test accuracy by which a method ends behind no compression; negative if it ends ahead."""
    runs = [run for run in json.loads(FILE.read_text())["runs"] if run["recipe"] == "images"]

    def final(name: str) -> float:
        return fmean(run["scores"][-1] for run in runs if run["method"] == name)

    return final("none") - final(method)


def points(method: str) -> str:
    """The difference from no compression, as the papers give it."""
    return f"{-behind(method):+.2f}".replace("-", "−")
