"""A group: the gradients of a bucket that one method averages together, and the routine around the method."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...collectives import Mean, cost
from ...collectives.fusion import adjacent, as_real, flattened, pieces
from ...collectives.node_chunks import NodeChunks, among_peers
from ...collectives.routines import Routine
from ...memory.state import Fields, State, group_name
from ...ops import tensors as ops
from .compressor import Compressor, copy_all

# Elements of a group, at most, unless it is of one parameter: the numbers of a payload then have 32 bits. Its indices
# do; so do its bytes, with up to 15 bits for each element, which Horovod counts; and those of a coded bitmap, at most
# 10 for each 64 elements, fit the slack of a payload on a device (2^28 bytes).
MOST_NUMEL = 1 << 30

# Types in which an average is finite if its magnitudes in float32 are below 2^127: that is known before it is decoded.
_WIDE = (torch.float32, torch.bfloat16)

Planned = TypeVar("Planned")


class Inspected(NamedTuple):
    """Payloads that the device has checked, for the text of an error."""

    method: Any  # a GatherCompressor, which needs this module
    name: str  # of the group
    table: Tensor  # of `ops.verify_payloads`
    nbytes: Sequence[int]  # of each
    numels: Sequence[int]
    fields: Sequence[bytes]
    ranks: int  # payload i is from rank i % ranks


class Group:
    """The gradients of a bucket that one method averages together. Planned once, by `plan_groups`.

    A method sees its state and, in a step, what it compresses: `parts`, contiguous, which are one vector of all
    gradients, or the gradients in their own shapes (`Compressor.vectors`). They are float32, or 16-bit floats as the
    gradients are, if the method reads those (`Compressor.reads_half`).

    Complex gradients are never compressed: they are averaged as twice as many real numbers.

    Attributes:
        names, shapes: of the states, and of the gradients by these names.
        indices: of the parameters within the bucket.
        compressed: whether the gradients are compressed, rather than averaged as they are.
        shapes_of_parts: the shapes of the gradients, or of this rank's chunk of a gradient of its node.
        numel: elements of all parts.
        nbytes: of the gradients, in their own type.

    In a step:
        gradients: what the averages are written to.
        parts: what the method compresses: gradients plus residual; empty until they are made. They may share the
            gradients' memory.
        device: of the gradients.
        discards: whether the averages are going to be thrown away (`Compressor.discarding`): what the state owes is
            not in them.
        state: of the method.
        before: the fields of the state before the step; None if the step does not change it.
        rank, size: of this rank among those that the method averages over.

        on_device: whether the host does not wait in the step to know if the averages are finite (`Verdict`).
        may_hold: whether a rank may commit late. The same on all ranks, as are the numbers that decide whether the step
            is skipped.
        commits_late: whether residual and momentum stay as they are until the device knows that (`commit_held`). There
            is no memory for second ones then, and a step that fails has not touched the first.
        is_plain: whether gradients of a group that commits late are contiguous and float32, as fields of the state are.
        holds: whether, until then, the gradients' memory holds the error of the step, or what it is computed from.
        remakes: whether, until then, gradients stay as they are, too: the error is made again of both.
        undecoded: the average of a group that commits late, until then.
        numbers: on a device, vectors of numbers that are not finite if the step is to be skipped, besides the averages.
        shows_averages: whether `numbers` are equally many for each gradient, in order, and not finite if its average is
            not. Averages are not looked at then.
        inspected: the payloads that the device has checked.
        told_later: called in the next step with the largest magnitude in the averages.

    After a step:
        finite: whether the averages were, if the compressor checks that; True where the device has to tell.
        culprits: names of the gradients whose averages were not.
        compressed_momentum: whether the averages are of compressed momenta.
    """

    gradients: list[Tensor]
    device: torch.device
    state: State

    def __init__(
        self,
        compressor: Compressor,
        method: Compressor,
        names: Sequence[str],
        likes: Sequence[Tensor],
        indices: Sequence[int],
        *,
        compressed: bool,
        frozen: bool = False,
        later_methods: Sequence[Compressor] = (),
    ) -> None:
        self.method = method
        self.names = list(names)
        self.name = group_name(self.names)
        self.shapes = {name: like.shape for name, like in zip(names, likes)}
        self.indices = list(indices)
        self.compressed = compressed
        self.frozen = frozen
        self.later_methods = list(later_methods)
        self.node_chunks: NodeChunks | None = compressor.node_chunks
        self.parts: list[Tensor] = []
        self.rank, self.size = 0, 1
        self.discards = False
        self.on_device = self.may_hold = self.shows_averages = False
        self.commits_late = self.is_plain = self.holds = self.remakes = False
        self.undecoded: Any = None
        self.numbers: list[Tensor] = []
        self.inspected: list[Inspected] = []
        self.told_later: Callable[[float], None] | None = None
        self.finite = True
        self.culprits: list[str] = []
        self.compressed_momentum = False
        self.before: dict[str, Any] | None = None
        self._compressor = compressor
        # What keeps steps from being captured: a choice of methods, or the method of what is compressed.
        choosing = (compressor,) if compressor is not method else ()
        deciding = (*choosing, method) if compressed else choosing
        self._uncaptured = next((one for one in deciding if one.capture_needs is not None), None)
        self.nbytes = sum(like.nbytes for like in likes)
        self._changes = method.changes_uncompressed and not (frozen or compressed)
        # The parameters of the state: with chunks of nodes, that of the chunk.
        self._state_shapes = self.shapes
        if compressed and self.node_chunks is not None:
            self._state_shapes = {n: torch.Size(self.node_chunks.shape(s)) for n, s in self.shapes.items()}
        self._joined_shape = method.joined_shape(likes[0].shape)
        self._planned: dict[Any, Any] = {}
        self.shapes_of_parts = list(self._state_shapes.values())
        self.numel = sum(map(torch.Size.numel, self.shapes_of_parts))
        self._left: dict[str, Fields] = {}  # fields by parameter of which the state of an uncompressed step was made
        self._memory: tuple[Tensor, list[Tensor]] | None = None  # for gradients as one vector; views of each of them
        self._target: Tensor | None = None  # the gradients as one vector, if they are adjacent in memory
        self._read: tuple[list[Tensor], Tensor | None] | None = None  # both, while averages are written elsewhere

    # --- for methods

    @property
    def vector(self) -> Tensor:
        """The only part, of a method that compresses vectors."""
        (vector,) = self.parts
        return vector

    def planned(self, make: Callable[[Group], Planned]) -> Planned:
        """The result of make(self), which is the same in all steps: made once."""
        if make not in self._planned:
            self._planned[make] = make(self)
        return self._planned[make]

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Views of each part's elements in a flat tensor that has them one after the other, in the parts' shapes."""
        return [flat.view(self._joined_shape)] if self.method.vectors else pieces(flat, self.shapes_of_parts)

    @property
    def dtype(self) -> torch.dtype:
        """The type that averages are decoded to: 16-bit floats, as the gradients are, or float32."""
        dtype = self.gradients[0].dtype
        written = self.method.writes_half and dtype in ops.HALF and self.size <= ops.MOST_HALF_TERMS
        return dtype if written else torch.float32

    @property
    def target(self) -> Tensor | None:
        """The gradients as one flat vector of `dtype`, to write averages to; None if they are not one in memory."""
        return self._target if self._target is not None and self._target.dtype == self.dtype else None

    @property
    def outs(self) -> list[Tensor] | None:
        """The gradients in the shapes of the parts, to write averages to; None if their memory is another."""
        if self.method.vectors:
            target = self.target
            return None if target is None else [target.view(self._joined_shape)]
        plain = self.gradients[0].dtype == self.dtype and all(map(Tensor.is_contiguous, self.gradients))
        return self.gradients if plain else None

    def free_outs(self) -> list[Tensor] | None:
        """`outs` on a CPU, if they are float32, with a copy of what was compressed there for the next residual.

        None if a method within the group's own has parts of other shapes.
        """
        method, state, outs = self.method, self.state, self.outs
        if outs is None or self.device.type != "cpu" or outs[0].dtype != torch.float32:
            return None
        if [out.shape for out in outs] != [part.shape for part in self.parts]:
            return None
        if method.keeps_residual and state.next_residual is None:
            state.next_residual = state.renewed("residual", outs[0], self.numel)
            copy_all(list(zip(self.pieces(state.next_residual), self.parts)))
        return outs

    def copies(self, averages: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """What to copy, (target, source), to write averages, one for each part, to the gradients."""
        if not self.method.vectors:
            return [(g, a.view(g.shape)) for g, a in zip(self.gradients, averages) if a is not g]
        if self._target is not None:
            at = self._target.data_ptr()
            return [(self._target, a.view(-1)) for a in averages if a.data_ptr() != at]
        return list(zip(self.gradients, pieces(averages[0], self.shapes_of_parts)))

    def write(self, averages: Sequence[Tensor]) -> None:
        """Write averages, one for each part, to the gradients. One operation on a device."""
        copy_all(self.copies(averages))

    @contextlib.contextmanager
    def writing_to(self, flat: Tensor) -> Iterator[None]:
        """Have averages be written to a flat float32 tensor, while parts are made of the gradients."""
        self._read = gradients, target = self.gradients, self._target
        self.gradients = pieces(flat, self.shapes_of_parts)
        self._target = flat if self.method.vectors else None
        try:
            yield
        finally:
            self.gradients, self._target = gradients, target
            self._read = None

    # --- a step

    def average(
        self, gradients: list[Tensor], rank: int = 0, size: int = 1, discards: bool = False, may_hold: bool = False
    ) -> Routine:
        """Begin to average gradients. Returns a coroutine that replaces them by their averages over the ranks.

        If a gradient of any rank is not finite, no average is finite on any rank, no state changes, and `finite` is
        False. Call `end_step` at the end of the step.

        Args:
            gradients: in the order of `names`: any strides, one dtype and device. Averages have the same. Complex ones
                must not be conjugate views.
            rank, size: this rank's number and the world size.
            discards: as the attribute. Call `end_step` as for a step that is skipped.
            may_hold: whether `commit_held` is called if the group commits late: averages are written there.

        Raises:
            ValueError: a gradient is sparse, or has no floats.
            RuntimeError: the step is captured as a CUDA graph, and the method cannot be (`Compressor.capture_needs`).
        """
        if gradients[0].is_complex():
            gradients = list(map(as_real, gradients))
        for gradient in gradients:
            if gradient.is_sparse or not gradient.is_floating_point():
                raise ValueError(
                    f"gradient of {self.name!r}: got {gradient.layout} {gradient.dtype}, expected a dense float tensor"
                )
        if self._uncaptured is not None and ops.is_capturing(gradients[0]):
            name, needs = type(self._uncaptured).__name__, self._uncaptured.capture_needs
            got = f"{name}: got a step to capture as a CUDA graph, expected {needs} for that"
            raise RuntimeError(f"{got}: its host decides in each step, which replays cannot (docs/gpu.md)")
        compressor, monitor = self._compressor, self._compressor.monitor
        self.gradients, self.rank, self.size, self.discards = gradients, rank, size, discards
        self.device = gradients[0].device
        self.on_device = gradients[0].is_cuda and self.node_chunks is None and self.method.undone_on_device
        self.numbers, self.inspected, self.told_later = [], [], None
        self.may_hold = self.shows_averages = False
        self.commits_late = self.is_plain = self.holds = self.remakes = False
        self.undecoded = None
        self.finite, self.culprits = True, []
        if self.node_chunks is not None:
            self.rank, self.size = self.node_chunks.node, self.node_chunks.nodes
        if compressor.observes and not (self.frozen or discards):
            compressor.observe(self)
        report = None if monitor is None else monitor.begin(self)
        compressor.traffic.bytes_dense += self.nbytes
        if not self.compressed:
            return self._uncompressed()
        may_hold = may_hold and self.on_device and not discards
        return self._compressed(may_hold) if report is None else report(self._compressed(may_hold))

    def kept_nbytes(self, rank: int, size: int) -> int:
        """Bytes of the tensors that the state has between steps, at most. For a group that is in no step.

        rank, size: this rank's number and the world size.
        """
        chunks = self.node_chunks
        self.rank, self.size = (rank, size) if chunks is None else (chunks.node, chunks.nodes)
        return self.method.kept_nbytes(self)

    def keep(self, discarded: Mapping[str, Tensor | None]) -> None:
        """Undo the step for some parameters.

        discarded: names whose averages nobody gets, and the gradients that optimizers find in their place.
        """
        state = self.method.memory.states.get(self.name)
        if discarded and self.before is not None and state is not None:
            self.method.keep(state, discarded)
            if len(discarded) == len(self.names):
                self.method.clean(state)

    def changed(self) -> list[tuple[Tensor, Tensor | None]] | None:
        """What the step has changed in the state, as of `State.changed`."""
        state = self.method.memory.states.get(self.name)
        return [] if self.before is None or state is None else state.changed(self.before)

    def end_step(self, skipped: bool, counts: bool = False) -> None:
        """End a step: complete it, or undo what it has changed.

        counts: whether a step that is skipped counts: tensors are restored, and numbers stay.
        """
        before, self.before = self.before, None
        self.gradients, self.parts, self._target, self.undecoded = [], [], None, None
        if before is None:
            return
        memory = self.method.memory
        state = memory.states.get(self.name)
        if state is None:
            return
        if skipped and counts:
            state.restore(before)
        elif skipped:
            if state.abandon(before):
                self.method.clean(state)
                if self._left:  # still to be sent, whatever the next buckets are
                    del memory.states[self.name]
                    memory.parked |= self._left
            return
        state.complete(before)
        if not (self.compressed or self._changes) and state.residual is None:
            del memory.states[self.name]  # it had a residual, which is sent

    def begin(self) -> State:
        """Get the state for a step, and note its fields before it."""
        if self.before is None:
            memory, shapes = self.method.memory, self._state_shapes
            self.state = memory.begin_step(shapes, self.method.state_shapes, self.device, self.rank, self.size)
            self.before = self.state.begin()
            if self.discards:
                self.state.drop_owed()
        return self.state

    def _compressed(self, may_hold: bool) -> Routine:
        method, gradients = self.method, self.gradients
        own = gradients if self.node_chunks is None else [(yield from self.node_chunks.scatter(gradients[0]))]
        state = self.begin()
        before, fields = self.before, dict(vars(state))
        self.compressed_momentum = method.compresses_momentum(state)
        try:
            self.gradients, self.parts = own, []
            self._target = adjacent(own) if method.vectors else None
            momenta = may_hold and method.averaged_momentum is not None
            if may_hold and (momenta or method.keeps_residual):
                held = own[0].dtype == torch.float32 and method.holds(self)
                late = method.remakes and own[0].dtype in _WIDE and not (momenta and not self.compressed_momentum)
                self.may_hold = held or late
                if self.may_hold and self._compressor.monitor is None:
                    self.is_plain = own[0].dtype == torch.float32 and all(map(Tensor.is_contiguous, own))
                    self.holds = held and self.is_plain
                    self.commits_late = self.holds or late
                    self.remakes = method.keeps_residual and late and not self.holds
            yield from method.add_residual(self)
            average = yield from (method.reduce(self) if self.node_chunks is None else among_peers(method.reduce(self)))
            # All ranks see the same average, so all commit or all undo. Limit of the gradient's own type: a finite
            # float32 number may overflow in float16.
            limit = torch.finfo(gradients[0].dtype).max
            finite = self.on_device or method.max_abs_bound(average, limit) <= limit
            if finite:
                state.step += 1
                if self.commits_late:
                    yield from method.complete_error(self, average)
                    self.undecoded = average
                else:
                    yield from method.commit(self, average)
                    if method.residual_decay != 1:
                        yield from method.decay_residuals(self)
                    state.payload = None
                state.next_residual = None
                if not method.keeps_residual:
                    state.residual = None  # of the method that was in charge before: it is sent now
            if self.node_chunks is not None:
                finite = yield from self.node_chunks.gather(own[0], finite, gradients[0])
        except BaseException:  # also if the routine is closed, because the backward pass has failed
            state.abandon(before)
            raise
        self.gradients, self.parts = gradients, []
        if not finite:
            state.replace_fields(fields)
            method.clean(state)  # another chunk of the node may be the one that is not finite
            for gradient in gradients:
                gradient.fill_(math.nan)
        self.finite = finite
        self.culprits = [] if finite else self.names

    @property
    def shown(self) -> list[Sequence[str]]:
        """The names that each of `numbers` shows an average of."""
        each = sum(map(Tensor.numel, self.numbers)) // len(self.names)
        return [(name,) for name in self.names for _ in range(each)]

    @property
    def errors(self) -> list[Tensor]:
        """What was compressed, in the shapes of the parts, from which a method subtracts what it has sent."""
        if self.holds:
            return self.parts
        assert self.state.residual is not None
        return self.pieces(self.state.residual)

    def commit_held(self, number: Tensor, copies: bool) -> Routine:
        """Coroutine, without collectives: update the state if a number is finite, and write the average.

        Args:
            number: float32 of 1 element, on a device: not finite if the step is to be skipped.
            copies: whether the former values are still needed (`keep`).
        """
        state = self.state
        for field in self.planned(_kept if self.compressed_momentum else _overwritten):
            value = getattr(state, field, None)
            if value is None:  # x + -0 has the bits of x
                setattr(state, field, torch.full((self.numel,), -0.0, dtype=torch.float32, device=self.device))
            elif copies:
                setattr(state, field, value.clone())
        average, self.undecoded = self.undecoded, None
        number = number.to(self.device, non_blocking=True)
        yield from self.method.commit_held(self, average, number)
        state.payload = None
        if self.method.residual_decay != 1:
            yield from self.method.decay_residuals(self, number)

    @property
    def addends(self) -> list[Tensor]:
        """What the residual is added to: the parts if they are made, otherwise the gradients, of their own type.

        Contiguous tensors, whose elements are those of the group one after the other.
        """
        own, target = self._read or (self.gradients, self._target)
        if not self.parts and own[0].dtype in ops.FLOATS:
            self._memory = None  # of steps without a residual
            return list(map(Tensor.contiguous, own)) if target is None else [target]
        self.load_parts()
        return self.parts

    def load_parts(self) -> None:
        """Make `parts` of the gradients alone, unless they are made."""
        if self.parts:
            return
        own, target = self._read or (self.gradients, self._target)
        dtype = own[0].dtype if own[0].dtype in ops.HALF and self.method.reads_half else torch.float32
        apart = (self.method.vectors and target is None) or (self.remakes and self.method.changes_parts)
        if self.on_device and (own[0].dtype != dtype or apart):
            memory = self.method.memory_for(self, dtype)
            torch._foreach_copy_(pieces(memory, self.shapes_of_parts), own)  # one operation
            self.parts = self.pieces(memory)
        elif not self.method.vectors:
            self.parts = [gradient.to(dtype).contiguous() for gradient in own]
        elif target is not None:
            self.parts = [target.to(dtype).view(self._joined_shape)]
        else:
            if self._memory is None or (self._memory[0].device, self._memory[0].dtype) != (self.device, dtype):
                memory = torch.empty(self.numel, dtype=dtype, device=self.device)
                self._memory = memory, pieces(memory, self.shapes_of_parts)
            memory, views = self._memory
            torch._foreach_copy_(views, own)
            self.parts = [memory.view(self._joined_shape)]

    def release_parts(self) -> None:
        """Free what was compressed, unless it is the gradients' memory or the next residual.

        If the gradients are to hold the error, it is the error by now.
        """
        if self.holds and self.outs is None:
            self.write(self.parts)
        if self.on_device:
            self.parts = []
        if self.remakes:
            self.state.next_residual = None

    def _uncompressed(self) -> Routine:
        method, memory, gradients = self.method, self.method.memory, self.gradients
        state = None
        # What `parked` has may be a residual that the method before has left; a state is of a step that nobody ended.
        left = self.name in memory.states or not memory.parked.keys().isdisjoint(self.shapes)
        if not self.frozen and (self._changes or left):
            if self.before is None and not self._changes:
                self._left = {name: memory.parked[name] for name in self.shapes if name in memory.parked}
            state = self.begin()
            if state.residual is not None:
                torch._foreach_add_(gradients, pieces(state.residual.to(gradients[0].dtype), self.shapes_of_parts))
        average = yield Mean(gradients[0], tensors=gradients)
        if state is not None and (average.is_cuda or bool(average.isfinite().all())):
            state.residual = None
        if self._changes:
            yield from method.apply_uncompressed(self)
            average = flattened(gradients)
        if memory.checks and not average.is_cuda:
            self.finite = ops.all_finite([average])
            self.culprits = [] if self.finite else [n for n, g in zip(self.names, gradients) if not ops.all_finite([g])]


def _kept(group: Group) -> list[str]:
    """The fields of the state with a number for each element."""
    return list(filter(group.state.is_zero_without, group.method.kept_fields))


def _overwritten(group: Group) -> list[str]:
    """Those that `commit_held` overwrites, unless momenta are compressed: before that, there is no error of theirs."""
    warms_up = group.method.averaged_momentum is not None
    return [field for field in _kept(group) if not (warms_up and field == "residual")]


def plan_groups(
    compressor: Compressor,
    parameters: Sequence[Tensor],
    names: Sequence[str],
    prefix: str = "",
    *,
    vectors: Sequence[int] = (),
    frozen: bool = False,
) -> list[Group]:
    """Divide the parameters of a bucket into groups, each of `MOST_NUMEL` elements at most, or of one parameter.

    Args:
        compressor: the compressor of the whole model.
        names: of the parameters, the same on all ranks. Rules of a `PerLayer` see them.
        prefix: keeps equal names of several models apart: states are kept under `prefix + name`.
        vectors: for each parameter, the number of the vector that has its gradient, the same on all ranks; by default,
            unknown. Those of a vector that are averaged uncompressed are a group if they are large: it is not copied.
        frozen: average gradients uncompressed, and leave the states alone. Residuals are not applied.

    Raises:
        ValueError: a parameter is neither of a floating-point type nor complex.
    """
    members: dict[Any, list[int]] = {}
    methods: list[Compressor] = []
    later: list[list[Compressor]] = []
    likes = list(map(as_real, parameters))
    for i, (name, like) in enumerate(zip(names, parameters)):
        if not (like.is_floating_point() or like.is_complex()):
            raise ValueError(f"gradient of {name!r}: got {like.dtype}, expected a floating-point or complex type")
        method = compressor.method_for(name, like.shape, prefix)
        compressor.register_parameter(name, like.shape, prefix + name)
        methods.append(method)
        exempt = frozen or compressor.exempts(name, like)
        following = () if exempt else compressor.later_methods(name, prefix)
        later.append([other for other in following if not other.bypasses(like)])
        compressed = not (exempt or (compressor.node_chunks or method).bypasses(like))
        if not (compressed or exempt) and like.numel() > method.max_numel:
            warnings.warn(
                f"parameter {name!r} is averaged uncompressed: got {like.numel()} elements, {type(method).__name__} "
                f"takes at most {method.max_numel}; shard it (FSDP2), or give it a low-rank method by PerLayer",
                stacklevel=2,
            )
        kind = method.groups_by(like.shape) if compressed else None
        alone = compressed and (kind is None or compressor.node_chunks is not None)
        # Turns of factors, warm-ups and schedules go by the step: a parameter that joins late keeps its own.
        steps = not frozen and (compressed or method.changes_uncompressed)
        step = method.memory.fields(prefix + name).get("step", 0) if steps else 0
        key = (i if alone else kind, id(method), step, compressed, like.dtype, like.device, *map(id, later[-1]))
        members.setdefault(key, []).append(i)
    groups = []
    for key, of_key in members.items():
        apart = _by_vector(of_key, likes, vectors) if vectors and not key[3] else [of_key]
        for indices in [run for some in apart for run in _split(some, likes)]:
            own_names, own_likes = [prefix + names[i] for i in indices], [likes[i] for i in indices]
            group = Group(
                compressor, methods[indices[0]], own_names, own_likes, indices,
                compressed=key[3], frozen=frozen, later_methods=later[indices[0]],
            )  # fmt: skip
            groups.append(group)
    return groups


def _by_vector(indices: list[int], parameters: Sequence[Tensor], vectors: Sequence[int]) -> list[list[int]]:
    """The parameters of each vector, by their numbers, if they are large together; and all others."""
    runs = [list(run) for _, run in itertools.groupby(indices, vectors.__getitem__)]
    large = [sum(parameters[i].nbytes for i in run) >= cost.ALONE_NBYTES for run in runs]
    rest = [i for run, alone in zip(runs, large) if not alone for i in run]
    return [run for run, alone in zip(runs, large) if alone] + ([rest] if rest else [])


def _split(indices: list[int], parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    """Split parameters, by their numbers, where together they would have more elements than `MOST_NUMEL`."""
    run, length = [indices[0]], parameters[indices[0]].numel()
    for i in indices[1:]:
        length += parameters[i].numel()
        if length > MOST_NUMEL:
            yield run
            run, length = [], parameters[i].numel()
        run.append(i)
    yield run


def averaged(compressor: Compressor, grad: Tensor, name: str, rank: int = 0, size: int = 1) -> Routine:
    """Coroutine: one step of one gradient, which it replaces by its average. Skipped if that is not finite."""
    (group,) = plan_groups(compressor, [grad], [name])
    yield from group.average([grad], rank, size)
    finite = group.finite and not (grad.is_cuda and not ops.all_finite([grad]))
    group.end_step(skipped=group.method.memory.checks and not finite)
    return grad
