"""The base class of methods whose payloads cannot be added: a stateless codec, and the exchange of its payloads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...collectives import AllToAll, Gather, ToHost
from ...collectives.cost import Link
from ...collectives.fusion import flattened, pieces
from ...collectives.requests import most_nbytes
from ...collectives.routines import Local, Routine, at_once, jointly
from ...memory.state import Key, State
from ...ops import groups as kernels
from ...ops import tensors as ops
from .compressor import Average, Compressor, with_scratch
from .group import Group, Inspected

# The network that exchange="auto" assumes: 1 Gb/s, a latency of 50 us, and half a millisecond to start one more
# collective and wait for it after the backward pass. It is not measured, because all ranks must decide alike.
NOMINAL_BANDWIDTH, NOMINAL_LATENCY, NOMINAL_OPERATION = 1.25e8, 5e-5, 5e-4

Item = TypeVar("Item")
Decoded = TypeVar("Decoded")


class CodedSum(NamedTuple):
    """A weighted sum of payloads, to decode."""

    outs: Sequence[Tensor]  # contiguous: of the shapes of the parts that were encoded; float32, or see `writes_half`
    payloads: Sequence[ops.Payload]
    weight: float
    add: bool = False  # to `outs`, rather than overwrite them
    parts: int = 1  # if more, of the only one of `outs`, as `tensor_split` cuts it: each has one of the payloads


class Undecoded(list[ops.Payload]):
    """The payloads of an average that is decoded where it is written: a device tells later if it is finite.

    They are of all ranks, or of all partitions if these are exchanged. There are none if it is known not to be.
    """


class Content(NamedTuple):
    """What a payload is of: the shapes of the parts, and the key of the random draws."""

    shapes: Sequence[torch.Size]
    key: Key

    @property
    def numel(self) -> int:
        return sum(map(math.prod, self.shapes))


class Piece(NamedTuple):
    """A piece of a part of a group."""

    start: int  # among the elements of the whole group
    stop: int
    view: Tensor


@dataclass
class GatherCompressor(Compressor):
    """A method whose payloads cannot be added: a stateless codec, and the exchange of its payloads.

    A codec of vectors defines `encode`, or `encode_lists` in place of it, and `decode_add`, or `sum_all`. A codec of
    lists of tensors sets `vectors = False`, and defines `encode_lists` and `sum_all`. A group has one payload, with one
    header.

    Args:
        exchange: how payloads reach all p ranks.

            "gather": encode, all-gather, decode every rank's payload in rank order. A rank receives p - 1 payloads.

            "scatter_reduce": a group has a partition for each rank, its owner (`partitions`). A rank encodes
            all partitions, and sends each to its owner, by an all-to-all. The owner decodes and averages the payloads
            that it receives, and encodes the average. All ranks gather these. A rank receives 2 (p - 1) / p payloads in
            two rounds, and the average is compressed twice. With error feedback, the owner keeps a residual of the
            second compression.

            "auto": "gather" until the cost model finds "scatter_reduce" faster for a parameter (`scatter_pays`), which
            it never does with 2 ranks; "scatter_reduce" from then on.
    """

    # Not in the digest: payloads do not depend on it.
    exchange: str = field(default="gather", kw_only=True, metadata={"digest": False})

    remakes = True

    # Whether payloads on a device have lengths that follow from the gradients' shapes and the step. Ranks need not
    # exchange lengths then.
    fixed_nbytes = False

    # Whether `sum_all` takes a vector in parts (`CodedSum.parts`).
    sums_parts = False

    number: ClassVar[int]  # in payload headers, set by `register`
    seed = 0  # of random draws; methods that draw declare it as a hyper-parameter

    def __post_init__(self) -> None:
        super().__post_init__()
        exchanges = ("gather", "scatter_reduce", "auto")
        self.check("exchange", self.exchange in exchanges, "'gather', 'scatter_reduce' or 'auto'")
        self.rounds = 1 if self.exchange == "gather" else 2
        self.asymmetric = self.exchange != "gather"
        self.adapts = self.exchange == "auto"

    @property
    def capture_needs(self) -> str | None:
        return None if self.fixed_nbytes else "a method whose payloads have a fixed length, such as QSGD()"

    def groups_by(self, shape: torch.Size) -> Any:
        return self.joined_shape(shape) if self.vectors else ()

    # --- the codec

    def encode_all(self, parts: Sequence[Tensor], key: Key) -> Tensor:
        """Encode the parts of a group. Returns the payload (uint8).

        Args:
            parts: contiguous; float32, or as `reads_half` says.
            key: of random draws.
        """
        return self.encode_lists([parts], [key])[0]

    def encode(self, grad: Tensor, key: Key) -> Tensor:
        """`encode_all` for a vector."""
        return self.encode_all([grad], key)

    def encode_lists(self, lists: Sequence[Sequence[Tensor]], keys: Sequence[Key]) -> list[Tensor]:
        """`encode_all` for several lists of parts: the partitions of a group."""
        if type(self).encode is GatherCompressor.encode:
            raise TypeError(f"{type(self).__name__}: got no `encode`, expected it, or `encode_lists`")
        return [self.encode(vector, key) for (vector,), key in zip(lists, keys)]

    def encode_average(self, parts: Sequence[Tensor], key: Key) -> Tensor:
        """`encode_all` for the owner of a partition, who sends its average to all ranks."""
        return self.encode_all(parts, key)

    def sum_all(self, sums: Sequence[CodedSum]) -> None:
        """Decode the payloads of several groups, and write their weighted sums, added in order.

        sums: with equally many payloads, one weight and one `add`.

        Raises:
            PayloadError: `encode_all` of this codec cannot have written a payload. Its `index` is the number of the
                payload: in its sum, or in all. Where only the device can tell, elements become NaN instead.
        """
        for coded in sums:
            (out,) = coded.outs
            if not coded.add:
                out.zero_()
            for_each(coded.payloads, self.decode_add, out, coded.weight)

    def decode_add(self, payload: ops.Payload, out: Tensor, weight: float) -> None:
        """Add `weight` times the decoded payload of a vector to `out`.

        Raises:
            PayloadError: `encode` of this codec cannot have written the payload.
        """
        raise TypeError(f"{type(self).__name__}: got no `decode_add`, expected it, or `sum_all`")

    def decode_all(
        self, payloads: Sequence[ops.Payload], outs: Sequence[Tensor], state: State | None = None
    ) -> Routine:
        """Coroutine: write the average of payloads, in order. Returns a bound of its magnitudes if it is known.

        Args:
            payloads: of finite gradients.
            outs: contiguous: of the shapes of the parts; float32, or as `writes_half` says.
            state: of the group, which may change. None for the owner of a partition, who encodes the average again.
        """
        return jointly(self._sum_each, outs[0].device, CodedSum(outs, payloads, 1.0 / len(payloads)))

    def decode(self, payloads: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Average payloads, in order. On a CPU, the next call reuses the memory of the result.

        shapes: of the parts that were encoded. Waits for the device once.
        """
        numels = [sum(map(math.prod, shapes))] * len(payloads)
        return self._decoded(self.open_all(payloads, numels, len(payloads)), shapes)

    def _decoded(self, payloads: Sequence[ops.Payload], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        flat = self.new_average(sum(map(math.prod, shapes)), payloads[0].body.device)
        outs = pieces(flat, list(map(torch.Size, shapes)))
        if all_finite(payloads):
            at_once(self.decode_all(payloads, outs))
        else:
            flat.fill_(math.nan)
        return outs

    def combine(self, payloads: Sequence[ops.Payload], group: Group) -> Routine:
        """Coroutine: the average of the payloads of all ranks, for `reduce` to return."""
        if group.on_device:
            finite = all_finite(payloads)
            if not finite or (group.may_hold and not group.numbers):  # the host has read it
                group.numbers.append(torch.full((1,), 0.0 if finite else math.nan, device=group.device))
            return Undecoded(payloads if finite else ())
        if not all_finite(payloads):
            return Average([], math.nan)
        outs, flat = group.free_outs(), None
        if outs is None:
            flat = self.new_average(group.numel, group.device)
            outs = pieces(flat, list(map(attrgetter("shape"), group.parts))) if group.parts else group.pieces(flat)
        if group.state.scattered:
            bound = yield from self._decode_partitions(payloads, group, outs)
        else:
            bound = yield from self.decode_all(payloads, outs, group.state)
        return Average(outs, bound) if flat is None else (yield from self.with_max_abs(group, flat, bound))

    def complete_error(self, group: Group, average: Undecoded) -> Routine:
        if group.holds and not self.vectors:
            yield Local(self._subtract_each, group.device, group)

    def commit(self, group: Group, average: Average | Undecoded) -> Routine:
        if not isinstance(average, Undecoded):
            yield from super().commit(group, average)
            return
        if not average:
            return
        keeps = self.error_feedback and not group.commits_late
        if keeps:
            yield Local(self._store_each, group.device, group)
        outs, flat = group.outs, None
        if outs is None:
            flat = self.new_average(group.numel, group.device, group.dtype)
            outs = group.pieces(flat)
        if group.state.scattered:
            decoding = self._decode_partitions(average, group, outs)
        else:
            decoding = self.decode_all(average, outs, group.state)
        yield from (decoding if flat is None else with_scratch(decoding, flat.nbytes))
        if flat is not None:
            group.write(outs)
        del outs, flat  # the next group needs its own memory
        if keeps:
            yield Local(self._subtract_each, group.device, group)

    def _store_each(self, groups: list[Group]) -> list[None]:
        self.store_residuals(groups)
        return [None] * len(groups)

    def _sum_each(self, sums: list[CodedSum]) -> list[None]:
        self._sum_all(sums)
        return [None] * len(sums)

    def _sum_all(self, sums: Sequence[CodedSum]) -> None:
        """`sum_all`. A PayloadError names the rank."""
        try:
            self.sum_all(sums)
        except ops.PayloadError as error:
            raise from_rank(error, len(sums[0].payloads)) from None

    # --- payload headers

    # Of the 16 bytes of `fields_of`, those that do not depend on the data: bit i for byte i.
    known_fields = 0xFFFF

    def fields_of(self, shapes: Sequence[torch.Size], key: Key) -> bytes:
        """The fields of the header of a payload whose length is fixed.

        Args:
            shapes: of the parts that were encoded.
            key: of random draws, of any rank.
        """
        return bytes(16)

    def opened(self, payloads: Sequence[Tensor], contents: Sequence[tuple[Content, int]], group: Group) -> Routine:
        """Coroutine: check the headers of payloads. Returns an `ops.Payload` for each.

        On a device, the host does not wait for what they say, if it follows from what was encoded. A payload that is
        not as expected makes the step one to be skipped then.

        Args:
            contents: of the first payloads, and how many these are; of the next ones; and so on.
            group: payload i is from rank i % group.size.

        Raises:
            PayloadError: names the rank whose payload is truncated, corrupt or made with another configuration.
        """
        numels: list[int] = []
        fields: list[bytes] = []
        ranks, expects = group.size, group.on_device and self.fixed_nbytes
        for content, count in contents:
            numels += [content.numel] * count
            fields += [self.fields_of(*content)] * count if expects else []
        if expects:
            expected = ops.ExpectedPayloads(payloads, numels, self.number, self.digest, fields, self.known_fields)
            table, numbers = yield Local(ops.verify_payloads, group.device, expected)
            group.numbers.append(numbers)
            nbytes = list(map(Tensor.numel, payloads))
            group.inspected.append(Inspected(self, group.name, table, nbytes, numels, fields, ranks))
            return ops.unread_payloads(payloads, fields)
        table = None
        if payloads[0].is_cuda:
            table = yield Local(ops.inspect_payloads, payloads[0].device, payloads)
            if table is not None:  # else they are inspected
                table = yield ToHost(table)
        return self.open_all(payloads, numels, ranks, table)

    def open_all(
        self, payloads: Sequence[Tensor], numels: Sequence[int], ranks: int, table: Tensor | None = None
    ) -> list[ops.Payload]:
        """`opened`, with a table of `ops.inspect_payloads` on the host. Waits for the device without one."""
        try:
            return ops.open_payloads(payloads, numels, table, method=self.number, digest=self.digest)
        except ops.PayloadError as error:
            raise from_rank(error, ranks) from None

    def check_inspected(self, one: Inspected) -> None:
        """Raise PayloadError if one of the payloads is not as expected. Waits for the device."""
        payloads = [torch.empty(nbytes, dtype=torch.uint8, device="meta") for nbytes in one.nbytes]
        try:
            opened = self.open_all(payloads, one.numels, one.ranks, one.table.cpu())
            known = [i for i in range(16) if self.known_fields >> i & 1]
            for index, (payload, fields) in enumerate(zip(opened, one.fields)):
                if any(payload.fields[i] != fields[i] for i in known) and not payload.flags & ops.NON_FINITE:
                    text = f"foreign payload: got the fields {payload.fields.hex()}, expected {fields.hex()}"
                    raise from_rank(ops.PayloadError(f"{text}: ranks count steps differently", index), one.ranks)
        except ops.PayloadError as error:
            raise self._of(one.name, error) from None

    def _of(self, name: str, error: ops.PayloadError) -> ops.PayloadError:
        return ops.PayloadError(f"{type(self).__name__}, parameter {name!r}: {error}")

    def seal(self, seal: ops.Seal) -> Tensor:
        """Write the header of a payload whose body is complete. Returns the payload."""
        return ops.seal_payloads([seal], method=self.number, digest=self.digest)[0]

    def seal_vectors(
        self, payloads: Sequence[Tensor], numels: Sequence[int], fields: Iterable[bytes], magnitudes: Sequence[Tensor]
    ) -> list[Tensor]:
        """Write the headers of payloads of vectors, whose bodies are complete. Returns the payloads.

        Args:
            numels, fields, magnitudes: of each, as for `ops.Seal`. On a CPU, the payload of a vector that is not finite
                is a header.
        """
        seals = list(map(ops.Seal, payloads, numels, fields, itertools.repeat(0), magnitudes))
        if not magnitudes[0].is_cuda:
            for i, magnitude in enumerate(magnitudes):
                if ops.known_non_finite(magnitude):
                    seals[i] = ops.Seal(ops.new_payload(0, magnitude.device), numels[i], magnitudes=magnitude)
        return ops.seal_payloads(seals, method=self.number, digest=self.digest)

    def non_finite(self, numel: int, device: torch.device) -> Tensor:
        """The payload of a group that is not finite: a header with a flag."""
        return self.seal(ops.Seal(ops.new_payload(0, device), numel, flags=ops.NON_FINITE))

    # --- the exchange

    def looks(self, group: Group) -> bool:
        # If the host waits for headers anyway: a gradient that is not finite has no payload to subtract.
        return not group.on_device

    def gather(self, payload: Tensor, numel: int) -> Gather:
        """The all-gather of a payload of this method.

        payload: as long as those of all ranks, if it follows from shapes how long they are.
        numel: elements that a rank encodes, at most.
        """
        return Gather(payload, same_length=self._knows_lengths(payload), limit=most_nbytes(numel))

    def _knows_lengths(self, payload: Tensor) -> bool:
        """Whether it follows from shapes how long payloads are: no rank has to be told."""
        return self.fixed_nbytes and payload.is_cuda

    def reduce(self, group: Group) -> Routine:
        state = group.state
        state.scattered = self._scatters(group)
        try:
            if state.scattered:
                return (yield from self._scatter_reduce(group))
            content = Content(list(map(attrgetter("shape"), group.parts)), state.key(self.seed))
            payload, earlier = yield from self.encoded(group, content.key)
            if group.holds and self.vectors:  # lists are the gradients themselves: `complete_error` has time
                own = ops.unread_payloads([payload], [self.fields_of(content.shapes, content.key)])
                state.payload = [(own[0], None)]
                yield Local(self._subtract_each, group.device, group)
                group.release_parts()
            elif group.remakes or not self.keeps_residual:
                group.release_parts()
            payloads = yield self.gather(payload, group.numel)
            contents = [(content, len(earlier) + group.size)]
            opened = (yield from self.opened([*earlier, *payloads], contents, group))[len(earlier) :]
            # What this rank has sent, each payload with the pieces of the group that it has; None for all.
            state.payload = [(opened[group.rank], None)]
            # All ranks see the same lengths, so they choose the same exchange.
            state.payload_nbytes = sum(map(Tensor.numel, payloads)) // len(payloads)
            return (yield from self.combine(opened, group))
        except ops.PayloadError as error:
            raise self._of(group.name, error) from None

    def encoded(self, group: Group, key: Key) -> Routine:
        """Coroutine: encode the parts of a group. Methods that run a collective for that override it.

        key: of random draws. Returns the payload, and the payloads of an earlier round that are still to be opened.
        """
        yield from ()
        return self.encode_all(group.parts, key), []

    def _may_scatter(self, group: Group) -> bool:
        """Whether some step may exchange partitions: "auto" never does with two ranks."""
        return (2 if self.exchange == "scatter_reduce" else 3) <= group.size <= group.numel

    def _scatters(self, group: Group) -> bool:
        if self.exchange == "gather" or not self._may_scatter(group):
            return False
        if self.exchange == "scatter_reduce" or getattr(group.state, "scattered", False):
            return True
        return scatter_pays(getattr(group.state, "payload_nbytes", 0), group.size)

    def partitions(self, group: Group, parts: Sequence[Tensor] = ()) -> list[list[Piece]]:
        """For each rank, the piece of each part that it owns.

        Partitions have whole rows of a part, unless it has fewer rows than there are ranks. They differ by one row of
        each part at most: the longer ones come first.

        parts: contiguous, of the shapes of the group's; default: these. If they are not made, the pieces have no data.
        """
        found: list[list[Piece]] = [[] for _ in range(group.size)]
        start = 0
        for part in parts or group.parts or group.planned(_unmade_parts):
            row = part.shape[1:] if part.shape[0] >= group.size and part.shape[1:].numel() > 1 else torch.Size()
            rows = part.reshape(-1, *row)
            edges = [0, *itertools.accumulate(map(len, rows.tensor_split(group.size)))]
            for owner, (begin, end) in zip(found, itertools.pairwise(edges)):
                owner.append(Piece(start + begin * row.numel(), start + end * row.numel(), rows[begin:end]))
            start += part.numel()
        return found

    def add_residual(self, group: Group) -> Routine:
        self.keep_owner_residual(group)
        return super().add_residual(group)

    def own_ranges(self, group: Group) -> list[tuple[int, int]]:
        if self.exchange == "gather" or not (self.error_feedback and self._may_scatter(group)):
            return []
        return [piece[:2] for piece in self.partitions(group)[group.rank]]

    def keep_owner_residual(self, group: Group) -> None:
        """Add the owner's residual to the residual if this rank owns other elements now."""
        state = group.state
        if getattr(state, "owner_residual", None) is not None:
            own = self.partitions(group)[group.rank] if self._scatters(group) else []
            if _merged([piece[:2] for piece in own]) != _merged(state.owner_ranges):
                state.fold_owner_residual()

    def _scatter_reduce(self, group: Group) -> Routine:
        state, key, partitions = group.state, group.state.key(self.seed), self.partitions(group)
        contents = [
            Content([piece.view.shape for piece in partition], key._replace(name=f"{key.name}[{i}]"))
            for i, partition in enumerate(partitions)
        ]
        lists = [[piece.view for piece in partition] for partition in partitions]
        payloads = self.encode_lists(lists, [content.key for content in contents])
        if group.remakes or not self.keeps_residual:
            group.release_parts()
            partitions, lists = self.partitions(group), []
        nbytes, most = list(map(Tensor.numel, payloads)), max(content.numel for content in contents)
        known, longest, limit = self._knows_lengths(payloads[0]), max(nbytes), most_nbytes(most)
        if known:  # partitions differ by a row of each part at most: all are sent with the longest one's bytes
            received = yield AllToAll(_filled_up(payloads, longest), (longest,) * group.size, True, limit=limit)
            received = [payload[: nbytes[group.rank]] for payload in received]
        else:
            received = yield AllToAll(ops.join_payloads(payloads), tuple(nbytes), limit=limit)
        of_all = [(contents[group.rank], group.size), *((content, 1) for content in contents)]
        opened = yield from self.opened([*received, *payloads], of_all, group)
        from_ranks, state.payload = opened[: group.size], list(zip(opened[group.size :], partitions))
        mine = partitions[group.rank]
        shapes = [piece.view.shape for piece in mine]
        decoded = self._decoded(from_ranks, shapes)
        # On a CPU, the next call reuses its memory.
        average = flattened(decoded) if decoded[0].is_cuda else torch.cat(list(map(Tensor.flatten, decoded)))
        del received, opened, from_ranks, decoded
        if group.on_device and self.fixed_nbytes:  # all ranks see in the average if a payload was not sound
            sound = group.numbers[-1][: group.size].amax().view(1)
            kernels.restore_unless_finite(sound, [average], [None], math.nan)
        if (residual := getattr(state, "owner_residual", None)) is not None:
            average.add_(residual)
        owner = key._replace(name=f"{key.name}[owner]")
        payload = self.encode_average(pieces(average, shapes), owner)
        payloads = yield self.gather(_filled_up([payload], longest) if known else payload, most)
        if known:
            payloads = [payload[:n] for payload, n in zip(payloads, nbytes)]
        of_owners = [(content._replace(key=owner), 1) for content in contents]
        opened = yield from self.opened(payloads, of_owners, group)
        if self.error_feedback and all_finite(opened):
            self._sum_all([CodedSum(pieces(average, shapes), [opened[group.rank]], -1.0, add=True)])
            state.owner_residual, state.owner_ranges = average, [piece[:2] for piece in mine]
        return (yield from self.combine(opened, group))

    def _decode_partitions(self, payloads: Sequence[ops.Payload], group: Group, outs: Sequence[Tensor]) -> Routine:
        """Coroutine: `decode_all` for payloads of partitions, in rank order."""
        yield from ()
        if self.sums_parts and self._knows_lengths(payloads[0].body):
            self._sum_all([CodedSum(outs, payloads, 1.0, parts=group.size)])
            return
        views = [[piece.view for piece in partition] for partition in self.partitions(group, outs)]
        self._sum_all([CodedSum(of_rank, [payload], 1.0) for of_rank, payload in zip(views, payloads)])

    # --- error feedback

    def holds(self, group: Group) -> bool:
        return self.keeps_residual and self.fixed_nbytes and not self._scatters(group)

    def subtract_transmitted(self, groups: Sequence[Group]) -> None:
        self._sum_all([coded for group in groups for coded in self.corrections(group)])

    def corrections(self, group: Group) -> list[CodedSum]:
        """The sums that subtract what peers decode from what becomes the residual."""
        flat: Any = group.state.residual  # a tensor where there are partitions: gradients hold no error then
        return [
            CodedSum(group.errors if partition is None else _views(flat, partition), [payload], -1.0, add=True)
            for payload, partition in group.state.payload
        ]


def _views(flat: Tensor, partition: Sequence[Piece]) -> list[Tensor]:
    """The pieces of a partition in a flat tensor of all elements of a group."""
    return [flat[start:stop].view(view.shape) for start, stop, view in partition]


def _filled_up(payloads: Sequence[Tensor], nbytes: int) -> Tensor:
    """Payloads of at most `nbytes` as one buffer, with so many bytes for each: their own memory, of `new_payloads`."""
    first, apart = payloads[0], nbytes * np.arange(len(payloads), dtype=np.uint64)
    end = first.storage_offset() + nbytes * len(payloads)
    if end <= first.untyped_storage().nbytes() and False not in (
        kernels.addresses(payloads) == first.data_ptr() + apart
    ):
        return first.as_strided((nbytes * len(payloads),), (1,))
    buffer = first.new_zeros(len(payloads), nbytes)
    torch._foreach_copy_([row[: payload.numel()] for row, payload in zip(buffer, payloads)], list(payloads))
    return buffer.view(-1)


def _unmade_parts(group: Group) -> list[Tensor]:
    """The parts of a group without data."""
    return group.pieces(torch.empty(1, device="cpu").expand(group.numel))


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges, with adjacent ones joined and empty ones left out."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        if start < stop:
            found.append((start, stop))
    return found


def all_finite(payloads: Sequence[ops.Payload]) -> bool:
    """Whether all payloads are of finite gradients."""
    return not any(map(ops.NON_FINITE.__and__, map(attrgetter("flags"), payloads)))


def scatter_pays(nbytes: float, size: int) -> bool:
    """Whether "scatter_reduce" takes less time than "gather" on the nominal network.

    Args:
        nbytes: of a rank's payload.
        size: the world size.
    """
    link = Link(size, NOMINAL_BANDWIDTH, NOMINAL_LATENCY)
    scattered = link.all_to_all(nbytes) + link.all_gather(nbytes / size) + NOMINAL_OPERATION
    return scattered < link.all_gather(nbytes)


def part_lengths(numel: int, parts: int) -> Any:
    """The elements of each of the parts that `tensor_split` cuts so many elements in."""
    return numel // parts + (np.arange(parts) < numel % parts)


def for_each(items: Iterable[Item], decode: Callable[..., Decoded], *arguments: float | Tensor) -> list[Decoded]:
    """decode(item, *arguments) for each item, as a payload. The `index` of a PayloadError is the item's number."""
    results: list[Decoded] = []
    try:
        for item in items:
            results.append(decode(item, *arguments))
    except ops.PayloadError as error:
        error.index = len(results)
        raise
    return results


def from_rank(error: ops.PayloadError, size: int) -> ops.PayloadError:
    """The error, whose text begins with the rank that has sent payload `index`, of those of `size` ranks in turns."""
    if error.index is None:
        return error
    return ops.PayloadError(f"from rank {error.index % size} of {size}: {error}")
