"""The base class of codecs of lists of tensors: a few numbers and packed elements for each."""

from __future__ import annotations

import functools
import itertools
import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...ops import groups
from ...ops import tensors as ops
from .gather import CodedSum, GatherCompressor

Shapes = tuple[torch.Size, ...]


class Layout(NamedTuple):
    """Where the numbers and the code of each tensor are, of one or more lists, each in a body of its own.

    A body has the numbers of all its tensors, float32, and then the code of each. Sections begin at multiples of 16.
    """

    body: np.ndarray  # the number of each tensor's body
    numels: np.ndarray  # of each tensor, int64
    counts: np.ndarray  # of each tensor's numbers
    numbers: np.ndarray  # where the tensor's numbers begin in its body, uint64
    codes: np.ndarray  # where its code begins there, uint64
    heads: list[int]  # bytes of each body's numbers
    nbytes: list[int]  # of each body


@dataclass
class ListCodec(GatherCompressor):
    """A codec of lists of tensors: a few numbers (float32) and packed elements for each.

    Subclasses define `encode_lists`, and the attributes and functions below.
    """

    vectors = False
    fixed_nbytes = True
    undone_on_device = True
    writes_half = True

    kernel: ClassVar[str]  # the decoder: its terms are the addresses of the code and of the numbers, and a weight
    problem: ClassVar[str | None] = None  # what the kernel fails with, if it can
    has_scales = True  # whether the numbers are finite and not negative

    @staticmethod
    @abstractmethod
    def code_nbytes(numel: int) -> int:
        """Bytes of the packed elements of a tensor."""

    @staticmethod
    def count_numbers(shape: torch.Size) -> int:
        """How many numbers a tensor of this shape has."""
        return 1

    def new_payloads(self, layout: Layout, device: torch.device) -> tuple[list[Tensor], np.ndarray]:
        """Payloads to be completed, and the address of each tensor's body (uint64)."""
        payloads = ops.new_payloads(layout.nbytes, device, gaps=True)
        return payloads, groups.addresses(payloads)[layout.body] + np.uint64(ops.HEADER_NBYTES)

    def write_numbers(self, layout: Layout, payloads: Sequence[Tensor], numbers: Tensor) -> None:
        """Write the numbers of all tensors (float32) to their payloads."""
        begin = ops.HEADER_NBYTES
        heads = [x[begin : begin + nbytes].view(torch.float32) for x, nbytes in zip(payloads, layout.heads)]
        torch._foreach_copy_(heads, list(numbers.split_with_sizes(list(map(Tensor.numel, heads)))))

    def seal_all(
        self, layout: Layout, payloads: Sequence[Tensor], fields: Iterable[bytes], magnitudes: Iterable[Tensor]
    ) -> list[Tensor]:
        """Write the headers of payloads whose bodies are complete. Returns the payloads."""
        numels = np.bincount(layout.body, layout.numels).astype(int).tolist()
        seals = list(map(ops.Seal, payloads, numels, fields, itertools.repeat(0), magnitudes))
        return ops.seal_payloads(seals, method=self.number, digest=self.digest)

    def layout(self, lists: Iterable[Sequence[Tensor]]) -> Layout:
        """The layout of the bodies for lists of tensors."""
        return _layout_of(type(self), tuple([tuple(map(attrgetter("shape"), tensors)) for tensors in lists]))

    def bodies(self, layout: Layout, lists: Sequence[Sequence[ops.Payload]]) -> np.ndarray:
        """The addresses of the bodies of the payloads of each list, uint64: (lists, payloads).

        Raises:
            PayloadError: one has another length than in the layout, or a scale is no finite number >= 0. On a device,
                elements become NaN instead of the latter.
        """
        contents = list(map(attrgetter("body"), itertools.chain(*lists)))
        nbytes = groups.numels(contents).reshape(len(lists), -1)
        wrong = (nbytes != np.array(layout.nbytes)[:, None]).reshape(-1)
        if True in wrong:
            i = int(wrong.argmax())
            expected = layout.nbytes[i // nbytes.shape[1]]
            got = f"got {contents[i].numel()} bytes after the header, expected {expected}"
            raise ops.PayloadError(f"corrupt payload: {got}", i)
        if self.has_scales and not contents[0].is_cuda:
            for i, body in enumerate(contents):
                numbers = body[: layout.heads[i // nbytes.shape[1]]].view(torch.float32)
                if not bool(((numbers >= 0) & (numbers < math.inf)).all()):
                    got = f"its scales are {numbers.tolist()[:3]}, expected finite numbers >= 0"
                    raise ops.PayloadError(f"corrupt payload: {got}", i)
        return groups.addresses(contents).reshape(nbytes.shape)

    def columns(self, layout: Layout, sums: Sequence[CodedSum]) -> tuple[np.ndarray, ...]:
        """What the kernel reads of each tensor's payloads: (tensors, payloads) each."""
        begin = self.bodies(layout, [coded.payloads for coded in sums])[layout.body]
        return begin + layout.codes[:, None], begin + layout.numbers[:, None]

    def sum_all(self, sums: Sequence[CodedSum]) -> None:
        columns = self.columns(self.layout([coded.outs for coded in sums]), sums)
        self.decode_sums([out for coded in sums for out in coded.outs], sums[0].add, columns, sums[0].weight)

    def decode_sums(
        self, outs: Sequence[Tensor], add: bool, columns: Sequence[np.ndarray | int], weights: np.ndarray | float
    ) -> None:
        """Run the kernel. columns, weights: of the terms of each tensor, (tensors, terms), or the same for all."""
        fails = self.problem is not None
        if failed := groups.decode_sums(self.kernel, outs, add, columns, weights, fails):
            raise ops.PayloadError(f"corrupt payload: {self.problem}", failed - 1)


@functools.lru_cache(maxsize=256)
def _layout_of(method: type[ListCodec], lists: tuple[Shapes, ...]) -> Layout:
    numels, counts, numbers, codes, heads, nbytes = [], [], [], [], [], []
    for shapes in lists:
        of_list = list(map(math.prod, shapes))
        numels += of_list
        count = list(map(method.count_numbers, shapes))
        counts += count
        *begins, head = itertools.accumulate(count, initial=0)
        numbers += begins
        heads.append(4 * head)
        sizes = map(_padded, [heads[-1], *map(method.code_nbytes, of_list)])
        *begins, end = itertools.accumulate(sizes)
        codes += begins
        nbytes.append(end)
    body = np.repeat(np.arange(len(lists)), list(map(len, lists)))
    starts = 4 * np.array(numbers, np.uint64), np.array(codes, np.uint64)
    return Layout(body, np.array(numels), np.array(counts), *starts, heads, nbytes)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ops.PAYLOAD_ALIGN) * ops.PAYLOAD_ALIGN
