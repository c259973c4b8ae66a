"""All states of one compressor: loss scale, changes of the group, buckets, changes of the method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .names import StateNames
from .state import BucketState, State
from .state_dict import restore

# From a gradient to the shapes of its state's tensors, by field. Called for loaded states only.
Shapes = Callable[[Tensor], Mapping[str, tuple[int, ...]]]


class LossScale:
    """The factor that gradients are multiplied by. Read once a step: a GradScaler keeps it on the device.

    A compressor and its parts share one.
    """

    def __init__(self, scaler: Any = None) -> None:
        self.scaler = scaler  # a torch.amp.GradScaler
        self._value: float | None = None

    def begin_step(self) -> None:
        """Read the scale again when it is needed next."""
        self._value = None

    @property
    def value(self) -> float:
        if self.scaler is None:
            return 1.0
        if self._value is None:
            self._value = float(self.scaler.get_scale())
        return self._value


class Memory:
    """The states that one compressor keeps, by parameter name.

    Args:
        method: name of the compressor's class, for errors.
        loss_scaled: state fields to multiply when the loss scale changes, and the power of the loss scale that they
            are proportional to.
        rank_local: state fields that differ between ranks. All other fields are the same on all ranks.
        partition_local: the rank-local fields of the partition that this rank owns; they depend on the world size.
    """

    def __init__(
        self, method: str, loss_scaled: Mapping[str, int], rank_local: tuple[str, ...], partition_local: tuple[str, ...]
    ) -> None:
        self.method = method
        self.loss_scaled = loss_scaled
        self.rank_local = rank_local
        self.partition_local = partition_local
        self.states: dict[str, State] = {}
        self.loss_scale = LossScale()
        self.skips_nonfinite = True  # whether a step is skipped for all parameters if an average is not finite
        self.names = StateNames()

    def begin_step(self, name: str, grad: Tensor, shapes: Shapes, rank: int, size: int) -> State:
        """Get a parameter's state for a step: checked, on the gradient's device, rescaled to the loss scale.

        Args:
            rank, size: this rank's number and the world size.

        Raises:
            ValueError: the state belongs to a gradient of another shape.
        """
        state = self.states.get(name)
        if state is None:
            state = self.states[name] = State(name)
        self._restore(state, grad, shapes, rank, size)
        if state.residual is not None and state.residual.shape != grad.shape:
            raise ValueError(
                f"{self.method}, parameter {name!r}: got a gradient of shape {tuple(grad.shape)}, expected "
                f"{tuple(state.residual.shape)} as in the step before; give each parameter a name of its own"
            )
        state.set_rank(rank, size, self.partition_local)
        self._rescale(state)
        return state

    def _restore(self, state: State, grad: Tensor, shapes: Shapes, rank: int, size: int) -> None:
        if state.loaded:
            restore(state, shapes(grad), grad.device, rank, size, self.rank_local, self.method)

    def find(self, name: str) -> State | None:
        """The state of a parameter, or of the bucket that has it."""
        buckets = (s for s in self.states.values() if isinstance(s, BucketState) and name in s.shapes)
        return self.states.get(name) or next(buckets, None)

    def free(self, names: Iterable[str]) -> None:
        """Free the states of parameters."""
        gone = set(names)
        self.split_buckets(gone)
        for name in gone:
            self.states.pop(name, None)

    def drop_rank_local(self) -> None:
        """Drop the residuals, and all other fields that differ between ranks, from all states."""
        for state in self.states.values():
            for field in self.rank_local:
                vars(state).pop(field, None)
            state.residual = None

    def add_to_residual(self, name: str, value: Tensor) -> None:
        """Add a tensor to the residual of a parameter. Its loss scale is that of the current step."""
        state = self.find(name)
        if state is None:
            state = self.states[name] = State(name)
        self._rescale(state)
        if isinstance(state, BucketState):
            state.add_to_residual(name, value)
        else:
            value = value.clone(memory_format=torch.contiguous_format)
            state.residual = value if state.residual is None else state.residual + value

    def piece(self, name: str, field: str) -> Tensor | None:
        """A tensor of a parameter's state, or a view of the parameter's part of its bucket's; None without one."""
        state = self.find(name)
        value = getattr(state, field, None)
        return value if value is None or not isinstance(state, BucketState) else state.piece(name, value)

    # --- loss scale

    def _rescale(self, state: State) -> None:
        scale = self.loss_scale.value
        factor = scale / getattr(state, "loss_scale", scale)
        if factor != 1.0:
            for name, power in self.loss_scaled.items():
                value = getattr(state, name, None)
                if isinstance(value, Tensor):
                    value.mul_(factor**power)
                elif value is not None:
                    setattr(state, name, value * factor**power)
        if self.loss_scale.scaler is not None or factor != 1.0:
            state.loss_scale = scale

    @property
    def checks(self) -> bool:
        """Whether a step is skipped if an average is not finite: by GradScaler, or by `optimizer_hooks`."""
        return self.skips_nonfinite or self.loss_scale.scaler is not None

    # --- rank and world size

    def change_group(self, rank: int, size: int) -> None:
        """Continue as another rank, or in a group of another size. Residuals are kept."""
        self.split_all_buckets()  # adds owners' residuals to residuals: none is lost
        for state in self.states.values():
            state.set_rank(rank, size, self.partition_local)

    # --- buckets

    def concatenate(
        self,
        name: str,
        gradients: Mapping[str, Tensor],
        joined_shape: tuple[int, ...],
        shapes: Shapes,
        rank: int,
        size: int,
    ) -> None:
        """Replace the states of several parameters by one `BucketState`.

        Args:
            name: of the bucket's state.
            gradients: by parameter name.
            joined_shape: of the concatenated gradients.
            shapes, rank, size: as in `begin_step`.
        """
        found = {parameter: self.states[parameter] for parameter in gradients if parameter in self.states}
        for parameter, state in found.items():
            state.abandon()
            self._restore(state, gradients[parameter], shapes, rank, size)
            self._rescale(state)  # a parameter that was frozen still has the loss scale of its last step
        for parameter in found:
            del self.states[parameter]
        of_bucket = {parameter: gradient.shape for parameter, gradient in gradients.items()}
        self.states[name] = BucketState.concatenate(name, of_bucket, found, joined_shape)

    def split_buckets(self, parameters: set[str]) -> None:
        """Split the states of all buckets that have any of these parameters."""
        for state in list(self.states.values()):
            if isinstance(state, BucketState) and state.shapes.keys() & parameters:
                del self.states[state.name]
                self.states |= state.split()

    def split_all_buckets(self) -> None:
        """Split the states of all buckets. The next step concatenates them again."""
        states = [state for state in self.states.values() if isinstance(state, BucketState)]
        self.split_buckets({parameter for state in states for parameter in state.shapes})

    # --- a change of the method

    def move_residual(self, name: str, to: Memory) -> None:
        """Free a parameter's state, and add its residual to the parameter's state in another memory.

        If a bucket has the parameter, its state is split first. The residual of a state that was loaded and not used
        since is dropped if the other memory has a state.
        """
        self.split_buckets({name})
        state = self.states.pop(name, None)
        residual = None if state is None else state.take_residual()
        if state is None or residual is None:
            return
        new = to.states.get(name)
        if state.loaded and new is not None:
            return  # not checked yet: it may be another rank's, or on another device
        if new is None:
            new = to.states[name] = State(name, state.rank, state.size)
            if hasattr(state, "loss_scale"):
                new.loss_scale = state.loss_scale
        current = self.loss_scale.value
        scale = getattr(new, "loss_scale", current) / getattr(state, "loss_scale", current)
        if scale != 1.0:
            residual.mul_(scale)
        new.residual = residual if new.residual is None else new.residual + residual
        new.loaded |= state.loaded  # checked in the next step
