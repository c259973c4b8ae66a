"""What a method is: hyper-parameters, configuration and state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from .hooks import Hooks
from .hyper_parameters import check_types, cloned, digest_of
from .memory import Memory
from .sharding import Sharding
from .state import State, Workspace
from .state_dict import state_dict_of, states_from
from .traffic import Traffic


@dataclass
class Compressor(Hooks):
    """A gradient compression method.

    Subclasses are dataclasses of their hyper-parameters and define `reduce`. Pass an instance to
    ``hvd.DistributedOptimizer(..., compression=)``, to `gradzip.ddp.HookState` or to `gradzip.LocalGroup`.

    Args:
        min_numel: smaller gradients, and those of fewer than two dimensions, are averaged uncompressed.
    """

    _: KW_ONLY
    min_numel: int = 1024

    # The largest number of collectives, one after the other, that a compressed gradient needs. ToHost does not count.
    rounds = 1

    # Whether front ends join the collectives of several gradients also if each has only one. It does not pay for a Mean
    # alone, which Horovod takes for its own all-reduce, and joins itself.
    joins = False

    # Momentum that the method applies to gradients in place of the optimizer.
    optimizer_momentum = 0.0

    # Whether the number of its collectives depends on gradients, and not on their shape and the step alone.
    adapts = False

    # State fields to multiply when the loss scale changes, and the power of the loss scale they are proportional to.
    loss_scaled: ClassVar[Mapping[str, int]] = {"residual": 1, "owner_residual": 1}

    # State fields that differ between ranks; and those of them that belong to the shard which the rank owns.
    rank_local: ClassVar[tuple[str, ...]] = ("residual", "owner_residual")
    shard_local: ClassVar[tuple[str, ...]] = ("owner_residual",)

    # Arguments for contract tests, set by `register`.
    example: ClassVar[str] = ""

    # Returns the front end of a compressor. gradzip.horovod sets it, so that nothing here imports a front end.
    horovod_front_end: ClassVar[Callable[[Compressor], Any]]

    def __post_init__(self) -> None:
        if not (isinstance(self.min_numel, int) and self.min_numel >= 0):
            raise ValueError(f"{type(self).__name__}: got min_numel = {self.min_numel!r}, expected an integer >= 0")
        check_types(self)
        self.memory = Memory(type(self).__name__, self.loss_scaled, self.rank_local, self.shard_local)
        self.traffic = Traffic()
        self.workspace = Workspace()
        # How the ranks of a node share a gradient, whose shards `method_for` then averages; None: each takes all of it.
        self.sharding: Sharding | None = None

    # --- the group

    def join_group(self, engine: Any) -> None:
        """Called by a front end before the first step in a group, on all ranks.

        Args:
            engine: as of `end_step`; in a `LocalGroup`, one that knows the group and exchanges nothing.
        """

    def change_group(self, rank: int, size: int) -> None:
        """Continue as another rank, or in a group of another size: called in elastic jobs. Residuals are kept."""
        for part in self.parts:
            part.memory.change_group(rank, size)

    # --- the end of a step

    def end_step(self, engine: Any) -> None:
        """Called by a front end when all gradients of a step are averaged, at the same point on all ranks.

        A method may exchange what it has measured here, and change what `method_for` returns in the next step. A
        `LocalGroup` calls it after each average.

        Args:
            engine: of the group that has averaged the gradients (gradzip.engines.base.Engine); None in a `LocalGroup`,
                where nothing can be exchanged.
        """

    def skip_step(self) -> None:
        """Called in place of `end_step`, on all ranks, if GradScaler is going to skip the optimizer's step.

        In a `LocalGroup`: if the average is not finite.
        """

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
        """The compressor that is in charge of a parameter. prefix: of its model; the state's name is prefix + name."""
        return self

    def step_of(self, name: str, shape: torch.Size, prefix: str = "") -> int:
        """The number of steps of a parameter so far, which ranks compare before they start. Arguments: `method_for`."""
        state = self.method_for(name, shape, prefix).memory.find(prefix + name)
        return 0 if state is None else state.step

    def register_parameter(self, name: str, shape: torch.Size, state_name: str) -> None:
        """Called when it is planned how a parameter is averaged. state_name: the name with the prefix of its model."""

    def observe(self, state_name: str, grad: Tensor) -> None:
        """Called with each gradient before it is averaged, but not for frozen parameters.

        Args:
            state_name: of the parameter, or of the bucket that is compressed as one vector.
            grad: must not be changed here, and is overwritten later.
        """

    # --- configuration

    def clone(self) -> Compressor:
        """A compressor with the same hyper-parameters and loss scale, and no state."""
        clone = replace(self, **{f.name: cloned(getattr(self, f.name)) for f in fields(self) if f.init})
        clone.memory.scaler = self.memory.scaler
        return clone

    @property
    def digest(self) -> int:
        """32 bits of the configuration: ranks with equal digests understand each other's payloads."""
        return digest_of(self)

    def follow(self, scaler: Any) -> Compressor:
        """Rescale states when the loss scale changes, for training in mixed precision.

        Gradients come multiplied by ``scaler.get_scale()``. If one gradient is not finite, GradScaler skips the
        optimizer's step for all parameters. All parameters keep a copy of their last state then, and are rolled back.

        Args:
            scaler: a torch.amp.GradScaler.

        Returns the compressor itself.

        >>> import gradzip, torch
        >>> compressor = gradzip.TopK(theta=0.99).follow(torch.amp.GradScaler("cpu"))
        """
        if isinstance(scaler, type) or not callable(getattr(scaler, "get_scale", None)):
            raise ValueError(f"follow: got {scaler!r}, expected a torch.amp.GradScaler, as in follow(scaler)")
        for compressor in (self, *self.parts):
            compressor.memory.scaler = scaler
        return self

    # --- state

    @property
    def states(self) -> dict[str, State]:
        """The states of this compressor's parameters, by name."""
        return self.memory.states

    def state_dict(self) -> dict[str, Any]:
        """All states as plain tensors and numbers. ``torch.load(weights_only=True)`` reads them."""
        return state_dict_of(self.states, self.rank_local, type(self).__name__)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict.

        Rank-local fields are kept if the same rank of a group of the same size continues, and dropped with a warning
        otherwise. `gradzip.checkpoint` merges the state dicts of all ranks. Shapes are checked in the first step.

        Raises:
            ValueError: the state dict belongs to another method or is malformed.
        """
        self.memory.states = states_from(state_dict, type(self).__name__)

    # --- Horovod calls these two methods of its `compression` argument

    def compress(self, *tensor: Tensor) -> tuple[Tensor, Any]:
        if not tensor:  # called on the class, as Horovod calls its own compressions
            raise TypeError("compression: got a class, expected an instance of it, as in compression=gradzip.TopK()")
        return type(self).horovod_front_end(self).compress(self, *tensor)

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        return tensor if ctx is None else ctx.finish(tensor)
