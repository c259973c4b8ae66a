"""`Auto`: the compressor, and the report of its decisions."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..collectives.engine import Engine
from ..cost import Link
from ..measure.step import now
from ..methods.base.composite import Composite
from ..methods.base.compressor import Compressor
from ..methods.base.registry import register
from ..methods.cast import Cast
from ..methods.none import NoCompression
from ..methods.spec import parse, unparse
from .assignments import NONE, Assignment, ParameterKey
from .search import WARM_UP, StepEnd, Steps, run
from .studies import OPTIMIZERS, SAFE, is_safe

logger = logging.getLogger("gradzip.auto")

# The methods to choose from by default, as far as they are safe with the optimizer; the most accurate first.
CANDIDATES = (*SAFE, "qsgd:coding=packed", "acpsgd")

# After this many consecutive steps of another optimizer, that optimizer's steps are measured instead.
PATIENCE = 20

# Share of a core that an idle engine may take without a remark. Horovod's cycles of 1 ms take 0.05.
BUSY = 0.03


@register("auto")
@dataclass
class Auto(Composite):
    """Measures the job that it runs in, and chooses the fastest method for each parameter, or none.

    The first `steps` steps are uncompressed. In them, Auto records when gradients are ready. It then measures the error
    and the time of all allowed methods on the gradients of one step, and measures the network. A cost model
    (`gradzip.cost`) proposes assignments of methods to parameters. Training continues with each of the best assignments
    for some steps, and with no compression and `fp16`, in turns of all. What is clearly slower has no further turn. How
    much the turns of an assignment differ is the noise, and gives the margin, at least 2 %: of the assignments that the
    fastest one does not beat by the margin, the first one is chosen, in the order none, `fp16`, `allow`, and mixed
    assignments. All ranks exchange their measurements; the slowest rank counts, and all ranks choose alike.

    When the method of a parameter changes, its residual moves to the new method. A method without error feedback sends
    the residual once, with the next gradient. While assignments are tried, each method with error feedback keeps a
    residual. In the step in which methods are measured, a copy of all gradients is kept.

    With one rank, nothing is compressed. `gradzip.LocalGroup` and `gradzip.roundtrip` never choose: they average
    uncompressed. If several optimizers share an Auto, the steps of one of them are measured, and the choice holds for
    all.

    Args:
        allow: the methods to choose from, as specs or compressors. Uncompressed is always allowed. Speed alone decides
            among them: allow what trains your network well. None: those of `fp16`, `block-float`,
            `qsgd:coding=packed` and `acpsgd` that are safe with the optimizer.
        max_error: the largest error |x - decoded| / |x| on a parameter's gradient, without a residual, with which a
            method may compress that parameter. Error feedback makes up for errors near 1 (`acpsgd`). None: any error.
        every: steps after which assignments are compared again; 0: never. An assignment is tried again if that costs
            less than 2 % of the time, and is chosen if it is faster by the margin, at least 3 %. With `max_error`,
            errors are measured again.
        steps: uncompressed steps before the first choice.
        optimizer: of the training: "sgd", "adamw" or "muon". Methods are safe with it if they ended about as without
            compression in a study (docs/accuracy.md), or are `fp16` or `block-float`. None: it is not known, so only
            those two are safe. Has no effect if `allow` is given.

    Attributes:
        decided: whether the first choice is made. The same on all ranks.
        choice: the spec of the chosen method, by parameter name.
        report: the last decision, as plain numbers and strings.

    On rank 0, the logger "gradzip.auto" gets a line for each decision: a warning for the first one and for changes, so
    that it is seen without any configuration of logging. The choice is a part of the state dict. If that
    is loaded in a group of another size, the choice is made again. On a device, Auto waits for the end of each step
    while assignments are compared.

    `fp16` overflows if a gradient or an average exceeds 65504. Such a step is skipped on all ranks. If many steps
    may overflow, use a GradScaler, which lowers the scale, or leave `fp16` out of `allow`.

    The choice depends on times, so it may differ between runs. Replicas stay bit-identical.

    Source of the model: Wang et al., FFT-based Gradient Sparsification, HPDC 2020, section 3.3.

    >>> import gradzip
    >>> compressor = gradzip.Auto(optimizer="adamw")
    >>> compressor = gradzip.Auto(allow=["fp16", "acpsgd:rank=8"], max_error=0.9)
    """

    allow: Sequence[str | Compressor] | None = None
    max_error: float | None = None
    every: int = 1000
    steps: int = 10
    optimizer: str | None = None

    observes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer is not None and self.optimizer not in OPTIMIZERS:
            raise ValueError(
                f"Auto: got optimizer = {self.optimizer!r}, expected one of {', '.join(OPTIMIZERS)}; for another one, "
                "leave it out, or give allow"
            )
        allowed = self._allowed(safe_candidates(self.optimizer) if self.allow is None else self.allow)
        self.allow = tuple(allowed)
        _check_number("every", self.every, 10, zero=True)
        _check_number("steps", self.steps, WARM_UP + 1)
        if self.max_error is not None and not (_is_number(self.max_error) and self.max_error > 0):
            raise ValueError(f"Auto: got max_error = {self.max_error!r}, expected a number > 0, or None for any error")
        self.set_parts([NoCompression(), *allowed])
        self.specs = [unparse(part) for part in self.parts]
        self.half = next((i for i, part in enumerate(self.parts) if isinstance(part, Cast)), None)
        self.report: dict[str, Any] = {}
        self.link: Link | None = None
        self._names: dict[str, ParameterKey] = {}  # by the name of the state
        self._leader: weakref.ref[Engine] | None = None  # engine of the optimizer whose steps are measured
        self._members: tuple[int, ...] = ()  # of that engine
        self._others = 0  # steps of other optimizers since that optimizer's last step
        self._device = torch.device("cpu")  # of the last gradient
        self._reset(0)

    def _allowed(self, allow: Sequence[str | Compressor]) -> list[Compressor]:
        if not allow or isinstance(allow, str) or not isinstance(allow, Sequence):
            got = repr(allow) if allow else "nothing"
            raise ValueError(f"Auto: got {got} as allow, expected a list of methods, as in allow=['fp16', 'acpsgd']")
        methods = [parse(method) if isinstance(method, str) else method for method in allow]
        for method in methods:
            if hasattr(method, "warmup_steps"):
                raise ValueError(
                    f"Auto: got {unparse(method)!r} in allow, expected methods whose steps are alike: those of "
                    f"{type(method).__name__} have phases"
                )
        compressing = [method for method in methods if not isinstance(method, NoCompression)]
        if not compressing:
            raise ValueError("Auto: got none alone in allow, expected a method that compresses")
        return compressing

    def _reset(self, size: int) -> None:
        """Forget the choice. size: of the group; 0 if it is not known yet."""
        self.decided = False
        self.chosen = Assignment(self.specs[NONE], {})
        self.candidates: list[Assignment] = []
        self.steps_since = 0  # steps since the last decision
        self.margin = 0.0  # of the last decision
        self._size = size
        self._restart_search()

    def _restart_search(self) -> None:
        """Stop the search. The next step starts a new one, or waits for the next comparison if the choice is made."""
        self.current = self.chosen  # the assignment in use: `chosen`, or one that is tried
        self._search: Steps[None] | None = None
        self._step_start: float | None = None
        self._arrivals: dict[str, float] | None = None
        self._gradients: dict[str, Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Get the state of a copy, which continues with the choice, or starts to measure."""
        dropped = ("_search", "_step_start", "_arrivals", "_gradients", "_leader")
        return {**vars(self), **dict.fromkeys(dropped), "_members": (), "current": self.chosen}

    # --- a method made of methods

    def method_for(self, name: str, shape: torch.Size | tuple[int, ...], prefix: str = "") -> Compressor:
        return self.parts[self.current.methods.get((name, shape), NONE)]

    @property
    def configuration(self) -> tuple[float | None, ...]:
        return self.max_error, self.every, self.steps

    @property
    def choice(self) -> dict[str, str]:
        """The spec of the chosen method, by parameter name."""
        keys = dict.fromkeys([*self._names.values(), *self.chosen.methods])
        return {key[0]: self.specs[self.chosen.methods.get(key, NONE)] for key in keys}

    # --- a step

    def register_parameter(self, name: str, shape: torch.Size, state_name: str) -> None:
        self._names[state_name] = (name, shape)
        if self.current is self.chosen:  # an assignment that is only tried leaves residuals where they are
            super().register_parameter(name, shape, state_name)

    def observe(self, state_name: str, grad: Tensor) -> None:
        if self._arrivals is not None and self._step_start is not None:
            self._arrivals[state_name] = time.perf_counter() - self._step_start
        self._device = grad.device
        if self._gradients is not None and not self.bypasses(grad):
            self._gradients[state_name] = grad.detach().clone()

    def skip_step(self) -> None:
        super().skip_step()
        self._step_start = None  # the next step is not timed
        for recorded in (self._arrivals, self._gradients):
            if recorded is not None:
                recorded.clear()

    def end_step(self, engine: Engine | None, names: Sequence[str]) -> None:
        super().end_step(engine, names)
        if engine is None or not self._is_measured(engine):
            return
        seconds = None if self._step_start is None else self._now() - self._step_start
        end = StepEnd(engine, seconds, dict(self._arrivals or {}))
        if self._search is None:
            self._search = run(self)
            next(self._search)
        try:
            self._search.send(end)
        except BaseException:  # for example because a rank died
            self._restart_search()
            raise
        if self._arrivals is not None:
            self._arrivals.clear()
        self._step_start = self._now()

    def _now(self) -> float:
        """The time. While assignments are compared, wait for the device first."""
        comparing = not self.decided or self.steps_since >= self.every > 0
        return now(self._device) if comparing else time.perf_counter()

    def _is_measured(self, engine: Engine) -> bool:
        """Whether the steps of this engine's optimizer are measured, rather than those of another optimizer."""
        leader = None if self._leader is None else self._leader()
        if leader is engine:
            self._others = 0
            return True
        if engine.size == 1:  # a job of one rank, or a process set of one rank beside larger ones
            if self._leader is None and self._size != 1:
                self._reset(1)
                self.choose(Assignment(self.specs[NONE], {}), [], None, rank=0, size=1)
            return False
        if self._leader is not None:
            if engine.members != self._members:
                raise RuntimeError(
                    f"Auto: got gradients that the ranks {list(engine.members)} average, and others that "
                    f"{list(self._members)} average; give each process set, and each new group, an Auto of its own"
                )
            self._others += 1
            if self._others < PATIENCE:
                return False
        self._restart_search()  # times of different optimizers are not comparable
        self._leader, self._members, self._others = weakref.ref(engine), engine.members, 0
        unknown = self.decided and not self.chosen.methods.keys() >= set(self.keys().values())
        if self._size != engine.size or unknown:  # a new group, or a new model
            self._reset(engine.size)
        return True

    # --- called by the search (search.Job)

    def record_arrivals(self, on: bool) -> None:
        self._arrivals = {} if on else None

    def keep_gradients(self) -> None:
        self._gradients = {}

    def take_gradients(self) -> dict[str, Tensor]:
        gradients, self._gradients = self._gradients or {}, None
        return gradients

    def keys(self) -> Mapping[str, ParameterKey]:
        return {state_name: (name, tuple(shape)) for state_name, (name, shape) in self._names.items()}

    def use(self, assignment: Assignment) -> None:
        self.current = assignment

    def choose(
        self, assignment: Assignment, candidates: Sequence[Assignment], link: Link | None, rank: int, size: int
    ) -> None:
        before = self.chosen.title if self.decided else None
        assignment.methods |= {key: NONE for key in self._names.values() if key not in assignment.methods}
        self.current = self.chosen = assignment
        self.choice_number += 1
        self.candidates, self.link = list(candidates), link
        self.decided, self.steps_since, self._size = True, 0, size
        self.report = self._report()
        if rank == 0:
            # Which method compresses is news: a warning is what users see who have not configured logging.
            news = size > 1 and before != assignment.title
            text = explain(self.report, assignment.is_simple(self.half), before)
            hint = self._hint() if news and before is None else ""
            logger.log(logging.WARNING if news else logging.INFO, "gradzip.Auto: %s%s", text, hint)

    def _hint(self) -> str:
        """What more would be allowed if the optimizer were known; empty if the user has said what is."""
        if self.optimizer is not None or self.specs[1:] != safe_candidates(None):
            return ""
        more = {name: [spec for spec in safe_candidates(name) if spec not in self.specs] for name in OPTIMIZERS}
        allows = [f"optimizer={name!r} allows {', '.join(specs)}, too" for name, specs in more.items() if specs]
        return f"; only methods for every optimizer were tried: {'; '.join(allows)}" if allows else ""

    def _report(self) -> dict[str, Any]:
        """The decision, as plain numbers and strings."""
        numels: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for key in self._names.values():
            spec = self.specs[self.chosen.methods.get(key, NONE)]
            numels[spec] += math.prod(key[1])
            counts[spec] += 1
        total = sum(numels.values()) or 1
        return {
            "assignment": self.chosen.title,
            "ranks": self._size,
            "share": {spec: numel / total for spec, numel in numels.most_common()},  # of the elements, by method
            "parameters": dict(counts),
            "ms": {c.title: c.seconds * 1000 for c in self.candidates if c.seconds is not None},
            "predicted_ms": {c.title: c.predicted * 1000 for c in self.candidates if c.predicted is not None},
            "margin": self.margin,
            "link": None if self.link is None else asdict(self.link),
        }

    # --- state

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"auto": self._saved() if self.decided else {}}

    def _saved(self) -> dict[str, Any]:
        saved = self.candidates
        if all(candidate is not self.chosen for candidate in saved):
            saved = [self.chosen, *saved]
        keys = list(dict.fromkeys(key for candidate in saved for key in candidate.methods))
        return {
            "size": self._size,
            "steps": self.steps_since,
            "methods": self.specs,
            "parameters": [[name, list(shape)] for name, shape in keys],
            "candidates": [
                [c.title, -1.0 if c.seconds is None else c.seconds, [c.methods.get(key, NONE) for key in keys]]
                for c in saved
            ],
            "chosen": next(i for i, candidate in enumerate(saved) if candidate is self.chosen),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict, with the choice. If it has none, or that of a group of another size, choose again.

        Raises:
            ValueError: as for other methods; or the choice is among other methods, or malformed.
        """
        super().load_state_dict(state_dict)
        self._leader = None
        self._reset(0)
        saved = state_dict.get("auto", {})
        what = "Auto.load_state_dict: got a"
        if not isinstance(saved, Mapping):
            raise ValueError(f"{what} choice of type {type(saved).__name__}, expected a dict")
        if saved and saved.get("methods") != self.specs:
            raise ValueError(f"{what} choice among {saved.get('methods')}, expected one among {self.specs}")
        try:
            if saved:
                self._load_choice(saved)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{what} malformed choice ({error!r}), expected a saved one") from None

    def _load_choice(self, saved: Mapping[str, Any]) -> None:
        keys = [(str(name), tuple(shape)) for name, shape in saved["parameters"]]
        candidates = []
        for title, seconds, indices in saved["candidates"]:
            methods = {key: range(len(self.parts))[index] for key, index in zip(keys, indices)}
            candidates.append(Assignment(title, methods, None if seconds < 0 else seconds))
        self.current = self.chosen = candidates[saved["chosen"]]
        self.candidates, self.steps_since, self._size = candidates, int(saved["steps"]), int(saved["size"])
        self.decided = True


def safe_candidates(optimizer: str | None) -> list[str]:
    """The methods to choose from by default, with an optimizer."""
    return [spec for spec in CANDIDATES if is_safe(parse(spec), optimizer)]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_number(name: str, value: Any, least: int, zero: bool = False) -> None:
    if not (isinstance(value, int) and _is_number(value) and (value >= least or (zero and value == 0))):
        never = ", or 0 for never" if zero else ""
        raise ValueError(f"Auto: got {name} = {value!r}, expected an integer >= {least}{never}")


def explain(report: dict[str, Any], simple: bool, before: str | None) -> str:
    """A decision and its reason, in one line.

    Args:
        simple: whether all gradients are averaged uncompressed or in 16 bits.
        before: title of the assignment that was chosen before.
    """
    if report["ranks"] == 1:
        return "one rank: nothing to send, nothing is compressed"
    title = report["assignment"]
    if simple:
        what = f"no compression pays here: {_name(title)}"
    else:
        shares = ", ".join(f"{share:.1%} {_name(method)}" for method, share in report["share"].items())
        what = f"{title} ({shares} of the elements)"
    if before is not None:
        what = f"still {what}" if before == title else f"no longer {_name(before)}, but {what}"
    times = sorted(report["ms"].items(), key=lambda item: item[1])
    listed = ", ".join(f"{_name(title)} {ms:.1f}" for title, ms in times)
    network = ""
    if link := report["link"]:
        network = f", {link['bandwidth'] * 8e-9:.3g} Gb/s, {link['latency'] * 1e6:.0f} us"
        if link["background"] > BUSY:
            network += f"; the engine takes {link['background']:.0%} of a core: with Horovod, try --cycle-time-ms 20"
    margin = f" (margin {report['margin']:.1%})" if report["margin"] else ""
    return f"{what}; ms per step: {listed}{margin}; {report['ranks']} ranks{network}"


def _name(title: str) -> str:
    return "fp32" if title == "none" else title
