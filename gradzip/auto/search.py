"""The search for the fastest assignment: a coroutine that is sent each training step.

The cost model proposes assignments, and measured steps decide among them. Each rank measures its own gradients, methods
and steps. All ranks exchange their measurements, and compute the same choice from the same numbers. The time of a step
runs from the end of one average to the end of the next one: it is what the user waits for.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from ..collectives.engine import Engine
from ..cost import Compressed, Link
from ..measure import measure_link, measure_method
from ..methods.base.compressor import Compressor
from .assignments import (
    NONE,
    Assignment,
    Measured,
    Option,
    ParameterKey,
    Profile,
    adapt,
    merge_lines,
    proposals,
    to_line,
    with_errors_below,
)

logger = logging.getLogger("gradzip.auto")

WARM_UP = 2  # steps after a change that are not timed: they allocate buffers and states
TIMED = 4  # timed steps of an assignment in each turn. Even: the steps of ACP-SGD alternate
TURNS = 2  # of each assignment: conditions change, so assignments take turns
MOST = 3  # compressing assignments to try: the fastest ones by the model
CLOSE = 1.15  # assignments slower than the fastest by this factor have no second turn
PAYS = 0.98  # an assignment is chosen in place of a simpler one if its time is at most this share
BETTER = 0.97  # an assignment replaces the chosen one if its time is at most this share
SHARE = 0.02  # share of the training time that trying other assignments may cost
MEASURED_RANKS = 4  # measure with so many payloads at most: decoding time is proportional to their number


class StepEnd(NamedTuple):
    """The end of a training step.

    seconds: time of the step; None if it is not known.
    arrivals: seconds from the start of the step to each gradient, by the name of its state, if they were recorded.
    """

    engine: Engine
    seconds: float | None
    arrivals: Mapping[str, float]


class Job(Protocol):
    """The training job: what the search reads of `Auto`, and asks of it."""

    max_error: float | None
    every: int
    steps: int
    specs: list[str]  # of the parts
    half: int | None  # index of the part that averages in 16 bits
    decided: bool
    chosen: Assignment
    candidates: list[Assignment]
    steps_since: int
    link: Link | None

    @property
    def parts(self) -> list[Compressor]: ...

    def keys(self) -> Mapping[str, ParameterKey]:
        """Names and shapes of the parameters, by the name of their state."""

    def record_arrivals(self, on: bool) -> None:
        """Start or stop recording when gradients are ready."""

    def keep_gradients(self) -> None:
        """Keep a copy of the next step's gradients."""

    def take_gradients(self) -> dict[str, Tensor]:
        """Return the kept gradients, by the name of the state, and free them."""

    def use(self, assignment: Assignment) -> None:
        """Use an assignment from the next step on, for a trial. Residuals of other methods stay where they are."""

    def choose(
        self, assignment: Assignment, candidates: Sequence[Assignment], link: Link | None, rank: int, size: int
    ) -> None:
        """Choose an assignment. Its methods get the residuals of all others, whose states are freed.

        Args:
            candidates: all assignments that may be tried, the uncompressed one first.
            link: as measured.
            rank, size: this rank's number and the world size.
        """


Result = TypeVar("Result")
Steps = Generator[None, StepEnd, Result]


def run(auto: Job) -> Steps[None]:
    """The search over a whole training. Each yield is one step."""
    if not auto.decided:
        yield from first_choice(auto)
    while True:
        while not auto.every or len(auto.candidates) < 2 or auto.steps_since < auto.every:
            yield
            auto.steps_since += 1
        yield from reconsider(auto)


def first_choice(auto: Job) -> Steps[None]:
    """Measure uncompressed steps, the methods and the link; try the proposed assignments; choose one."""
    times, arrivals = yield from _uncompressed_steps(auto)
    layers, engine = yield from _measured_layers(auto, _medians(arrivals))
    profile = Profile(layers, measure_link(engine), engine.bucket_nbytes, engine.fusion_nbytes)
    candidates = proposals(profile, auto.specs, auto.half, MOST)
    engine = yield from time_candidates(auto, candidates, TURNS, engine, times)
    auto.choose(fastest(candidates, auto.half), candidates, profile.link, engine.rank, engine.size)


def _uncompressed_steps(auto: Job) -> Steps[tuple[list[float], list[Mapping[str, float]]]]:
    """Run `auto.steps` uncompressed steps. Returns times and arrivals of those after the warm-up."""
    auto.record_arrivals(True)
    ends = []
    for _ in range(auto.steps):
        ends.append((yield))
    while not (timed := [end for end in ends[WARM_UP:] if end.seconds is not None]):
        ends.append((yield))
    auto.record_arrivals(False)
    return [end.seconds for end in timed if end.seconds is not None], [end.arrivals for end in timed]


def _medians(arrivals: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for of_step in arrivals for name in of_step}
    return {name: statistics.median(a[name] for a in arrivals if name in a) for name in sorted(names)}


def _measured_layers(auto: Job, ready: Mapping[str, float]) -> Steps[tuple[dict[str, Measured], Engine]]:
    """Measure the allowed methods on the gradients of the next step, which is uncompressed.

    ready: seconds until gradients are ready, by the name of the state.
    """
    auto.keep_gradients()
    engine = (yield).engine
    gradients, keys = auto.take_gradients(), auto.keys()
    mine = {
        name: Measured(keys[name], seconds, measure_options(auto, gradients.pop(name, None), name, engine.size))
        for name, seconds in ready.items()
    }
    layers = merge_lines(engine.allgather_bytes(to_line(mine), "gradzip.auto"))
    return with_errors_below(layers, auto.max_error), engine


def measure_options(auto: Job, gradient: Tensor | None, name: str, size: int) -> dict[int, Option]:
    """Measure the methods that compress a gradient, by index. None: no method does."""
    options: dict[int, Option] = {}
    for index, part in enumerate(auto.parts):
        if index == NONE or gradient is None or part.bypasses(gradient):
            continue
        ranks = min(size, MEASURED_RANKS)
        try:
            measured = measure_method(part, gradient, name, ranks)
        except Exception as error:  # out of memory, for example: other ranks wait for this one's measurements
            logger.warning("%s on %s was not measured, and is not chosen: %r", auto.specs[index], name, error)
            continue
        compressed = measured.compressed
        if all(kind == "all_gather" for kind, _ in compressed.rounds):
            compressed = Compressed(compressed.rounds, compressed.encode, compressed.decode * size / ranks)
        options[index] = Option(compressed, measured.error)
    return options


def time_candidates(
    auto: Job,
    candidates: Sequence[Assignment],
    turns: int,
    engine: Engine | None = None,
    known: Sequence[float] = (),
) -> Steps[Engine]:
    """Train some steps with each assignment, in turns. Set its time: the slowest rank's median.

    Args:
        engine: of the step before.
        known: times of the first assignment, measured just before. It has no first turn then.

    Returns the engine of the last step.
    """
    times: dict[int, list[float]] = {id(candidate): [] for candidate in candidates}
    times[id(candidates[0])] += known
    left = list(candidates)
    for turn in range(turns):
        for candidate in left:
            if turn == 0 and times[id(candidate)]:
                continue
            auto.use(candidate)
            for _ in range(WARM_UP):
                yield
            goal = len(times[id(candidate)]) + TIMED
            while len(times[id(candidate)]) < goal:
                end = yield
                engine = end.engine
                if end.seconds is not None:
                    times[id(candidate)].append(end.seconds)
        assert engine is not None
        slowest = engine.max_over_ranks([statistics.median(times[id(candidate)]) for candidate in left], "gradzip.auto")
        for candidate, seconds in zip(left, slowest):
            candidate.seconds = seconds
        left = [candidate for candidate, seconds in zip(left, slowest) if seconds <= CLOSE * min(slowest)]
        if len(left) == 1:
            break
    assert engine is not None
    return engine


def fastest(candidates: Sequence[Assignment], half: int | None) -> Assignment:
    """The fastest assignment, or a simpler one that is almost as fast. candidates: the uncompressed one first."""
    none = candidates[0]
    simple = [candidate for candidate in candidates if candidate.is_simple(half)]
    others = [candidate for candidate in candidates if not candidate.is_simple(half)]
    best = min(simple, key=_seconds)
    if others and _seconds(other := min(others, key=_seconds)) <= PAYS * _seconds(best):
        return other
    return best if _seconds(best) <= PAYS * _seconds(none) else none


def reconsider(auto: Job) -> Steps[None]:
    """Try the candidates that are cheap enough to try again. The chosen one stays unless another is clearly faster.

    Residuals of the chosen assignment wait meanwhile. If there is a `max_error`, errors are measured again.
    """
    number, candidates = auto.candidates.index(auto.chosen), auto.candidates
    if auto.max_error is not None:
        auto.use(candidates[0])
        layers, _ = yield from _measured_layers(auto, dict.fromkeys(auto.keys(), 0.0))
        candidates = [adapt(candidate, layers, auto.specs, auto.half) for candidate in candidates]
    chosen = candidates[number]
    tried, budget = [chosen], SHARE * auto.every * _seconds(chosen)
    for candidate in sorted((c for c in candidates if c is not chosen), key=_seconds):
        cost = (WARM_UP + TIMED) * max(0.0, _seconds(candidate) - _seconds(chosen))
        if cost <= budget:
            tried.append(candidate)
            budget -= cost
    engine = yield from time_candidates(auto, tried, 1)
    best = min(tried, key=_seconds)
    auto.choose(
        best if _seconds(best) <= BETTER * _seconds(chosen) else chosen, candidates, auto.link, engine.rank, engine.size
    )


def _seconds(assignment: Assignment) -> float:
    return float("inf") if assignment.seconds is None else assignment.seconds
