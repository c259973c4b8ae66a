"""What front ends tell the optimizers of torch about the gradients of a step.

DDP and FSDP do not know the optimizer of a parameter. A front end names parameters, and torch calls `_before` and
`_after` around the steps of all optimizers:

    register    A method has applied momentum to a gradient, or averages momenta in place of gradients: refuse
                optimizers whose update does not fit.
    skip        An average is not finite: hide the gradients of optimizers that hold the parameters, in their next step.
    skip_if     The same, if a device finds that. Optimizers that can skip there do so. For others, the host waits.

An optimizer changes neither a parameter without a gradient nor the state of one.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..memory.verdict import Verdict
from ..methods.base.compressor import Compressor
from ..methods.base.group import Group
from . import found_inf


def _optimizers(*names: str) -> tuple[type, ...]:
    return tuple(getattr(torch.optim, name) for name in names if hasattr(torch.optim, name))


# Those with a second moment of the gradients.
_SECOND_MOMENT = _optimizers(
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adafactor"
)

# Those that add weight decay to gradients, unless it is decoupled as in AdamW.
_COUPLED = _optimizers("ASGD", "Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")


class Averaged:
    """How the gradients of a group were averaged, if a method with momentum does it, or is going to.

    name: of the group.
    compressed_momentum: whether the averages are those of `Compressor.compresses_momentum`.
    warms_up: whether they are not, though the method with momentum has averaged them.
    method: the one with momentum.
    """

    def __init__(self, group: Group, method: Compressor, parameters: Iterable[Tensor]) -> None:
        self.name = group.name
        self.compressed_momentum = group.compressed_momentum
        self.warms_up = group.method is method and not group.compressed_momentum
        self.method = weakref.ref(method)
        self._parameters = {id(parameter): weakref.ref(parameter) for parameter in parameters}

    def has(self, parameter: Tensor) -> bool:
        """Whether it is about a parameter, and not about one that had its number before."""
        return self._parameters[id(parameter)]() is parameter


@dataclass(eq=False)
class Skip:
    """A step to skip, or that a device has to tell of.

    Attributes:
        names: of the averages that are not finite. There may be none: they may be those of other ranks.
        warns: whether the optimizer warns.
        verdict: of a device, if the host has not known in the step; read: refers to what to call when it knows.
        parameters: of that step, by `id`.
        taken: parameters, by `id`, that a later step has averaged.
        is_read: whether the session has read the verdict.
        later: those that skip the next step of some of its parameters, too.
        taking_back: of the optimizers that have skipped the step on the device: corrects what they have counted.
    """

    names: Sequence[str] = ()
    warns: bool = False
    verdict: Verdict | None = None
    read: Callable[[], Callable[[], None] | None] | None = None
    parameters: Mapping[int, Callable[[], Tensor | None]] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    is_read: bool = False
    later: list[Skip] = field(default_factory=list)
    taking_back: list[Callable[[], None]] = field(default_factory=list)

    def is_over(self, parameters: set[int]) -> bool:
        """Whether a later step has averaged some of these parameters, by `id`: GradScaler may have skipped this one."""
        return not parameters.isdisjoint(self.taken) or any(one.is_over(parameters) for one in self.later)

    def warn(self) -> None:
        """Warn, once."""
        if self.warns:
            what = f"of {self.names[0]!r}" if self.names else "on another rank, or of a sum,"
            more = f" (and of {len(self.names) - 1} more)" if len(self.names) > 1 else ""
            warnings.warn(
                f"got an average gradient {what} that is not finite{more}, expected finite ones: the step is skipped "
                "on all ranks; compressor.skip_nonfinite(False) turns this off",
                stacklevel=2,
            )
        self.warns = False

    def found_out(self) -> None:
        """Correct what optimizers have counted, and warn: the host knows now that the step was skipped."""
        for take_back in self.taking_back:
            take_back()
        self.taking_back.clear()
        self.warn()

    def read_now(self) -> None:
        """Have the host learn whether the step was skipped, unless it has."""
        if not self.is_read and self.read is not None and (read := self.read()) is not None:
            read()


_Hidden = list[tuple[Skip, Tensor, Tensor]]  # for what step to skip, of which parameter, which gradient

_PARAMETERS = operator.itemgetter(1)

# How the gradients of parameters were averaged since the last step, by the number (`id`) of the parameter.
_averaged: dict[int, Averaged] = {}
# Steps that the optimizers of parameters have to skip, by parameter.
_skips: Any = WeakIdKeyDictionary()
# Steps of which a device has to tell, by the number (`id`) of the parameter.
_verdicts: dict[int, Skip] = {}
# What is hidden from an optimizer, by optimizer: a list for each of its steps in progress. The step of one class may
# call that of another, as that of Horovod's optimizer does.
_hidden: weakref.WeakKeyDictionary[Any, list[_Hidden]] = weakref.WeakKeyDictionary()
# The verdicts that optimizers have been given for their last step, and that correct what they have counted.
_unread: weakref.WeakKeyDictionary[Any, list[Skip]] = weakref.WeakKeyDictionary()
# The verdicts that optimizers have been given for their step in progress.
_handed: weakref.WeakKeyDictionary[Any, list[Skip]] = weakref.WeakKeyDictionary()


@functools.cache
def install() -> None:
    """Have torch call the hooks. Front ends call it before the first step."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def register(told: Iterable[tuple[Group, Sequence[Tensor]]]) -> None:
    """Record how gradients were averaged. Call it in each step, before the optimizers'.

    told: groups, with their parameters as the optimizers know them.
    """
    for group, parameters in told:
        now = group.method
        method: Compressor | None = None
        if now.optimizer_momentum or (now.averaged_momentum is not None and group.compressed):
            method = now
        elif group.later_methods:  # an optimizer that will not fit is refused now, and not when the phase begins
            method = next((later for later in group.later_methods if later.averaged_momentum is not None), None)
        if method is not None and not group.frozen:
            averaged_so = Averaged(group, method, parameters)
            _averaged.update(dict.fromkeys(map(id, parameters), averaged_so))
        elif _averaged:
            for parameter in parameters:
                _averaged.pop(id(parameter), None)


def averaged(parameter: Tensor) -> Averaged | None:
    """How the gradient of a parameter was averaged before the current step of its optimizer; None: as any gradient."""
    found = _averaged.get(id(parameter))
    return found if found is not None and found.has(parameter) else None


def skip(parameters: Iterable[Tensor], names: Sequence[str], warns: bool) -> None:
    """Have the optimizers that hold any of these parameters skip their next step.

    Args:
        names: of the averages that are not finite. There may be none: they may be those of other ranks.
        warns: whether the optimizer warns.
    """
    _skip(Skip(names, warns), parameters)


def _skip(one: Skip, parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        _verdicts.pop(id(parameter), None)
        if (former := _skips.get(parameter)) is not None and former is not one and one not in former.later:
            former.later.append(one)
        _skips[parameter] = one


def skip_if(told: Sequence[tuple[Group, Sequence[Tensor]]], verdict: Verdict, read: Callable[[], None] | None) -> Skip:
    """Have the optimizers that hold any of these parameters skip their next step, if a verdict says so. Returns that.

    Args:
        told: groups with their parameters.
        read: a method to call when the host knows that they do; None: it never does.
    """
    take(told)  # what becomes of an earlier step no longer counts
    parameters = list(itertools.chain.from_iterable(map(_PARAMETERS, told)))
    numbers = list(map(id, parameters))
    refs = dict(zip(numbers, map(weakref.ref, parameters)))
    one = Skip(verdict=verdict, read=read and weakref.WeakMethod(read), parameters=refs)
    for number in [n for n, other in _verdicts.items() if other.parameters[n]() is None]:
        del _verdicts[number]
    _verdicts.update(dict.fromkeys(numbers, one))
    return one


def take(told: Iterable[tuple[Group, Sequence[Tensor]]]) -> None:
    """Have the optimizers of these parameters take their next step, with parameters that are frozen since, too.

    told: groups with their parameters.
    """
    some_skip = bool(_skips)  # a call of Python: once, and not for each group
    if some_skip or _verdicts:
        for _, parameters in told:
            for parameter in parameters if some_skip else ():
                if one := _skips.pop(parameter, None):
                    one.taken.add(id(parameter))
            for number in map(id, parameters) if _verdicts else ():
                if late := _verdicts.pop(number, None):
                    late.taken.add(number)


def _before(optimizer: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Before a step: check the optimizer, and hide the gradients; and again whenever its closure has been called."""
    hidden: _Hidden = []
    if steps := _hidden.get(optimizer):
        # Others have failed: torch has not called `_after`.
        going_on = _steps_in_progress(optimizer)
        for failed in steps[going_on:]:
            _give_back([of for of in failed if not of[0].is_over({id(parameter) for _, parameter, _ in failed})])
        del steps[going_on:]
    for one in _unread.pop(optimizer, ()):
        one.read_now()  # what the last step has counted is corrected before this one
    if _handed.pop(optimizer, None):
        found_inf.take_away(optimizer)  # a step has failed
    _check(optimizer)
    _hidden.setdefault(optimizer, []).append(hidden)
    # Horovod's optimizer may be about to average the gradients again, before it calls the step of the user's class.
    if not (getattr(optimizer, "_synchronized", False) and getattr(optimizer, "_should_synchronize", False)):
        _hide(optimizer, hidden)
    if len(arguments) > 1 and callable(arguments[1]):
        return (arguments[0], _watched(optimizer, arguments[1], hidden), *arguments[2:]), options
    if callable(options.get("closure")):
        return arguments, {**options, "closure": _watched(optimizer, options["closure"], hidden)}
    return None


def _watched(optimizer: Any, closure: Callable[..., Any], hidden: _Hidden) -> Callable[..., Any]:
    """The same closure. The gradients that it has computed are checked and hidden as those before the step."""

    @functools.wraps(closure)
    def watched(*arguments: Any, **options: Any) -> Any:
        try:
            loss = closure(*arguments, **options)
            _check(optimizer)
        except BaseException:
            _after(optimizer)  # torch does not call it
            raise
        _hide(optimizer, hidden)
        return loss

    return watched


def _after(optimizer: Any, *_: Any) -> None:
    """After a step: give back the gradients that were hidden. Whoever zeroes or logs them finds them there."""
    steps = _hidden.get(optimizer)
    _give_back(steps.pop() if steps else [])
    if not steps:
        _hidden.pop(optimizer, None)
        if handed := _handed.pop(optimizer, None):
            found_inf.take_away(optimizer)
            if (take_back := getattr(optimizer, "rollback_counts", None)) is not None:
                if any(one.is_read and one.verdict for one in handed):
                    take_back()
                else:
                    for one in handed:
                        one.taking_back.append(take_back)
                    _unread[optimizer] = handed
        for number in map(id, _parameters(optimizer)) if _averaged or _verdicts else ():
            _averaged.pop(number, None)
            _verdicts.pop(number, None)
        for parameter in _parameters(optimizer) if _skips else ():
            _skips.pop(parameter, None)


def _give_back(hidden: _Hidden) -> None:
    for _, parameter, gradient in hidden:
        if parameter.grad is None:
            parameter.grad = gradient


def _steps_in_progress(optimizer: Any) -> int:
    """How many steps of an optimizer call the one for which torch has called `_before`."""
    frame: Any = sys._getframe(2)  # torch's function around the steps of all optimizers
    code, found = frame.f_code, 0
    while frame := frame.f_back:
        found += frame.f_code is code and any(value is optimizer for value in frame.f_locals.values())
    return found


def _parameters(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _hide(optimizer: Any, hidden: _Hidden) -> None:
    """Hide the gradients of all parameters of an optimizer that has to skip its step, or have the device skip it."""
    if not (_skips or _verdicts):
        return
    parameters = _parameters(optimizer)
    _hand_over(optimizer, parameters)
    if not _skips:
        return
    numbers = set(map(id, parameters))
    pending = (_skips[p] for p in parameters if p in _skips)
    found: Skip | None = next((one for one in pending if not one.is_over(numbers)), None)
    if found is None:
        return
    found.warn()
    for parameter in parameters:
        if parameter.grad is not None:
            hidden.append((found, parameter, parameter.grad))
            parameter.grad = None


def _hand_over(optimizer: Any, parameters: Sequence[Tensor]) -> None:
    """Give the verdicts on the gradients of an optimizer to it, if it can skip a step on the device; else wait."""
    found = {one: None for p in parameters if (one := _verdicts.get(id(p))) and one.parameters[id(p)]() is p}
    numbers = set(map(id, parameters))
    found = {one: None for one in found if not one.is_over(numbers)}
    if not found:
        return
    verdicts = [one.verdict.found for one in found if one.verdict is not None]
    if found_inf.prepare(optimizer):
        found_inf.hand_over(optimizer, torch.stack(verdicts).amax(0) if len(verdicts) > 1 else verdicts[0])
        _handed[optimizer] = list(found)
        return
    for one in found:
        if one.verdict:
            _skip(one, [p for p in parameters if _verdicts.get(id(p)) is one])
            one.read_now()


def _check(optimizer: Any) -> None:
    """Raise ValueError if the update of an optimizer does not fit how the gradients of its parameters were averaged."""
    if not _averaged:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found = averaged(parameter)
            method = None if found is None else found.method()
            if method is None:
                continue
            if not method.optimizer_momentum:
                _check_momentum(optimizer, group, method)
            elif applied := applied_option(optimizer, group):
                raise ValueError(
                    f"{type(optimizer).__name__}: got {applied} = {group[applied]} for a parameter to which "
                    f"{type(method).__name__} applies momentum {method.optimizer_momentum}, expected 0: use "
                    f"gradzip.optim.DGCSGD, or give its param group {applied}=0"
                )


def applied_option(optimizer: Any, group: dict[str, Any]) -> str | None:
    """The option by which an optimizer applies momentum or weight decay of its own to gradients; None: it does not."""
    if not isinstance(optimizer, _COUPLED):
        return None
    options = ("momentum",) if group.get("decoupled_weight_decay") else ("momentum", "weight_decay")
    return next((name for name in options if group.get(name)), None)


def _check_momentum(optimizer: Any, group: dict[str, Any], method: Compressor) -> None:
    """Raise ValueError if an optimizer has another momentum than that which is averaged, or a second moment."""
    name, kind, beta = type(optimizer).__name__, type(method).__name__, method.averaged_momentum
    if isinstance(optimizer, _SECOND_MOMENT):
        raise ValueError(
            f"{name}: got a parameter whose momentum {kind} compresses, expected an optimizer without a second moment "
            "of gradients, or one that holds it still then: use gradzip.optim.AdamW"
        )
    option = "betas" if "betas" in group else "momentum"
    own = float(group["betas"][0] if option == "betas" else group.get(option) or 0.0)
    if own and own != beta:
        raise ValueError(
            f"{name}: got {option} = {group[option]} for a parameter whose momentum {kind} compresses with beta = "
            f"{beta}, expected equal numbers: give {kind} beta={own}, or the optimizer a constant momentum of {beta}"
        )
    decay = method.second_moment_decay
    if decay is not None and option == "betas" and float(group["betas"][1]) != decay:
        raise ValueError(
            f"{name}: got betas = {group['betas']} for a parameter whose warm-up {kind} ends by a second moment with "
            f"beta2 = {decay}, expected equal numbers: give {kind} beta2={float(group['betas'][1])}"
        )
