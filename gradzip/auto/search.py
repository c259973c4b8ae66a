"""The search for the fastest method: a coroutine that is sent each training step.

Training goes on with each allowed method in turns, and the measured steps decide. All ranks exchange their times and
errors, and compute the same choice from the same numbers. The time of a step runs from the end of one average to the
end of the next one: it is what the user waits for.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from ..collectives.engine import Engine
from ..measure import measure_method
from ..methods.base.compressor import Compressor

logger = logging.getLogger("gradzip.auto")

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


class StepEnd(NamedTuple):
    """The end of a training step. seconds: time of the step; None if it is not known."""

    engine: Engine
    seconds: float | None


class Job(Protocol):
    """The training job: what the search reads of `Auto`, and asks of it. Methods are indices of `parts`."""

    max_error: float | None
    every: int
    steps: int
    specs: list[str]  # of the parts
    decided: bool
    chosen: int
    seconds: dict[int, float]  # of a step with each method, as last measured
    steps_since: int

    @property
    def parts(self) -> list[Compressor]: ...

    def keep_gradients(self) -> None:
        """Keep a copy of the next step's gradients."""

    def take_gradients(self) -> dict[str, Tensor]:
        """Return the kept gradients, by the name of the state, and free them."""

    def use(self, index: int) -> None:
        """Use a method from the next step on, for a trial. Residuals of other methods stay where they are."""

    def choose(self, index: int, seconds: Mapping[int, float], margin: float, rank: int, size: int) -> None:
        """Choose a method, which gets the residuals of all others. Their states are freed.

        Args:
            seconds: of a step with each method that was tried.
            margin: of the decision.
            rank, size: this rank's number and the world size.
        """


Result = TypeVar("Result")
Steps = Generator[None, StepEnd, Result]
Times = dict[int, list[float]]  # of the turns of each method


def run(auto: Job) -> Steps[None]:
    """The search over a whole training. Each yield is one step."""
    if not auto.decided:
        yield from first_choice(auto)
    while True:
        while not auto.every or auto.steps_since < auto.every:
            yield
            auto.steps_since += 1
        yield from reconsider(auto)


def first_choice(auto: Job) -> Steps[None]:
    """Time uncompressed steps, then steps with each allowed method; choose one."""
    ends = []
    for _ in range(auto.steps):
        ends.append((yield))
    while not (known := [end.seconds for end in ends[WARM_UP:] if end.seconds is not None]):
        ends.append((yield))
    allowed = yield from allowed_methods(auto)
    engine, times = yield from time_methods(auto, allowed, TURNS, ends[-1].engine, known)
    seconds, margin = means(times), max(PAYS, noise_of(times))
    auto.choose(fastest(seconds, margin), seconds, margin, engine.rank, engine.size)


def allowed_methods(auto: Job) -> Steps[list[int]]:
    """The methods whose errors are at most `max_error` on the gradients of the next step, which is uncompressed.

    Without a `max_error`, all, and no step is needed.
    """
    everything = list(range(len(auto.parts)))
    if auto.max_error is None:
        return everything
    auto.use(NONE)
    auto.keep_gradients()
    engine = (yield).engine
    gradients = auto.take_gradients()
    errors = engine.max_over_ranks([_error(auto, i, gradients) for i in everything], "gradzip.auto")
    return [i for i in everything if i == NONE or errors[i] <= auto.max_error]


def _error(auto: Job, index: int, gradients: Mapping[str, Tensor]) -> float:
    """The largest error of a method on any gradient that it compresses; infinity if one is not finite."""
    part, largest = auto.parts[index], 0.0
    for name, gradient in gradients.items():
        if part.bypasses(gradient):
            continue
        try:
            error = measure_method(part, gradient, name, ranks=1, repeats=2).error
        except Exception as failure:  # out of memory, for example: other ranks wait for this one's measurements
            logger.warning("%s on %s was not measured, and is not chosen: %r", auto.specs[index], name, failure)
            return math.inf
        largest = max(largest, error if math.isfinite(error) else math.inf)
    return largest


def time_methods(
    auto: Job, methods: Sequence[int], turns: int, engine: Engine | None = None, known: Sequence[float] = ()
) -> Steps[tuple[Engine, Times]]:
    """Train some steps with each method, in turns. The time of a turn is the slowest rank's median.

    Args:
        engine: of the step before.
        known: times of the first method, measured just before. They are its first turn.

    Returns the engine of the last step, and the times.
    """
    times: Times = {index: [] for index in methods}
    left = list(methods)
    for turn in range(turns):
        medians = []
        for index in left:
            if known and turn == 0 and index == methods[0]:
                medians.append(statistics.median(known))
                continue
            auto.use(index)
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
        for index, seconds in zip(left, engine.max_over_ranks(medians, "gradzip.auto")):
            times[index].append(seconds)
        limit, seconds_of = MUCH_SLOWER if turn == 0 else max(CLOSE, 1 + 2 * noise_of(times)), means(times)
        left = [index for index in left if seconds_of[index] <= limit * min(seconds_of[i] for i in left)]
        if len(left) == 1:
            break
    assert engine is not None
    return engine, times


def means(times: Times) -> dict[int, float]:
    """The time of each method: the mean over its turns."""
    return {index: statistics.fmean(of_turns) for index, of_turns in times.items()}


def noise_of(times: Times) -> float:
    """The share of a step by which two equal methods hardly ever differ, as the times of their turns vary.

    `DEVIATIONS` standard deviations of the difference of two means, from the relative deviations of all turns from the
    mean of their method. 0 if no method has two turns.
    """
    repeated: Collection[list[float]] = [of_turns for of_turns in times.values() if len(of_turns) > 1]
    if not repeated:
        return 0.0
    squares = [(t / statistics.fmean(of_turns) - 1) ** 2 for of_turns in repeated for t in of_turns]
    freedom = sum(len(of_turns) - 1 for of_turns in repeated)
    return DEVIATIONS * math.sqrt(2 / max(map(len, repeated)) * sum(squares) / freedom)


def fastest(seconds: Mapping[int, float], margin: float) -> int:
    """The first method, in the order of the parts, that the fastest does not beat by more than a share of a step."""
    return next(i for i in sorted(seconds) if (1 - margin) * seconds[i] <= min(seconds.values()))


def reconsider(auto: Job) -> Steps[None]:
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
