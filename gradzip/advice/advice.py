"""The results of `gradzip advise`: predictions and accuracy of all methods, what to use, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..methods.base.compressor import Compressor
from . import cost
from .cost import Compressed, Link, Step
from .decision import FP16, FP32, Decision, decide
from .layer_costs import LayerCost
from .studies import OPTIMIZERS, SAFE, Study, is_safe, study_of

ENOUGH = 0.9  # share of the ideal; where averages of every step do not reach it, local steps are recommended


@dataclass(frozen=True)
class Row:
    """A method's prediction. Times in seconds.

    nbytes: bytes that one rank hands to collectives in a step. ratio: bytes in float32 / nbytes.
    """

    method: str
    seconds: float
    compute: float
    compression: float
    exposed: float
    nbytes: float
    ratio: float
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
        joined = cost.joined(self.front_end, stock=method in (FP32, FP16))
        return cost.predict(self.step, self.compressed(method, link.ranks), link, **joined)

    def rows(self) -> list[Row]:
        predictions = {method: self.predict(method, self.link) for method in self.costs}
        dense = sum(4 * layer.numel for layer in self.step.layers)
        rows = []
        for method, found in predictions.items():
            nbytes = sum(layer.nbytes for layer in self.compressed(method, self.link.ranks))
            parts = found.seconds, found.compute, found.compression, found.exposed
            fp32, fp16, ideal = (
                seconds / found.seconds
                for seconds in (predictions[FP32].seconds, predictions[FP16].seconds, found.compute)
            )
            rows.append(Row(method, *parts, nbytes, dense / nbytes, fp32, fp16, ideal))
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

    # --- in words

    def table(self, rows: Sequence[Row]) -> list[list[str]]:
        """Header and rows of the predictions."""
        table = [[
            "method", "ms/step", "× fp32", "× fp16", "of ideal", "compression", "exposed", "MB/step", "ratio",
            *(f"with {OPTIMIZERS[optimizer]}" for optimizer in self.optimizers),
        ]]  # fmt: skip
        for row in rows:
            studies = [self.study(row.method, optimizer) for optimizer in self.optimizers]
            table.append([
                named(row.method), f"{1e3 * row.seconds:.1f}", f"{row.times_fp32:.2f}", f"{row.times_fp16:.2f}",
                f"{row.share_of_ideal:.0%}", f"{1e3 * row.compression:.1f}", f"{1e3 * row.exposed:.1f}",
                f"{row.nbytes / 1e6:.2f}", f"{row.ratio:.1f}",
                *("-" if row.method == FP32 else study.difference if study else "not measured" for study in studies),
            ])  # fmt: skip
        return table

    def sentences(self, rows: Sequence[Row]) -> Iterator[str]:
        """What to use, why, what it costs in accuracy, and what the advice would be with other optimizers."""
        decision = self.decide(rows, self.optimizer)
        yield sentence(rows, decision)
        if decision.compresses:
            yield from self._accuracy(decision.chosen)
        if local := self.local_steps(rows):
            method, found = local
            yield (
                f"No method that may be advised reaches {ENOUGH:.0%} of the ideal when every step averages. With local "
                f"steps, gradzip.outer.LocalSteps(..., every={found.every(ENOUGH)}) and {named(method)} do: an "
                f"exchange sends {found.nbytes / 1e6:.2f} MB in {_ms(found.seconds)}, and {found.hidden_by} or more "
                "steps could hide it. Local steps change what is learned: train with and without, and compare."
            )
        if self.optimizer is None and not self.named:
            yield (
                f"Without --optimizer, only {' and '.join(SAFE)} are advised: they are for every optimizer. What would "
                f"be advised with one: {self._with_optimizers(rows)}."
            )

    def notes(self) -> Iterator[str]:
        """Further remarks."""
        for method, compressor in self.methods.items():
            if (beta := compressor.averaged_momentum) is not None:
                study = self.study(method, "adamw")
                trained = f" In the study with AdamW, {study.method} averaged the whole training." if study else ""
                yield (
                    f"{method}: the step is one after the warm-up.{trained} The optimizer must have the momentum "
                    f"{beta}, and AdamW must be gradzip.optim.AdamW."
                )

    def _accuracy(self, method: str) -> Iterator[str]:
        """What a method costs in accuracy, with each of the optimizers."""
        for optimizer in self.optimizers:
            study, name = self.study(method, optimizer), OPTIMIZERS[optimizer]
            if study is not None:
                ends = study.difference if study.difference.startswith("as") else f"{study.difference} than fp32"
                advised = "" if study.holds else ". It is not advised with this optimizer"
                yield f"With {name}, {method} ends {ends} ({study.conditions}){advised}."
            elif self.optimizer is not None:
                yield f"With {name}, no study has measured what {method} costs in accuracy."
        yield "A study is no proof: train your network with and without, and compare."

    def _with_optimizers(self, rows: Sequence[Row]) -> str:
        """What is advised with each optimizer: "sgd acpsgd, adamw fp16"."""
        return ", ".join(f"{name} {named(self.decide(rows, name).chosen)}" for name in OPTIMIZERS)

    def json(self, rows: Sequence[Row]) -> dict[str, Any]:
        """All results in JSON types. A method without a study has None."""
        decision, local = self.decide(rows, self.optimizer), self.local_steps(rows)
        methods = [asdict(row) | {"studies": {}} for row in rows]
        for method in methods:
            studies = {name: self.study(method["method"], name) for name in self.optimizers}
            method["studies"] = {name: study and asdict(study) for name, study in studies.items()}
        return {
            "front_end": self.front_end, "link": asdict(self.link) | {"bandwidth": min(self.link.bandwidth, 1e300)},
            "step_seconds": self.step.seconds, "parameters": sum(layer.numel for layer in self.step.layers),
            "layers": len(self.step.layers), "optimizer": self.optimizer, "methods": methods,
            "advised": decision.chosen, "gain": decision.gain, "margin": decision.margin,
            "local_steps": local and asdict(local[1]) | {
                "method": local[0], "every": local[1].every(ENOUGH), "hidden_by": local[1].hidden_by,
            },
        }  # fmt: skip


def sentence(rows: Sequence[Row], decision: Decision) -> str:
    """The recommendation, in one sentence."""
    by_name = {row.method: row for row in rows}
    row = by_name[decision.chosen]
    if decision.compresses:
        return (
            f"Use {row.method}: {_ms(row.seconds)} a step, {row.times_fp32:.2f} times as fast as fp32 and "
            f"{row.times_fp16:.2f} times as fast as fp16, at {row.share_of_ideal:.0%} of the ideal. It saves "
            f"{decision.gain:.0%} of the faster one's step; the margin of error is {decision.margin:.0%}."
        )
    takes = f"{_ms(row.seconds)} a step, {row.share_of_ideal:.0%} of the ideal"
    name = named(decision.stock)
    if decision.fastest is None:
        return f"Do not compress: use {name}. It takes {takes}."
    if decision.gain > 0:
        return (
            f"Within the noise: do not compress, use {name}. It takes {takes}; {decision.fastest} saves "
            f"{decision.gain:.1%} of the step, less than the margin of error of {decision.margin:.0%}."
        )
    return (
        f"Do not compress: use {name}. It takes {takes}; {decision.fastest}, the fastest that may be advised, takes "
        f"{_ms(by_name[decision.fastest].seconds)}."
    )


def named(method: str) -> str:
    """The name to show."""
    return "fp32" if method == FP32 else method


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"
