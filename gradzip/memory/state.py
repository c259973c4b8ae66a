"""The state of a group of parameters between steps; keys of random draws; reusable memory."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

# From the shape of a parameter to the shapes of its parts of a state's tensors, by field.
FieldShapes = Callable[[torch.Size], Mapping[str, tuple[int, ...]]]

# What is saved of one parameter: tensors of its shape, the part of `owner_residual` that it has, from its element
# `owner_start` on, and numbers.
Fields = dict[str, Any]

# Fields that are sums over elements. They are saved with the first parameter of a group.
_SUMS = ("payload_nbytes", "square", "former_square")


def nbytes_of(fields: Mapping[str, Any]) -> int:
    """Bytes of the tensors among fields, also in lists."""
    values = [value if isinstance(value, list) else [value] for value in fields.values()]
    return sum(value.nbytes for value in itertools.chain(*values) if isinstance(value, Tensor))


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


def group_name(names: Sequence[str]) -> str:
    """The name of a group of parameters: of its state, its random draws and its reports."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


class State:
    """State of the parameters of a group: step count, residual, and the fields that their method adds.

    Tensors are flat: the parts of the parameters, one after the other, in the order of `shapes`. A method says how
    large each part is (`Compressor.state_shapes`). In a group of one parameter, methods may keep tensors of any shape.

    A step that is skipped or has failed is undone by restoring the fields that the state had before. In a step, methods
    therefore assign new tensors to fields, and change none in place. `renewed` has memory for them. What gradients hold
    overwrites fields at the end of a step, where that counts (`Group.commit_held`). Until the step is complete, what is
    saved, copied and split are the fields before it.

    Args:
        shapes: of the parameters, by name.
    """

    __slots__ = ("__dict__", "__weakref__", "_spares", "before")  # the last two are no fields

    # Fields that a state dict does not hold. It has what `owner_ranges` says in another form, too.
    TRANSIENT = (
        "name", "shapes", "field_shapes", "numel", "payload", "next_residual", "next_velocity", "owner_ranges"
    )  # fmt: skip

    def __init__(self, shapes: Mapping[str, torch.Size], rank: int = 0, size: int = 1) -> None:
        self.shapes = dict(shapes)
        # Of the parameters' parts of tensors: by parameter, and by field.
        self.field_shapes: dict[str, Mapping[str, tuple[int, ...]]] = {name: {} for name in shapes}
        self.name = group_name(list(shapes))
        self.numel = sum(shape.numel() for shape in shapes.values())  # elements of all parameters
        self.rank = rank
        self.size = size  # of the group of ranks
        self.step = 0
        self.residual: Tensor | None = None
        self.payload: Any = None  # what this rank has sent in the current step
        self.next_residual: Tensor | None = None  # in the current step: what is going to be the residual, if it is made
        self._spares: dict[str, Tensor | None] = {}  # by field that is renewed: a tensor to overwrite
        self.before: dict[str, Any] | None = None  # the fields before a step that has begun and is not complete

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.kept)  # a copy has no spares yet

    def __setstate__(self, fields: dict[str, Any]) -> None:
        vars(self).update(fields)
        self._spares, self.before = {}, None

    def key(self, seed: int) -> Key:
        """The key of this rank's random draw in the current step."""
        return Key(seed, self.step, self.name, self.rank)

    # --- a step

    def replace_fields(self, fields: Mapping[str, Any]) -> None:
        """Replace all fields by these, a copy of former ones."""
        vars(self).clear()
        vars(self).update(fields)

    @property
    def kept(self) -> dict[str, Any]:
        """The fields, without a step that has begun and is not complete: it may have failed."""
        return vars(self) if self.before is None else self.before

    def begin(self) -> dict[str, Any]:
        """Begin a step. Returns the fields before it."""
        self.before = dict(vars(self))
        return self.before

    def complete(self, before: Mapping[str, Any]) -> None:
        """Complete a step: it can no longer be undone. `renewed` may reuse the tensors of former fields.

        before: what `begin` returned.
        """
        if before is not self.before:
            return
        self.before = None
        for name in self._spares:
            former = before.get(name)
            # Only on a CPU: a device's allocator keeps freed memory itself.
            if isinstance(former, Tensor) and former.is_cpu and former is not getattr(self, name, None):
                self._spares[name] = former

    def changed(self, before: Mapping[str, Any]) -> list[tuple[Tensor, Tensor | None]] | None:
        """The tensors that the step in progress has changed: each now, and as before; None stands for zeros.

        None: fields have come or gone without which a state is another one, so that their elements do not suffice to
        undo the step.
        """
        if before is not self.before:
            return []
        found: list[tuple[Tensor, Tensor | None]] = []
        fields = vars(self)
        for field in fields.keys() | before.keys():
            now, former = fields.get(field), before.get(field)
            if now is former or field in self.TRANSIENT or not (isinstance(now, Tensor) or isinstance(former, Tensor)):
                continue
            if now is None or (former is None and not self.is_zero_without(field)):
                return None
            found.append((now, former))
        moves = "owner_residual" in before and before.get("owner_ranges") != fields.get("owner_ranges")
        return None if moves else found

    def is_zero_without(self, field: str) -> bool:
        """Whether a state without a field is as one whose elements of it are all 0."""
        shapes = self.field_shapes
        return field == "owner_residual" or all(of.get(field) == tuple(self.shapes[n]) for n, of in shapes.items())

    def restore(self, before: Mapping[str, Any]) -> None:
        """Undo what the step in progress has changed of tensors. Numbers, such as the step count, stay."""
        fields = vars(self)
        for field in fields.keys() | before.keys():
            values = fields.get(field), before.get(field)
            if field == "owner_ranges" or any(isinstance(value, Tensor) for value in values):
                if field in before:
                    fields[field] = before[field]
                else:
                    del fields[field]

    def abandon(self, before: Mapping[str, Any] | None = None) -> bool:
        """Restore the fields before a step that has begun and is not complete. Returns whether there was one.

        before: what `begin` returned in the step that is meant; another one may have begun since. None: the last one.
        """
        if self.before is None or (before is not None and before is not self.before):
            return False
        self.replace_fields(self.before)  # collectives in progress may use the others: they are not recycled
        self.before = None
        return True

    def keep(self, parameters: Collection[str]) -> None:
        """Undo the step in progress for the elements of some parameters: nobody gets their averages.

        What has a number for each of their elements becomes what it was before the step. All else goes on, such as the
        step count, and factors that all ranks have; unless these are all parameters.
        """
        before = self.before or {}
        if before and set(parameters) == self.shapes.keys():
            self.replace_fields(before)
            return
        owner: Any = getattr(self, "owner_residual", None)
        ranges = getattr(self, "owner_ranges", ())
        former_owner = before.get("owner_residual")
        if former_owner is not None and before["owner_ranges"] != ranges:  # the step has folded it
            folded = self._folded(before["residual"], former_owner, before["owner_ranges"])
            before, former_owner = {**before, "residual": folded}, None
        for name in parameters:
            shape, first = self.shapes[name], self.start_of(name)
            for field in [field for field, of in self.field_shapes[name].items() if of == tuple(shape)]:
                now, former = vars(self).get(field), before.get(field)
                if now is None and former is not None:  # a residual that was sent whole
                    now = vars(self)[field] = torch.zeros_like(former)
                if now is not None and now is not former:
                    _restore(self.piece(name, now), None if former is None else self.piece(name, former))
            begin = 0
            for start, stop in ranges:
                low, high = max(start, first), min(stop, first + shape.numel())
                if low < high:
                    part = slice(begin + low - start, begin + high - start)
                    _restore(owner[part], None if former_owner is None else former_owner[part])
                begin += stop - start

    def renewed(self, field: str, like: Tensor, numel: int | None = None) -> Tensor:
        """Uninitialized flat memory for the new value of a field, with the dtype and on the device of `like`.

        It is not that of the current value. Assign it to the field in the same step.

        numel: number of elements; default: those of `like`.
        """
        numel = like.numel() if numel is None else numel
        spare = self._spares.get(field)
        self._spares[field] = None
        if spare is not None and spare.numel() == numel and spare.dtype == like.dtype and spare.device == like.device:
            return spare
        return torch.empty(numel, dtype=like.dtype, device=like.device)

    def cast(self, field: str, dtype: torch.dtype) -> None:
        """In a step: convert a tensor, if there is one of another dtype, also as it was before the step."""
        for fields in (vars(self), self.before or {}):
            if field in fields:
                fields[field] = fields[field].to(dtype)

    def drop_owed(self) -> None:
        """In a step: drop what earlier steps owe to this one's average."""
        for name in ("owner_residual", "owner_ranges", "velocity", "average_velocity"):
            vars(self).pop(name, None)
        self.residual = None

    # --- ranks

    def fold_owner_residual(self) -> None:
        """Add the owner's residual to the residual.

        It is the error of an average, so it counts `size` times in the rank's gradient. It has the elements of
        `owner_ranges`, one range after the other.
        """
        owner, ranges = (vars(self).pop(name, None) for name in ("owner_residual", "owner_ranges"))
        if owner is not None:
            self.residual = self._folded(self.residual, owner, ranges)

    def _folded(self, residual: Tensor | None, owner: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
        residual = owner.new_zeros(self.numel) if residual is None else residual.clone()
        pieces = owner.split_with_sizes([stop - start for start, stop in ranges])
        for (start, stop), piece in zip(ranges, pieces, strict=True):
            residual[start:stop].add_(piece, alpha=self.size)
        return residual

    # --- parameters

    def start_of(self, parameter: str) -> int:
        """The first element of a parameter among those of all parameters."""
        names = list(self.shapes)
        return sum(self.shapes[name].numel() for name in names[: names.index(parameter)])

    def piece(self, parameter: str, value: Tensor) -> Tensor:
        """A view of one parameter's part of a tensor that has all their elements."""
        start, shape = self.start_of(parameter), self.shapes[parameter]
        return value.view(-1)[start : start + shape.numel()].view(shape)

    def by_parameter(self) -> dict[str, Fields]:
        """The fields to save, by parameter: tensors of their own, lists of tensors, and numbers."""
        fields = {k: v for k, v in self.kept.items() if k not in self.TRANSIENT and v is not None}
        owner, ranges = fields.pop("owner_residual", None), self.kept.get("owner_ranges", ())
        saved: dict[str, Fields] = {name: {} for name in self.shapes}
        for key, value in fields.items():
            for i, (name, part) in enumerate(zip(saved, self._parts(key, value))):
                saved[name][key] = type(value)() if key in _SUMS and i else part
        begin = 0
        for start, stop in ranges:
            of_range = owner[begin : begin + stop - start]
            begin += stop - start
            for name, shape in self.shapes.items():
                first = self.start_of(name)
                low, high = max(start, first), min(stop, first + shape.numel())
                if low < high:
                    saved[name]["owner_residual"] = of_range[low - start : high - start].clone()
                    saved[name]["owner_start"] = low - first
        return saved

    def _parts(self, key: str, value: Any) -> Sequence[Any]:
        """The parts of a field's value, by parameter."""
        shapes = list(self.field_shapes.values())
        if isinstance(value, Tensor) and all(key in of_one for of_one in shapes):
            pieces = value.view(-1).split_with_sizes([math.prod(of_one[key]) for of_one in shapes])
            copies = pieces if len(shapes) == 1 else [piece.clone() for piece in pieces]
            return [piece.view(of_one[key]) for piece, of_one in zip(copies, shapes)]
        if isinstance(value, (Tensor, list)) and len(shapes) > 1:
            raise TypeError(f"{self.name}: got no shapes of the field {key!r}, expected them from `state_shapes`")
        return [value] * len(shapes)

    @classmethod
    def of_parameters(
        cls, shapes: Mapping[str, torch.Size], states: Mapping[str, Fields], field_shapes: FieldShapes
    ) -> State:
        """The state of a group, made of the saved fields of its parameters, by name.

        A parameter without a field counts as zeros, if the field has a number for each element; other fields are
        dropped then, so that the method begins anew. Numbers are the largest of those of the parameters.
        """
        state = cls(shapes)
        of_fields = state.field_shapes = {name: field_shapes(shape) for name, shape in shapes.items()}
        owned: list[tuple[int, Tensor]] = []
        for key in dict.fromkeys(key for fields in states.values() for key in fields):
            values = {name: fields[key] for name, fields in states.items() if key in fields}
            some = next(iter(values.values()))
            if key == "owner_residual":
                owned = [
                    (state.start_of(name) + states[name]["owner_start"], values[name].view(-1))
                    for name in shapes
                    if name in values
                ]
            elif isinstance(some, Tensor) and all(key in of_one for of_one in of_fields.values()):
                if len(values) < len(shapes) and any(of[key] != tuple(shapes[n]) for n, of in of_fields.items()):
                    continue
                parts = [
                    values[name].reshape(-1) if name in values else some.new_zeros(math.prod(of_one[key]))
                    for name, of_one in of_fields.items()
                ]
                vars(state)[key] = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
            elif key in _SUMS:
                vars(state)[key] = sum(values.values())
            elif key != "owner_start":
                vars(state)[key] = max(values.values()) if len(shapes) > 1 else some
        if owned:
            ranges: list[tuple[int, int]] = []
            for start, piece in owned:
                stop = start + piece.numel()
                if ranges and ranges[-1][1] == start:
                    start, ranges[-1:] = ranges[-1][0], []
                ranges.append((start, stop))
            state.owner_residual, state.owner_ranges = torch.cat([piece for _, piece in owned]), ranges
        return state

    if TYPE_CHECKING:  # fields that methods add

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


def _restore(part: Tensor, former: Tensor | None) -> None:
    """Overwrite a part of a tensor by what it was before; None: there was nothing."""
    part.zero_() if former is None else part.copy_(former)


class Workspace:
    """Reusable buffers by name, which grow to the largest size asked for.

    A fresh large tensor costs a page fault every 4 KiB, which takes several times as long as the work done in it.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:
        return Workspace, ()  # a copy has no buffers yet

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor in the buffer `name`. The next call with that name reuses its memory.

        On a device, it is a new one: the allocator reuses memory there without page faults.
        """
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        numel = math.prod(shape)
        buffer = self._buffers.get((name, dtype, device))
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[name, dtype, device] = torch.empty(numel, dtype=dtype, device=device)
        return buffer[:numel].view(shape)

    def clear(self) -> None:
        """Free all buffers."""
        self._buffers.clear()
