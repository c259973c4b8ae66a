"""`Auto`: the compressor."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..composite import Composite
from ..compressor import Compressor
from ..cost import Link
from ..engines.base import Engine
from ..measure.clock import now
from ..methods import Cast, NoCompression
from ..registry import register
from ..spec import parse, unparse
from .plans import NONE, Key, Plan, is_simple
from .report import explain, report
from .search import WARM_UP, Steps, Tick, life

logger = logging.getLogger("gradzip.auto")

# Steps of other optimizers, one after the other, after which they decide in place of the one that has decided so far.
PATIENCE = 20


@register("auto")
@dataclass
class Auto(Composite):
    """Measures the job that it runs in, and chooses a method for each parameter: the fastest, or none.

    After `steps` uncompressed steps, in which it records when gradients are ready, it measures the error and the time
    of all allowed methods on the gradients of one step, and the network. A cost model (`gradzip.cost`) proposes plans:
    a method for each parameter. Training goes on with each of the best for some steps, and with no compression and
    `fp16`, in two rounds; then the fastest plan is in charge. A plan that compresses must be 2 % faster than both
    simple ones, and `fp16` 2 % faster than none. All ranks exchange what they have measured; the slowest rank counts,
    and all choose alike.

    The residual of a method that is not chosen moves to the one that is. If that has no error feedback, the residual is
    sent once, with the next gradient. While plans are tried, each method with error feedback keeps a residual. In the
    step in which methods are measured, a copy of all gradients is kept.

    With one rank, nothing is compressed. `gradzip.LocalGroup` and `gradzip.roundtrip` never choose: they average
    uncompressed. If several optimizers share an Auto, one of them decides for all.

    Args:
        allow: the methods to choose from, as specs or compressors. Uncompressed is always allowed. The default has the
            fastest method with error feedback, and an unbiased one without state that is faster on small parameters.
            Speed alone decides among them: allow what trains your network well (AdamW: ``"topk:theta=0.96,bits=4"``).
        max_error: the largest error |x - decoded| / |x| of a method on one gradient, without a residual, for which it
            may compress that parameter. Error feedback makes up for errors near 1 (`acpsgd`); None: any error.
        every: steps after which plans are compared again. A plan is tried again if that costs less than 2 % of the
            time, and replaces the one in charge if it is 3 % faster. With `max_error`, errors are measured again.
            0: never.
        steps: uncompressed steps before the first choice.

    Attributes:
        decided: whether the first choice is made. The same on all ranks.
        choice: the spec of the method in charge, by parameter name.
        report: the last decision, as plain numbers and strings.

    The logger "gradzip.auto" gets a line for each decision, on rank 0. The choice is a part of the state dict. If that
    is loaded in a group of another size, the choice is made again. On a device, steps are timed until it has done its
    work, as long as plans are compared.

    The choice depends on times, so it may differ between runs. Replicas stay bit-identical.

    Source of the model: Wang et al., FFT-based Gradient Sparsification, HPDC 2020, section 3.3.

    >>> import gradzip
    >>> compressor = gradzip.Auto(allow=["fp16", "acpsgd:rank=8"], max_error=0.9)
    """

    allow: Sequence[str | Compressor] = ("fp16", "qsgd:coding=packed", "acpsgd")
    max_error: float | None = None
    every: int = 1000
    steps: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = self._allowed()
        self.allow = tuple(allowed)
        _check_number("every", self.every, 10, zero=True)
        _check_number("steps", self.steps, WARM_UP + 1)
        if self.max_error is not None and not (_is_number(self.max_error) and self.max_error > 0):
            raise ValueError(f"Auto: got max_error = {self.max_error!r}, expected a number > 0, or None for any error")
        self.set_parts([NoCompression(), *allowed])
        self.titles = [unparse(part) for part in self.parts]
        self.half = next((i for i, part in enumerate(self.parts) if isinstance(part, Cast)), None)
        self.report: dict[str, Any] = {}
        self.link: Link | None = None
        self._names: dict[str, Key] = {}  # of parameters, by the name of their state
        self._leader: weakref.ref[Engine] | None = None  # the optimizer whose steps count
        self._members: tuple[int, ...] = ()
        self._others = 0  # steps of other optimizers since
        self._device = torch.device("cpu")  # of the last gradient
        self._forget(0)

    def _allowed(self) -> list[Compressor]:
        if not self.allow or isinstance(self.allow, str) or not isinstance(self.allow, Sequence):
            got = repr(self.allow) if self.allow else "nothing"
            raise ValueError(f"Auto: got {got} as allow, expected a list of methods, as in allow=['fp16', 'acpsgd']")
        methods = [parse(method) if isinstance(method, str) else method for method in self.allow]
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

    def _forget(self, size: int) -> None:
        """Start from the beginning, in a group of `size` ranks. 0: not known yet."""
        self.decided = False
        self.chosen = Plan(self.titles[NONE], {})  # in charge, but for a few steps when others are tried
        self.plans: list[Plan] = []
        self.steps_since = 0  # the last decision
        self._size = size
        self._start()

    def _start(self) -> None:
        """Start the search again, or, if the choice is made, wait for the next look."""
        self.plan = self.chosen
        self._search: Steps[None] | None = None
        self._clock: float | None = None
        self._arrivals: dict[str, float] | None = None
        self._gradients: dict[str, Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies and for pickle. A copy goes on with the choice, or begins to measure."""
        started = ("_search", "_clock", "_arrivals", "_gradients", "_leader")
        return {**vars(self), **dict.fromkeys(started), "_members": (), "plan": self.chosen}

    # --- a method made of methods

    def method_for(self, name: str, shape: torch.Size | tuple[int, ...], prefix: str = "") -> Compressor:
        return self.parts[self.plan.methods.get((name, shape), NONE)]

    @property
    def configuration(self) -> tuple[float | None, ...]:
        return self.max_error, self.every, self.steps

    @property
    def choice(self) -> dict[str, str]:
        """The spec of the method in charge, by parameter name."""
        keys = dict.fromkeys([*self._names.values(), *self.chosen.methods])
        return {key[0]: self.titles[self.chosen.methods.get(key, NONE)] for key in keys}

    # --- what happens in a step

    def register_parameter(self, name: str, shape: torch.Size, state_name: str) -> None:
        self._names[state_name] = (name, shape)

    def observe(self, state_name: str, grad: Tensor) -> None:
        if self._arrivals is not None and self._clock is not None:
            self._arrivals[state_name] = time.perf_counter() - self._clock
        self._device = grad.device
        if self._gradients is not None and not self.bypasses(grad):
            self._gradients[state_name] = grad.detach().clone()

    def skip_step(self) -> None:
        self._clock = None  # the next step's time is not known
        self._clear()

    def _clear(self) -> None:
        """Drop what was recorded since the last step."""
        for recorded in (self._arrivals, self._gradients):
            if recorded is not None:
                recorded.clear()

    def end_step(self, engine: Engine | None) -> None:
        if engine is None or not self._leads(engine):
            return
        seconds = None if self._clock is None else self._now() - self._clock
        tick = Tick(engine, seconds, dict(self._arrivals or {}))
        if self._search is None:
            self._search = life(self)
            next(self._search)
        try:
            self._search.send(tick)
        except BaseException:  # of a rank that died, for example
            self._start()
            raise
        if self._arrivals is not None:
            self._arrivals.clear()
        self._clock = self._now()

    def _now(self) -> float:
        """The time; while plans are compared, when the device has done its work."""
        comparing = not self.decided or self.steps_since >= self.every > 0
        return now(self._device) if comparing else time.perf_counter()

    def _leads(self, engine: Engine) -> bool:
        """Whether this is the optimizer whose steps count."""
        if self.memory.in_flight:  # of another optimizer, which ends its step later: methods must not change now
            return False
        leader = None if self._leader is None else self._leader()
        if leader is engine:
            self._others = 0
            return True
        if engine.size == 1:  # alone, or a process set of one rank, beside those of more
            if self._leader is None and self._size != 1:
                self._forget(1)
                self.settle(Plan(self.titles[NONE], {}), [], None, rank=0, size=1)
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
        self._start()  # times of one optimizer are not compared with those of another
        self._leader, self._members, self._others = weakref.ref(engine), engine.members, 0
        unknown = self.decided and not self.chosen.methods.keys() >= set(self.keys().values())
        if self._size != engine.size or unknown:  # a new group, or a new model
            self._forget(engine.size)
        return True

    # --- what the search asks for (search.Job)

    def record_arrivals(self, on: bool) -> None:
        self._arrivals = {} if on else None

    def keep_gradients(self) -> None:
        self._gradients = {}

    def kept_gradients(self) -> dict[str, Tensor]:
        gradients, self._gradients = self._gradients or {}, None
        return gradients

    def keys(self) -> Mapping[str, Key]:
        return {state_name: (name, tuple(shape)) for state_name, (name, shape) in self._names.items()}

    def use(self, plan: Plan) -> None:
        self.plan = plan

    def settle(self, plan: Plan, plans: Sequence[Plan], link: Link | None, rank: int, size: int) -> None:
        """Put a plan in charge: its methods get the residuals of all others, whose states are freed. Rank 0 logs it."""
        before = self.chosen if self.decided else None
        plan.methods |= {key: NONE for key in self._names.values() if key not in plan.methods}
        self.plan = self.chosen = plan
        self.plans, self.link = list(plans), link
        self.decided, self.steps_since, self._size = True, 0, size
        self.hand_over({state_name: self.method_for(*key) for state_name, key in self._names.items()})
        keys = list(self._names.values())
        self.report = report(plan, self.plans, keys, self.titles, size, link)
        if rank == 0:
            logger.info("%s", explain(self.report, is_simple(plan, self.half), before.title if before else None))

    # --- state

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"auto": self._saved() if self.decided else {}}

    def _saved(self) -> dict[str, Any]:
        keys = list(dict.fromkeys(key for plan in (self.chosen, *self.plans) for key in plan.methods))
        plans = self.plans if any(plan is self.chosen for plan in self.plans) else [self.chosen, *self.plans]
        return {
            "size": self._size,
            "steps": self.steps_since,
            "methods": self.titles,
            "parameters": [[name, list(shape)] for name, shape in keys],
            "plans": [
                [plan.title, -1.0 if plan.seconds is None else plan.seconds, [plan.methods.get(k, NONE) for k in keys]]
                for plan in plans
            ],
            "chosen": next(i for i, plan in enumerate(plans) if plan is self.chosen),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict, with the choice. A choice that was not made yet, or by other ranks, is made again.

        Raises:
            ValueError: as for other methods, or the choice is among other methods, or malformed.
        """
        super().load_state_dict(state_dict)
        self._leader = None
        self._forget(0)
        saved = state_dict.get("auto") or {}
        what = "Auto.load_state_dict: got a"
        if saved and saved.get("methods") != self.titles:
            raise ValueError(f"{what} choice among {saved.get('methods')}, expected one among {self.titles}")
        try:
            if saved:
                self._load_choice(saved)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{what} malformed choice ({error!r}), expected a saved one") from None

    def _load_choice(self, saved: Mapping[str, Any]) -> None:
        keys = [(str(name), tuple(shape)) for name, shape in saved["parameters"]]
        plans = []
        for title, seconds, indices in saved["plans"]:
            methods = {key: range(len(self.parts))[index] for key, index in zip(keys, indices)}
            plans.append(Plan(title, methods, None if seconds < 0 else seconds))
        self.plan = self.chosen = plans[saved["chosen"]]
        self.plans, self.steps_since, self._size = plans, int(saved["steps"]), int(saved["size"])
        self.decided = True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_number(name: str, value: Any, least: int, zero: bool = False) -> None:
    if not (isinstance(value, int) and _is_number(value) and (value >= least or (zero and value == 0))):
        never = ", or 0 for never" if zero else ""
        raise ValueError(f"Auto: got {name} = {value!r}, expected an integer >= {least}{never}")
