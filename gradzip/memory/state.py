"""The state of a parameter, or of a bucket of parameters, between steps; keys of random draws; reusable memory."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import ops

# The joined shape (`Compressor.joined_shape`) of methods that compress a bucket as one vector.
VECTOR = (1, -1)

# State fields that are sums over elements: a bucket has the sum of its parameters' values.
_SUMS = ("payload_nbytes", "square", "former_square")


class Key(NamedTuple):
    """The key of one random draw. Equal keys give equal numbers on every device; different keys independent ones."""

    seed: int
    step: int
    name: str
    rank: int | str  # "shared" where all ranks must draw the same numbers

    @property
    def bits(self) -> int:
        """The key as 64 bits, the key of the counter-based generator (csrc/common/philox.h)."""
        text = f"{self.seed}/{self.step}/{self.rank}/{self.name}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class State:
    """State of one parameter: step count, residual, and the fields that its method adds.

    A step that is skipped or has failed is undone by restoring the fields that the state had before. In a step, methods
    therefore assign new tensors to fields, and change none in place. `renewed` has memory for them. Until the step is
    complete, what is saved, copied and split are the fields before it.
    """

    __slots__ = ("__dict__", "__weakref__", "_before", "_spares")  # the last two are no fields

    # Fields that a state dict does not hold.
    TRANSIENT: tuple[str, ...] = ("name", "payload", "next_residual", "loaded")

    def __init__(self, name: str, rank: int = 0, size: int = 1) -> None:
        self.name = name
        self.rank = rank
        self.size = size  # of the group
        self.step = 0
        self.residual: Tensor | None = None
        self.payload: Tensor | None = None  # that this rank has sent in the current step
        self.next_residual: Tensor | None = None  # in the current step: what is going to be the residual, if it is made
        self.loaded = False  # whether it comes from a state dict, and is not yet checked against a gradient
        self._spares: dict[str, Tensor | None] = {}  # by field that is renewed: a tensor to overwrite
        self._before: dict[str, Any] | None = None  # the fields before a step that has begun and is not complete

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.kept)  # a copy has no spares yet

    def __setstate__(self, fields: dict[str, Any]) -> None:
        vars(self).update(fields)
        self._spares, self._before = {}, None

    def key(self, seed: int) -> Key:
        """The key of this rank's random draw in the current step."""
        return Key(seed, self.step, self.name, self.rank)

    def fields(self) -> dict[str, Any]:
        """A shallow copy of all fields, for `replace_fields`."""
        return dict(vars(self))

    def replace_fields(self, fields: Mapping[str, Any]) -> None:
        """Replace all fields by these, which `fields` returned."""
        vars(self).clear()
        vars(self).update(fields)

    @property
    def kept(self) -> dict[str, Any]:
        """The fields, without a step that has begun and is not complete: it may have failed."""
        return vars(self) if self._before is None else self._before

    def begin(self) -> dict[str, Any]:
        """Begin a step. Returns the fields before it."""
        self._before = self.fields()
        return self._before

    def complete(self, before: Mapping[str, Any]) -> None:
        """Complete a step: it can no longer be undone. before: what `begin` returned."""
        if before is self._before:
            self._before = None
            self._recycle(before)

    def abandon(self, before: Mapping[str, Any] | None = None) -> bool:
        """Restore the fields before a step that has begun and is not complete. Returns whether there was one.

        before: what `begin` returned in the step that is meant; another one may have begun since. None: the last one.
        """
        if self._before is None or (before is not None and before is not self._before):
            return False
        self.replace_fields(self._before)  # collectives in progress may use the others: they are not recycled
        self._before = None
        return True

    def renewed(self, field: str, like: Tensor) -> Tensor:
        """Uninitialized memory for the new value of a field, with the shape and dtype of `like`.

        It is not that of the current value, unless a CUDA graph is captured: replays find the value of the last one
        there. Assign it to the field in the same step.
        """
        spare = self._spares.get(field)
        self._spares[field] = None
        if ops.is_capturing(like):
            spare = getattr(self, field, None)
        if spare is not None and (spare.shape, spare.dtype, spare.device) == (like.shape, like.dtype, like.device):
            return spare
        return torch.empty_like(like, memory_format=torch.contiguous_format)

    def _recycle(self, fields: Mapping[str, Any]) -> None:
        """Let `renewed` reuse the tensors of former fields.

        Only on a CPU: a device's allocator keeps freed memory itself.
        """
        for name in self._spares:
            former = fields.get(name)
            if isinstance(former, Tensor) and former.device.type == "cpu" and former is not getattr(self, name, None):
                self._spares[name] = former

    def set_rank(self, rank: int, size: int, partition_local: tuple[str, ...]) -> None:
        """Record rank and world size; drop the partition-local fields if they changed."""
        if (self.rank, self.size) != (rank, size):
            for name in partition_local:
                if hasattr(self, name):
                    setattr(self, name, None)
        self.rank, self.size = rank, size

    @property
    def parameters(self) -> Collection[str]:
        """The names of the parameters whose state this is."""
        return (self.name,)

    def pieces(self, value: Tensor) -> list[Tensor]:
        """Views of each parameter's part of a tensor of the state, or of its gradient."""
        return [value]

    def take_residual(self) -> Tensor | None:
        """Remove the residual and the owner's residual from the state, and return their sum."""
        residual = _with_owner_residual(self).get("residual")
        self.residual = None
        for name in ("owner_residual", "owner_start"):
            vars(self).pop(name, None)
        return residual

    def state_dict(self) -> dict[str, Any]:
        """The fields to save: tensors, lists of tensors and numbers."""
        return {k: v for k, v in self.kept.items() if k not in self.TRANSIENT and v is not None}

    def state_dicts(self) -> dict[str, dict[str, Any]]:
        """State dicts by parameter name."""
        return {self.name: self.state_dict()}

    if TYPE_CHECKING:  # fields that methods add

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


class BucketState(State):
    """State of several parameters of a bucket, whose gradients are concatenated to one tensor.

    Buckets change: DDP rebuilds its buckets after the first step, and parameters are frozen. A bucket's state is
    therefore concatenated from its parameters' states and split into them again. It is also saved by parameter.
    """

    TRANSIENT = (*State.TRANSIENT, "shapes", "joined_shape")

    def __init__(self, name: str, shapes: Mapping[str, torch.Size], joined_shape: tuple[int, ...] = VECTOR) -> None:
        super().__init__(name)
        self.shapes = dict(shapes)  # by parameter name, in the order of the concatenation
        self.joined_shape = joined_shape

    @classmethod
    def concatenate(
        cls,
        name: str,
        shapes: Mapping[str, torch.Size],
        states: Mapping[str, State],
        joined_shape: tuple[int, ...] = VECTOR,
    ) -> BucketState:
        """Concatenate the states of a bucket's parameters. A parameter without a state counts as zeros."""
        bucket = cls(name, shapes, joined_shape)
        saved = {parameter: _with_owner_residual(state) for parameter, state in states.items()}
        for key in dict.fromkeys(key for fields in saved.values() for key in fields):
            values = {parameter: fields[key] for parameter, fields in saved.items() if key in fields}
            some = next(iter(values.values()))
            if isinstance(some, Tensor):
                parts = [
                    values[parameter].reshape(-1) if parameter in values else some.new_zeros(shape.numel())
                    for parameter, shape in shapes.items()
                ]
                vars(bucket)[key] = torch.cat(parts).view(joined_shape)
            else:  # equal for all parameters, unless some were not averaged in a step
                vars(bucket)[key] = sum(values.values()) if key in _SUMS else max(values.values())
        return bucket

    @property
    def parameters(self) -> Collection[str]:
        return self.shapes.keys()

    def add_to_residual(self, parameter: str, value: Tensor) -> None:
        """Add a tensor to the residual of one parameter."""
        if self.residual is None:
            numel = sum(shape.numel() for shape in self.shapes.values())
            self.residual = value.new_zeros(numel).view(self.joined_shape)
        self.piece(parameter, self.residual).add_(value)

    def pieces(self, value: Tensor) -> list[Tensor]:
        parts = value.view(-1).split([shape.numel() for shape in self.shapes.values()])
        return [part.view(shape) for part, shape in zip(parts, self.shapes.values())]

    def piece(self, parameter: str, value: Tensor) -> Tensor:
        """A view of one parameter's part of a tensor of the state."""
        return dict(zip(self.shapes, self.pieces(value)))[parameter]

    def split(self) -> dict[str, State]:
        """Split into the states of the parameters, with tensors of their own."""
        states = {parameter: State(parameter, self.rank, self.size) for parameter in self.shapes}
        numels = {parameter: shape.numel() for parameter, shape in self.shapes.items()}
        for key, value in _with_owner_residual(self).items():
            if isinstance(value, Tensor):
                values = [piece.clone() for piece in self.pieces(value)]
            elif key in _SUMS:
                values = [type(value)(value * numel / sum(numels.values())) for numel in numels.values()]
            else:
                values = [value] * len(numels)
            for state, part in zip(states.values(), values):
                vars(state)[key] = part
        return states

    def state_dicts(self) -> dict[str, dict[str, Any]]:
        return {parameter: state.state_dict() for parameter, state in self.split().items()}


def _with_owner_residual(state: State) -> dict[str, Any]:
    """The fields to save, with the owner's residual added to the rank's residual.

    The owner's residual is the error of an average, so it counts `size` times in the rank's gradient. It belongs to the
    rank's partition of `split_partitions`, or, if the state has `owner_start`, to the flat elements from there on.
    """
    fields = state.state_dict()
    owner, start = fields.pop("owner_residual", None), fields.pop("owner_start", None)
    if owner is not None:
        fields["residual"] = fields["residual"].clone()
        if start is not None:
            partitions = {state.rank: fields["residual"].view(-1)[start : start + owner.numel()]}
        else:
            partitions = dict(enumerate(split_partitions(fields["residual"], state.size)))
        # The group may have another size than when the state was saved.
        if state.rank in partitions and partitions[state.rank].shape == owner.shape:
            partitions[state.rank].add_(owner, alpha=state.size)
    return fields


def split_partitions(tensor: Tensor, size: int) -> list[Tensor]:
    """Split a contiguous tensor into views, one for each of `size` ranks, in order.

    Partitions are blocks of rows, so that methods for matrices get matrices. With fewer than `size` rows, they are
    pieces of the flat tensor.
    """
    if size == 1:
        return [tensor]
    rows = tensor if tensor.dim() > 1 and tensor.shape[0] >= size else tensor.view(-1)
    return list(rows.tensor_split(size))


class Workspace:
    """Reusable buffers by name, which grow to the largest size asked for.

    A fresh large tensor costs a page fault every 4 KiB, which takes several times as long as the work done in it.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], Tensor] = {}

    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:
        return Workspace, ()  # a copy has no buffers yet

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor in the buffer `name`. The next call with that name reuses its memory."""
        numel = math.prod(shape)
        buffer = self._buffers.get((name, device))
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[name, device] = torch.empty(numel, dtype=dtype, device=device)
        return buffer[:numel].view(shape)

    def clear(self) -> None:
        """Free all buffers."""
        self._buffers.clear()
