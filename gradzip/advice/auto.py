"""`Auto`: a compressor that measures its job, and chooses a method: none, 16 bits or an allowed one.

The search for the fastest method is a coroutine that is sent each training step. Training goes on with each allowed
method in turns, and the measured steps decide. All ranks exchange their times and errors, and compute the same choice
from the same numbers. The time of a step runs from the end of one average to the end of the next one: it is what the
user waits for.
"""

from __future__ import annotations

import logging
import math
import statistics
import weakref
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..collectives.engine import Engine
from ..memory.state_dict import is_count
from ..methods.base.composite import Composite
from ..methods.base.compressor import Compressor
from ..methods.base.group import Group
from ..methods.base.registry import register
from ..methods.cast import Cast
from ..methods.none import NoCompression
from ..methods.spec import parse, unparse
from .advice import named
from .measure import Moment, errors_of, moment, seconds_between
from .studies import OPTIMIZERS, SAFE, is_safe

logger = logging.getLogger("gradzip.auto")

# The methods to choose from by default, as far as they are safe with the optimizer; the most accurate first.
CANDIDATES = (*SAFE, "qsgd:coding=packed", "acpsgd")

# After this many consecutive steps of another optimizer, that optimizer's steps are measured instead.
PATIENCE = 20

NONE = 0  # index of the part that averages gradients uncompressed
WARM_UP = 2  # steps after a change that are not timed: they allocate buffers and states
TIMED = 4  # timed steps of a method in each turn. Even: the steps of ACP-SGD alternate
TURNS = 4  # of each method: conditions change, so methods take turns
TURNS_AGAIN = 3  # when methods are compared again
MUCH_SLOWER = 2.0  # methods slower than the fastest by this factor have no second turn
CLOSE = 1.15  # methods slower by this factor, or by twice the margin, have no third turn
PAYS = 0.02  # least margin by which a method must be faster than a simpler one
BETTER = 0.03  # least margin by which a method must be faster than the chosen one
DEVIATIONS = 3.0  # standard deviations in the margin: it holds for the best of several methods
SHARE = 0.02  # share of the training time that trying other methods may cost


# The search gets the engine of each step, and the moments at its start and end; None if they are not known.
Result = TypeVar("Result")
Span = tuple[Moment, Moment]
Steps = Generator[None, tuple[Engine, Span | None], Result]
Times = dict[int, list[float]]  # of the turns of each method


@register("auto")
@dataclass
class Auto(Composite):
    """Measures the job that it runs in, and chooses the fastest method, or none.

    The first `steps` steps are uncompressed. Training continues with each allowed method for some steps, in turns of
    all. What is clearly slower has no further turn. How much the turns of a method differ is the noise, and gives the
    margin, at least 2 %: of the methods that the fastest one does not beat by the margin, the first one is chosen, in
    the order none, `allow`. All ranks exchange their times; the slowest rank counts, and all ranks choose alike.

    When the method changes, residuals move to the new one. A method without error feedback sends them once, with the
    next gradient. While methods are tried, each method with error feedback keeps residuals.

    With one rank, nothing is compressed. `gradzip.LocalGroup` and `gradzip.roundtrip` never choose: they average
    uncompressed. If several optimizers share an Auto, the steps of one of them are measured, and the choice holds for
    all.

    Args:
        allow: the methods to choose from, as specs or compressors. Uncompressed is always allowed. Speed alone decides
            among them: allow what trains your network well. None: those of `fp16`, `block-float`,
            `qsgd:coding=packed` and `acpsgd` that are safe with the optimizer.
        max_error: the largest error |x - decoded| / |x| on the gradient of a parameter, without a residual, with which
            a method may be chosen. It is measured in one uncompressed step, in which all gradients are copied, in the
            buckets of the job. Error feedback makes up for errors near 1 (`acpsgd`). None: any error.
        every: steps after which methods are compared again; 0: never. A method is tried again if that costs less than
            2 % of the time, and is chosen if it is faster by the margin, at least 3 %. With `max_error`, errors are
            measured again.
        steps: uncompressed steps before the first choice.
        optimizer: of the training: "sgd", "adamw" or "muon". Methods are safe with it if they ended about as without
            compression in a study (docs/accuracy.md), or are `fp16` or `block-float`. None: it is not known, so only
            those two are safe. Has no effect if `allow` is given.

    Attributes:
        decided: whether the first choice is made. The same on all ranks.
        choice: the spec of the chosen method, by parameter name; "none" for parameters that it does not compress.
        report: the last decision, as plain numbers and strings.

    On rank 0, the logger "gradzip.auto" gets a line for each decision: a warning for the first one and for changes, so
    that it is seen without any configuration of logging. The choice is a part of the state dict. If that
    is loaded in a group of another size, the choice is made again. On a device, steps are timed by its events: Auto
    waits once for all steps of a turn, and once for the errors of a method.

    `fp16` overflows if a gradient or an average exceeds 65504. Such a step is skipped on all ranks. If many steps
    may overflow, use a GradScaler, which lowers the scale, or leave `fp16` out of `allow`.

    The choice depends on times, so it may differ between runs. Replicas stay bit-identical.

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
    undone_on_device = False
    capture_needs = "the method that it has chosen, gradzip.parse(compressor.report['method'])"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer is not None and self.optimizer not in OPTIMIZERS:
            raise ValueError(
                f"Auto: got optimizer = {self.optimizer!r}, expected one of {', '.join(OPTIMIZERS)}; for another one, "
                "leave it out, or give allow"
            )
        allowed = _allowed(safe_candidates(self.optimizer) if self.allow is None else self.allow)
        self.allow = tuple(allowed)
        if not (is_count(self.every) and (self.every >= 10 or self.every == 0)):
            raise ValueError(f"Auto: got every = {self.every!r}, expected an integer >= 10, or 0 for never")
        if not (is_count(self.steps) and self.steps > WARM_UP):
            raise ValueError(f"Auto: got steps = {self.steps!r}, expected an integer >= {WARM_UP + 1}")
        number = isinstance(self.max_error, (int, float)) and not isinstance(self.max_error, bool)
        if self.max_error is not None and not (number and self.max_error > 0):
            raise ValueError(f"Auto: got max_error = {self.max_error!r}, expected a number > 0, or None for any error")
        self.set_parts([NoCompression(), *allowed])
        self.specs = [unparse(part) for part in self.parts]
        self.report: dict[str, Any] = {}
        self._shapes: dict[str, torch.Size] = {}  # of the parameters, by name
        self._leader: weakref.ref[Engine] | None = None  # engine of the optimizer whose steps are measured
        self._members: tuple[int, ...] = ()  # of that engine
        self._others = 0  # steps of other optimizers since that optimizer's last step
        self.device = torch.device("cpu")  # of the last gradient
        self._reset(0)

    def _reset(self, size: int) -> None:
        """Forget the choice. size: of the group; 0 if it is not known yet."""
        self.decided = False
        self.chosen = NONE  # index of the part
        self.seconds: dict[int, float] = {}  # of a step with each part, as last measured
        self.steps_since = 0  # steps since the last decision
        self._size = size
        self._restart_search()

    def _restart_search(self) -> None:
        """Stop the search. The next step starts a new one, or waits for the next comparison if the choice is made."""
        self._set_current(self.chosen, trial=False)
        self._search: Steps[None] | None = None
        self._step_start: Moment | None = None
        # Copies of this step's gradients, by bucket and by the name of the state, if they are to be kept.
        self.gradients: list[dict[str, Tensor]] | None = None

    def _set_current(self, index: int, trial: bool) -> None:
        """Set the part in use: the chosen one, or one on trial, which leaves residuals where they are."""
        self.current, self._trial = index, trial
        self.choice_number += 1

    def __getstate__(self) -> dict[str, Any]:
        """Get the state of a copy, which continues with the choice, or starts to measure."""
        dropped = ("_search", "_step_start", "gradients", "_leader")
        return {**vars(self), **dict.fromkeys(dropped), "_members": (), "current": self.chosen, "_trial": False}

    # --- a method made of methods

    def method_for(self, name: str, shape: torch.Size | tuple[int, ...], prefix: str = "") -> Compressor:
        return self.parts[self.current]

    def takes(self, name: str, like: Tensor, prefix: str = "") -> bool:
        return not self.bypasses(like)  # by one of the methods, whichever is chosen

    def stages(self, names: Sequence[str]) -> list[list[Compressor]]:
        clones: list[Any] = [self.clone() for _ in self.parts]
        for index, clone in enumerate(clones):
            clone.use(index)
        return [clones]  # while methods are compared

    @property
    def configuration(self) -> tuple[float | None, ...]:
        return self.max_error, self.every, self.steps

    @property
    def choice(self) -> dict[str, str]:
        """The spec of the chosen method, by parameter name; "none" for parameters that it does not compress."""
        part, spec = self.parts[self.chosen], self.specs[self.chosen]
        return {
            name: self.specs[NONE] if part.bypasses(torch.empty(shape, device="meta")) else spec
            for name, shape in self._shapes.items()
        }

    # --- a step

    def register_parameter(self, name: str, shape: torch.Size, state_name: str) -> None:
        self._shapes[name] = shape
        if not self._trial:
            super().register_parameter(name, shape, state_name)

    def observe(self, group: Group) -> None:
        self.device = group.gradients[0].device
        if self.gradients is not None:
            named = zip(group.names, group.gradients)
            self.gradients.append({name: x.detach().clone() for name, x in named if not self.bypasses(x)})

    def skip_step(self) -> None:
        super().skip_step()
        self._step_start = None  # the next step is not timed
        if self.gradients is not None:
            self.gradients.clear()

    def end_step(self, engine: Engine | None, names: Sequence[str]) -> None:
        super().end_step(engine, names)
        if engine is None or not self._is_measured(engine):
            return
        start, end = self._step_start, self._moment()
        span = None if start is None or end is None or type(start) is not type(end) else (start, end)
        if self._search is None:
            self._search = run(self)
            next(self._search)
        try:
            self._search.send((engine, span))
        except BaseException:  # for example because a rank died
            self._restart_search()
            raise
        self._step_start = self._moment()

    def _moment(self) -> Moment | None:
        """This moment, while methods are compared."""
        return moment(self.device) if not self.decided or self.steps_since >= self.every > 0 else None

    def _is_measured(self, engine: Engine) -> bool:
        """Whether the steps of this engine's optimizer are measured, rather than those of another optimizer."""
        leader = None if self._leader is None else self._leader()
        if leader is engine:
            self._others = 0
            return True
        if engine.size == 1:  # a job of one rank, or a process set of one rank beside larger ones
            if self._leader is None and self._size != 1:
                self._reset(1)
                self.choose(NONE, {}, 0.0, rank=0, size=1)
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
        if self._size != engine.size:  # a new group
            self._reset(engine.size)
        return True

    # --- called by the search

    def use(self, index: int) -> None:
        """Use a method from the next step on, for a trial. Residuals of other methods stay where they are."""
        if (index, True) != (self.current, self._trial):
            self._set_current(index, trial=True)

    def choose(self, index: int, seconds: Mapping[int, float], margin: float, rank: int, size: int) -> None:
        """Choose a method, which gets the residuals of all others. Their states are freed.

        Args:
            index: of the part.
            seconds: of a step with each method that was tried.
            margin: of the decision.
            rank, size: this rank's number and the world size.
        """
        before = self.specs[self.chosen] if self.decided else None
        self.chosen, self.seconds = index, {**self.seconds, **seconds}
        self._set_current(index, trial=False)
        self.decided, self.steps_since, self._size = True, 0, size
        self.report = {
            "method": self.specs[index],
            "ranks": size,
            "ms": {self.specs[i]: 1000 * of_step for i, of_step in self.seconds.items()},
            "margin": margin,
        }
        if rank == 0:
            # Which method compresses is news: a warning is what users see who have not configured logging.
            news = size > 1 and before != self.specs[index]
            logger.log(logging.WARNING if news else logging.INFO, "gradzip.Auto: %s", self._explained(before))

    def _explained(self, before: str | None) -> str:
        """The decision and its reason, in one line. before: spec of the method that was chosen before."""
        if self._size == 1:
            return "one rank: nothing to send, nothing is compressed"
        method, simple = self.specs[self.chosen], isinstance(self.parts[self.chosen], (NoCompression, Cast))
        what = f"no compression pays here: {named(method)}" if simple else method
        if before is not None:
            what = f"still {what}" if before == method else f"no longer {named(before)}, but {what}"
        times = sorted(self.report["ms"].items(), key=lambda item: item[1])
        listed = ", ".join(f"{named(spec)} {ms:.1f}" for spec, ms in times)
        margin = f" (margin {self.report['margin']:.1%})" if self.report["margin"] else ""
        hint = self._hint() if before is None else ""
        return f"{what}; ms per step: {listed}{margin}; {self._size} ranks{hint}"

    def _hint(self) -> str:
        """What more would be allowed if the optimizer were known; empty if the user has said what is."""
        if self.optimizer is not None or self.specs[1:] != safe_candidates(None):
            return ""
        more = {name: [spec for spec in safe_candidates(name) if spec not in self.specs] for name in OPTIMIZERS}
        allows = [f"optimizer={name!r} allows {', '.join(specs)}, too" for name, specs in more.items() if specs]
        return f"; only methods for every optimizer were tried: {'; '.join(allows)}" if allows else ""

    # --- state

    def state_dict(self) -> dict[str, Any]:
        saved = {
            "size": self._size,
            "steps": self.steps_since,
            "methods": self.specs,
            "parameters": {name: list(shape) for name, shape in self._shapes.items()},
            "chosen": self.chosen,
            "seconds": [self.seconds.get(i, -1.0) for i in range(len(self.parts))],
        }
        return super().state_dict() | {"auto": saved if self.decided else {}}

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict, with the choice.

        If it has none, that of a group of another size, or one for each parameter, as those of gradzip 0.2, the choice
        is made again.

        Raises:
            ValueError: as for other methods; or the choice is among other methods, or malformed.
        """
        super()._load(state_dict)
        self._leader = None
        self._reset(0)
        saved, what = state_dict.get("auto", {}), "Auto.load_state_dict: got a"
        if not isinstance(saved, Mapping):
            raise ValueError(f"{what} choice of type {type(saved).__name__}, expected a dict")
        if saved and saved.get("methods") != self.specs:
            raise ValueError(f"{what} choice among {saved.get('methods')}, expected one among {self.specs}")
        if not saved or "candidates" in saved:
            return
        try:
            seconds = {i: float(t) for i, t in zip(range(len(self.parts)), saved["seconds"], strict=True) if t >= 0}
            self.chosen, self.seconds = range(len(self.parts))[saved["chosen"]], seconds
            self.steps_since, self._size = int(saved["steps"]), int(saved["size"])
            shapes = {name: torch.Size(shape) for name, shape in saved["parameters"].items()}
            self._shapes = self._shapes | shapes
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{what} malformed choice ({error!r}), expected a saved one") from None
        self.decided = True
        self._set_current(self.chosen, trial=False)


# --- the search


def run(auto: Auto) -> Steps[None]:
    """The search over a whole training. Each yield is one step."""
    if not auto.decided:
        yield from first_choice(auto)
    while True:
        while not auto.every or auto.steps_since < auto.every:
            yield
            auto.steps_since += 1
        yield from reconsider(auto)


def first_choice(auto: Auto) -> Steps[None]:
    """Train some uncompressed steps, then some with each allowed method, and choose one."""
    for _ in range(auto.steps):
        yield
    allowed = yield from allowed_methods(auto)
    engine, times = yield from time_methods(auto, allowed, TURNS)
    seconds, margin = means(times), max(PAYS, noise_of(times))
    auto.choose(fastest(seconds, margin), seconds, margin, engine.rank, engine.size)


def allowed_methods(auto: Auto) -> Steps[list[int]]:
    """The methods whose errors are at most `max_error` on the gradients of the next step, which is uncompressed.

    Without a `max_error`, all, and no step is needed.
    """
    everything = list(range(len(auto.parts)))
    if auto.max_error is None:
        return everything
    auto.use(NONE)
    auto.gradients = []  # of the next step
    engine, _ = yield
    buckets, auto.gradients = auto.gradients or [], None
    errors = engine.max_over_ranks([_error(auto, i, buckets) for i in everything], "gradzip.auto")
    return [i for i in everything if i == NONE or errors[i] <= auto.max_error]


def _error(auto: Auto, index: int, buckets: Sequence[Mapping[str, Tensor]]) -> float:
    """The largest error of a method on any gradient that it compresses; infinity if one is not finite."""
    part, errors = auto.parts[index], [0.0]
    compressed = [{name: x for name, x in bucket.items() if not part.bypasses(x)} for bucket in buckets]
    try:
        found = [errors_of(part, bucket) for bucket in compressed if bucket]
        errors += torch.cat([of_bucket.to(auto.device) for of_bucket in found]).tolist() if found else []
    except Exception as failure:  # out of memory, for example: other ranks wait for this one's measurements
        logger.warning("%s was not measured, and is not chosen: %r", auto.specs[index], failure)
        return math.inf
    return max(error if math.isfinite(error) else math.inf for error in errors)


def time_methods(auto: Auto, methods: Sequence[int], turns: int) -> Steps[tuple[Engine, Times]]:
    """Train some steps with each method, in turns. The time of a turn is the slowest rank's median.

    Returns the engine of the last step, and the times.
    """
    times: Times = {index: [] for index in methods}
    left = list(methods)
    for turn in range(turns):
        medians = []
        for index in left:
            auto.use(index)
            for _ in range(WARM_UP):
                yield
            of_turn: list[Span] = []
            while len(of_turn) < TIMED:
                engine, span = yield
                if span is not None:
                    of_turn.append(span)
            medians.append(statistics.median(seconds_between(*span) for span in of_turn))
        for index, slowest in zip(left, engine.max_over_ranks(medians, "gradzip.auto")):
            times[index].append(slowest)
        limit, seconds_of = MUCH_SLOWER if turn == 0 else max(CLOSE, 1 + 2 * noise_of(times)), means(times)
        left = [index for index in left if seconds_of[index] <= limit * min(seconds_of[i] for i in left)]
        if len(left) == 1:
            break
    return engine, times


def means(times: Times) -> dict[int, float]:
    """The time of each method: the mean over its turns."""
    return {index: statistics.fmean(of_turns) for index, of_turns in times.items()}


def noise_of(times: Times) -> float:
    """The share of a step by which two equal methods hardly ever differ, as the times of their turns vary.

    `DEVIATIONS` standard deviations of the difference of two means, from the relative deviations of all turns from the
    mean of their method. 0 if no method has two turns.
    """
    repeated = [of_turns for of_turns in times.values() if len(of_turns) > 1]
    if not repeated:
        return 0.0
    squares = [(t / statistics.fmean(of_turns) - 1) ** 2 for of_turns in repeated for t in of_turns]
    freedom = sum(len(of_turns) - 1 for of_turns in repeated)
    return DEVIATIONS * math.sqrt(2 / max(map(len, repeated)) * sum(squares) / freedom)


def fastest(seconds: Mapping[int, float], margin: float) -> int:
    """The first method, in the order of the parts, that the fastest does not beat by more than a share of a step."""
    return next(i for i in sorted(seconds) if (1 - margin) * seconds[i] <= min(seconds.values()))


def reconsider(auto: Auto) -> Steps[None]:
    """Try the methods that are cheap enough to try again. The chosen one stays unless another is clearly faster.

    Residuals of the chosen method wait meanwhile. If there is a `max_error`, errors are measured again. A chosen method
    that is no longer allowed gives way to another.
    """
    allowed = yield from allowed_methods(auto)
    chosen = auto.chosen if auto.chosen in allowed else NONE
    least = auto.seconds.get(chosen, 0.0)
    tried, budget = [chosen], SHARE * auto.every * least
    # Methods that have not been timed yet, because their errors were too large, come first.
    for index in sorted((i for i in allowed if i != chosen), key=lambda i: auto.seconds.get(i, 0.0)):
        price = TURNS_AGAIN * (WARM_UP + TIMED) * max(0.0, auto.seconds.get(index, 0.0) - least)
        if price <= budget:
            tried.append(index)
            budget -= price
    engine, times = yield from time_methods(auto, tried, TURNS_AGAIN)
    seconds, margin = means(times), max(BETTER, noise_of(times))
    best = min(seconds, key=seconds.__getitem__)
    if seconds[best] > (1 - margin) * seconds[chosen]:
        best = chosen
    auto.choose(best, seconds, margin, engine.rank, engine.size)


# --- arguments and words


def safe_candidates(optimizer: str | None) -> list[str]:
    """The methods to choose from by default, with an optimizer."""
    return [spec for spec in CANDIDATES if is_safe(parse(spec), optimizer)]


def _allowed(allow: Sequence[str | Compressor]) -> list[Compressor]:
    """The methods of `allow` that compress."""
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
