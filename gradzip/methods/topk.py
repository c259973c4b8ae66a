"""Sparsification by magnitude, and the payload format of sparse gradients."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter, methodcaller
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..memory.state import Key
from ..ops import groups
from ..ops import tensors as ops
from .base.compressor import INDEXED_NUMEL
from .base.error_feedback import ErrorFeedback
from .base.gather import CodedSum, GatherCompressor, for_each
from .base.registry import register
from .base.schedule import Theta, check_theta, theta_at

_COUNT = struct.Struct("<Q")  # k; the header's other 8 bytes hold the range float


@functools.lru_cache(maxsize=4096)  # it is asked for with each payload
def num_kept(theta: float, numel: int) -> int:
    """Number of elements that a sparsifier keeps: (1 - theta) * numel, rounded, at least 1."""
    return max(1, round((1.0 - theta) * numel))


class Drafts(NamedTuple):
    """Payloads to be completed."""

    payloads: Sequence[Tensor]
    ks: Sequence[int]  # elements of each
    numels: Sequence[int]  # of the vectors
    packed: list[Tensor]  # room for the coded values
    values: list[Tensor]  # float32, to be written; with bits = 32, in the payloads
    streams: list[Tensor]  # room for the indices


@dataclass
class SparseCodec(ErrorFeedback, GatherCompressor):
    """Payloads of k values with their indices.

    Payload: header; k values, float32 or range floats of `bits` bits; coded indices (gradzip/ops/index_code.py).
    """

    bits = 32
    max_numel = INDEXED_NUMEL
    undone_on_device = True

    def encode_lists(self, lists: Sequence[Sequence[Tensor]], keys: Sequence[Key]) -> list[Tensor]:
        vectors = list(map(methodcaller("reshape", -1), map(itemgetter(0), lists)))
        numels = list(map(Tensor.numel, vectors))
        drafts = self.drafts(list(map(self.num_kept, numels, map(attrgetter("step"), keys))), numels, vectors[0].device)
        return self.complete(drafts, groups.topk_abs(vectors, drafts.ks, drafts.values))

    def drafts(self, ks: Sequence[int], numels: Sequence[int], device: torch.device) -> Drafts:
        """Payloads to be completed, of k elements each of vectors of so many."""
        if self.bits == 32:
            return self._drafts(list(map((4).__mul__, ks)), ks, numels, device)
        drafts = self._drafts([ops.packed_nbytes(k, self.bits) for k in ks], ks, numels, device)
        values = torch.empty(sum(ks), dtype=torch.float32, device=device)
        return drafts._replace(values=list(values.split_with_sizes(list(ks))))

    def _drafts(self, nbytes: Sequence[int], ks: Sequence[int], numels: Sequence[int], device: torch.device) -> Drafts:
        """The same, with room for so many bytes of values."""
        ends = list(map(operator.add, nbytes, map(ops.index_code_capacity, ks, numels)))
        payloads = ops.new_payloads(ends, device, streams=True)
        begin = ops.HEADER_NBYTES
        drafts = Drafts(payloads, ks, numels, [], [], [])
        for payload, at, end in zip(payloads, nbytes, ends):
            packed = payload[begin : begin + at]
            drafts.packed.append(packed)
            drafts.streams.append(payload[begin + at : begin + end])
            if self.bits == 32:
                drafts.values.append(packed.view(torch.float32))
        return drafts

    def complete(
        self, drafts: Drafts, indices: Sequence[Tensor], magnitudes: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Seal payloads whose values are in place. indices: int32, ascending. magnitudes: of values that are coded."""
        numbers: Sequence[ops.RangeFloat] = ()
        if magnitudes is None:
            # Check the kept elements, which include those that are not finite: their magnitudes are the largest.
            magnitudes = groups.abs_max(drafts.values)
            if self.bits < 32:
                # Fit the mantissa to each payload: the largest values of a gradient span few octaves.
                numbers = groups.range_float_fit(drafts.values, self.bits)
                clamped = torch.empty((), dtype=torch.int64, device=drafts.values[0].device)  # the range is that of all
                groups.range_float_encode(drafts.values, numbers, self.bits, None, drafts.packed, clamped)
        nbytes = groups.index_code_write(indices, drafts.numels, drafts.streams)
        streams = map(ops.Stream, map(Tensor.numel, drafts.packed), nbytes)
        rest = b"" if numbers else bytes(8)
        fields = map(operator.add, map(_COUNT.pack, drafts.ks), itertools.repeat(rest))
        seals = map(
            ops.Seal, drafts.payloads, drafts.numels, fields, itertools.repeat(0), magnitudes,
            numbers or itertools.repeat(None), itertools.repeat(None), streams,
        )  # fmt: skip
        return ops.seal_payloads(list(seals), method=self.number, digest=self.digest)

    known_fields = 0x00FF  # the range float depends on the data

    def fields_of(self, shapes: Sequence[torch.Size], key: Key) -> bytes:
        return _COUNT.pack(self.num_kept(sum(map(math.prod, shapes)), key.step)) + bytes(8)

    def num_kept(self, numel: int, step: int) -> int:
        """k of a payload of so many elements, on a device."""
        raise TypeError(f"{type(self).__name__}: got no `num_kept`, expected it where lengths are fixed")

    def parse(
        self, payloads: Sequence[ops.Payload], numels: Sequence[int]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Parse payloads of gradients of so many elements. Returns their coded indices and values (float32).

        Does not wait for the device: unused bytes may follow the indices there. Raises PayloadError, with its `index`.
        """
        ks, packed, streams = zip(*for_each(zip(payloads, numels), self._sections))
        return streams, self.values(payloads, packed, ks, numels)

    def _sections(self, of: tuple[ops.Payload, int]) -> tuple[int, Tensor, Tensor]:
        """k, the values as they are coded, and the coded indices of the payload of so many elements."""
        payload, numel = of
        (k,) = _COUNT.unpack(payload.fields[:8])
        values_end = self.values_nbytes(k, numel)
        # Check before memory is allocated: decoded 2-bit values take 16 times their bytes in the payload.
        if values_end > payload.body.numel():
            raise ops.PayloadError(
                f"corrupt payload: it claims {k} values, but {payload.body.numel()} bytes do not hold them"
            )
        stream = payload.body[values_end:]
        if not stream.is_cuda:
            stream, _ = ops.index_code_open(stream)
            if payload.body.numel() - values_end - stream.numel() >= ops.PAYLOAD_ALIGN:
                raise ops.PayloadError(f"corrupt payload: its {k} values and indices do not fill it")
        return k, payload.body[:values_end], stream

    def values_nbytes(self, k: int, numel: int) -> int:
        """The bytes of the values of a payload that claims k. Raises PayloadError if no payload has so many."""
        if k > numel:
            raise ops.PayloadError(f"corrupt payload: it claims {k} values of {numel} elements")
        return ops.packed_nbytes(k, self.bits)

    def values(
        self, payloads: Sequence[ops.Payload], packed: Sequence[Tensor], ks: Sequence[int], numels: Sequence[int]
    ) -> Sequence[Tensor]:
        """Decode the k values of each payload (float32). Raises PayloadError, with its `index`."""
        if self.bits == 32:
            return [own.view(torch.float32) for own in packed]
        wires = list(map(attrgetter("wire"), payloads))
        values, failed = groups.range_float_decode(wires, packed, self.bits, ks)
        if failed:
            raise ops.PayloadError(f"corrupt payload: {ops.BAD_CODES}", failed - 1)
        return values

    def sum_all(self, sums: Sequence[CodedSum]) -> None:
        if self.bits == 32 and sums[0].outs[0].is_cuda:
            self._sum_on_device(sums)
            return
        payloads = [payload for coded in sums for payload in coded.payloads]
        numels = [coded.outs[0].numel() for coded in sums for _ in coded.payloads]
        terms = zip(*self.parse(payloads, numels))
        parsed = []
        for coded in sums:
            own = list(itertools.islice(terms, len(coded.payloads)))
            parsed.append(ops.WeightedSum(coded.outs[0], [(term, coded.weight) for term in own], coded.add))
        ops.index_code_decode_add_all(parsed)

    def _sum_on_device(self, sums: Sequence[CodedSum]) -> None:
        """`sum_all` of plain values, where nothing waits to read the indices."""
        outs = [out for coded in sums for out in coded.outs]
        payloads = [payload for coded in sums for payload in coded.payloads]
        contents = list(map(attrgetter("body"), payloads))
        fields = b"".join(map(attrgetter("fields"), payloads))
        table = (len(outs), -1)  # a row for each sum
        counts = np.frombuffer(fields, "<u8")[::2].reshape(table)
        nbytes, values = groups.numels(contents).reshape(table), groups.addresses(contents).reshape(table)
        numels = groups.numels(outs)[:, None]
        wrong = (counts > numels.astype(np.uint64)) | (4 * counts > nbytes.astype(np.uint64))
        if True in wrong:
            i = int(wrong.argmax())
            k, size, numel = counts.flat[i], nbytes.flat[i], outs[i // counts.shape[1]].numel()
            raise ops.PayloadError(f"corrupt payload: it claims {k} values of {numel} elements in {size} bytes", i)
        columns = (values + 4 * counts, nbytes - 4 * counts.astype(np.int64), values, counts)
        groups.decode_sums("index_code_decode_add", outs, sums[0].add, columns, sums[0].weight)


@register(
    "topk",
    number=2,
    examples=[
        "theta=0.9,exchange=scatter_reduce",
        "",
        "bits=8",
        "theta=0.9,select=sampled",
        "theta=0.9,bits=2,chunk=256,residual_decay=0.9",
    ],
)
@dataclass
class TopK(SparseCodec):
    """Sends the k elements of largest magnitude.

    This is the best approximation by k elements. Its squared error is the sum of squares of the dropped elements.

    Args:
        theta: fraction of the elements that is dropped, in [0, 1), or a schedule step -> theta.
        select: "exact" keeps k = round((1 - theta) n) of the n elements, ties to the lower index. "sampled" estimates
            the threshold from a random sample, and keeps the elements that reach it: k to within 10 %, or fewer if
            fewer elements are not 0.
        bits: 32 sends float32 values; 2 to 16 sends range-based floats, fitted to each payload.
        error_feedback: add what was not sent to the next gradient. Without it, Top-k does not converge.
        seed: of the samples.
        chunk: keep k = round((1 - theta) chunk) elements, at least 1, of each `chunk` consecutive ones, and ceil(k m /
            chunk) of the m elements of the last chunk, if it is shorter. A multiple of 32 up to 4096, with bits=2. Each
            value is a sign and one of two levels of its chunk, the means of the magnitudes up to their mean, and above
            it. None: the k largest of all.

    Payload: header; k values of `bits` bits; coded indices: 48 + ceil(bits k / 8) + I bytes, padded to 16. I is 12
    bytes plus the smaller of a bitmap, ceil(n / 8), and Rice-coded gaps, 1.02 bytes per index at theta = 0.99. With
    `chunk`, a chunk has two levels, bfloat16, and 2 bits for each value, padded to 4 bytes; coded indices follow: at
    theta = 0.985 and chunk = 4096, 0.0193 bytes for each element of the gradient.

    Deterministic. On a CUDA device, payloads have room for the longest coded indices of k elements, so that nothing
    waits for their length: 5 % more than random indices take at theta = 0.99. select="sampled" waits for k.

    Source: Aji, Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017; error feedback: Stich,
    Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018; sampled selection: Zhang, Zhang, Shi, Chu, Li,
    Evaluation and Optimization of Gradient Compression for Distributed Deep Learning, ICDCS 2023, section III; chunks:
    Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, 2025, with levels of our own.
    """

    theta: Theta = 0.99
    select: str = "exact"
    bits: int = 32
    error_feedback: bool = True
    seed: int = 0
    chunk: int | None = field(default=None, metadata={"digest": "if changed"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_theta(self.theta)
        if self.chunk is not None:
            ops.check_chunk(self.chunk, "TopK")
            if (self.bits, self.select) != (2, "exact"):
                raise ValueError(
                    f"TopK: got bits = {self.bits!r} and select = {self.select!r} with chunk = {self.chunk}, expected "
                    "bits = 2 and select = 'exact'"
                )
        self.check("select", self.select in ("exact", "sampled"), "'exact' or 'sampled'")
        self.fixed_nbytes = self.select == "exact"
        valid = isinstance(self.bits, int) and (self.bits == 32 or 2 <= self.bits <= 16)
        self.check("bits", valid, "32 (float32), or 2 to 16 (range floats)")

    @property
    def capture_needs(self) -> str | None:
        return None if self.fixed_nbytes else "select='exact'"

    @property
    def reads_half(self) -> bool:  # type: ignore[override]
        return self.chunk is not None and super().reads_half

    def num_kept(self, numel: int, step: int) -> int:
        return num_kept(theta_at(self.theta, step), self.chunk or numel)

    def encode_lists(self, lists: Sequence[Sequence[Tensor]], keys: Sequence[Key]) -> list[Tensor]:
        if self.chunk is None and self.select == "exact":
            return super().encode_lists(lists, keys)
        vectors = list(map(methodcaller("reshape", -1), map(itemgetter(0), lists)))
        ks = list(map(self.num_kept, map(Tensor.numel, vectors), map(attrgetter("step"), keys)))
        if self.chunk is None:
            return self._encode_samples(vectors, ks, keys)
        return self._encode_chunks(vectors, ks, self.chunk)

    def _encode_samples(self, vectors: Sequence[Tensor], ks: Sequence[int], keys: Sequence[Key]) -> list[Tensor]:
        selections, found = groups.select_sampled(vectors, ks, list(map(attrgetter("bits"), keys)))
        drafts = self.drafts(found, list(map(Tensor.numel, vectors)), vectors[0].device)
        return self.complete(drafts, groups.topk_abs(vectors, found, drafts.values, selections))

    # --- chunks

    def _encode_chunks(self, vectors: Sequence[Tensor], ks: Sequence[int], chunk: int) -> list[Tensor]:
        numels = list(map(Tensor.numel, vectors))
        counts = [ops.chunk_topk_count(numel, k, chunk) for numel, k in zip(numels, ks)]
        nbytes = [ops.chunk_topk_nbytes(numel, k, chunk) for numel, k in zip(numels, ks)]
        drafts = self._drafts(nbytes, counts, numels, vectors[0].device)
        indices, most = groups.chunk_topk(vectors, counts, ks, chunk, drafts.packed)
        return self.complete(drafts._replace(ks=ks), indices, most.split_with_sizes([1] * len(ks)))

    def values_nbytes(self, k: int, numel: int) -> int:
        if self.chunk is None:
            return super().values_nbytes(k, numel)
        if not 1 <= k <= self.chunk:
            raise ops.PayloadError(f"corrupt payload: it claims {k} values of each {self.chunk} elements")
        return ops.chunk_topk_nbytes(numel, k, self.chunk)

    def values(
        self, payloads: Sequence[ops.Payload], packed: Sequence[Tensor], ks: Sequence[int], numels: Sequence[int]
    ) -> Sequence[Tensor]:
        if self.chunk is None:
            return super().values(payloads, packed, ks, numels)
        counts = [ops.chunk_topk_count(numel, k, self.chunk) for numel, k in zip(numels, ks)]
        values, failed = groups.chunk_topk_values(packed, numels, ks, counts, self.chunk)
        if failed:
            raise ops.PayloadError(f"corrupt payload: {ops.BAD_LEVELS}", failed - 1)
        return values
