"""The search for the fastest plan: a coroutine that is sent each training step.

The model proposes, measurement decides: every rank measures its own gradients, methods and steps, all exchange what
they have measured, and compute the same choice from the same numbers. A step lasts from the end of one exchange of
gradients to the end of the next one: what the user waits for.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from ..compressor import Compressor
from ..cost import Compressed, Link
from ..engines.base import Engine
from ..measure import measure_link, measure_method
from .plans import (
    NONE,
    Key,
    Measured,
    Option,
    Plan,
    Profile,
    adapted,
    agree,
    is_simple,
    proposals,
    to_line,
    with_errors_below,
)

logger = logging.getLogger("gradzip.auto")

WARM_UP = 2  # steps after a change that are not timed: they allocate buffers and states
TIMED = 4  # steps of a plan that are timed, in each round. Even: the steps of ACP-SGD alternate
ROUNDS = 2  # times change: plans take turns
MOST = 3  # plans that compress, the fastest ones by the model
CLOSE = 1.15  # plans slower than the fastest by this factor are not tried in the second round
PAYS = 0.98  # share of the time of a simpler plan that a plan may take to be chosen in its place
BETTER = 0.97  # share of the time of the plan in charge that another one may take to replace it
SHARE = 0.02  # share of the time between two looks that trying other plans may cost
MEASURED_RANKS = 4  # the time to decode payloads is proportional to their number: measured with so many at most


class Tick(NamedTuple):
    """The end of a training step. seconds: that it took, None if that is not known.

    arrivals: seconds from the start of the step to each gradient, by the name of its state, if they were recorded.
    """

    engine: Engine
    seconds: float | None
    arrivals: Mapping[str, float]


class Job(Protocol):
    """What the search sees of `Auto`: its arguments, what is in charge, and what it can ask for."""

    max_error: float | None
    every: int
    steps: int
    titles: list[str]  # of the parts
    half: int | None  # index of the part that averages in 16 bits
    decided: bool
    chosen: Plan
    plans: list[Plan]
    steps_since: int
    link: Link | None

    @property
    def parts(self) -> list[Compressor]: ...

    def keys(self) -> Mapping[str, Key]:
        """Names and shapes of the parameters, by the name of their state."""

    def record_arrivals(self, on: bool) -> None:
        """Record when gradients are ready, or stop."""

    def keep_gradients(self) -> None:
        """Keep a copy of the next step's gradients."""

    def kept_gradients(self) -> dict[str, Tensor]:
        """The gradients of the last step, by the name of the state. They are not kept any more."""

    def use(self, plan: Plan) -> None:
        """Average by a plan, from the next step on. Residuals of other methods wait."""

    def settle(self, plan: Plan, plans: Sequence[Plan], link: Link | None, rank: int, size: int) -> None:
        """Put a plan in charge.

        Args:
            plans: all that may be tried, the one without compression first.
            link: as measured.
            rank, size: this rank's number and the world size.
        """


Result = TypeVar("Result")
Steps = Generator[None, Tick, Result]


def life(auto: Job) -> Steps[None]:
    """All steps of a training. Each yield is one step."""
    if not auto.decided:
        yield from first_choice(auto)
    while True:
        while not auto.every or len(auto.plans) < 2 or auto.steps_since < auto.every:
            yield
            auto.steps_since += 1
        yield from second_look(auto)


def first_choice(auto: Job) -> Steps[None]:
    """Measure uncompressed steps, the link and the methods; try the best plans; choose."""
    times, arrivals = yield from _uncompressed_steps(auto)
    layers, engine = yield from _measured_layers(auto, _medians(arrivals))
    profile = Profile(layers, measure_link(engine), engine.bucket_nbytes, engine.fusion_nbytes)
    plans = proposals(profile, auto.titles, auto.half, MOST)
    engine = yield from race(auto, plans, ROUNDS, engine, times)
    auto.settle(winner(plans, auto.half), plans, profile.link, engine.rank, engine.size)


def _uncompressed_steps(auto: Job) -> Steps[tuple[list[float], list[Mapping[str, float]]]]:
    """The times of `auto.steps` steps without compression, but for the first ones, and when gradients were ready."""
    auto.record_arrivals(True)
    ticks = []
    for _ in range(auto.steps):
        ticks.append((yield))
    while not (timed := [t for t in ticks[WARM_UP:] if t.seconds is not None]):
        ticks.append((yield))
    auto.record_arrivals(False)
    return [tick.seconds for tick in timed if tick.seconds is not None], [tick.arrivals for tick in timed]


def _medians(arrivals: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for of_step in arrivals for name in of_step}
    return {name: statistics.median(a[name] for a in arrivals if name in a) for name in sorted(names)}


def _measured_layers(auto: Job, ready: Mapping[str, float]) -> Steps[tuple[dict[str, Measured], Engine]]:
    """Measure the allowed methods on the gradients of the next step, which is uncompressed.

    ready: seconds until gradients are ready, by the name of the state.
    """
    auto.keep_gradients()
    engine = (yield).engine
    gradients, keys = auto.kept_gradients(), auto.keys()
    mine = {
        name: Measured(keys[name], seconds, measure_options(auto, gradients.pop(name, None), name, engine.size))
        for name, seconds in ready.items()
    }
    layers = agree(engine.allgather_bytes(to_line(mine), "gradzip.auto"))
    return with_errors_below(layers, auto.max_error), engine


def measure_options(auto: Job, gradient: Tensor | None, name: str, size: int) -> dict[int, Option]:
    """The methods that compress a gradient, as measured on it. None: no method compresses it."""
    options: dict[int, Option] = {}
    for index, part in enumerate(auto.parts):
        if index == NONE or gradient is None or part.bypasses(gradient):
            continue
        ranks = min(size, MEASURED_RANKS)
        try:
            measured = measure_method(part, gradient, name, ranks)
        except Exception as error:  # out of memory, for example: other ranks wait for what this one has measured
            logger.warning("%s on %s was not measured, and is not chosen: %r", auto.titles[index], name, error)
            continue
        compressed = measured.compressed
        if all(kind == "all_gather" for kind, _ in compressed.rounds):
            compressed = Compressed(compressed.rounds, compressed.encode, compressed.decode * size / ranks)
        options[index] = Option(compressed, measured.error)
    return options


def race(
    auto: Job, plans: Sequence[Plan], rounds: int, engine: Engine | None = None, known: Sequence[float] = ()
) -> Steps[Engine]:
    """Train some steps with each plan, in turns, and fill in its time: the median of the slowest rank.

    Args:
        known: times of the first plan, from steps just before. It has no turn in the first round then.
        engine: of those steps.

    Returns the engine of the last step.
    """
    times: dict[int, list[float]] = {id(plan): [] for plan in plans}
    times[id(plans[0])] += known
    contenders = list(plans)
    for number in range(rounds):
        for plan in contenders:
            if number == 0 and times[id(plan)]:
                continue
            auto.use(plan)
            for _ in range(WARM_UP):
                yield
            goal = len(times[id(plan)]) + TIMED
            while len(times[id(plan)]) < goal:
                tick = yield
                engine = tick.engine
                if tick.seconds is not None:
                    times[id(plan)].append(tick.seconds)
        assert engine is not None  # of the last step
        agreed = engine.max_over_ranks([statistics.median(times[id(plan)]) for plan in contenders], "gradzip.auto")
        for plan, seconds in zip(contenders, agreed):
            plan.seconds = seconds
        contenders = [plan for plan, seconds in zip(contenders, agreed) if seconds <= CLOSE * min(agreed)]
        if len(contenders) == 1:
            break
    assert engine is not None
    return engine


def winner(plans: Sequence[Plan], half: int | None) -> Plan:
    """The fastest plan; but the simpler one, where the other wins little. plans: without compression first."""
    none = plans[0]
    simple = [plan for plan in plans if is_simple(plan, half)]
    others = [plan for plan in plans if not is_simple(plan, half)]
    best = min(simple, key=_seconds)
    if others and _seconds(fastest := min(others, key=_seconds)) <= PAYS * _seconds(best):
        return fastest
    return best if _seconds(best) <= PAYS * _seconds(none) else none


def second_look(auto: Job) -> Steps[None]:
    """Try the plans again that do not cost too much to try. The plan in charge stays, unless another is clearly faster.

    Residuals of the plan in charge wait meanwhile. With a limit of the error, errors are measured again.
    """
    number, plans = auto.plans.index(auto.chosen), auto.plans
    if auto.max_error is not None:  # gradients have changed
        auto.use(plans[0])
        layers, _ = yield from _measured_layers(auto, dict.fromkeys(auto.keys(), 0.0))
        plans = [adapted(plan, layers, auto.titles, auto.half) for plan in plans]
    incumbent = plans[number]
    tried, budget = [incumbent], SHARE * auto.every * _seconds(incumbent)
    for plan in sorted((p for p in plans if p is not incumbent), key=_seconds):
        cost = (WARM_UP + TIMED) * max(0.0, _seconds(plan) - _seconds(incumbent))
        if cost <= budget:
            tried.append(plan)
            budget -= cost
    engine = yield from race(auto, tried, 1)
    fastest = min(tried, key=_seconds)
    chosen = fastest if _seconds(fastest) <= BETTER * _seconds(incumbent) else incumbent
    auto.settle(chosen, plans, auto.link, engine.rank, engine.size)


def _seconds(plan: Plan) -> float:
    return float("inf") if plan.seconds is None else plan.seconds
