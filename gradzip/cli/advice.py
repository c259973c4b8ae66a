"""The results of `gradzip advise`: predictions and accuracy of all methods, a decision, a projection to more ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .. import cost
from ..auto.studies import OPTIMIZERS, Study, is_safe, study_of
from ..cost import JOINED, Compressed, Link, Step
from ..methods.base.compressor import Compressor
from .decision import FP16, FP32, Decision, decide
from .layer_costs import LayerCost

ENOUGH = 0.9  # share of the ideal; where averages of every step do not reach it, local steps are recommended


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
    """Predictions of all methods for a step on a link, the fastest first, and which of them to use.

    front_end: "horovod" or "ddp".
    costs: of each method, by layer. `FP32` and `FP16` are among the methods.
    methods: the compressors by the same names.
    named: whether the user has named the methods. They are advised then, whatever they cost in accuracy.
    optimizer: a name in OPTIMIZERS; None if the user has not named it.
    """

    step: Step
    link: Link
    front_end: str
    costs: Mapping[str, Sequence[LayerCost]]
    methods: Mapping[str, Compressor]
    named: bool = False
    optimizer: str | None = None

    def compressed(self, method: str, ranks: int) -> list[Compressed]:
        """The cost of a method on each layer, in a group of that many ranks."""
        return [layer.among(ranks) for layer in self.costs[method]]

    def predict(self, method: str, link: Link) -> cost.Prediction:
        layers = self.compressed(method, link.ranks)
        return cost.predict(self.step, layers, link, **JOINED[self.front_end])

    def local_steps(self, rows: Sequence[Row]) -> tuple[str, cost.Exchange] | None:
        """The method whose exchange of local steps is fastest, if averages of every step do not reach `ENOUGH`."""
        usable = {FP32, FP16, *self.allowed(self.optimizer)}
        if max(row.share_of_ideal for row in rows if row.method in usable) >= ENOUGH:
            return None
        # Studies of an optimizer are of gradients: for differences, only methods that every optimizer goes with.
        safe = [name for name in self.allowed(None) if self.methods[name].averaged_momentum is None]
        link = self.link
        found = {m: cost.exchange(self.step, self.compressed(m, link.ranks), link) for m in {FP32, FP16, *safe}}
        return min(found.items(), key=lambda item: item[1].seconds)

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

    @property
    def optimizers(self) -> list[str]:
        """The optimizers to tell accuracies for: the user's, or all."""
        return list(OPTIMIZERS) if self.optimizer is None else [self.optimizer]

    def study(self, method: str, optimizer: str) -> Study | None:
        """What a study has found about a method with an optimizer."""
        return study_of(self.methods[method], optimizer)

    def allowed(self, optimizer: str | None) -> list[str]:
        """The methods that may be advised: those that the user has named, or those that are safe with the optimizer."""
        return [name for name, method in self.methods.items() if self.named or is_safe(method, optimizer)]

    def decide(self, rows: Sequence[Row], optimizer: str | None) -> Decision:
        """What to use with an optimizer; None: with one that is not known."""
        return decide({row.method: row.seconds for row in rows}, self.allowed(optimizer))

    def variations(self) -> dict[str, float]:
        """The slowest of the timed steps of methods, divided by the fastest ones, where the difference matters."""
        found = {}
        for method, layers in self.costs.items():
            least = sum(layer.compressed.encode + layer.compressed.decode for layer in layers)
            slowest = sum(layer.slowest for layer in layers)
            if slowest > 2 * least and slowest - least > 0.05 * self.step.seconds:
                found[method] = slowest / least
        return found

    def projection(self, ranks: int, rows: Sequence[Row], most: int = 3) -> list[dict[str, Any]]:
        """Weak scaling to 2, 4, 8, ... and `ranks` ranks: seconds and efficiency of a step, by method.

        Has fp32, fp16, and the `most` fastest methods that may be advised with any of the optimizers.
        """
        advised = {name for optimizer in self.optimizers for name in self.allowed(optimizer)} - {FP32, FP16}
        methods = [FP32, FP16, *[row.method for row in rows if row.method in advised][:most]]
        sizes = sorted({ranks, *(1 << shift for shift in range(1, ranks.bit_length()) if 1 << shift <= ranks)})
        found = []
        for size in sizes:
            steps = {method: self.predict(method, replace(self.link, ranks=size)).seconds for method in methods}
            efficiency = {method: self.step.seconds / seconds for method, seconds in steps.items()}
            found.append({"ranks": size, "seconds": steps, "efficiency": efficiency})
        return found

    def json(self, rows: Sequence[Row], projection: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """All results in JSON types. If no ratio pays, `least_ratio` is None; if nothing is measured, a study is."""
        methods = [asdict(row) for row in rows]
        for method in methods:
            method["least_ratio"] = method["least_ratio"] if math.isfinite(method["least_ratio"]) else None
            studies = {name: self.study(method["method"], name) for name in self.optimizers}
            method["studies"] = {name: None if study is None else asdict(study) for name, study in studies.items()}
        link = asdict(self.link) | {"bandwidth": min(self.link.bandwidth, 1e300)}
        decision, local = self.decide(rows, self.optimizer), self.local_steps(rows)
        return {
            "front_end": self.front_end, "link": link, "step_seconds": self.step.seconds,
            "parameters": sum(layer.numel for layer in self.step.layers), "layers": len(self.step.layers),
            "optimizer": self.optimizer, "methods": methods, "advised": decision.chosen, "gain": decision.gain,
            "margin": decision.margin, "projection": list(projection),
            "local_steps": local and {
                "method": local[0], "every": local[1].every(ENOUGH), "seconds": local[1].seconds,
                "nbytes": local[1].nbytes, "hidden_by": local[1].hidden_by,
            },
        }  # fmt: skip
