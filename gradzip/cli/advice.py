"""The results of `gradzip advise`: predictions of all methods, a recommendation, a projection to more ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .. import cost
from ..cost import JOINED, Compressed, Link, Step
from .layer_costs import LayerCost

FP32, FP16 = "none", "fp16"
# Recommend compression only if it is faster by this share: less is within the noise, and compression costs accuracy.
MARGIN = 0.02


@dataclass(frozen=True)
class Row:
    """A method's prediction. Times in seconds.

    nbytes: bytes that one rank hands to collectives in a step. ratio: bytes in float32 / nbytes.
    least_ratio: the ratio at which the method is as fast as the faster of fp32 and fp16.
    """

    method: str
    seconds: float
    compute: float
    compression: float
    exposed: float
    nbytes: float
    ratio: float
    least_ratio: float
    times_fp32: float
    times_fp16: float
    share_of_ideal: float


@dataclass(frozen=True)
class Advice:
    """Predictions of all methods for a step on a link, the fastest first.

    front_end: "horovod" or "ddp".
    costs: of each method, by layer. `FP32` and `FP16` are among the methods.
    """

    step: Step
    link: Link
    front_end: str
    costs: Mapping[str, Sequence[LayerCost]]

    def compressed(self, method: str, ranks: int) -> list[Compressed]:
        """The cost of a method on each layer, in a group of that many ranks."""
        return [layer.among(ranks) for layer in self.costs[method]]

    def predict(self, method: str, link: Link) -> cost.Prediction:
        layers = self.compressed(method, link.ranks)
        return cost.predict(self.step, layers, link, **JOINED[self.front_end])

    def rows(self) -> list[Row]:
        predictions = {method: self.predict(method, self.link) for method in self.costs}
        fp32, fp16 = predictions[FP32].seconds, predictions[FP16].seconds
        dense = sum(4 * layer.numel for layer in self.step.layers)
        rows = []
        for method, found in predictions.items():
            layers = self.compressed(method, self.link.ranks)
            nbytes = sum(layer.nbytes for layer in layers)
            least = 1.0
            if method != FP32:
                limit = fp32 if method == FP16 else min(fp32, fp16)
                least = cost.least_ratio(self.step, layers, self.link, limit, **JOINED[self.front_end])
            times = fp32 / found.seconds, fp16 / found.seconds, found.compute / found.seconds
            parts = found.compute, found.compression, found.exposed
            rows.append(Row(method, found.seconds, *parts, nbytes, dense / nbytes, least, *times))
        return sorted(rows, key=lambda row: row.seconds)

    def sentence(self, rows: Sequence[Row]) -> str:
        """The recommendation, in one sentence."""
        by_name = {row.method: row for row in rows}
        stock = min(by_name[FP32], by_name[FP16], key=lambda row: row.seconds)
        if by_name[FP32].seconds <= (1 + MARGIN) * by_name[FP16].seconds:
            stock = by_name[FP32]
        best = min((row for row in rows if row.method not in (FP32, FP16)), key=lambda row: row.seconds, default=None)
        if best is not None and best.seconds < (1 - MARGIN) * stock.seconds:
            return (
                f"Use {best.method}: {_ms(best.seconds)} a step, {best.times_fp32:.2f} times as fast as fp32 and "
                f"{best.times_fp16:.2f} times as fast as fp16, at {best.share_of_ideal:.0%} of the ideal."
            )
        name = "fp32" if stock.method == FP32 else "fp16"
        against = f"; the fastest method, {best.method}, takes {_ms(best.seconds)}" if best is not None else ""
        return (
            f"Do not compress: use {name}. It takes {_ms(stock.seconds)} a step, {stock.share_of_ideal:.0%} of the "
            f"ideal{against}."
        )

    def notes(self, cycle_time: str | None, cores: int) -> list[str]:
        """Further remarks. cycle_time: of Horovod, if it is set. cores: of this machine."""
        notes = []
        if self.link.spread > 0.2:
            notes.append(f"Ranks differ in speed by {self.link.spread:.0%}; the slowest one counts.")
        few_cores = self.link.background > 0.02 if self.link.background else cores <= 4
        if self.front_end == "horovod" and cycle_time is None and len(self.step.layers) >= 40 and few_cores:
            notes.append(
                f"With {len(self.step.layers)} parameters and few cores, Horovod's cycles cost time: start the job "
                "with horovodrun --cycle-time-ms 20, and measure."
            )
        return notes

    def projection(self, ranks: int, methods: Sequence[str]) -> list[dict[str, Any]]:
        """Weak scaling to 2, 4, 8, ... and `ranks` ranks: seconds and efficiency of a step, by method."""
        sizes = sorted({ranks, *(1 << shift for shift in range(1, ranks.bit_length()) if 1 << shift <= ranks)})
        rows = []
        for size in sizes:
            steps = {method: self.predict(method, replace(self.link, ranks=size)).seconds for method in methods}
            efficiency = {method: self.step.seconds / seconds for method, seconds in steps.items()}
            rows.append({"ranks": size, "seconds": steps, "efficiency": efficiency})
        return rows

    def json(self, rows: Sequence[Row], projection: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """All results in JSON types. If no ratio pays, `least_ratio` is None."""
        methods = [asdict(row) for row in rows]
        for method in methods:
            method["least_ratio"] = method["least_ratio"] if math.isfinite(method["least_ratio"]) else None
        link = asdict(self.link) | {"bandwidth": min(self.link.bandwidth, 1e300)}
        return {
            "front_end": self.front_end, "link": link, "step_seconds": self.step.seconds,
            "parameters": sum(layer.numel for layer in self.step.layers), "layers": len(self.step.layers),
            "methods": methods, "advice": self.sentence(rows), "projection": list(projection),
        }  # fmt: skip


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"
