"""The results of `gradzip advise`: predictions and accuracy of all methods, what to use, and why."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from typing import Any

from ..averaging.memory_bytes import memory_bytes
from ..methods.base.compressor import Compressor
from ..methods.hierarchical import Hierarchical
from . import cost
from .cost import Compressed, Link, Prediction, Step
from .studies import LOCAL_STEPS, MOST_STEPS, OPTIMIZERS, SAFE, Study, is_safe, study_of

FP32, FP16, BF16 = STOCK = "none", "fp16", "bf16"  # without compression; torch's hooks send 16 bits

# README's method for AdamW and Muon, and that of its recipe for AdamW in the steps after the warm-up.
FOUR_BITS = "block-float:bits=4,rounding=nearest"
SIGNS = "momentum:inner=signsgd(majority=False)"
BETWEEN = "hierarchical:inner="  # how specs of methods between nodes begin

# Margin of error: in the measured training steps that the margin is taken from, 19 of 20 methods that are predicted to
# gain lose less than this against their predicted gain. `python -m benchmarks.training.decisions` computes it.
MARGIN = 0.21

# Use fp16 in place of fp32 only if it is faster by this share: it costs next to nothing, but it can overflow. Of other
# sizes of buckets than DDP's, name those that are.
FP16_PAYS = 0.02

# Share of the ideal; where averages of every step do not reach it, local steps are recommended.
ENOUGH = 0.9

BUCKETS_MB = (1, 4)  # sizes of buckets to try in place of DDP's


@dataclass(frozen=True)
class Decision:
    """What to use.

    stock: fp32, fp16 or bf16: the fastest one, or fp32 if it is hardly slower.
    fastest: the fastest of the methods that may be used; None if there are none.
    gain: the share of the fastest stock step that `fastest` saves. 0 without one; negative if slower.
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
        seconds: of a step, by method. One of `STOCK` is among them.
        allowed: the methods that may be used beside those. None: all.
        margin: of error, as a share of a step.

    >>> decide({"none": 0.5, "fp16": 0.4, "acpsgd": 0.2, "topk": 0.3}).chosen
    'acpsgd'
    >>> decide({"none": 0.5, "fp16": 0.4, "acpsgd": 0.2, "topk": 0.36}, allowed=["topk"]).chosen
    'fp16'
    """
    stock = min((name for name in STOCK if name in seconds), key=seconds.__getitem__)
    least = seconds[stock]
    if FP32 in seconds and (1 - FP16_PAYS) * seconds[FP32] <= least:
        stock = FP32
    methods = [name for name in (seconds if allowed is None else allowed) if name not in STOCK]
    fastest = min(methods, key=seconds.__getitem__, default=None)
    gain = 0.0 if fastest is None else 1 - seconds[fastest] / least
    return Decision(stock, fastest, gain, margin)


@dataclass(frozen=True)
class Row(Prediction):
    """A method's prediction, in comparison.

    nbytes: bytes of a step in the terms of one all-reduce: those of BlockFloat's two rounds count half, those within
        nodes not at all. ratio: bytes in float32 / nbytes.
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

    def _predict(self, method: str, **buckets: float) -> Prediction:
        joined = cost.joined(self.front_end, stock=method in STOCK) | buckets
        return cost.predict(self.step, self.costs[method], self.link, **joined)

    @functools.cached_property
    def rows(self) -> list[Row]:
        """The predictions of all methods, the fastest first."""
        dense = sum(4 * layer.numel for layer in self.step.layers)
        found = {method: self._predict(method) for method in self.costs}
        shapes = {layer.name: layer.shape for layer in reversed(self.step.layers)}
        rows = []
        for method, step in found.items():
            nbytes = sum(layer.nbytes for layer in self.costs[method])
            fp32, fp16 = (found[stock].seconds / step.seconds for stock in (FP32, FP16))
            parts = step.seconds, step.compute, step.compression, step.exposed
            size = (self.link.nodes, self.link.per_node) if method.startswith(BETWEEN) else self.link.ranks
            kept = memory_bytes(self.methods[method], shapes, size)
            rows.append(Row(*parts, nbytes, method, dense / nbytes, fp32, fp16, step.compute / step.seconds, kept))
        return sorted(rows, key=attrgetter("seconds"))

    @property
    def optimizers(self) -> list[str]:
        """The optimizers to tell accuracies for: the user's, or all."""
        return list(OPTIMIZERS) if self.optimizer is None else [self.optimizer]

    def allowed(self, optimizer: str | None) -> list[str]:
        """The methods that may be advised: those that the user has named, or those that are safe with the optimizer."""
        return [name for name, method in self.methods.items() if self.named or is_safe(studied_as(method), optimizer)]

    def decide(self, optimizer: str | None) -> Decision:
        """What to use with an optimizer; None: with one that is not known."""
        return decide({row.method: row.seconds for row in self.rows}, self.allowed(optimizer))

    def study_of(self, method: str, optimizer: str) -> Study | None:
        """The study of a method with an optimizer, if there is one."""
        return study_of(studied_as(self.methods[method]), optimizer)

    def local_steps(self) -> tuple[str, cost.Exchange] | None:
        """The method whose exchange of local steps is fastest, if averages of every step do not reach `ENOUGH`."""
        usable = {*STOCK, *self.allowed(self.optimizer)}
        if max(row.share_of_ideal for row in self.rows if row.method in usable) >= ENOUGH:
            return None
        # Studies of an optimizer are of gradients: for differences, only methods that every optimizer goes with, and
        # integers of 4 bits, which the studies of local steps had.
        safe = [
            name
            for name in {*self.allowed(None), FOUR_BITS} & self.methods.keys()
            if self.methods[name].averaged_momentum is None and not name.startswith(BETWEEN)
        ]
        found = {method: cost.exchange(self.step, self.costs[method], self.link) for method in {FP32, FP16, *safe}}
        return min(found.items(), key=lambda item: item[1].seconds)

    def bucket_mb(self) -> tuple[int, float] | None:
        """The `bucket_cap_mb` of DDP, and the step, if another size of buckets than its own is clearly faster."""
        if self.front_end != "ddp" or self.link.ranks == 1:
            return None
        chosen = self.decide(self.optimizer).chosen
        own = next(row.seconds for row in self.rows if row.method == chosen)
        found = {mb: self._predict(chosen, bucket_nbytes=float(mb << 20)).seconds for mb in BUCKETS_MB}
        best = min(found, key=found.__getitem__)
        return (best, found[best]) if found[best] < (1 - FP16_PAYS) * own else None

    # --- in words

    def table(self) -> list[list[str]]:
        """Header and rows of the predictions."""
        accuracy = f"with {OPTIMIZERS[self.optimizer]}" if self.optimizer else "holds with"
        table = [["method", "ms/step", "× fp16", "codec", "exposed", "MB", "MB kept", accuracy]]
        for row in self.rows:
            table.append([
                named(row.method), f"{1e3 * row.seconds:.1f}", f"{row.times_fp16:.2f}",
                f"{1e3 * row.compression:.1f}", f"{1e3 * row.exposed:.1f}",
                f"{row.nbytes / 1e6:.1f}", f"{row.memory_bytes / 1e6:.0f}", self._evidence(row.method),
            ])  # fmt: skip
        return table

    def _evidence(self, method: str) -> str:
        """What studies say of a method: the difference with the user's optimizer, or the optimizers that it suits."""
        if method == FP32:
            return "-"
        if self.optimizer is not None:
            study = self.study_of(method, self.optimizer)
            return study.signed if study else "no study"
        studies = {name: self.study_of(method, name) for name in OPTIMIZERS}
        return ", ".join(OPTIMIZERS[name] for name, study in studies.items() if study and study.holds) or "none"

    def sentences(self) -> Iterator[str]:
        """What to use; then why, what it costs in accuracy, and what the advice would be with other optimizers."""
        decision = self.decide(self.optimizer)
        yield from self._recommendation(decision)
        if decision.compresses:
            yield from self._accuracy(decision.chosen)
        if found := self.bucket_mb():
            yield f"With bucket_cap_mb={found[0]} in DistributedDataParallel, a step takes {_ms(found[1])}."
        if local := self.local_steps():
            yield from self._local_steps(*local)
        if self.optimizer is None and not self.named:
            chosen = ", ".join(f"{name} {named(self.decide(name).chosen)}" for name in OPTIMIZERS)
            yield (
                f"Without --optimizer, only {' and '.join(SAFE)} are advised: they are for every optimizer. What would "
                f"be advised with one: {chosen}."
            )

    def notes(self) -> Iterator[str]:
        """What compressed momenta and methods between nodes need."""
        chosen = self.decide(self.optimizer).chosen
        for method, compressor in self.methods.items():
            if (beta := compressor.averaged_momentum) is not None and (self.named or method == chosen):
                study = self.study_of(method, "adamw")
                trained = f" In the study with AdamW, {study.method} averaged the whole training." if study else ""
                yield (
                    f"{named(method)}: the step is one after the warm-up.{trained} The optimizer must have the "
                    f"momentum {beta}, and AdamW must be gradzip.optim.AdamW: gradzip.recipes.adamw makes both."
                )

    def _recommendation(self, decision: Decision) -> Iterator[str]:
        """What to use, in one sentence, and why, in another."""
        by_name = {row.method: row for row in self.rows}
        row, fastest = by_name[decision.chosen], decision.fastest
        takes = f"{_ms(row.seconds)} a step, {row.share_of_ideal:.0%} of the ideal"
        if decision.compresses:
            stock = by_name[decision.stock]
            times = f"{stock.seconds / row.seconds:.1f} times as fast as {named(stock.method)}"
            yield f"Use {called(self.methods[row.method])}: {times}, predicted."
            yield (
                f"{takes}; {named(stock.method)} takes {_ms(stock.seconds)}. It saves {decision.gain:.0%}; the margin "
                f"of error is {decision.margin:.0%}."
            )
            return
        yield f"Do not compress: {named(row.method)} takes {takes}, predicted."
        if fastest is not None:
            then = _ms(by_name[fastest].seconds)
            within = f": within the margin of error of {decision.margin:.0%}" if decision.gain > 0 else ""
            yield f"{named(fastest)}, the fastest that may be advised, takes {then}{within}."
        if row.method == FP16 and BF16 in by_name:
            yield "With torch's bf16 hook, it is the same: no overflow, and fewer digits." + (
                "" if any(self.study_of(BF16, name) for name in self.optimizers) else " No study has measured it."
            )

    def _local_steps(self, method: str, found: cost.Exchange) -> Iterator[str]:
        needed = found.every(ENOUGH)
        every = min((steps for steps in (10, 20) if steps >= needed), default=MOST_STEPS)
        reached = every * found.step_seconds / (every * found.step_seconds + found.seconds)
        studied = "; ".join(f"{OPTIMIZERS[name]} by {LOCAL_STEPS[name]}" for name in self.optimizers)
        more = f", and {ENOUGH:.0%} takes every={needed}" if needed > every else ""
        yield (
            f"No method that may be advised reaches {ENOUGH:.0%} of the ideal when every step averages. "
            f"gradzip.outer.LocalSteps(..., every={every}) with {named(method)} reaches {reached:.0%}: an exchange "
            f"sends {found.nbytes / 1e6:.1f} MB in {_ms(found.seconds)}{more}. Studies of integers of 4 bits, after a "
            f"start of a fifth of the steps, ended worse than without compression: {studied}."
        )

    def _accuracy(self, method: str) -> Iterator[str]:
        """What a method costs in accuracy, with each of the optimizers."""
        for optimizer in self.optimizers:
            study, name = self.study_of(method, optimizer), OPTIMIZERS[optimizer]
            if study is not None:
                ends = study.difference if study.difference.startswith("as") else f"{study.difference} than fp32"
                advised = "" if study.holds else ". It is not advised with this optimizer"
                yield f"With {name}, {named(method)} ends {ends} ({study.conditions}){advised}."
            elif self.optimizer is not None:
                yield f"With {name}, no study has measured what {named(method)} costs in accuracy."
        yield "A study is no proof: train your network with and without, and compare."

    def json(self) -> dict[str, Any]:
        """All results in JSON types. A method without a study has None."""
        decision, local, bucket = self.decide(self.optimizer), self.local_steps(), self.bucket_mb()
        methods = []
        for row in self.rows:
            studies = {name: self.study_of(row.method, name) for name in self.optimizers}
            methods.append(
                asdict(row) | {"studies": {name: study and asdict(study) for name, study in studies.items()}}
            )
        finite = {name: min(getattr(self.link, name), 1e300) for name in ("bandwidth", "within")}
        return {
            "front_end": self.front_end, "link": asdict(self.link) | finite,
            "step_seconds": self.step.seconds, "parameters": sum(layer.numel for layer in self.step.layers),
            "layers": len(self.step.layers), "optimizer": self.optimizer, "methods": methods,
            "advised": decision.chosen, "gain": decision.gain, "margin": decision.margin,
            "bucket_cap_mb": bucket and bucket[0],
            "local_steps": local and asdict(local[1]) | {
                "method": local[0], "every": local[1].every(ENOUGH), "hidden_by": local[1].hidden_by,
            },
        }  # fmt: skip


_NAMES = {FP32: "fp32", FOUR_BITS: "block-float, 4 bits", SIGNS: "recipes.adamw"}


def named(method: str) -> str:
    """The name to show."""
    if method.startswith(BETWEEN):
        inner = method.removeprefix(BETWEEN).replace("(", ":", 1).removesuffix(")")
        return f"{named(inner)} between nodes"
    return _NAMES.get(method, method)


def called(method: Any) -> str:
    """How to make a method in Python, for reading.

    >>> import gradzip
    >>> called(gradzip.BlockFloat(bits=4, rounding="nearest"))
    "BlockFloat(bits=4, rounding='nearest')"
    >>> called(gradzip.Hierarchical(gradzip.BlockFloat()))
    'Hierarchical(BlockFloat())'
    """
    if not isinstance(method, Compressor):
        return repr(method)
    if method.averaged_momentum is not None:
        return "gradzip.recipes.adamw"
    given = []
    for field in fields(method):
        value = getattr(method, field.name)
        if isinstance(value, Compressor):
            given.append(called(value))
        elif value != field.default:
            given.append(f"{field.name}={value!r}")
    return f"{type(method).__name__}({', '.join(given)})"


def studied_as(method: Compressor) -> Compressor:
    """The method that studies are about: between nodes, the one that a chunk has."""
    return method.inner if isinstance(method, Hierarchical) else method


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"
