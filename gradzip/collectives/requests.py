"""The collectives that methods ask for. A method yields a collective and is sent its result; an engine runs it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..ops import tensors as ops

# The ranks that a collective runs among: all ranks of the group, the ranks of this rank's node, or its peers, which are
# the ranks with the same place on every node. "rank" in a collective's description is the number among these.
Scope = Literal["all", "node", "peers"]


@dataclass(frozen=True)
class Mean:
    """All-reduce: the average over the ranks of a floating-point tensor of the same shape and dtype on each.

    Result: the average. The engine may overwrite the tensor, and return it, unless `keep`. With `tensors`, the average
    of their concatenation, which is also written to them; such requests are for `fusion`, not for engines.

    In float16, a sum may overflow where the average does not. Engines therefore divide by the number of ranks before
    they add float16, and after they have added other types.
    """

    tensor: Tensor
    in_place: bool = False  # write the average to the tensor, also if it is joined with others
    keep: bool = False  # leave the tensor as it is
    scope: Scope = "all"
    tensors: Sequence[Tensor] = ()  # several of one dtype and device, of which `tensor` is the first

    def addend(self, size: int) -> Tensor:
        """What this rank of `size` adds to the sum, to be overwritten. It is the tensor itself, unless `keep`."""
        tensor = self.tensor.clone() if self.keep else self.tensor
        return tensor.div_(size) if tensor.dtype == torch.float16 else tensor

    def average(self, total: Tensor, size: int) -> Tensor:
        """Make the average of the sum of all ranks' addends, in its memory."""
        return total if self.tensor.dtype == torch.float16 else total.div_(size)


# The most bytes that a peer may send, if a plan does not say less: it is believed before its bytes are checked.
MOST_NBYTES = 1 << 26


def most_nbytes(numel: int) -> int:
    """The most bytes that a method sends for so many elements: twice 64 bits for each, and headers."""
    return 16 * numel + (1 << 12)


@dataclass(frozen=True)
class Gather:
    """All-gather of a payload (uint8), or of several, concatenated.

    Payloads start with a payload header, and lengths may differ between ranks, unless `same_length`. Result: the bytes
    of each rank, in rank order.
    """

    tensor: Tensor
    count: int = 1  # of payloads, the same on all ranks
    same_length: bool = False  # whether all ranks send equally many bytes: no lengths are exchanged
    scope: Scope = "all"
    limit: int = MOST_NBYTES  # what a rank sends at most

    def split_by_rank(self, gathered: Tensor, size: int) -> list[Tensor]:
        """Split the concatenated bytes of `size` ranks into the result. Payload headers hold the lengths.

        Waits for the device if the payloads are on CUDA, unless `same_length`.
        """
        if self.same_length:
            return split_equally(gathered, self.tensor.numel(), size)
        payloads = ops.split_payloads(gathered, size * self.count)
        if self.count == 1:
            return payloads
        groups = [payloads[i : i + self.count] for i in range(0, len(payloads), self.count)]
        parts = gathered.split_with_sizes([sum(payload.numel() for payload in group) for group in groups])
        return [ops.join_payloads(group, buffer=part) for group, part in zip(groups, parts)]


@dataclass(frozen=True)
class AllToAll:
    """All-to-all: one payload for each rank, concatenated in rank order, `nbytes[i]` bytes for rank i.

    Payloads start with a payload header, unless `same_length`. Result: a list of the payloads for this rank, in the
    order of the ranks that sent them.
    """

    tensor: Tensor
    nbytes: tuple[int, ...]
    same_length: bool = False  # whether all parts of all ranks have equally many bytes
    scope: Scope = "all"
    limit: int = MOST_NBYTES  # what a part has at most

    @property
    def parts(self) -> list[Tensor]:
        return list(self.tensor.split_with_sizes(list(self.nbytes)))


def split_equally(received: Tensor, nbytes: int, size: int) -> list[Tensor]:
    """Split received bytes by rank. Raises PayloadError unless each of `size` ranks has sent `nbytes`."""
    if received.numel() != size * nbytes:
        raise ops.PayloadError(
            f"got {received.numel()} bytes from {size} ranks, expected {nbytes} from each: give every rank the same "
            "method, arguments and gradients"
        )
    return list(received.view(size, nbytes))


@dataclass(frozen=True)
class Broadcast:
    """Broadcast from rank 0 of a tensor of the same shape and dtype on each rank.

    Result: rank 0's tensor, the same bits on all ranks. The engine may overwrite the tensor, and return it.
    """

    tensor: Tensor
    scope: Scope = "all"


@dataclass(frozen=True)
class ToHost:
    """Copy of a tensor of this rank to host memory. Nothing is sent.

    With it, a method gets numbers from a device without waiting for the device itself: all methods of a round wait
    once, together. Sizes and dtypes may differ. Result: the tensor on the CPU, maybe a view of a larger one.
    """

    scope: ClassVar[Scope] = "all"  # for uniformity with collectives

    tensor: Tensor


@dataclass(frozen=True)
class RingSum:
    """Sum over the ranks of segments that are compressed and decompressed while other segments are on the wire.

    Result: None, once every segment is decoded. All callbacks are called by the engine, each once per segment.

    Args:
        numels: elements of each segment on the wire, the same on all ranks. There may be any number of segments; with
            several for each rank (`ring_segments`), compression overlaps communication.
        encode: encode(i) returns this rank's segment i: contiguous, numels[i] elements of `dtype` on `device`. The
            tensor is not changed, and must not change until the sum is done. Called before decode(i).
        decode: decode(i, total) takes the sum of segment i over the ranks, the same bits on all. The next RingSum may
            reuse the memory of `total`.

    Source: Yu et al., GradiVeQ, NeurIPS 2018, Algorithm 1.
    """

    numels: tuple[int, ...]
    encode: Callable[[int], Tensor]
    decode: Callable[[int, Tensor], None]
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    scope: Scope = "all"


Collective = Mean | Gather | AllToAll | Broadcast | ToHost | RingSum


def among(scope: Scope, collective: Collective) -> Any:
    """The same collective, among other ranks. What sends nothing stays as it is."""
    return collective if isinstance(collective, ToHost) else replace(collective, scope=scope)


# Segment size, large enough to amortise per-message latency.
SEGMENT_NBYTES = 1 << 18

# Largest number of segments; beyond it, segments grow. Compression of all but the first and the last one overlaps.
SEGMENTS_PER_RANK = 32


def ring_segments(rows: int, size: int, row_nbytes: float) -> list[slice]:
    """Split independently compressed rows into segments for a ring of `size` ranks, equally many for each rank.

    Segments differ by at most one row. With fewer rows than ranks, each segment is a row.

    row_nbytes: bytes of a row on the wire.

    >>> ring_segments(7, 2, 4.0)
    [slice(0, 4, None), slice(4, 7, None)]
    >>> len(ring_segments(1 << 18, 3, 4.0)), len(ring_segments(1 << 30, 3, 4.0))  # 1 MiB, 4 GiB
    (6, 96)
    """
    if size < 1:
        raise ValueError(f"ring_segments: got size = {size}, expected at least 1")
    per_rank = math.ceil(rows * row_nbytes / (size * SEGMENT_NBYTES))
    count = min(rows, size * min(max(1, per_rank), SEGMENTS_PER_RANK))
    edges = [-(-rows * i // count) for i in range(count + 1)] if count else []
    return [slice(begin, end) for begin, end in itertools.pairwise(edges)]
