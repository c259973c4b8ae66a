"""The base class of all methods: hyper-parameters, a routine with its extension points, configuration and state."""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, Field, dataclass, fields, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from ...collectives import ToHost
from ...collectives.fusion import pieces
from ...collectives.node_chunks import NodeChunks
from ...collectives.routines import Local, Routine, at_once, jointly
from ...collectives.traffic import Traffic
from ...memory.memory import LossScale, Memory
from ...memory.names import original
from ...memory.state import State, Workspace
from ...memory.state_dict import all_or_nothing, fields_from, state_dict_of
from ...memory.streams import HomeStreams
from ...memory.verdict import Verdict
from ...ops import groups
from ...ops import tensors as ops
from .exempt import Kind, check_exempt, exempt_names

if TYPE_CHECKING:
    from .group import Group

# Elements that kernels can number: indices have 32 bits, and a device has room for 2^28 bytes of them, with a header.
INDEXED_NUMEL = 2**31 - 2**8
# Scratch memory of the end of a step, as of averages that are not decoded where gradients are: groups with so many
# bytes of it take it in one call; larger ones one after the other, so that they share memory. A model has eight groups
# or so.
TOGETHER_NBYTES = 1 << 25
_DIGEST = "_digest"  # attribute of a compressor: its hyper-parameters, and their digest


class StepMonitor(Protocol):
    """The interface of `gradzip.Monitor`, which watches a compressor."""

    def begin(self, group: Any) -> Callable[[Routine], Routine] | None:
        """Called before a group is averaged. Returns a function to wrap its routine by, or None."""

    def report(self, values: dict[str, float]) -> None:
        """Report numbers of the current step, by the ends of their tags."""


@dataclass
class Average:
    """An average that is not written to gradients yet.

    Attributes:
        parts: of the shapes of `Group.parts`. On a CPU, they may be the gradients, or memory of the next group's.
        max_abs: an upper bound of the magnitudes, 0 if nobody looks; None if it is not known yet.
    """

    parts: list[Tensor]
    max_abs: float | None = None


class Announcement:
    """Whether the averages of a compressor are announced to be thrown away: within the context (`discarding`)."""

    def __init__(self) -> None:
        self.depth = 0  # contexts may be nested

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: Any) -> None:
        self.depth -= 1


@dataclass
class Compressor(ABC):
    """A gradient compression method.

    Subclasses are dataclasses of their hyper-parameters, and define `reduce`. They may set the class attributes below,
    and override the extension points: the methods that `Group` and the front ends call, all of which have defaults.

    Pass an instance to ``hvd.DistributedOptimizer(..., compression=)``, to `gradzip.ddp.HookState` or to
    `gradzip.LocalGroup`.

    Args:
        min_numel: smaller gradients, and those of fewer than two dimensions, are averaged uncompressed.
    """

    _: KW_ONLY
    min_numel: int = 1024

    # The largest number of consecutive collectives that a compressed gradient needs. ToHost does not count.
    rounds = 1

    # Whether residuals are kept. Methods with error feedback declare it as a hyper-parameter.
    error_feedback = False

    # The factor of residuals in the next step. `ErrorFeedback` declares it as a hyper-parameter.
    residual_decay = 1.0

    # Larger gradients are averaged uncompressed.
    max_numel = math.inf

    # Whether a group's gradients are compressed as one vector, rather than as a list of tensors of their own shapes.
    vectors = True

    # Whether `reduce` takes parts of 16-bit floats, and whether averages are decoded to such gradients.
    reads_half = False
    writes_half = False

    # Whether `apply_uncompressed` is called.
    changes_uncompressed = False

    # Whether `observe` is called.
    observes = False

    # Whether averages are unbiased without error feedback: the expectation over the random draws is the mean gradient.
    unbiased = False

    # Momentum that the method applies to gradients in place of the optimizer.
    optimizer_momentum = 0.0

    # Momentum of the optimizer, if the method averages momenta in place of gradients.
    averaged_momentum: ClassVar[float | None] = None

    # Decay rate of the optimizer's second moment, if the method decides by that when to compress momenta.
    second_moment_decay: ClassVar[float | None] = None

    # Whether a step may need an AllToAll or a RingSum, in which ranks do different work.
    asymmetric = False

    # Whether a step can be undone by restoring the elements of the state's tensors. If so, the host does not wait for a
    # device to know whether averages are finite.
    undone_on_device = False

    # Whether a group can commit when a device knows if the step is skipped: the error, if a residual is kept, is made
    # again of gradients and a residual that have stayed as they were (`remake_error`).
    remakes = False

    # Whether `add_residual` changes parts that may be the gradients themselves.
    changes_parts = False

    # Whether the number of collectives depends on the gradients' values, besides their shape and the step.
    adapts = False

    # State fields to multiply when the loss scale changes, and the power of the loss scale they are proportional to.
    loss_scaled: ClassVar[Mapping[str, int]] = {"residual": 1, "owner_residual": 1}

    # State fields that differ between ranks; and those among them that belong to the partition that the rank owns.
    rank_local: ClassVar[tuple[str, ...]] = ("residual", "owner_residual", "owner_start")
    partition_local: ClassVar[tuple[str, ...]] = ("owner_residual", "owner_ranges")

    # Specs for tests and benchmarks of all methods, set by `register`.
    examples: ClassVar[tuple[str, ...]] = ()

    # What Horovod calls of its `compression` argument. gradzip.horovod sets both: methods import no front end.
    compress: ClassVar[Callable[..., tuple[Tensor, Any]]]
    decompress: ClassVar[Callable[..., Tensor]]

    def __post_init__(self) -> None:
        self.check("min_numel", isinstance(self.min_numel, int) and self.min_numel >= 0, "an integer >= 0")
        # A shell or a YAML file may give strings, and the string "false" is true.
        for f in fields(self):
            value = getattr(self, f.name)
            self.check(f.name, f.type != "bool" or isinstance(value, bool), "True or False")
            self.check(f.name, f.name != "seed" or (is_number(value) and isinstance(value, int)), "an integer")
            # Nobody would ask an inner method which parameters are exempt.
            exempt = any(inner.exempted for inner in methods_in(value))
            self.check(f.name, not exempt, f"no exempt parameters: call exempt_modules of the {type(self).__name__}")
        self.memory = Memory(type(self).__name__, self.loss_scaled, self.rank_local, self.partition_local)
        self.traffic = Traffic()
        self.workspace = Workspace()
        self.streams = HomeStreams()
        self.monitor: StepMonitor | None = None
        self.announcement: Announcement | None = None  # once `discarding` was called
        # Whether a rank keeps what it did not send. The owner of a partition may keep a residual without that.
        self.keeps_residual = bool(self.error_feedback)
        self.exempted: frozenset[str] = frozenset()  # names of parameters that are averaged uncompressed
        self.last_verdict: Verdict | bool = False  # whether the last step was skipped
        self.bucket_cap_mb: float | None = None  # MiB of a bucket; None: front ends choose
        # Front ends plan again when it changes: parameters may have other methods, whose residuals they take over.
        self.choice_number = 0
        # Whether other ranks average other pieces of a gradient, unseen by this one: chunks of a node, or shards.
        self.averages_pieces = False
        # If set, a gradient is averaged by node, and `method_for` averages one chunk of it on each rank.
        self.node_chunks: NodeChunks | None = None

    @property
    def capture_needs(self) -> str | None:
        """What a step that is captured as a CUDA graph needs instead of this method, for errors. None: nothing.

        A replay repeats what the host has decided: a method whose host waits for values, or chooses by the step, cannot
        be captured.
        """
        return None

    @property
    def last_step_skipped(self) -> bool:
        """Whether an average of the last step was not finite; equal on all ranks. Waits for a device to know."""
        return bool(self.last_verdict)

    def check(self, name: str, valid: object, expected: str) -> None:
        """Raise ValueError, which names a hyper-parameter, its value and what was expected, unless it is valid."""
        if not valid:
            raise ValueError(f"{type(self).__name__}: got {name} = {getattr(self, name)!r}, expected {expected}")

    # --- extension points of a step of one group, in the order in which `Group` calls them

    def bypasses(self, grad: Tensor) -> bool:
        """Whether a gradient of this shape is averaged uncompressed."""
        return grad.dim() < 2 or not max(1, self.min_numel) <= grad.numel() <= self.max_numel

    def groups_by(self, shape: torch.Size) -> Hashable | None:
        """What gradients of a bucket must have in common to be one group; None: each is a group of its own."""
        return None

    def joined_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """The shape of the vector of a group with a gradient of this shape, with -1 for one length."""
        return (-1,)

    def state_shapes(self, shape: torch.Size) -> dict[str, tuple[int, ...]]:
        """The shapes of a parameter's parts of the state's tensors, by field, for a gradient of this shape."""
        return {"residual": tuple(shape)}

    @property
    def kept_fields(self) -> tuple[str, ...]:
        """The fields of `state_shapes` that the state of a compressed parameter has between steps (float32)."""
        return ("residual",) if self.keeps_residual else ()

    def own_ranges(self, group: Group) -> list[tuple[int, int]]:
        """The ranges of a group's elements of which this rank keeps the owner's residual, if it may keep one."""
        return []

    def kept_nbytes(self, group: Group) -> int:
        """Bytes of the tensors that the state of a group has between steps, at most."""
        if not group.compressed:
            return 0
        of_parameters = map(self.state_shapes, group.shapes_of_parts)
        numel = sum(math.prod(shapes[field]) for shapes in of_parameters for field in self.kept_fields)
        return 4 * (numel + sum(stop - start for start, stop in self.own_ranges(group)))

    def memory_for(self, group: Group, dtype: torch.dtype) -> Tensor:
        """Uninitialized memory for the parts of a group, one after the other, on a device, if they are copies.

        With error feedback, it is that of the next residual: what is compressed becomes that without a copy. 16-bit
        floats do not, nor does what the gradients' memory is going to hold (`Group.holds`).
        """
        memory = torch.empty(group.numel, dtype=dtype, device=group.device)
        if self.keeps_residual and dtype == torch.float32 and not group.holds:
            group.state.next_residual = memory
        return memory

    def holds(self, group: Group) -> bool:
        """Whether the error of a group on a device can be held in the gradients' memory in this step (`Group.holds`).

        If so, `reduce` or `complete_error` turns `group.parts` into it in place, and the residual takes it before
        `commit`. Or they leave there what `commit_held` computes it from. If not, and the method `remakes` it, `reduce`
        calls `Group.release_parts` once they are encoded. It adds to `Group.numbers` those that tell whether the step
        is to be skipped, of averages up to 2^127.
        """
        return False

    def add_residual(self, group: Group) -> Routine:
        """Coroutine: make `group.parts`, for `reduce`: the gradients plus the residual.

        The sum has memory of its own, which becomes the next residual without a copy; or that of the gradients, if
        these hold the error.
        """
        state = group.state
        if state.residual is None:
            group.load_parts()
            return
        addends, total = group.addends, state.next_residual  # which is set if they are in its memory
        if group.holds and group.outs is not None:
            group.parts = group.outs
            yield Local(groups.add_residual, group.device, (addends, state.residual, group.parts))
            return
        if total is None and self.keeps_residual and not group.holds:
            total = state.next_residual = state.renewed("residual", state.residual)
        elif total is None:
            total = torch.empty_like(state.residual)
        yield Local(groups.add_residual, group.device, (addends, state.residual, [total]))
        group.parts = group.pieces(total)

    @abstractmethod
    def reduce(self, group: Group) -> Routine:
        """Average the parts of a group over the ranks: the method itself, as a coroutine over collectives.

        Returns an `Average`; or any other value, if the method overrides `max_abs_bound` and `commit`.
        """

    def max_abs_bound(self, average: Any, limit: float) -> float:
        """An upper bound of the average's magnitudes: exact if above `limit`, not finite if any element is not finite.

        The same on all ranks. Not called if the group is `on_device`. Otherwise, waits for the device, unless `reduce`
        ended with `with_max_abs`. 0 if nobody looks.
        """
        if average.max_abs is None:
            average.max_abs = _most(average.parts)
        return float(average.max_abs)

    def complete_error(self, group: Group, average: Any) -> Routine:
        """Coroutine: complete the error that the gradients hold. The average is not decoded yet.

        Called for all groups that commit late.
        """
        yield from ()

    def commit(self, group: Group, average: Any) -> Routine:
        """Coroutine: write the average to the gradients, and the residual to the state. Only if it is finite.

        The residual is there already if the gradients have held it.
        """
        return jointly(self.apply_averages, group.device, (group, average))

    def commit_held(self, group: Group, average: Any, number: Tensor) -> Routine:
        """Coroutine, without collectives: have the residual, if one is kept, take the error; write the average.

        number: float32 of 1 element, on the device: not finite if the residual must stay as it is.
        """
        if group.holds:
            assert group.state.residual is not None
            residuals = pieces(group.state.residual, group.shapes_of_parts)
            yield Local(groups.take_errors, group.device, (number, residuals, group.gradients))
        elif group.remakes:
            yield from with_scratch(self._take_remade(group, number), 4 * group.numel)
        yield from self.commit(group, average)

    def _take_remade(self, group: Group, number: Tensor) -> Routine:
        state = group.state
        residual = state.residual
        assert residual is not None
        yield from self.remake_error(group)
        yield Local(groups.take_errors, group.device, (number, [residual], [state.residual]))
        group.parts, state.residual = [], residual

    def remake_error(self, group: Group) -> Routine:
        """Coroutine: make the error of the step again, in memory of its own, as the residual.

        By the operations that a group has which does not commit late. `State.step` is that of the next step already.
        """
        state = group.state
        yield from group.method.add_residual(group)
        state.residual, state.next_residual = state.next_residual, None
        yield Local(self._subtract_each, group.device, group)

    def apply_averages(self, updates: list[tuple[Group, Average]]) -> list[None]:
        """`commit` for several groups."""
        keeping = [group for group, _ in updates if self.error_feedback and not group.commits_late]
        if keeping:
            self.store_residuals(keeping)
        copy_all([pair for group, average in updates for pair in group.copies(average.parts)])
        if keeping:
            self.subtract_transmitted(keeping)
        return [None] * len(updates)

    def compresses_momentum(self, state: State) -> bool:
        """Whether `reduce` averages compressed momenta in the state's current step. The same on all ranks.

        What is handed back then has the mean of gradients, but not their squares.
        """
        return False

    def apply_uncompressed(self, group: Group) -> Routine:
        """Coroutine: change the averages of a group that bypassed compression, `group.gradients`, in place."""
        yield from ()
        raise TypeError(f"{type(self).__name__} leaves uncompressed averages as they are")

    # --- for `reduce` to call

    def looks(self, group: Group) -> bool:
        """Whether the host looks at averages. On a device it has to wait for it: only if nothing else would do."""
        return not group.on_device and (self.memory.checks or group.device.type == "cpu")

    def with_max_abs(self, group: Group, flat: Tensor, max_abs: float | None = None) -> Routine:
        """Coroutine: the `Average` of a group, with its largest magnitude if it is on a device.

        If `reduce` ends with it, the host waits once for the magnitudes of all groups.

        Args:
            flat: the averages, one after the other; made by `new_average`, so that it keeps its values until it is
                applied.
            max_abs: the largest magnitude, if it is known.
        """
        if not self.looks(group):
            max_abs = 0.0 if max_abs is None else max_abs
        elif max_abs is None and flat.is_cuda:
            max_abs = float((yield ToHost((yield Local(ops.abs_max_all, flat.device, flat)))))
        return Average(group.pieces(flat), max_abs)

    def new_average(self, numel: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialized memory for an average (flat). On a CPU, the next call reuses it.

        On a device it does not, because several averages wait for `with_max_abs` together.
        """
        if device.type == "cpu":
            return self.workspace.empty("average", (numel,), dtype, device)
        return torch.empty(numel, dtype=dtype, device=device)

    # --- error feedback

    def store_residuals(self, groups: Sequence[Group]) -> None:
        """Make what `reduce` has compressed the residuals: copies, if its memory is going to be overwritten."""
        copies: list[tuple[Tensor, Tensor]] = []
        for group in groups:
            state = group.state
            if group.commits_late:
                continue
            if state.next_residual is None:
                state.residual = state.renewed("residual", group.parts[0], group.numel)
                copies += zip(group.pieces(state.residual), group.parts)
            else:
                state.residual = state.next_residual
        copy_all(copies)

    def _subtract_each(self, groups: list[Group]) -> list[None]:
        self.subtract_transmitted(groups)
        return [None] * len(groups)

    def subtract_transmitted(self, groups: Sequence[Group]) -> None:
        """Subtract what peers decode of this rank's groups from what becomes the residuals (`Group.errors`)."""
        raise TypeError(f"{type(self).__name__} has no error feedback")

    def decay_residuals(self, group: Group, number: Tensor | None = None) -> Routine:
        """Coroutine: multiply the residuals that the step has left by `residual_decay`, in place.

        number: if it is not finite, the residuals stay as they are. None: those that the step has not replaced do.
        """
        fields, before = vars(group.state), group.before or {}
        own = [(fields.get(name), before.get(name)) for name in ("residual", "owner_residual")]
        residuals = [x for x, former in own if x is not None and (number is not None or x is not former)]
        if residuals:
            yield Local(self._decay_all, group.device, (residuals, number))

    def _decay_all(self, of: list[tuple[list[Tensor], Tensor | None]]) -> list[None]:
        number, decay = of[0][1], self.residual_decay
        factor = decay if number is None else number.new_full((1,), decay).where(number.isfinite(), 1.0)[0]
        torch._foreach_mul_([x for residuals, _ in of for x in residuals], factor)  # one operation on a device
        return [None] * len(of)

    # --- the group

    def join_group(self, engine: Any) -> None:
        """Prepare for a group. Called on all ranks before the first step in it.

        Args:
            engine: of the group; in a `LocalGroup` a stand-in that knows the ranks but runs no collectives.
        """

    def change_group(self, rank: int, size: int) -> None:
        """Continue as another rank, or in a group of another size, in an elastic job. Residuals are kept."""
        for part in self.parts:
            part.memory.change_group(rank, size)

    # --- the end of a step

    def end_step(self, engine: Any, names: Sequence[str]) -> None:
        """End a step. Called when all its gradients are averaged, at the same point on all ranks.

        A method may run collectives here, and change the result of `method_for` for the next step. A `LocalGroup` calls
        it after each average. The backward pass may still fail. Changes of the states of `names` are undone then; all
        else is changed in `complete_step`.

        Args:
            engine: of the group that has averaged the gradients (`gradzip.collectives.engine.Engine`); None in a
                `LocalGroup`. The other ranks of a sharded model call it at the same point, too (`sum_over_shards`).
            names: of the states of the parameters that the step has averaged, in any order, without frozen ones.
        """

    def complete_step(self, names: Sequence[str]) -> None:
        """Complete a step, which can no longer be undone. Called after `end_step`, when gradients are the averages.

        A method may change the result of `method_for` for the next step, and states, but runs no collectives.

        Args:
            names: as in `end_step`.
        """

    def skip_step(self) -> None:
        """End a step that is skipped, because an average is not finite. Called on all ranks in place of `end_step`."""

    def keep(self, state: State, gradients: Mapping[str, Tensor | None]) -> None:
        """Undo a step for some parameters of a state, whose averages nobody gets (`State.keep`).

        gradients: that optimizers find in place of the averages, by name.
        """
        state.keep(gradients)

    def clean(self, state: State) -> None:
        """Remove what a step that was undone has written to a tensor of the state in place. By default, nothing."""

    # --- methods made of methods

    @property
    def parts(self) -> list[Compressor]:
        """The compressors that `method_for` may return: this one, or those that a `Composite` is made of."""
        return [self]

    @property
    def selects_by_name(self) -> bool:
        """Whether the parameter's name decides how it is averaged."""
        return bool(self.exempted)

    def method_for(self, name: str, shape: torch.Size, prefix: str = "") -> Compressor:
        """The compressor of a parameter. prefix: of its model; the state's name is prefix + name."""
        return self

    def stages(self, names: Sequence[str]) -> list[list[Compressor]]:
        """For each stage of a training with these parameters: clones whose states are all kept then.

        Each has one method in charge of a parameter.
        """
        return [[self.clone()]]

    def later_methods(self, name: str, prefix: str = "") -> Sequence[Compressor]:
        """The methods that `method_for` is known to return for a parameter in later steps."""
        return ()

    def takes(self, name: str, like: Tensor, prefix: str = "") -> bool:
        """Whether a parameter of this shape is compressed, now or in a later phase, unless it is exempt."""
        now = self.node_chunks or self.method_for(name, like.shape, prefix)
        return not all(method.bypasses(like) for method in (now, *self.later_methods(name, prefix)))

    def exempts(self, name: str, like: Tensor) -> bool:
        """Whether a parameter is averaged uncompressed, whatever the method."""
        return name in self.exempted or like.is_complex()

    def is_compressed(self, name: str, like: Tensor, prefix: str = "") -> bool:
        """Whether a parameter of this shape is compressed, now or in a later phase. Arguments: as in `method_for`."""
        return not self.exempts(name, like) and self.takes(name, like, prefix)

    def count_compressed(self, named: Mapping[str, Tensor], prefix: str = "") -> tuple[int, int]:
        """How many parameters are compressed, now or in a later phase, and how many `exempt_modules` keeps from it."""
        taken = [name for name, p in named.items() if not p.is_complex() and self.takes(name, p, prefix)]
        exempt = len(self.exempted.intersection(taken))
        return len(taken) - exempt, exempt

    def step_of(self, name: str, shape: torch.Size, prefix: str = "") -> int:
        """The number of steps of a parameter so far, the same on all ranks. Arguments: as in `method_for`."""
        return int(self.method_for(name, shape, prefix).memory.fields(prefix + name).get("step", 0))

    def register_parameter(self, name: str, shape: torch.Size, state_name: str) -> None:
        """Note a parameter that is going to be averaged. state_name: its name with the prefix of its model."""

    def observe(self, group: Group) -> None:
        """See the gradients of a group before they are averaged, except those of frozen parameters.

        They must not be changed, and are overwritten later.
        """

    # --- configuration

    def clone(self) -> Compressor:
        """A compressor with the same hyper-parameters and settings, and no state."""
        clone = replace(self, **{f.name: cloned(getattr(self, f.name)) for f in fields(self) if f.init})
        clone.bucket_cap_mb, clone.exempted = self.bucket_cap_mb, self.exempted
        clone._share(LossScale(self.memory.loss_scale.scaler))
        return clone.skip_nonfinite(self.memory.skips_nonfinite)

    @property
    def digest(self) -> int:
        """32 bits of the class and the hyper-parameters.

        Ranks with equal digests understand each other's payloads. Fields whose metadata say ``digest: False`` do not
        count, and those with ``digest: "if changed"`` only if they differ from their default: adding such a field
        leaves payloads as they are.
        """
        current = _values_of(type(self))(vars(self))
        known, found = vars(self).get(_DIGEST, (None, 0))  # it is asked for with each payload
        if known != current:
            values = {f.name: getattr(self, f.name) for f in fields(self) if _in_digest(self, f)}
            # Schedules count as equal if their classes are: their repr may hold an address.
            plain = {k: type(v).__qualname__ if callable(v) else repr(v) for k, v in values.items()}
            found = zlib.crc32(f"{type(self).__name__}{sorted(plain.items())}".encode())
            vars(self)[_DIGEST] = current, found
        return found

    def follow(self, scaler: Any) -> Compressor:
        """Rescale states when the loss scale changes, for training in mixed precision.

        Gradients come multiplied by ``scaler.get_scale()``. If an average is not finite, GradScaler skips the
        optimizer's step for all parameters, and all states are restored.

        Args:
            scaler: a torch.amp.GradScaler.

        Returns the compressor itself.

        >>> import gradzip, torch
        >>> compressor = gradzip.TopK(theta=0.99).follow(torch.amp.GradScaler("cpu"))
        """
        if isinstance(scaler, type) or not callable(getattr(scaler, "get_scale", None)):
            raise ValueError(f"follow: got {scaler!r}, expected a torch.amp.GradScaler, as in follow(scaler)")
        self._share(LossScale(scaler))
        return self

    def _share(self, loss_scale: LossScale) -> None:
        for compressor in (self, *self.parts):
            compressor.memory.loss_scale = loss_scale

    def skip_nonfinite(self, enabled: bool = True) -> Compressor:
        """Set whether a step is skipped on all ranks if an average is not finite. It is, by default.

        All states of this compressor are restored then, as if the step had not been; on a device, where the host does
        not wait to know, it is counted. The optimizers of `torch.optim` that hold its parameters skip their next step,
        which changes neither parameters nor optimizer state, and a warning is given. Other optimizers can ask
        `last_step_skipped`.

        Disabled, a NaN or inf reaches the parameters of its bucket on all ranks, unless GradScaler skips the step
        (`follow`). On a device, it reaches the states of a method whose payloads have no headers, too, as `BlockFloat`
        or `ACPSGD`. Call it before the first step, on all ranks alike.

        Returns the compressor itself.

        >>> import gradzip
        >>> compressor = gradzip.TopK(theta=0.99).skip_nonfinite(False)
        """
        for compressor in (self, *self.parts):
            compressor.memory.skips_nonfinite = enabled
        return self

    def exempt_modules(self, model: torch.nn.Module, *kinds: Kind) -> Compressor:
        """Average some parameters uncompressed, whatever the method: those of modules of these kinds.

        "embedding": of `Embedding` and `EmbeddingBag`. "head": of the output layer, which is
        ``model.get_output_embeddings()`` or the last linear layer or convolution. "1d": biases and norms, which methods
        leave uncompressed anyway. Or a class of modules, whose own parameters are meant. A parameter that several
        modules share is exempt if one of them is.

        Args:
            model: the one that the front end averages, before or after it is wrapped. Call it before the first step, on
                all ranks alike; again for another model, or to add kinds.

        Returns the compressor itself.

        Raises:
            TypeError: model is no module.
            ValueError: an unknown kind, or nothing is left that the method compresses, with what earlier calls exempt.
                Front ends ask that again, of all ranks, before the first step.

        >>> import gradzip, torch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(100, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 100))
        >>> compressor = gradzip.TopK(theta=0.99).exempt_modules(model, "embedding", "head")
        >>> sorted(compressor.exempted)
        ['0.weight', '2.bias', '2.weight']
        """
        names, trained = exempt_names(model, kinds)
        before, self.exempted = self.exempted, self.exempted | names
        try:
            check_exempt("exempt_modules", *self.count_compressed(trained))
        except ValueError:
            self.exempted = before
            raise
        self.choice_number += 1
        return self

    def discarding(self) -> Announcement:
        """Announce averages that are going to be thrown away: those of the backward passes within the context.

        Such averages have no residual in them, and change no state of the method: none of them comes back in a later
        step. For the gradients that a discriminator gets from the loss of a generator, for the first pass of
        sharpness-aware minimization, and for gradients that are looked at and zeroed. Passes that need no averages at
        all are cheaper within DDP's `no_sync()`.

        Call it on all ranks, for the first time before the first step: ranks then compare in each step whether they
        have announced it, in an all-reduce of one number.

        >>> import gradzip
        >>> compressor = gradzip.TopK(theta=0.99)
        >>> discarding = compressor.discarding()  # then, in the loop: with discarding: loss.backward()
        """
        self.announcement = self.announcement or Announcement()
        return self.announcement

    # --- state

    @property
    def states(self) -> dict[str, State]:
        """The states of the groups that were averaged, by the names of the groups."""
        return self.memory.states

    @property
    def loaded_names(self) -> set[str]:
        """The names of loaded states that no parameter has had yet."""
        return set().union(*(part.memory.loaded for part in self.parts))

    def rename_states(self, names: Mapping[str, str | None]) -> None:
        """Give the states of parameters other names, by name; None frees a state."""
        for part in self.parts:
            part.memory.rename(names)

    def state_dict(self) -> dict[str, Any]:
        """Get all states as plain tensors and numbers, which ``torch.load(weights_only=True)`` reads."""
        return state_dict_of(self.memory.by_parameter(), self.rank_local, type(self).__name__)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict: all of it, or nothing.

        Rank-local fields are kept if the same rank of a group of the same size continues, and dropped with a warning
        otherwise. `gradzip.checkpoint` merges the state dicts of all ranks. Shapes are checked in the first step. Once
        training runs, all ranks must load between the same two steps: states decide which collectives follow.

        Raises:
            ValueError: the state dict belongs to another method or is malformed, or has values that are not finite.
        """
        with self.all_or_nothing():
            self._load(state_dict)

    def all_or_nothing(self) -> AbstractContextManager[None]:
        """Restore all states if the block raises an error. They may be loaded there, but not in a step."""
        parts = {id(part): part for part in (self, *self.parts)}.values()
        return all_or_nothing(*parts, *(part.memory for part in parts))

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        """`load_state_dict`, which restores what this has changed before an error. Replaces attributes as a whole."""
        saved = fields_from(state_dict, type(self).__name__)
        self.memory.load({original(name): fields for name, fields in saved.items()})
        self.choice_number += 1  # front ends plan again: bypassed parameters may have residuals


@functools.cache
def _values_of(method: type[Any]) -> Callable[[Mapping[str, Any]], Any]:
    """What gets the values of all hyper-parameters from the attributes of a method of this class."""
    return itemgetter(*(f.name for f in fields(method)))


def _in_digest(method: Compressor, f: Field[Any]) -> bool:
    counts = f.metadata.get("digest", True)
    return getattr(method, f.name) != f.default if counts == "if changed" else bool(counts)


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy to each target its source, given as (target, source). One operation on a device."""
    if pairs:
        targets, sources = map(list, zip(*pairs))
        torch._foreach_copy_(targets, sources)


def with_scratch(work: Routine, nbytes: int) -> Routine:
    """Coroutine: local work that needs so many bytes of a device: not jointly with that of others if it needs many."""
    return work if nbytes <= TOGETHER_NBYTES else _by_itself(work)


def _by_itself(work: Routine) -> Routine:
    yield from ()
    return at_once(work)


def add_all(sums: list[tuple[list[Tensor], list[Tensor]]], alpha: float) -> list[None]:
    """Add alpha times others to the tensors of several groups, (targets, others). One operation on a device."""
    torch._foreach_add_(*map(list, map(itertools.chain.from_iterable, zip(*sums))), alpha=alpha)
    return [None] * len(sums)


def _most(tensors: Sequence[Tensor]) -> float:
    """The largest magnitude, NaN if an element is NaN."""
    numbers = torch.cat(ops.abs_max_all(tensors)).tolist()
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def is_number(value: Any) -> bool:
    """Whether a hyper-parameter is a number, which True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def methods_in(value: Any) -> Iterator[Compressor]:
    """The methods in a hyper-parameter."""
    if isinstance(value, Compressor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        yield from itertools.chain.from_iterable(map(methods_in, value.values() if isinstance(value, dict) else value))


def cloned(value: Any) -> Any:
    """Clone the methods in a hyper-parameter. A method is whatever has `clone` and `memory`."""
    if hasattr(value, "memory"):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(cloned(item) for item in value)
    return {key: cloned(item) for key, item in value.items()} if type(value) is dict else value
