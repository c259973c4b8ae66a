"""Compression of momenta in place of gradients."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..collectives import Mean, ToHost
from ..collectives.fusion import pieces
from ..collectives.routines import Local, Routine, jointly
from ..memory.state import State
from ..memory.state_dict import check_method, in_line, is_count
from ..ops import groups
from ..ops import tensors as ops
from .base.composite import Composite
from .base.compressor import Compressor, add_all, is_number, with_scratch
from .base.group import Group
from .base.registry import register
from .none import NoCompression

_FLOAT32_MAX = torch.finfo(torch.float32).max

# What a momentum has of the method for it.
_OF_INNER = (
    "rounds", "max_numel", "vectors", "asymmetric", "error_feedback", "unbiased", "residual_decay", "rank_local",
    "partition_local", "bypasses", "groups_by", "joined_shape", "own_ranges", "complete_step", "skip_step", "clean",
    "remakes",
)  # fmt: skip

# "auto" ends the warm-up when the second moment has changed by less than this factor.
_SETTLED = 0.96


@dataclass
class _Average:
    """The average of a step, before it is applied."""

    average: Any  # of gradients in the warm-up, otherwise what `inner.reduce` returned
    previous: Tensor | None  # the momentum before the step; None stands for zeros
    previous_bound: float  # of its magnitudes
    compressed: bool  # whether the average is that of the compressed momenta
    square: float = 0.0  # the average's sum of squares, if "auto" needs it
    bound: float = 0.0  # of the magnitudes of the new momentum, once it is known
    is_zero: bool = False  # in the warm-up, once it is known


@register(
    "momentum",
    examples=[
        "inner=signsgd(majority=False),warmup_steps=1",
        "inner=topk(theta=0.9),beta=0.5",
        "inner=acpsgd",
    ],
)
@dataclass
class Momentum(Compressor):
    """Averages momenta, compressed by another method, and hands back the gradients that lead to them.

    AdamW divides by the root mean square of gradients. Compression changes squares much more than means, so that AdamW
    loses more than SGD. Momenta change slowly, and what AdamW adds to the parameters is a momentum. All ranks therefore
    keep the same momentum m. With the gradient g and the residual r of a rank, and the method C:

        warm-up        g' = mean(g),                  m = beta m + g'
        from then on   c = beta m + g + r,  r = c - C(c)
                       m' = mean(C(c)),     g' = m' - beta m,  m = m'

    g' is handed back as the average: the gradient from which the momentum of the optimizer becomes m'. The momentum of
    torch.optim.SGD is m itself; exp_avg of AdamW is (1 - beta) m. Nothing is lost: the sum of all g' plus the mean
    residual is the sum of the mean gradients.

    **Which optimizer:** `gradzip.optim.AdamW`, which holds its second moment still once momenta are compressed, because
    the squares of g' say nothing about those of gradients. SGD and Muon of torch work as they are. Their momentum must
    be `beta`, or 0: the first step of an optimizer with another one raises ValueError, and so does that of torch's
    AdamW, Adam and others with a second moment. Nesterov's momentum adds g' once more, with the error of compression.

    Args:
        inner: the method for momenta, not one that is made of methods. One with error feedback or an unbiased one,
            because the error of each step stays in the momentum. ``SignSGD(majority=False)`` was best in the study of
            docs/accuracy.md.
        beta: in [0, 1); the momentum of the optimizer, beta1 of AdamW.
        warmup_steps: first steps of a parameter, in which gradients are averaged uncompressed, in float32. Steps that
            are skipped count on a device, and not on a CPU. Those whose average is 0, as of a parameter that no rank
            has used, do not count. With `Hierarchical` and FSDP2 they do: a rank sees only a piece of an average.
            `gradzip.optim.AdamW` needs some, to learn its second moment. A tenth of a training run of 735 steps was
            enough. "auto": until the second moment has settled, see below.
        beta2: for ``warmup_steps="auto"``, in [0, 1): the decay rate of the optimizer's second moment, beta2 of AdamW.

    **When "auto" ends the warm-up:** AdamW's second moment v remembers 1 / (1 - beta2) steps. The sum of its elements,
    ||v||, is the running mean of the average gradient's sum of squares, which all ranks see. The running mean of ||v||
    at the same rate is about ||v|| as many steps earlier. Both are corrected for their bias, and summed over the
    parameters that are compressed and still in their warm-up. The warm-up ends for all of them after the step in which
    the two differ by less than 4 %, but not in the first 2 / (1 - beta2) steps. `memory.find(name).warmup_steps` is the
    number of steps it took; late parameters have a warm-up of their own. Training a small language model for 735 steps
    with beta2 = 0.95, it ended after 154, 133 and 138 steps at the learning rates 0.002, 0.004 and 0.008, and ||v|| had
    not settled in 300 steps with beta2 = 0.98. A learning rate that still rises may hold the gradients still, too: if
    yours rises for long, begin behind that, as in
    ``Phases({0: NoCompression(), 2000: Momentum(SignSGD(majority=False), warmup_steps="auto")})``.

    Parameters that bypass `inner` are averaged uncompressed in all steps, and keep no momentum here.

    `Hierarchical`, `PerLayer` and `Phases` may be made of it.

    Payload: that of `inner`; in the warm-up 4 bytes for each element.

    Memory: one more float32 tensor for each parameter, saved in state dicts. During a step, two on a CPU, and on a
    device where docs/methods.md says so ("Memory of a device"): elsewhere, the average is decoded when it is known that
    the step counts, and overwrites the momentum.

    Deterministic if `inner` is. Waits for a CUDA device when `inner` does, and with ``warmup_steps="auto"``, with which
    the ranks of a model that is sharded also exchange two numbers in each step.

    >>> import gradzip
    >>> compressor = gradzip.Momentum(gradzip.SignSGD(majority=False), beta=0.9, warmup_steps=2)
    >>> group, sent = gradzip.LocalGroup(compressor, size=2), []
    >>> for _ in range(4):
    ...     averages = group.average([torch.ones(64, 64), torch.zeros(64, 64)], "weight")
    ...     sent.append(group.bytes_sent)
    >>> sent
    [16384, 32768, 33344, 33920]

    Source: Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed, ICML
    2021, Algorithm 1, and section 7.1 for the end of the warm-up, which compares ||v|| with that of one earlier step.
    There, the optimizer exchanges momenta; handing back g' leaves optimizers and front ends as they are.
    """

    changes_parts = True

    inner: Compressor
    beta: float = 0.9
    warmup_steps: int | Literal["auto"] = 0
    beta2: float = 0.999

    def __post_init__(self) -> None:
        inner = self.inner
        if not isinstance(inner, Compressor) or isinstance(inner, (Composite, Momentum)):
            got = type(inner).__name__ if isinstance(inner, Compressor) else repr(inner)
            raise ValueError(f"Momentum: got {got}, expected a method that is not made of others, such as TopK()")
        if isinstance(inner, NoCompression):
            raise ValueError(
                f"Momentum: got {inner!r}, which compresses nothing, expected a method that does; to average gradients "
                "uncompressed, use NoCompression() alone"
            )
        if inner.optimizer_momentum:
            raise ValueError(
                f"Momentum: got {inner!r}, which has momentum of its own, expected a method without; use TopK in place "
                "of DGC"
            )
        if not (inner.keeps_residual or inner.unbiased):
            raise ValueError(
                f"Momentum: got {inner!r}, which is biased and has no error feedback, expected a method with error "
                "feedback, as SignSGD(majority=False), or an unbiased one, as QSGD(); the error of each step would "
                "stay in the momentum"
            )
        for name in _OF_INNER:
            setattr(self, name, getattr(inner, name))
        self.exchange = getattr(inner, "exchange", None)  # which ranks compare
        super().__post_init__()
        self.keeps_residual = inner.keeps_residual
        for name in ("beta", "beta2"):
            self.check(name, is_number(getattr(self, name)) and 0 <= getattr(self, name) < 1, "a number in [0, 1)")
        self._is_auto = self.warmup_steps == "auto"
        self.check("warmup_steps", self._is_auto or is_count(self.warmup_steps), "an integer >= 0 or 'auto'")
        self.adapts = inner.adapts or self._is_auto
        inner.memory, inner.workspace = self.memory, self.workspace  # it is called with the states that are kept here

    # --- what `inner` decides, too

    @property
    def undone_on_device(self) -> bool:  # type: ignore[override]
        return self.inner.undone_on_device and not self._is_auto

    @property
    def capture_needs(self) -> str | None:
        return "a number as warmup_steps" if self._is_auto else self.inner.capture_needs

    @property
    def loss_scaled(self) -> Mapping[str, int]:  # type: ignore[override]
        own = {"momentum": 1, "momentum_bound": 1, "square": 2, "former_square": 2}
        return {**self.inner.loss_scaled, **own}

    @property
    def digest(self) -> int:
        auto = self.beta2 if self._is_auto else ""
        return zlib.crc32(f"Momentum{self.beta}{self.warmup_steps}{auto}{self.inner.digest}".encode())

    def state_shapes(self, shape: torch.Size) -> dict[str, tuple[int, ...]]:
        return self.inner.state_shapes(shape) | {"momentum": tuple(shape)}

    @property
    def kept_fields(self) -> tuple[str, ...]:
        return (*self.inner.kept_fields, "momentum")

    def join_group(self, engine: Any) -> None:
        self.inner.join_group(engine)
        self.averages_pieces = getattr(engine, "shards", None) is not None

    def end_step(self, engine: Any, names: Sequence[str]) -> None:
        self.inner.end_step(engine, names)
        if self._is_auto:
            self._end_warmups(engine, set(names))

    def keep(self, state: State, gradients: Mapping[str, Tensor | None]) -> None:
        """Also decay the momentum where the optimizer finds zeros, which it takes for a gradient."""
        bound = (state.before or {}).get("momentum_bound", 0.0)
        super().keep(state, gradients)
        if (momentum := getattr(state, "momentum", None)) is None:
            return
        if hasattr(state, "momentum_bound"):
            state.momentum_bound = max(state.momentum_bound, bound)
        for name, gradient in gradients.items():
            if gradient is not None and not gradient.count_nonzero():
                state.piece(name, momentum).mul_(self.beta)

    def state_dict(self) -> dict[str, Any]:
        """`Compressor.state_dict`, with the class of `inner`, whose states they are."""
        return super().state_dict() | {"inner": type(self.inner).__name__}

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        check_method(state_dict, "Momentum")
        inner = type(self.inner).__name__
        if (got := state_dict.get("inner", inner)) != inner:
            raise ValueError(f"Momentum.load_state_dict: got the state of {in_line(got)}, expected that of {inner!r}")
        super()._load(state_dict)

    # --- a step

    @property
    def averaged_momentum(self) -> float:  # type: ignore[override]
        return self.beta

    @property
    def second_moment_decay(self) -> float | None:  # type: ignore[override]
        return self.beta2 if self._is_auto else None

    def compresses_momentum(self, state: State) -> bool:
        if self.warmup_steps == "auto":
            return getattr(state, "warmup_steps", None) is not None
        return state.step - getattr(state, "unused", 0) >= self.warmup_steps

    def add_residual(self, group: Group) -> Routine:
        """Coroutine: what the rank offers, c. In the warm-up, the gradient and a residual that another method left."""
        state = group.state
        if not group.compressed_momentum:
            if not group.holds:
                yield from super().add_residual(group)
            elif state.residual is not None:  # gradients are averaged where they are
                torch._foreach_add_(group.gradients, pieces(state.residual, group.shapes_of_parts))
            return
        if (momentum := getattr(state, "momentum", None)) is not None:
            group.load_parts()
            yield from jointly(self._add_all, group.device, (group.parts, group.pieces(momentum)))
        yield from self.inner.add_residual(group)

    def reduce(self, group: Group) -> Routine:
        state = group.state
        previous, bound = getattr(state, "momentum", None), 0.0
        if previous is not None and self.looks(group):
            bound = state.momentum_bound if hasattr(state, "momentum_bound") else ops.abs_max(previous)
        # A device has to know if m' - beta m is finite before it is written.
        decayed = None
        if previous is not None and group.may_hold:
            decayed = yield Local(self._decayed_max_abs, group.device, previous)
        if self.compresses_momentum(state):
            if decayed is not None:
                group.numbers.append(decayed)
            return _Average((yield from self.inner.reduce(group)), previous, bound, compressed=True)
        parts = group.gradients if group.holds else group.parts
        mean = yield Mean(parts[0], in_place=True, tensors=parts if len(parts) > 1 else ())
        if group.may_hold:  # likewise m', which is at most 2^127 then
            numbers = ops.largest_magnitudes(group.gradients if group.holds else parts).mul_(2)
            group.numbers.append(numbers if decayed is None else numbers.add_(decayed))
        if group.holds:
            return _Average(None, previous, bound, compressed=False)
        largest, square = None, 0.0
        if self._is_auto:
            numbers = yield from jointly(_max_abs_and_norms, group.device, mean)
            largest, norm = (yield ToHost(numbers)).tolist() if numbers.is_cuda else numbers.tolist()
            square = norm**2
        average = yield from self.with_max_abs(group, mean, largest)
        return _Average(average, previous, bound, compressed=False, square=square)

    def looks(self, group: Group) -> bool:
        # Steps whose average is 0 do not count for the warm-up, and the next bound follows from this one.
        return not group.on_device

    def max_abs_bound(self, average: _Average, limit: float) -> float:
        """As of `Compressor`, but not exact: |m'| + beta |m| may be above the limit where |m' - beta m| is not."""
        previous = self.beta * average.previous_bound
        if average.compressed:
            average.bound = self.inner.max_abs_bound(average.average, limit)
            return average.bound + previous
        largest = super().max_abs_bound(average.average, limit)
        average.is_zero = largest == 0
        average.bound = largest + previous
        return largest if average.bound <= _FLOAT32_MAX else math.inf  # the momentum must be finite, too

    def commit(self, group: Group, average: _Average) -> Routine:
        state, previous = group.state, average.previous
        like = torch.empty(0, dtype=torch.float32, device=group.device)  # `inner` may have released the parts
        momentum = state.renewed("momentum", like, group.numel)
        if average.compressed:
            with group.writing_to(momentum):
                yield from self.inner.commit(group, average.average)
            gradient = momentum
            if previous is not None:
                target = group.target
                gradient = self.new_average(group.numel, group.device) if target is None else target
                torch.sub(momentum, previous, alpha=self.beta, out=gradient)
            group.write(group.pieces(gradient) if not self.vectors else [gradient])
        else:
            torch._foreach_copy_(group.pieces(momentum), average.average.parts)
            group.write(average.average.parts)
            if previous is not None:
                momentum.add_(previous, alpha=self.beta)
            state.residual = None  # it was sent
            if self._is_auto and (self.averages_pieces or not average.is_zero):
                self._learn(state, average.square)
            if group.on_device:
                self._count_unused_later(group)
                group.numbers.append(ops.largest_magnitudes([momentum]))  # it may overflow where its gradient does not
            else:
                self._count_unused(state, 0.0 if average.is_zero else 1.0)
        state.momentum = momentum
        vars(state).pop("momentum_bound", None)
        if not group.on_device:
            state.momentum_bound = average.bound

    def holds(self, group: Group) -> bool:
        """In the warm-up, gradients hold their average, which the momentum follows."""
        return not self.compresses_momentum(group.state) or self.inner.holds(group)

    def complete_error(self, group: Group, average: _Average) -> Routine:
        if not average.compressed:
            return super().complete_error(group, average)
        return self.inner.complete_error(group, average.average)

    def commit_held(self, group: Group, average: _Average, number: Tensor) -> Routine:
        vars(group.state).pop("momentum_bound", None)
        if not group.is_plain:
            yield from with_scratch(self._commit_apart(group, average, number), 8 * group.numel)
            return
        take: Any = self._follow
        if average.compressed:
            yield from self.inner.commit_held(group, average.average, number)  # gradients are m' then
            if average.previous is None:
                group.state.momentum.zero_()  # m' - 0 has the bits of m'
            take = self._take_momenta
        else:
            group.state.residual = None  # it was sent
            self._count_unused_later(group)
        yield from with_scratch(jointly(take, group.device, (group, number)), 4 * group.numel)

    def _commit_apart(self, group: Group, average: _Average, number: Tensor) -> Routine:
        """Coroutine: the same with m' in scratch, which gradients cannot hold."""
        previous = group.state.momentum
        momentum = torch.empty(group.numel, dtype=torch.float32, device=group.device)
        with group.writing_to(momentum):
            yield from self.inner.commit_held(group, average.average, number)
        gradient = momentum if average.previous is None else torch.sub(momentum, previous, alpha=self.beta)
        group.write(group.pieces(gradient))
        groups.take_errors([(number, [previous], [momentum])])

    def _follow(self, of: list[tuple[Group, Tensor]]) -> list[None]:
        """Have momenta become beta m + g', for the average g' that gradients are, if a number is finite."""
        gradients = [gradient for group, _ in of for gradient in group.gradients]
        momenta = [m for group, _ in of for m in pieces(group.state.momentum, group.shapes_of_parts)]
        groups.take_errors([(of[0][1], momenta, torch._foreach_add(gradients, momenta, alpha=self.beta))])
        return [None] * len(of)

    def _take_momenta(self, of: list[tuple[Group, Tensor]]) -> list[None]:
        """Have momenta take m', which gradients are, if a number is finite. Gradients become m' - beta m."""
        gradients = [gradient for group, _ in of for gradient in group.gradients]
        momenta = [m for group, _ in of for m in pieces(group.state.momentum, group.shapes_of_parts)]
        averages = torch._foreach_sub(gradients, momenta, alpha=self.beta)
        groups.take_errors([(of[0][1], momenta, gradients)])
        torch._foreach_copy_(gradients, averages)
        return [None] * len(of)

    def _count_unused_later(self, group: Group) -> None:
        group.told_later = functools.partial(self._count_unused, group.state)

    def _count_unused(self, state: State, largest: float) -> None:
        """Count a step of the warm-up if its average is 0. largest: its largest magnitude."""
        if largest == 0 and not self.averages_pieces:  # decided alike by all ranks, as optimizers are told it
            state.unused = getattr(state, "unused", 0) + 1

    # --- the end of the warm-up

    def _learn(self, state: State, square: float) -> None:
        """Update the running mean of sums of squares, ||v||, and its running mean."""
        state.square = square + self.beta2 * (getattr(state, "square", 0.0) - square)
        state.former_square = state.square + self.beta2 * (getattr(state, "former_square", 0.0) - state.square)
        state.squares = getattr(state, "squares", 0) + 1

    def _end_warmups(self, engine: Any, names: set[str]) -> None:
        """End the warm-ups of the parameters of a step together, if their second moment has settled."""
        memory = round(1 / (1 - self.beta2))
        of_step = [state for state in self.states.values() if not names.isdisjoint(state.shapes)]
        learning = [s for s in of_step if not self.compresses_momentum(s) and getattr(s, "squares", 0) >= 2 * memory]
        # An exact sum does not depend on the order of the states.
        totals = [math.fsum(one) for one in zip((0.0, 0.0), *map(self._unbiased, learning))]
        now, formerly = totals if engine is None else engine.sum_over_shards(totals)
        if 0 < _SETTLED * formerly < now < formerly / _SETTLED:
            for state in learning:
                state.warmup_steps = state.step

    def _unbiased(self, state: State) -> tuple[float, float]:
        """||v|| and its running mean, divided by the sums of their weights."""
        n, faded = state.squares, self.beta2**state.squares
        return state.square / (1 - faded), state.former_square / (1 - faded * (1 + n * (1 - self.beta2)))

    def _decayed_max_abs(self, momenta: list[Tensor]) -> list[Tensor]:
        """2.02 beta max |m| of each momentum m. If it is finite, so is m' - beta m of each m' up to 2^127.

        Also as bfloat16, whose largest number is 2^127 (2 - 2^-7).
        """
        found = ops.abs_max_all(momenta)
        torch._foreach_mul_(found, 2.02 * self.beta)
        return found

    def _add_all(self, sums: list[tuple[list[Tensor], list[Tensor]]]) -> list[None]:
        return add_all(sums, self.beta)


def _max_abs_and_norms(tensors: list[Tensor]) -> list[Tensor]:
    """The largest magnitude and the root of the sum of squares of each tensor, the same on all ranks to the bit."""
    return [torch.cat([largest, ops.bucket_norms(x)]) for x, largest in zip(tensors, ops.abs_max_all(tensors))]
