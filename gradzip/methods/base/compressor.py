"""The base class of all methods: hyper-parameters, a routine with its extension points, configuration and state."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, Field, dataclass, fields, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ... import ops
from ...collectives import ToHost
from ...collectives.node_chunks import NodeChunks
from ...collectives.routines import Local, Routine, jointly
from ...collectives.traffic import Traffic
from ...memory.memory import LossScale, Memory
from ...memory.state import State, Workspace
from ...memory.state_dict import state_dict_of, states_from
from ...memory.streams import HomeStreams

INDEXED_NUMEL = 2**31 - 1  # elements that kernels can number: indices have 32 bits
_MAX_ABS = "_gradzip_max_abs"  # attribute of an average that holds its largest magnitude, if that is known
_PARTS = "_gradzip_parts"  # attribute of a vector: its parts, and the gradients that they are copies of
_DIGEST = "_digest"  # attribute of a compressor: its hyper-parameters, and their digest


class StepMonitor(Protocol):
    """The interface of `gradzip.Monitor`, which watches a compressor."""

    def begin(self, averaging: Any, grad: Tensor, rank: int, size: int) -> Callable[[Routine], Routine] | None:
        """Called before a gradient is averaged. Returns a function to wrap its routine by, or None."""

    def report(self, values: dict[str, float]) -> None:
        """Report numbers of the current step, by the ends of their tags."""


@dataclass
class Compressor(ABC):
    """A gradient compression method.

    Subclasses are dataclasses of their hyper-parameters, and define `reduce`. They may set the class attributes below,
    and override the extension points: the methods that `Averaging` and the front ends call, all of which have defaults.

    Pass an instance to ``hvd.DistributedOptimizer(..., compression=)``, to `gradzip.ddp.HookState` or to
    `gradzip.LocalGroup`.

    Args:
        min_numel: smaller gradients, and those of fewer than two dimensions, are averaged uncompressed.
    """

    _: KW_ONLY
    min_numel: int = 1024

    # The largest number of consecutive collectives that a compressed gradient needs. ToHost does not count.
    rounds = 1

    # Whether to join the collectives of several gradients even if each gradient needs only one. This does not pay for a
    # single Mean under Horovod, which joins its own all-reduces.
    joins = False

    # Whether residuals are kept. Methods with error feedback declare it as a hyper-parameter.
    error_feedback = False

    # The factor of residuals in the next step. `ErrorFeedback` declares it as a hyper-parameter.
    residual_decay = 1.0

    # Larger gradients are averaged uncompressed.
    max_numel = math.inf

    # Whether `apply_uncompressed` is called.
    changes_uncompressed = False

    # Whether `observe` is to see each uncompressed gradient by itself.
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

    # Whether the number of collectives depends on the gradients' values, besides their shape and the step.
    adapts = False

    # State fields to multiply when the loss scale changes, and the power of the loss scale they are proportional to.
    loss_scaled: ClassVar[Mapping[str, int]] = {"residual": 1, "owner_residual": 1}

    # State fields that differ between ranks; and those among them that belong to the partition that the rank owns.
    rank_local: ClassVar[tuple[str, ...]] = ("residual", "owner_residual")
    partition_local: ClassVar[tuple[str, ...]] = ("owner_residual",)

    # Specs for tests and benchmarks of all methods, set by `register`.
    examples: ClassVar[tuple[str, ...]] = ()

    # The function behind `compress`, which Horovod calls. gradzip.horovod sets it: methods import no front end.
    horovod_compress: ClassVar[Callable[[Compressor, Tensor], tuple[Tensor, Any]]]

    def __post_init__(self) -> None:
        if not (isinstance(self.min_numel, int) and self.min_numel >= 0):
            raise ValueError(f"{type(self).__name__}: got min_numel = {self.min_numel!r}, expected an integer >= 0")
        check_types(self)
        self.memory = Memory(type(self).__name__, self.loss_scaled, self.rank_local, self.partition_local)
        self.traffic = Traffic()
        self.workspace = Workspace()
        self.streams = HomeStreams()
        self.monitor: StepMonitor | None = None
        self.last_step_skipped = False  # whether an average of the last step was not finite; equal on all ranks
        self.bucket_cap_mb: float | None = None  # MiB of a bucket; None: front ends choose
        # Front ends plan again when it changes: parameters may have other methods, whose residuals they take over.
        self.choice_number = 0
        # Whether other ranks average other pieces of a gradient, unseen by this one: chunks of a node, or shards.
        self.averages_pieces = False
        # If set, a gradient is averaged by node, and `method_for` averages one chunk of it on each rank.
        self.node_chunks: NodeChunks | None = None

    # --- extension points of a step of one gradient, in the order in which `Averaging` calls them

    def bypasses(self, grad: Tensor) -> bool:
        """Whether a gradient of this shape is averaged uncompressed."""
        return grad.dim() < 2 or not max(1, self.min_numel) <= grad.numel() <= self.max_numel

    def joined_shape(self, shape: torch.Size) -> tuple[int, ...] | None:
        """The shape in which gradients of a bucket are concatenated, with -1 for one length; None: they are not.

        The gradients of a bucket whose joined shapes are equal are compressed as one tensor: with `state.VECTOR` as one
        vector, with (-1, 1, 3, 3) as rows of kernels. A method that has one sets `joins`.
        """
        return None

    def state_shapes(self, grad: Tensor) -> dict[str, tuple[int, ...]]:
        """The expected shapes of tensors in a loaded state of this gradient, by field."""
        return {"residual": tuple(grad.shape)}

    def add_residual(self, grad: Tensor, state: State) -> Routine:
        """Coroutine: the gradient plus the residual, for `reduce`.

        On a CPU, with error feedback, the sum is in memory of its own, which becomes the residual without a copy.

        Args:
            grad: contiguous float32; may be changed and returned.
        """
        if state.residual is None:
            return grad
        if self.error_feedback and not ops.on_device(grad):
            state.next_residual = torch.add(grad, state.residual, out=state.renewed("residual", grad))
            return state.next_residual
        yield Local(_add_all, grad.device, (grad, state.residual))
        return grad

    @abstractmethod
    def reduce(self, grad: Tensor, state: State) -> Routine:
        """Average `grad` over the group: the method itself, as a coroutine over collectives.

        Args:
            grad: the gradient plus residual, in its own shape, contiguous float32.

        Returns the average, in any shape with as many elements; or any other value, if the method overrides
        `max_abs_bound` and `apply_average`.
        """

    def max_abs_bound(self, average: Any, limit: float) -> float:
        """An upper bound of the average's magnitudes: exact if above `limit`, not finite if any element is not finite.

        The same on all ranks. Waits for the device, unless `reduce` ended with `with_max_abs`. 0 if nobody looks.
        """
        known = getattr(average, _MAX_ABS, None)
        return ops.abs_max(average) if known is None else known

    def commit(self, grad: Tensor, corrected: Tensor, average: Any, state: State) -> Routine:
        """Coroutine: `apply_average`, together with other gradients of the bucket."""
        yield from jointly(self.apply_averages, grad.device, (grad, corrected, average, state))

    def apply_averages(self, updates: list[tuple[Tensor, Tensor, Any, State]]) -> list[None]:
        """`apply_average` for several gradients."""
        for update in updates:
            self.apply_average(*update)
        return [None] * len(updates)

    def apply_average(self, grad: Tensor, corrected: Tensor, average: Any, state: State) -> None:
        """Write the average to `grad`, and the residual to the state. Called only if the average is finite.

        Args:
            corrected: the argument of `reduce`; it may share memory with `grad`.
            average: the result of `reduce`.
        """
        if self.error_feedback:
            self.store_residual(corrected, state)
        write_average(grad, average.view(grad.shape))
        if self.error_feedback:
            self.subtract_transmitted(state)

    def compresses_momentum(self, state: State) -> bool:
        """Whether `reduce` averages compressed momenta in the state's current step. The same on all ranks.

        What is handed back then has the mean of gradients, but not their squares.
        """
        return False

    def apply_uncompressed(self, average: Tensor, state: State) -> Routine:
        """Coroutine: change the average of a gradient that bypassed compression, in place."""
        yield from ()
        raise TypeError(f"{type(self).__name__} leaves uncompressed averages as they are")

    # --- for `reduce` to call

    def looks(self, average: Tensor) -> bool:
        """Whether the host looks at averages. On a device it has to wait for it: only if a step may be skipped."""
        return self.memory.checks or not ops.on_device(average)

    def with_max_abs(self, average: Tensor, max_abs: float | None = None) -> Routine:
        """Coroutine: attach the largest magnitude to an average on a device, for `max_abs_bound`. Returns the average.

        If `reduce` ends with it, the host waits once for the magnitudes of all gradients.

        Args:
            average: made by `new_average`, so that it keeps its values until it is applied.
            max_abs: the largest magnitude, if it is known.
        """
        if not self.looks(average):
            max_abs = 0.0 if max_abs is None else max_abs
        elif max_abs is None and ops.on_device(average):
            max_abs = float((yield ToHost((yield Local(ops.abs_max_all, average.device, average)))))
        setattr(average, _MAX_ABS, max_abs)
        return average

    def new_average(self, numel: int, device: torch.device) -> Tensor:
        """Uninitialized memory for an average (float32, flat). On a CPU, the next call reuses it.

        On a device it does not, because several averages wait for `with_max_abs` together.
        """
        if device.type == "cpu":
            return self.workspace.empty("average", (numel,), torch.float32, device)
        return torch.empty(numel, dtype=torch.float32, device=device)

    # --- error feedback

    def store_residual(self, corrected: Tensor, state: State) -> None:
        """Make the argument of `reduce` the residual: a copy, if its memory is going to be overwritten."""
        self.store_residuals([corrected], [state])

    def store_residuals(self, corrected: list[Tensor], states: list[State]) -> None:
        """`store_residual` for several gradients."""
        copies, originals = [], []
        for own, state in zip(corrected, states):
            if state.next_residual is None:
                state.residual = state.renewed("residual", own)
                copies.append(state.residual)
                originals.append(own)
            else:
                state.residual = state.next_residual
        if copies:
            torch._foreach_copy_(copies, originals)  # one operation on a device

    def subtract_transmitted(self, state: State) -> None:
        """Subtract what peers decode of this rank's gradient from the residual."""
        assert state.residual is not None
        state.residual.sub_(self.transmitted(state).view(state.residual.shape))

    def decay_residuals(self, state: State) -> Routine:
        """Coroutine: multiply the residuals that the step has left by `residual_decay`, in place."""
        if self.residual_decay == 1:
            return
        for residual in (state.residual, getattr(state, "owner_residual", None)):
            if residual is not None:
                yield Local(self._decay_all, residual.device, residual)

    def _decay_all(self, residuals: list[Tensor]) -> list[None]:
        torch._foreach_mul_(residuals, self.residual_decay)  # one operation on a device
        return [None] * len(residuals)

    def transmitted(self, state: State) -> Tensor:
        """What peers decode of this rank's gradient in the current step."""
        raise TypeError(f"{type(self).__name__} has no error feedback")

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

    def take_back(self, name: str, average: Tensor, skipped: bool) -> None:
        """Add what the optimizer does not get of an average to the residual, so that nothing of it is lost.

        Called after `complete_step`, on all ranks.

        Args:
            name: of the parameter's state.
            average: what the optimizer does not get, float32, the same on all ranks.
            skipped: whether the optimizer skips the parameter, which has no gradient, rather than seeing another one.
        """
        if average.count_nonzero():
            self.memory.add_to_residual(name, average)

    def clean(self, state: State) -> None:
        """Remove what a step that was undone has written to a tensor of the state in place. By default, nothing."""

    # --- methods made of methods

    @property
    def parts(self) -> list[Compressor]:
        """The compressors that `method_for` may return: this one, or those that a `Composite` is made of."""
        return [self]

    @property
    def selects_by_name(self) -> bool:
        """Whether `method_for` depends on the parameter's name."""
        return False

    def method_for(self, name: str, shape: torch.Size, prefix: str = "") -> Compressor:
        """The compressor of a parameter. prefix: of its model; the state's name is prefix + name."""
        return self

    def later_methods(self, name: str, prefix: str = "") -> Sequence[Compressor]:
        """The methods that `method_for` is known to return for a parameter in later steps."""
        return ()

    def step_of(self, name: str, shape: torch.Size, prefix: str = "") -> int:
        """The number of steps of a parameter so far, the same on all ranks. Arguments: as in `method_for`."""
        state = self.method_for(name, shape, prefix).memory.find(prefix + name)
        return 0 if state is None else int(state.kept["step"])

    def register_parameter(self, name: str, shape: torch.Size, state_name: str) -> None:
        """Note a parameter that is going to be averaged. state_name: its name with the prefix of its model."""

    def observe(self, state_name: str, grad: Tensor) -> None:
        """See each gradient before it is averaged, except those of frozen parameters.

        Args:
            state_name: of the parameter, or of the bucket that is compressed as one tensor.
            grad: must not be changed, and is overwritten later.
        """

    # --- configuration

    def clone(self) -> Compressor:
        """A compressor with the same hyper-parameters, loss scale, buckets and `skip_nonfinite`, and no state."""
        clone = replace(self, **{f.name: cloned(getattr(self, f.name)) for f in fields(self) if f.init})
        clone.bucket_cap_mb = self.bucket_cap_mb
        clone._share(LossScale(self.memory.loss_scale.scaler))
        return clone.skip_nonfinite(self.memory.skips_nonfinite)

    @property
    def digest(self) -> int:
        """32 bits of the class and the hyper-parameters.

        Ranks with equal digests understand each other's payloads. Fields whose metadata say ``digest: False`` do not
        count, and those with ``digest: "if changed"`` only if they differ from their default: adding such a field
        leaves payloads as they are.
        """
        current = [getattr(self, f.name) for f in fields(self)]
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
        optimizer's step for all parameters, and all states are rolled back.

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

        All states of this compressor are rolled back then, as if the step had not been. The optimizers of
        `torch.optim` that hold its parameters see no gradients in their next step, so that it changes neither
        parameters nor optimizer state, and warn. Other optimizers can ask `last_step_skipped`.

        Disabled, a NaN or inf reaches the parameters of its layer on all ranks, unless GradScaler skips the step
        (`follow`). On a device, it reaches the states of a method whose payloads have no headers, too, as `BlockFloat`
        or `ACPSGD`: the host does not wait to know. Call it before the first step, on all ranks alike.

        Returns the compressor itself.

        >>> import gradzip
        >>> compressor = gradzip.TopK(theta=0.99).skip_nonfinite(False)
        """
        for compressor in (self, *self.parts):
            compressor.memory.skips_nonfinite = enabled
        return self

    # --- state

    @property
    def states(self) -> dict[str, State]:
        """The states of this compressor's parameters, by name."""
        return self.memory.states

    def state_dict(self) -> dict[str, Any]:
        """Get all states as plain tensors and numbers, which ``torch.load(weights_only=True)`` reads."""
        return state_dict_of(self.states, self.rank_local, type(self).__name__)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict.

        Rank-local fields are kept if the same rank of a group of the same size continues, and dropped with a warning
        otherwise. `gradzip.checkpoint` merges the state dicts of all ranks. Shapes are checked in the first step. Once
        training runs, all ranks must load between the same two steps: states decide which collectives follow.

        Raises:
            ValueError: the state dict belongs to another method or is malformed.
        """
        self.memory.states = states_from(state_dict, type(self).__name__)

    # --- Horovod calls these two methods of its `compression` argument

    def compress(self, *tensor: Tensor) -> tuple[Tensor, Any]:
        if not tensor:  # called on the class, as Horovod calls its own compressions
            raise TypeError("compression: got a class, expected an instance of it, as in compression=gradzip.TopK()")
        return type(self).horovod_compress(self, *tensor)

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        return tensor if ctx is None else ctx.finish(tensor)


def _in_digest(method: Compressor, f: Field[Any]) -> bool:
    counts = f.metadata.get("digest", True)
    return getattr(method, f.name) != f.default if counts == "if changed" else bool(counts)


def _add_all(pairs: list[tuple[Tensor, Tensor]]) -> list[None]:
    torch._foreach_add_(*map(list, zip(*pairs)))  # one operation on a device
    return [None] * len(pairs)


def write_average(grad: Tensor, average: Tensor) -> None:
    """Write the average to a gradient. On a CPU, if that is a copy of several (`set_parts`), to these at once."""
    if _PARTS in vars(grad) and not ops.on_device(grad):
        write_parts(grad, average)
    else:
        grad.copy_(average)


def set_parts(vector: Tensor, parts: list[Tensor], gradients: list[Tensor]) -> None:
    """Note that a vector has copies of these gradients, one after the other. parts: views of them."""
    setattr(vector, _PARTS, (parts, gradients))


def write_parts(vector: Tensor, average: Tensor) -> None:
    """Write the average to the gradients of a vector, unless it is done."""
    parts, gradients = vars(vector).pop(_PARTS, (None, None))
    if gradients is None:
        return
    if average.data_ptr() != vector.data_ptr():
        pieces = average.reshape(-1).split([gradient.numel() for gradient in gradients])
        parts = [piece.view(gradient.shape) for piece, gradient in zip(pieces, gradients)]
    torch._foreach_copy_(gradients, parts)  # one operation on a device


def check_types(method: Any) -> None:
    """Check switches and seeds. A shell or a YAML file may give strings, and the string "false" is true.

    Raises:
        ValueError: a bool that is not True or False, or a seed that is not an integer.
    """
    for f in fields(method):
        value = getattr(method, f.name)
        if f.type == "bool" and not isinstance(value, bool):
            raise ValueError(f"{type(method).__name__}: got {f.name} = {value!r}, expected True or False")
        if f.name == "seed" and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{type(method).__name__}: got seed = {value!r}, expected an integer")


def cloned(value: Any) -> Any:
    """Clone the methods in a hyper-parameter. A method is whatever has `clone` and `memory`."""
    if hasattr(value, "memory"):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(cloned(item) for item in value)
    return {key: cloned(item) for key, item in value.items()} if type(value) is dict else value
