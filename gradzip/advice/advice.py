"""The results of `gradzip advise`: predictions and accuracy of all methods, what to use, and why."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

from ..averaging.memory_bytes import memory_bytes
from ..methods.base.compressor import Compressor
from . import cost
from .cost import Compressed, Link, Prediction, Step
from .studies import OPTIMIZERS, SAFE, is_safe, study_of

FP32, FP16 = "none", "fp16"

# Margin of error: in the measured training steps that the margin is taken from, 19 of 20 methods that are predicted to
# gain lose less than this against their predicted gain. `python -m benchmarks.training.decisions` computes it.
MARGIN = 0.21

# Use fp16 in place of fp32 only if it is faster by this share: it costs next to nothing, but it can overflow.
FP16_PAYS = 0.02

# Share of the ideal; where averages of every step do not reach it, local steps are recommended.
ENOUGH = 0.9


@dataclass(frozen=True)
class Decision:
    """What to use.

    stock: fp32 or fp16: the faster one, or fp32 if fp16 is hardly faster.
    fastest: the fastest of the methods that may be used; None if there are none.
    gain: the share of the faster of fp32's and fp16's step that `fastest` saves. 0 without one; negative if slower.
    margin: the gain must exceed it.
    """

    stock: str
    fastest: str | None
    gain: float
    margin: float

    @property
    def compresses(self) -> bool:
        return self.gain > self.margin

    @property
    def chosen(self) -> str:
        return self.fastest if self.fastest and self.compresses else self.stock


def decide(seconds: Mapping[str, float], allowed: Iterable[str] | None = None, margin: float = MARGIN) -> Decision:
    """Choose among methods by their predicted steps.

    Args:
        seconds: of a step, by method. `FP32` or `FP16` is among them.
        allowed: the methods that may be used beside those two. None: all.
        margin: of error, as a share of a step.

    >>> decide({"none": 0.5, "fp16": 0.4, "acpsgd": 0.2, "topk": 0.3}).chosen
    'acpsgd'
    >>> decide({"none": 0.5, "fp16": 0.4, "acpsgd": 0.2, "topk": 0.36}, allowed=["topk"]).chosen
    'fp16'
    """
    stock = min((name for name in (FP32, FP16) if name in seconds), key=seconds.__getitem__)
    least = seconds[stock]
    if FP32 in seconds and (1 - FP16_PAYS) * seconds[FP32] <= least:
        stock = FP32
    methods = [name for name in (seconds if allowed is None else allowed) if name not in (FP32, FP16)]
    fastest = min(methods, key=seconds.__getitem__, default=None)
    gain = 0.0 if fastest is None else 1 - seconds[fastest] / least
    return Decision(stock, fastest, gain, margin)


@dataclass(frozen=True)
class Row(Prediction):
    """A method's prediction, in comparison.

    nbytes: bytes that one rank hands to collectives in a step. ratio: bytes in float32 / nbytes.
    memory_bytes: that a rank keeps between steps.
    """

    method: str
    ratio: float
    times_fp32: float
    times_fp16: float
    share_of_ideal: float
    memory_bytes: int


@dataclass(frozen=True)
class Advice:
    """Predictions of all methods for a step on a link, the fastest first, and which of them to use.

    front_end: "horovod" or "ddp".
    costs: of each method, by layer, in a group of the link's ranks. `FP32` and `FP16` are among the methods.
    methods: the compressors by the same names.
    named: whether the user has named the methods. They are advised then, whatever they cost in accuracy.
    optimizer: a name in OPTIMIZERS; None if the user has not named it.
    """

    step: Step
    link: Link
    front_end: str
    costs: Mapping[str, Sequence[Compressed]]
    methods: Mapping[str, Compressor]
    named: bool = False
    optimizer: str | None = None

    @functools.cached_property
    def rows(self) -> list[Row]:
        """The predictions of all methods, the fastest first."""
        dense = sum(4 * layer.numel for layer in self.step.layers)
        found = {}
        for method, layers in self.costs.items():
            joined = cost.joined(self.front_end, stock=method in (FP32, FP16))
            found[method] = cost.predict(self.step, layers, self.link, **joined)
        shapes = {layer.name: layer.shape for layer in reversed(self.step.layers)}
        rows = []
        for method, step in found.items():
            nbytes = sum(layer.nbytes for layer in self.costs[method])
            fp32, fp16 = (found[stock].seconds / step.seconds for stock in (FP32, FP16))
            parts = step.seconds, step.compute, step.compression, step.exposed
            kept = memory_bytes(self.methods[method], shapes, self.link.ranks)
            rows.append(Row(*parts, nbytes, method, dense / nbytes, fp32, fp16, step.compute / step.seconds, kept))
        return sorted(rows, key=attrgetter("seconds"))

    @property
    def optimizers(self) -> list[str]:
        """The optimizers to tell accuracies for: the user's, or all."""
        return list(OPTIMIZERS) if self.optimizer is None else [self.optimizer]

    def allowed(self, optimizer: str | None) -> list[str]:
        """The methods that may be advised: those that the user has named, or those that are safe with the optimizer."""
        return [name for name, method in self.methods.items() if self.named or is_safe(method, optimizer)]

    def decide(self, optimizer: str | None) -> Decision:
        """What to use with an optimizer; None: with one that is not known."""
        return decide({row.method: row.seconds for row in self.rows}, self.allowed(optimizer))

    def local_steps(self) -> tuple[str, cost.Exchange] | None:
        """The method whose exchange of local steps is fastest, if averages of every step do not reach `ENOUGH`."""
        usable = {FP32, FP16, *self.allowed(self.optimizer)}
        if max(row.share_of_ideal for row in self.rows if row.method in usable) >= ENOUGH:
            return None
        # Studies of an optimizer are of gradients: for differences, only methods that every optimizer goes with.
        safe = [name for name in self.allowed(None) if self.methods[name].averaged_momentum is None]
        found = {method: cost.exchange(self.step, self.costs[method], self.link) for method in {FP32, FP16, *safe}}
        return min(found.items(), key=lambda item: item[1].seconds)

    # --- in words

    def table(self) -> list[list[str]]:
        """Header and rows of the predictions."""
        table = [[
            "method", "ms/step", "× fp32", "× fp16", "of ideal", "compression", "exposed", "MB/step", "ratio",
            "MB kept", *(f"with {OPTIMIZERS[optimizer]}" for optimizer in self.optimizers),
        ]]  # fmt: skip
        for row in self.rows:
            studies = [study_of(self.methods[row.method], optimizer) for optimizer in self.optimizers]
            table.append([
                named(row.method), f"{1e3 * row.seconds:.1f}", f"{row.times_fp32:.2f}", f"{row.times_fp16:.2f}",
                f"{row.share_of_ideal:.0%}", f"{1e3 * row.compression:.1f}", f"{1e3 * row.exposed:.1f}",
                f"{row.nbytes / 1e6:.2f}", f"{row.ratio:.1f}", f"{row.memory_bytes / 1e6:.2f}",
                *("-" if row.method == FP32 else study.difference if study else "not measured" for study in studies),
            ])  # fmt: skip
        return table

    def sentences(self) -> Iterator[str]:
        """What to use, why, what it costs in accuracy, and what the advice would be with other optimizers."""
        decision = self.decide(self.optimizer)
        yield self._recommendation(decision)
        if decision.compresses:
            yield from self._accuracy(decision.chosen)
        if local := self.local_steps():
            method, found = local
            yield (
                f"No method that may be advised reaches {ENOUGH:.0%} of the ideal when every step averages. With local "
                f"steps, gradzip.outer.LocalSteps(..., every={found.every(ENOUGH)}) and {named(method)} do: an "
                f"exchange sends {found.nbytes / 1e6:.2f} MB in {_ms(found.seconds)}, and {found.hidden_by} or more "
                "steps could hide it. Local steps change what is learned: train with and without, and compare."
            )
        if self.optimizer is None and not self.named:
            chosen = ", ".join(f"{name} {named(self.decide(name).chosen)}" for name in OPTIMIZERS)
            yield (
                f"Without --optimizer, only {' and '.join(SAFE)} are advised: they are for every optimizer. What would "
                f"be advised with one: {chosen}."
            )

    def notes(self) -> Iterator[str]:
        """What compressed momenta need."""
        for method, compressor in self.methods.items():
            if (beta := compressor.averaged_momentum) is not None:
                study = study_of(compressor, "adamw")
                trained = f" In the study with AdamW, {study.method} averaged the whole training." if study else ""
                yield (
                    f"{method}: the step is one after the warm-up.{trained} The optimizer must have the momentum "
                    f"{beta}, and AdamW must be gradzip.optim.AdamW: gradzip.recipes.adamw makes both."
                )

    def _recommendation(self, decision: Decision) -> str:
        """What to use, and why, in one sentence."""
        by_name = {row.method: row for row in self.rows}
        row, fastest = by_name[decision.chosen], decision.fastest
        ideal = f"{row.share_of_ideal:.0%} of the ideal"
        if decision.compresses:
            return (
                f"Use {row.method}: {_ms(row.seconds)} a step, {row.times_fp32:.2f} times as fast as fp32 and "
                f"{row.times_fp16:.2f} times as fast as fp16, at {ideal}. It saves {decision.gain:.0%} of the faster "
                f"one's step; the margin of error is {decision.margin:.0%}."
            )
        start, reason = "Do not compress: use", ""
        if decision.gain > 0:
            start = "Within the noise: do not compress, use"
            reason = (
                f"; {fastest} saves {decision.gain:.1%} of the step, less than the margin of error of "
                f"{decision.margin:.0%}"
            )
        elif fastest is not None:
            seconds = by_name[fastest].seconds
            reason = f"; {fastest}, the fastest that may be advised, takes {_ms(seconds)}"
        return f"{start} {named(row.method)}. It takes {_ms(row.seconds)} a step, {ideal}{reason}."

    def _accuracy(self, method: str) -> Iterator[str]:
        """What a method costs in accuracy, with each of the optimizers."""
        for optimizer in self.optimizers:
            study, name = study_of(self.methods[method], optimizer), OPTIMIZERS[optimizer]
            if study is not None:
                ends = study.difference if study.difference.startswith("as") else f"{study.difference} than fp32"
                advised = "" if study.holds else ". It is not advised with this optimizer"
                yield f"With {name}, {method} ends {ends} ({study.conditions}){advised}."
            elif self.optimizer is not None:
                yield f"With {name}, no study has measured what {method} costs in accuracy."
        yield "A study is no proof: train your network with and without, and compare."

    def json(self) -> dict[str, Any]:
        """All results in JSON types. A method without a study has None."""
        decision, local = self.decide(self.optimizer), self.local_steps()
        methods = []
        for row in self.rows:
            studies = {name: study_of(self.methods[row.method], name) for name in self.optimizers}
            methods.append(
                asdict(row) | {"studies": {name: study and asdict(study) for name, study in studies.items()}}
            )
        return {
            "front_end": self.front_end, "link": asdict(self.link) | {"bandwidth": min(self.link.bandwidth, 1e300)},
            "step_seconds": self.step.seconds, "parameters": sum(layer.numel for layer in self.step.layers),
            "layers": len(self.step.layers), "optimizer": self.optimizer, "methods": methods,
            "advised": decision.chosen, "gain": decision.gain, "margin": decision.margin,
            "local_steps": local and asdict(local[1]) | {
                "method": local[0], "every": local[1].every(ENOUGH), "hidden_by": local[1].hidden_by,
            },
        }  # fmt: skip


def named(method: str) -> str:
    """The name to show."""
    return "fp32" if method == FP32 else method


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"
