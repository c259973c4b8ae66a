"""What methods cost in accuracy, by optimizer: the best study of each method with each optimizer.

studies.json has the rows. `python -m benchmarks.convergence.studies --write` takes them from benchmarks/results.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..methods.base.compressor import Compressor
from ..methods.phases import Phases
from ..methods.spec import parse

FILE = Path(__file__).with_name("studies.json")

# Optimizers by the name of an argument, as people write them.
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW", "muon": "Muon"}

# Methods for every optimizer. They differ from the gradient by less than 1 % of the largest element nearby, and end
# within the margin in all studies that have them: block-float with AdamW, Muon and SGD, fp16 with AdamW.
SAFE = ("fp16", "block-float")

MOST_STEPS = 30  # largest `every` of local steps that is advised: the next one that was studied, 100, ended far behind

# Arguments that change how numbers are written or drawn, and not how far they are from the gradient; and when a warm-up
# ends, which depends on the length of the training.
_ALIKE = ("coding", "seed", "warmup_steps", "beta2")


@dataclass(frozen=True)
class Study:
    """What one study has found about a method: the difference from the runs without compression, at the end.

    Args:
        optimizer: a name in OPTIMIZERS.
        method: the spec of the whole training. With phases, the study is about the method of the last one.
        worse_by: how much worse the final score is, in units of `measure`; a mean over the seeds. Negative: better.
        margin: the study counts a score as good as without compression if it is worse by at most this.
        measure: "points of test accuracy" or "bits per character".
        network, parameters, data, steps, seeds: how it trained.
        source: file of benchmarks/results.
    """

    optimizer: str
    method: str
    worse_by: float
    margin: float
    measure: str
    network: str
    parameters: int
    data: str
    steps: int
    seeds: int
    source: str

    @property
    def holds(self) -> bool:
        """Whether training ends about as well as without compression."""
        return self.worse_by <= self.margin

    @property
    def difference(self) -> str:
        """The difference in a few words: "as fp32", "0.9 points worse", "0.75 bits worse"."""
        if self.signed == "as fp32":
            return self.signed
        return f"{self.signed[1:]} {'worse' if self.worse_by > 0 else 'better'}"

    @property
    def signed(self) -> str:
        """How much worse, in short: "as fp32", "+0.9 points", "-0.04 bits"."""
        unit, digits = self.measure.partition(" ")[0], 1 if self.measure.startswith("points") else 2
        size = f"{self.worse_by:+.{digits}f}"
        return "as fp32" if float(size) == 0 else f"{size} {unit}"

    @property
    def conditions(self) -> str:
        """How it trained, in a few words."""
        runs = "one run" if self.seeds == 1 else f"{self.seeds} seeds"
        return f"{self.network} of {self.parameters / 1e6:.2g} M parameters on {self.data}, {self.steps} steps, {runs}"


@dataclass(frozen=True)
class LocalStudy:
    """What a study has found about local steps whose differences are integers of 4 bits, after a start of a fifth.

    worse_by: how much worse the final score is than without compression, in `measure`, by `every`; a mean over seeds.
    network: and how it trained; first, the argument of `LocalSteps` that was not the default.
    beyond: the same as `worse_by` of one run, by an `every` that is not advised.
    """

    worse_by: Mapping[int, float]
    measure: str
    network: str
    beyond: Mapping[int, float] = field(default_factory=dict)

    def __str__(self) -> str:
        ends, further = (
            " and ".join(f"{size:g} with every={every}" for every, size in of.items())
            for of in (self.worse_by, self.beyond)
        )
        return f"{ends}, in {self.measure} ({self.network})" + (f", and in one run by {further}" if further else "")


# By optimizer: `convergence_outer_more.json`, `convergence_muon_outer_more.json` and `convergence_images_outer.json`.
# Beyond them, `convergence_outer.json` and `convergence_muon_outer.json`.
_BITS = "% of the bits per character"
LOCAL_STEPS = {
    "sgd": LocalStudy({10: 1.45}, "points of test accuracy", "outer=None, resnet20, 3120 steps, one run"),
    "adamw": LocalStudy({10: 0.5, 30: 1.6}, _BITS, "charlm-small, 2940 steps, 2 seeds", {5: 6.1, 100: 4.3}),
    "muon": LocalStudy({10: 0.7, 30: 1.3}, _BITS, "outer=None, charlm-small, 2940 steps, 2 seeds", {100: 2.5}),
}  # fmt: skip


@functools.cache
def studies() -> tuple[tuple[Compressor, Study], ...]:
    """All studies, with the method that each is about."""
    rows = [Study(**row) for row in json.loads(FILE.read_text())]
    return tuple((studied(parse(study.method)), study) for study in rows)


def studied(trained: Compressor) -> Compressor:
    """The method that a study of a training is about: without phases, the one that averaged all its steps."""
    return _plain(list(trained.phases.values())[-1] if isinstance(trained, Phases) else trained)


def study_of(method: Compressor, optimizer: str | None) -> Study | None:
    """The study of a method with an optimizer; None if there is none, or the optimizer is not known."""
    plain = _plain(method)
    return next((study for other, study in studies() if study.optimizer == optimizer and other == plain), None)


def is_safe(method: Compressor, optimizer: str | None) -> bool:
    """Whether training ends about as well as without compression: by a study, or with every optimizer.

    Args:
        optimizer: a name in OPTIMIZERS. None: not known, so only methods for every optimizer are safe.
    """
    study = study_of(method, optimizer)
    return (study is not None and study.holds) or _plain(method) in [_plain(parse(spec)) for spec in SAFE]


def _plain(method: Compressor) -> Compressor:
    """The method with the defaults of the arguments that do not change what it costs in accuracy."""
    defaults: dict[str, Any] = {f.name: f.default for f in fields(method) if f.name in _ALIKE}
    return replace(method, **defaults)
