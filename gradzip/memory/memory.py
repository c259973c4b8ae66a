"""All states of one compressor: loss scale, changes of the group, of buckets and of the method."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops import tensors as ops
from .names import StateNames, moved
from .state import Fields, FieldShapes, State, group_name, nbytes_of
from .state_dict import check_fields
from .verdict import read_all


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

    def later(self) -> Callable[[], float]:
        """What returns the scale of now, later. The host does not wait for the device."""
        if self.scaler is None or self._value is not None:
            return functools.partial(float, self.value)
        scale = getattr(self.scaler, "_scale", None)  # GradScaler's own tensor: `get_scale` waits
        if isinstance(scale, Tensor) and scale.is_cuda:
            copy = ops.CopyLater(scale)
            return lambda: copy.result().item()
        return functools.partial(float, self.value)

    @property
    def value(self) -> float:
        if self.scaler is None:
            return 1.0
        if self._value is None:
            self._value = float(self.scaler.get_scale())
        return self._value


class Memory:
    """The states that one compressor keeps.

    Groups change: DDP rebuilds its buckets after the first step, and parameters are frozen. A group's state is
    therefore made of the fields of its parameters, and split into them again. Fields are also saved by parameter.

    Args:
        method: name of the compressor's class, for errors.
        loss_scaled: state fields to multiply when the loss scale changes, and the power of the loss scale that they
            are proportional to.
        rank_local: state fields that differ between ranks. All other fields are the same on all ranks.
        partition_local: the rank-local fields of the partition that this rank owns; they depend on the world size.
    """

    def __init__(
        self,
        method: str,
        loss_scaled: Mapping[str, int],
        rank_local: tuple[str, ...],
        partition_local: tuple[str, ...],
    ) -> None:
        self.method = method
        self.loss_scaled = loss_scaled
        self.rank_local = rank_local
        self.partition_local = partition_local
        self.states: dict[str, State] = {}  # of groups, by name
        self.parked: dict[str, Fields] = {}  # by parameter: loaded, or of a former group
        self.loaded: set[str] = set()  # names of loaded states that no parameter has had yet
        self.loss_scale = LossScale()
        self.skips_nonfinite = True  # whether a step is skipped for all parameters if an average is not finite
        self.names = StateNames()

    # --- a step

    def begin_step(
        self, shapes: Mapping[str, torch.Size], field_shapes: FieldShapes, device: torch.device, rank: int, size: int
    ) -> State:
        """Get the state of a group for a step: on its device, rescaled to the loss scale.

        Args:
            shapes: of the parameters, by name.
            field_shapes: `Compressor.state_shapes`.
            rank, size: this rank's number and the world size.

        Raises:
            ValueError: the state of a parameter has other shapes.
        """
        state = self.states.get(group_name(list(shapes)))
        if state is not None and state.before is not None:
            state.abandon()  # a step that nobody has ended: its backward pass has failed
        if state is None or (state.shapes is not shapes and list(state.shapes.items()) != list(shapes.items())):
            state = self._regroup(shapes, field_shapes, device, rank, size)
        elif (state.rank, state.size) != (rank, size):
            state.rank, state.size = rank, size
            for field in self.partition_local:
                vars(state).pop(field, None)
        if self.loss_scale.scaler is not None or hasattr(state, "loss_scale"):
            self._rescale(state)
        return state

    def _regroup(
        self, shapes: Mapping[str, torch.Size], field_shapes: FieldShapes, device: torch.device, rank: int, size: int
    ) -> State:
        """Make the state of a group of what its parameters have."""
        for name, shape in shapes.items():
            state = self.find(name)
            if state is not None and state.residual is not None and state.shapes[name] != shape:
                raise ValueError(
                    f"{self.method}, parameter {name!r}: got a gradient of shape {tuple(shape)}, expected "
                    f"{tuple(state.shapes[name])} as in the step before; give each parameter a name of its own"
                )
        self.split(shapes)
        found = {name: self.parked.pop(name) for name in shapes if name in self.parked}
        self.loaded.difference_update(found)
        try:
            for name, fields in found.items():
                expected = field_shapes(shapes[name])
                check_fields(name, fields, expected, device, rank, size, self.rank_local, self.method)
                self._rescale_fields(fields)  # a parameter that was frozen still has the loss scale of its last step
        except ValueError:
            self.parked |= found
            raise
        state = State.of_parameters(shapes, found, field_shapes)
        state.rank, state.size = rank, size
        self.states[state.name] = state
        return state

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of all states."""
        return sum(map(nbytes_of, [*(state.kept for state in self.states.values()), *self.parked.values()]))

    # --- by parameter

    def find(self, name: str) -> State | None:
        """The state of the group that has a parameter."""
        state = self.states.get(name)
        if state is not None and name in state.shapes:
            return state
        return next((state for state in self.states.values() if name in state.shapes), None)

    def fields(self, name: str) -> Mapping[str, Any]:
        """The fields of a parameter's state, parked or not; those of tensors are the whole group's."""
        state = self.find(name)
        return self.parked.get(name, {}) if state is None else state.kept

    def by_parameter(self) -> dict[str, Fields]:
        """The fields to save, by parameter."""
        read_all()
        saved = dict(self.parked)
        for state in self.states.values():
            saved |= state.by_parameter()
        return saved

    def split(self, parameters: Iterable[str]) -> None:
        """Park the fields of all groups that have any of these parameters."""
        for name in parameters:
            if (state := self.find(name)) is not None:
                state.abandon()
                del self.states[state.name]
                self.parked |= state.by_parameter()

    def load(self, fields: dict[str, Fields]) -> None:
        """Replace all states by loaded ones, by parameter."""
        self.states, self.parked, self.loaded = {}, fields, set(fields)

    def rename(self, names: Mapping[str, str | None]) -> None:
        """Give states other names, by name; None frees a state."""
        self.split(names)
        found = {name: self.parked.pop(name) for name in names if name in self.parked}
        self.parked |= {to: found[name] for name, to in names.items() if to is not None and name in found}
        self.loaded = moved(self.loaded, names)

    def _take(self, name: str) -> Fields | None:
        self.split([name])
        return self.parked.pop(name, None)

    def clear(self) -> None:
        """Free all states."""
        self.states, self.parked = {}, {}

    def drop_rank_local(self) -> None:
        """Drop the residuals, and all other fields that differ between ranks, from all states."""
        self.split([name for state in self.states.values() for name in state.shapes])
        for fields in self.parked.values():
            for name in self.rank_local:
                fields.pop(name, None)

    def add_to_residual(self, name: str, value: Tensor, rank: int = 0, size: int = 1) -> None:
        """Add a tensor to the residual of a parameter. Its loss scale is that of the current step.

        rank, size: this rank's number and the world size.
        """
        state = self.find(name)
        if state is None:
            fields = self.parked.setdefault(name, {"step": 0, "rank": rank, "size": size})
            self._rescale_fields(fields)
            own, residual = value.clone(memory_format=torch.contiguous_format), fields.get("residual")
            fields["residual"] = own if residual is None else own.add_(residual)
            return
        self._rescale(state)
        if state.residual is None:
            state.residual = value.new_zeros(state.numel)
        state.piece(name, state.residual).add_(value)

    def piece(self, name: str, field: str) -> Tensor | None:
        """A view of a parameter's part of a tensor with its elements; None without one."""
        state = self.find(name)
        value = getattr(state, field, None)
        return None if state is None or value is None else state.piece(name, value)

    # --- loss scale

    def _rescale(self, state: State) -> None:
        self._rescale_fields(vars(state))

    def _rescale_fields(self, fields: Fields) -> None:
        """Multiply fields by what the loss scale has changed by since their last step, tensors in place."""
        scale = self.loss_scale.value
        factor = scale / fields.get("loss_scale", scale)
        if factor != 1.0:
            for name, power in self.loss_scaled.items():
                value = fields.get(name)
                if isinstance(value, Tensor):
                    value.mul_(factor**power)
                elif value is not None:
                    fields[name] = value * factor**power
        if self.loss_scale.scaler is not None or factor != 1.0:
            fields["loss_scale"] = scale

    @property
    def checks(self) -> bool:
        """Whether a step is skipped if an average is not finite: by GradScaler, or by `optimizer_hooks`."""
        return self.skips_nonfinite or self.loss_scale.scaler is not None

    # --- rank and world size

    def change_group(self, rank: int, size: int) -> None:
        """Continue as another rank, or in a group of another size. Residuals are kept."""
        for state in self.states.values():
            state.abandon()
            state.fold_owner_residual()  # none is lost
        self.split([name for state in self.states.values() for name in state.shapes])
        for fields in self.parked.values():
            _fold_owner_residual(fields)
            fields["rank"], fields["size"] = rank, size

    # --- a change of the method

    def move_residual(self, name: str, to: Memory) -> None:
        """Free a parameter's state, and add its residual to the parameter's state in another memory.

        A residual that was loaded and not used since is dropped if the other memory has a state: it may be another
        rank's.
        """
        was_parked = name in self.parked
        if (state := self.find(name)) is not None:
            state.abandon()
            state.fold_owner_residual()
        fields = self._take(name)
        if fields is None:
            return
        _fold_owner_residual(fields)
        if fields.get("residual") is None or (was_parked and to.find(name) is not None):
            return
        self._rescale_fields(fields)
        to.add_to_residual(name, fields["residual"], fields["rank"], fields["size"])


def _fold_owner_residual(fields: Fields) -> None:
    """Add the owner's residual to the residual of a parameter (`State.fold_owner_residual`), if it has one."""
    owner, start = (fields.pop(name, None) for name in ("owner_residual", "owner_start"))
    if owner is not None and fields.get("residual") is not None:
        fields["residual"] = fields["residual"].clone()
        fields["residual"].view(-1)[start : start + owner.numel()].add_(owner, alpha=fields["size"])
