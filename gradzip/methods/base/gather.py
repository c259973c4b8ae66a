"""The base class of methods whose payloads cannot be added: a stateless codec, and the exchange of its payloads."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...collectives import AllToAll, Gather, ToHost
from ...collectives.cost import Link
from ...collectives.routines import Local, Routine, at_once, jointly
from ...memory.state import Key
from ...ops import tensors as ops
from .compressor import Average, Compressor

if TYPE_CHECKING:
    from ...averaging.group import Group

# The network that exchange="auto" assumes: 1 Gb/s, a latency of 50 us, and half a millisecond to start one more
# collective and wait for it after the backward pass. It is not measured, because all ranks must decide alike.
NOMINAL_BANDWIDTH, NOMINAL_LATENCY, NOMINAL_OPERATION = 1.25e8, 5e-5, 5e-4


class CodedSum(NamedTuple):
    """A weighted sum of payloads, to decode."""

    outs: Sequence[Tensor]  # float32, contiguous: of the shapes of the parts that were encoded
    payloads: Sequence[ops.Payload]
    weight: float
    add: bool = False  # to `outs`, rather than overwrite them


@dataclass
class GatherCompressor(Compressor):
    """A method whose payloads cannot be added: a stateless codec, and the exchange of its payloads.

    A codec of vectors defines `encode` and `decode_add`, or `sum_all` in place of the latter. A codec of lists of
    tensors sets `vectors = False`, and defines `encode_all` and `sum_all`. A group has one payload, with one header.

    Args:
        exchange: how payloads reach all p ranks.

            "gather": encode, all-gather, decode every rank's payload in rank order. A rank receives p - 1 payloads.

            "scatter_reduce": a group has a partition for each rank, its owner (`partition_ranges`). A rank encodes
            all partitions, and sends each to its owner, by an all-to-all. The owner decodes and averages the payloads
            that it receives, and encodes the average. All ranks gather these. A rank receives 2 (p - 1) / p payloads in
            two rounds, and the average is compressed twice. With error feedback, the owner keeps a residual of the
            second compression.

            "auto": "gather" until the cost model finds "scatter_reduce" faster for a parameter (`scatter_pays`), which
            it never does with 2 ranks; "scatter_reduce" from then on.
    """

    # Not in the digest: payloads do not depend on it.
    exchange: str = field(default="gather", kw_only=True, metadata={"digest": False})

    # Whether payloads on a device have lengths that follow from the gradients' shapes and the step. Ranks need not
    # exchange lengths then.
    fixed_nbytes = False

    number: ClassVar[int]  # in payload headers, set by `register`
    seed = 0  # of random draws; methods that draw declare it as a hyper-parameter

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exchange not in ("gather", "scatter_reduce", "auto"):
            raise ValueError(
                f"{type(self).__name__}: got exchange = {self.exchange!r}, expected 'gather', 'scatter_reduce' or "
                "'auto'"
            )
        self.rounds = 1 if self.exchange == "gather" else 2
        self.asymmetric = self.exchange != "gather"
        self.adapts = self.exchange == "auto"

    def groups_by(self, shape: torch.Size) -> Any:
        return self.joined_shape(shape) if self.vectors else ()

    # --- the codec

    def encode_all(self, parts: Sequence[Tensor], key: Key) -> Tensor:
        """Encode the parts of a group (contiguous float32). Returns the payload (uint8). key: of random draws."""
        (vector,) = parts
        return self.encode(vector, key)

    def encode(self, grad: Tensor, key: Key) -> Tensor:
        """`encode_all` for a vector."""
        raise TypeError(f"{type(self).__name__}: got no `encode`, expected one of a codec of vectors")

    def encode_average(self, parts: Sequence[Tensor], key: Key) -> Tensor:
        """`encode_all` for the owner of a partition, who sends its average to all ranks."""
        return self.encode_all(parts, key)

    def sum_all(self, sums: Sequence[CodedSum]) -> None:
        """Decode the payloads of several groups, and write their weighted sums, added in order.

        Raises:
            PayloadError: `encode_all` of this codec cannot have written a payload. Where only the device can tell,
                elements become NaN instead.
        """
        for outs, payloads, weight, add in sums:
            (out,) = outs
            if not add:
                out.zero_()
            for rank, payload in enumerate(payloads):
                try:
                    self.decode_add(payload, out, weight)
                except ops.PayloadError as error:
                    raise from_rank(error, rank, len(payloads)) from None

    def decode_add(self, payload: ops.Payload, out: Tensor, weight: float) -> None:
        """Add `weight` times the decoded payload of a vector to `out`.

        Raises:
            PayloadError: `encode` of this codec cannot have written the payload.
        """
        raise TypeError(f"{type(self).__name__}: got no `decode_add`, expected it, or `sum_all`")

    def decode_all(self, payloads: Sequence[ops.Payload], outs: Sequence[Tensor]) -> Routine:
        """Coroutine: write the average of payloads, in order, to `outs`, of the shapes of the parts."""
        if not all_finite(payloads):
            for out in outs:
                out.fill_(math.nan)
        else:
            coded = CodedSum(outs, payloads, 1.0 / len(payloads))
            yield from jointly(self._sum_all, outs[0].device, coded)

    def decode(self, payloads: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Average payloads, in order. On a CPU, the next call reuses the memory of the result.

        shapes: of the parts that were encoded. Waits for the device once.
        """
        outs = self._new_averages(shapes, payloads[0].device)
        opened = at_once(self.opened(payloads, [sum(out.numel() for out in outs)] * len(payloads), len(payloads)))
        at_once(self.decode_all(opened, outs))
        return outs

    def _new_averages(self, shapes: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
        numels = [math.prod(shape) for shape in shapes]
        return [
            p.view(tuple(s)) for p, s in zip(self.new_average(sum(numels), device).split_with_sizes(numels), shapes)
        ]

    def decode_partition(self, payloads: Sequence[ops.Payload], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """The average of payloads for the owner of a partition, who encodes it again."""
        outs = self._new_averages(shapes, payloads[0].body.device)
        at_once(self.decode_all(payloads, outs))
        return outs

    def combine(self, payloads: Sequence[ops.Payload], group: Group) -> Routine:
        """Coroutine: the `Average` of the payloads of all ranks, for `reduce` to return. May change the state."""
        flat = self.new_average(group.numel, group.device)
        yield from self.decode_all(payloads, group.pieces(flat))
        return (yield from self.with_max_abs(group, flat, None if all_finite(payloads) else math.nan))

    def _sum_all(self, sums: list[CodedSum]) -> list[None]:
        self.sum_all(sums)
        return [None] * len(sums)

    # --- payload headers

    def opened(self, payloads: Sequence[Tensor], numels: Sequence[int], ranks: int) -> Routine:
        """Coroutine: check the headers of payloads. Returns an `ops.Payload` for each.

        Args:
            numels: elements of each.
            ranks: payload i is from rank i % ranks.

        Raises:
            PayloadError: names the rank whose payload is truncated, corrupt or made with another configuration.
        """
        return self.open_all(payloads, numels, ranks, (yield from inspected(payloads)))

    def open_all(
        self, payloads: Sequence[Tensor], numels: Sequence[int], ranks: int, table: Tensor | None = None
    ) -> list[ops.Payload]:
        """`opened`, with the table of `inspected`. Waits for the device without one."""
        try:
            return ops.open_payloads(payloads, numels, table, method=self.number, digest=self.digest)
        except ops.PayloadError as error:
            raise from_rank(error, 0 if error.index is None else error.index % ranks, ranks) from None

    def seal(self, seal: ops.Seal) -> Tensor:
        """Write the header of a payload whose body is complete. Returns the payload."""
        return ops.seal_payloads([seal], method=self.number, digest=self.digest)[0]

    def non_finite(self, numel: int, device: torch.device) -> Tensor:
        """The payload of a group that is not finite: a header with a flag."""
        return self.seal(ops.Seal(ops.new_payload(0, device), numel, flags=ops.NON_FINITE))

    # --- the exchange

    def looks(self, x: Tensor) -> bool:
        return True  # the host waits for headers anyway, and a gradient that is not finite has no payload to subtract

    def gather(self, payload: Tensor, alike: bool = True) -> Gather:
        """The all-gather of a payload of this method. alike: whether all ranks encode equally many elements."""
        return Gather(payload, same_length=alike and self.fixed_nbytes and ops.on_device(payload))

    def reduce(self, group: Group) -> Routine:
        state = group.state
        state.scattered = self._scatters(group)
        with attribute_payload_errors(f"{type(self).__name__}, parameter {group.name!r}"):
            if state.scattered:
                return (yield from self._scatter_reduce(group))
            payload, earlier = yield from self.encoded(group)
            payloads = yield self.gather(payload)
            numels = [group.numel] * (len(earlier) + group.size)
            opened = (yield from self.opened([*earlier, *payloads], numels, group.size))[len(earlier) :]
            # What this rank has sent, each payload with the ranges of the group's elements that it has.
            state.payload = [(opened[group.rank], [(0, group.numel)])]
            # All ranks see the same lengths, so they choose the same exchange.
            state.payload_nbytes = sum([p.numel() for p in payloads]) // len(payloads)
            return (yield from self.combine(opened, group))

    def encoded(self, group: Group) -> Routine:
        """Coroutine: encode the parts of a group. Methods that run a collective for that override it.

        Returns the payload, and the payloads of an earlier round that are still to be opened.
        """
        yield from ()
        return self.encode_all(group.parts, group.state.key(self.seed)), []

    def _scatters(self, group: Group) -> bool:
        if self.exchange == "gather" or not 1 < group.size <= group.numel:
            return False
        if self.exchange == "scatter_reduce" or getattr(group.state, "scattered", False):
            return True
        return scatter_pays(getattr(group.state, "payload_nbytes", 0), group.size)

    def partition_ranges(self, group: Group) -> list[list[tuple[int, int]]]:
        """For each rank, the range of elements of each part that it owns, among those of the whole group.

        Partitions have whole rows of a part, unless it has fewer rows than there are ranks.
        """
        found: list[list[tuple[int, int]]] = [[] for _ in range(group.size)]
        begin = 0
        for part in group.parts:
            row = self._row_numel(part, group.size)
            edges = _edges(part.numel() // row, group.size)
            for owner, (start, stop) in enumerate(itertools.pairwise(edges)):
                found[owner].append((begin + start * row, begin + stop * row))
            begin += part.numel()
        return found

    def _row_numel(self, part: Tensor, size: int) -> int:
        """Elements of a part that stay together in a partition."""
        return part.shape[1:].numel() if part.shape[0] >= size else 1

    def add_residual(self, group: Group) -> Routine:
        self.keep_owner_residual(group)
        yield from super().add_residual(group)

    def keep_owner_residual(self, group: Group) -> None:
        """Add the owner's residual to the residual if this rank owns other elements now."""
        state = group.state
        if getattr(state, "owner_residual", None) is not None:
            own = self.partition_ranges(group)[group.rank] if self._scatters(group) else []
            if _merged(own) != _merged(state.owner_ranges):
                state.fold_owner_residual()

    def _scatter_reduce(self, group: Group) -> Routine:
        state, key, ranges = group.state, group.state.key(self.seed), self.partition_ranges(group)
        shapes = [self._partition_shapes(group, of_rank) for of_rank in ranges]
        payloads = [
            self.encode_all(self._partition(group, of_rank, of_shapes), key._replace(name=f"{key.name}[{i}]"))
            for i, (of_rank, of_shapes) in enumerate(zip(ranges, shapes))
        ]
        mine = shapes[group.rank]
        numels = [sum(stop - start for start, stop in of_rank) for of_rank in ranges]
        sent = AllToAll(ops.join_payloads(payloads), tuple(p.numel() for p in payloads))
        received = yield sent
        own = numels[group.rank]
        opened = yield from self.opened([*received, *payloads], [own] * group.size + numels, group.size)
        from_ranks, state.payload = opened[: group.size], list(zip(opened[group.size :], ranges))
        average = torch.cat([part.reshape(-1) for part in self.decode_partition(from_ranks, mine)])
        if (residual := getattr(state, "owner_residual", None)) is not None:
            average.add_(residual)
        parts = [part.view(shape) for part, shape in zip(average.split_with_sizes([math.prod(s) for s in mine]), mine)]
        payload = self.encode_average(parts, key._replace(name=f"{key.name}[owner]"))
        payloads = yield self.gather(payload, alike=len(set(numels)) == 1)
        opened = yield from self.opened(payloads, numels, group.size)
        flat = torch.empty(group.numel, dtype=torch.float32, device=group.device)
        if not all_finite(opened):
            return Average(group.pieces(flat.fill_(math.nan)), math.nan)
        self.sum_all(
            [
                CodedSum([flat[a:b].view(s) for (a, b), s in zip(of_rank, of_shapes)], [payload], 1.0)
                for payload, of_rank, of_shapes in zip(opened, ranges, shapes)
            ]
        )
        if self.error_feedback:
            decoded = torch.cat([flat[start:stop] for start, stop in ranges[group.rank]])
            state.owner_residual, state.owner_ranges = average.sub_(decoded), ranges[group.rank]
        return (yield from self.with_max_abs(group, flat))

    def _partition_shapes(self, group: Group, ranges: list[tuple[int, int]]) -> list[tuple[int, ...]]:
        """The shapes of a partition's pieces of each part."""
        shapes: list[tuple[int, ...]] = []
        for part, (start, stop) in zip(group.parts, ranges):
            row = self._row_numel(part, group.size)
            shapes.append((stop - start,) if row == 1 else ((stop - start) // row, *part.shape[1:]))
        return shapes

    def _partition(self, group: Group, ranges: list[tuple[int, int]], shapes: list[tuple[int, ...]]) -> list[Tensor]:
        """A partition's pieces of each part."""
        found, begin = [], 0
        for part, (start, stop), shape in zip(group.parts, ranges, shapes):
            found.append(part.view(-1)[start - begin : stop - begin].view(shape))
            begin += part.numel()
        return found

    # --- error feedback

    def subtract_transmitted(self, groups: Sequence[Group]) -> None:
        self.sum_all([coded for group in groups for coded in self.corrections(group)])

    def corrections(self, group: Group) -> list[CodedSum]:
        """The sums that subtract what peers decode from the residual."""
        state = group.state
        assert state.residual is not None and state.payload is not None
        if not state.scattered:
            ((payload, _),) = state.payload
            return [CodedSum(group.pieces(state.residual), [payload], -1.0, add=True)]
        sums = []
        for payload, ranges in state.payload:
            pieces = zip(ranges, self._partition_shapes(group, ranges))
            outs = [state.residual[start:stop].view(shape) for (start, stop), shape in pieces]
            sums.append(CodedSum(outs, [payload], -1.0, add=True))
        return sums


def _edges(rows: int, size: int) -> list[int]:
    """Where parts of `rows` rows begin and end, that differ by one row at most: the longer ones come first."""
    each, longer = divmod(rows, size)
    return list(itertools.accumulate((each + (i < longer) for i in range(size)), initial=0))


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
    return not any([payload.flags & ops.NON_FINITE for payload in payloads])


def scatter_pays(nbytes: float, size: int) -> bool:
    """Whether "scatter_reduce" takes less time than "gather" on the nominal network.

    Args:
        nbytes: of a rank's payload.
        size: the world size.
    """
    link = Link(size, NOMINAL_BANDWIDTH, NOMINAL_LATENCY)
    scattered = link.all_to_all(nbytes) + link.all_gather(nbytes / size) + NOMINAL_OPERATION
    return scattered < link.all_gather(nbytes)


def inspected(payloads: Sequence[Tensor]) -> Routine:
    """Coroutine: inspect payloads on a device. Returns a table on the host for `ops.open_payloads`, or None."""
    if not payloads[0].is_cuda:
        return None
    table = yield Local(ops.inspect_payloads, payloads[0].device, payloads)
    return None if table is None else (yield ToHost(table))


def parse_all(coded: CodedSum, parse: Callable[[ops.Payload], Any]) -> list[Any]:
    """Parse the payloads of a sum. A PayloadError names the rank."""
    parsed: list[Any] = []
    try:
        for payload in coded.payloads:
            parsed.append(parse(payload))
    except ops.PayloadError as error:
        raise from_rank(error, len(parsed), len(coded.payloads)) from None
    return parsed


@contextlib.contextmanager
def attribute_terms(counts: Sequence[int]) -> Iterator[None]:
    """Prefix the text of a PayloadError that a kernel raises with the rank whose payload it is.

    counts: of the payloads of each sum.
    """
    try:
        yield
    except ops.PayloadError as error:
        ranks = [(rank, count) for count in counts for rank in range(count)]
        raise (error if error.index is None else from_rank(error, *ranks[error.index])) from None


def from_rank(error: ops.PayloadError, rank: int, size: int) -> ops.PayloadError:
    """The error, whose text begins with the payload's source."""
    return ops.PayloadError(f"{payload_source(rank, size)}: {error}")


def payload_source(rank: int, size: int) -> str:
    """Describe the source of a payload, for errors."""
    return f"from rank {rank} of {size}"


@contextlib.contextmanager
def attribute_payload_errors(source: str) -> Iterator[None]:
    """Prefix the text of a PayloadError with the payload's source."""
    try:
        yield
    except ops.PayloadError as error:
        raise ops.PayloadError(f"{source}: {error}") from None
