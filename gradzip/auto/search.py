"""The search for the fastest assignment: a coroutine that is sent each training step.

The cost model proposes assignments, and measured steps decide among them. Each rank measures its own gradients, methods
and steps. All ranks exchange their measurements, and compute the same choice from the same numbers. The time of a step
runs from the end of one average to the end of the next one: it is what the user waits for.
"""

from __future__ import annotations

import logging
import math
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
TURNS = 4  # of each assignment: conditions change, so assignments take turns
TURNS_AGAIN = 3  # when assignments are compared again
MOST = 3  # compressing assignments to try: the fastest ones by the model
MUCH_SLOWER = 2.0  # assignments slower than the fastest by this factor have no second turn
CLOSE = 1.15  # assignments slower by this factor, or by twice the margin, have no third turn
PAYS = 0.02  # least margin by which an assignment must be faster than a simpler one
BETTER = 0.03  # least margin by which an assignment must be faster than the chosen one
DEVIATIONS = 3.0  # standard deviations in the margin: it holds for the best of several assignments
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
    margin: float  # of the decision to make

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
    engine, noise = yield from time_candidates(auto, candidates, TURNS, engine, times)
    auto.margin = max(PAYS, noise)
    auto.choose(fastest(candidates, auto.specs, auto.margin), candidates, profile.link, engine.rank, engine.size)


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
) -> Steps[tuple[Engine, float]]:
    """Train some steps with each assignment, in turns. Set its time: the mean over its turns.

    The time of a turn is the slowest rank's median.

    Args:
        engine: of the step before.
        known: times of the first assignment, measured just before. They are its first turn.

    Returns the engine of the last step, and the noise: `noise_of` the turns.
    """
    times: dict[int, list[float]] = {id(candidate): [] for candidate in candidates}
    left = list(candidates)
    for turn in range(turns):
        medians = []
        for candidate in left:
            if known and turn == 0 and candidate is candidates[0]:
                medians.append(statistics.median(known))
                continue
            auto.use(candidate)
            for _ in range(WARM_UP):
                yield
            of_turn: list[float] = []
            while len(of_turn) < TIMED:
                end = yield
                engine = end.engine
                if end.seconds is not None:
                    of_turn.append(end.seconds)
            medians.append(statistics.median(of_turn))
        assert engine is not None
        for candidate, seconds in zip(left, engine.max_over_ranks(medians, "gradzip.auto")):
            times[id(candidate)].append(seconds)
            candidate.seconds = statistics.fmean(times[id(candidate)])
        limit = MUCH_SLOWER if turn == 0 else max(CLOSE, 1 + 2 * noise_of(list(times.values())))
        least = min(map(_seconds, left))
        left = [candidate for candidate in left if _seconds(candidate) <= limit * least]
        if len(left) == 1:
            break
    assert engine is not None
    return engine, noise_of(list(times.values()))


def noise_of(times: Sequence[Sequence[float]]) -> float:
    """The share of a step by which two equal assignments hardly ever differ, as the times of their turns vary.

    `DEVIATIONS` standard deviations of the difference of two means, from the relative deviations of all turns from the
    mean of their assignment. 0 if no assignment has two turns.

    Args:
        times: of the turns of each assignment.
    """
    repeated = [of_turns for of_turns in times if len(of_turns) > 1]
    if not repeated:
        return 0.0
    squares = [(t / statistics.fmean(of_turns) - 1) ** 2 for of_turns in repeated for t in of_turns]
    freedom = sum(len(of_turns) - 1 for of_turns in repeated)
    turns = max(map(len, repeated))
    return DEVIATIONS * math.sqrt(2 / turns * sum(squares) / freedom)


def fastest(candidates: Sequence[Assignment], specs: Sequence[str], margin: float) -> Assignment:
    """The first assignment that the fastest one does not beat by more than the margin, a share of a step.

    The order is that of `specs`, the specs of the parts: uncompressed first. Mixed assignments come last.
    """
    order = sorted(candidates, key=lambda c: specs.index(c.title) if c.title in specs else len(specs))
    least = min(map(_seconds, candidates))
    return next(candidate for candidate in order if (1 - margin) * _seconds(candidate) <= least)


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
        cost = TURNS_AGAIN * (WARM_UP + TIMED) * max(0.0, _seconds(candidate) - _seconds(chosen))
        if cost <= budget:
            tried.append(candidate)
            budget -= cost
    engine, noise = yield from time_candidates(auto, tried, TURNS_AGAIN)
    auto.margin = max(BETTER, noise)
    best = min(tried, key=_seconds)
    if _seconds(best) > (1 - auto.margin) * _seconds(chosen):
        best = chosen
    auto.choose(best, candidates, auto.link, engine.rank, engine.size)


def _seconds(assignment: Assignment) -> float:
    return float("inf") if assignment.seconds is None else assignment.seconds
