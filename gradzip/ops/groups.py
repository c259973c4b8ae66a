"""Kernels that take the gradients of whole groups in one call, for methods. Arguments are not checked.

All tensors of a call are on one device; nothing waits for it, unless documented otherwise.

Kernels take tables by address, which is `table.__array_interface__["data"][0]`: `table.ctypes.data` makes two calls of
Python. Of tables with fields, the former makes more. So do `x.all()` and `np.cumsum(x)`; `False in x` and
`np.add.accumulate(x)` make none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from operator import attrgetter, methodcaller
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import _native, replays
from .abs_max import abs_max_tensor
from .bucket_norms import NORMS
from .range_float import WORDS, RangeFloat
from .restore import pattern_of

# --- matrices, whose factors are one flat tensor for each group


class Matrices:
    """The sizes of the matrices of a group, and where each begins in flat tensors. Made once.

    Args:
        shapes: (n, m) of each.
        rank: r, columns of their factors.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], rank: int) -> None:
        self.rank = rank
        self.rows, self.columns = np.array(shapes, np.int64).reshape(-1, 2).T
        self.p_numel, self.q_numel = rank * int(self.rows.sum()), rank * int(self.columns.sum())
        # In bytes: of the matrices, of their P and of their Q.
        self.at, self.p_at, self.q_at = map(_starts, (self.rows * self.columns, rank * self.rows, rank * self.columns))


def _starts(numels: np.ndarray) -> np.ndarray:
    return 4 * (np.cumsum(numels) - numels)


class Projection(NamedTuple):
    """`low_rank_project` of a group: parts += residual, then parts @ factor, or their transposes with `transpose`.

    The parts are of one type; float32, if there is a residual.
    """

    matrices: Matrices
    parts: Sequence[Tensor]
    residual: Tensor | None  # flat
    factor: Tensor  # flat
    transpose: bool


def project(projections: Sequence[Projection]) -> list[Tensor]:
    """The results of `low_rank_project` for the matrices of several groups, flat and adjacent, in one call."""
    numels = [of.matrices.q_numel if of.transpose else of.matrices.p_numel for of in projections]
    out = torch.empty(sum(numels), dtype=torch.float32, device=projections[0].factor.device)
    outs = out.split_with_sizes(numels)
    tables = []
    for (matrices, parts, residual, factor, transpose), out in zip(projections, outs):
        table = np.empty((len(matrices.rows), 9), np.int64)  # struct Projection of csrc/common/low_rank.h
        given, computed = (matrices.p_at, matrices.q_at) if transpose else (matrices.q_at, matrices.p_at)
        own = list(map(methodcaller("data_ptr"), parts))
        table[:, 0] = own if residual is None else residual.data_ptr() + matrices.at
        table[:, 1], table[:, 2] = _native.FLOATS.index(parts[0].dtype), 0 if residual is None else own
        table[:, 3], table[:, 4] = matrices.rows, matrices.columns
        table[:, 5], table[:, 6], table[:, 7] = factor.data_ptr() + given, matrices.rank, transpose
        table[:, 8] = out.data_ptr() + computed
        tables.append(table)
    _run_table("low_rank_project", outs[0], tables)
    return list(outs)


class Update(NamedTuple):
    """`low_rank_apply_average` of a group: residual = parts - sent_p sent_qT, then outs = p qT."""

    matrices: Matrices
    outs: Sequence[Tensor]  # of one type
    parts: Sequence[Tensor]  # with a residual: float32, which may be the outs
    residual: Tensor | None  # these are all flat
    sent_p: Tensor
    sent_q: Tensor
    p: Tensor
    q: Tensor
    number: Tensor | None  # if it is not finite, the residual stays as it is


def apply_averages(updates: Sequence[Update]) -> list[None]:
    """`low_rank_apply_average_all` for the matrices of several groups, in one call."""
    tables = []
    for matrices, outs, parts, residual, sent_p, sent_q, p, q, number in updates:
        table = np.empty((len(matrices.rows), 12), np.int64)  # struct AverageUpdate of csrc/common/low_rank.h
        table[:, 0], table[:, 1] = list(map(methodcaller("data_ptr"), outs)), _native.FLOATS.index(outs[0].dtype)
        if residual is None:
            table[:, 2:4] = 0
        else:
            table[:, 2] = table[:, 0] if parts is outs else list(map(methodcaller("data_ptr"), parts))
            table[:, 3] = residual.data_ptr() + matrices.at
        for column, (factor, at) in enumerate(
            ((sent_p, matrices.p_at), (sent_q, matrices.q_at), (p, matrices.p_at), (q, matrices.q_at)), start=4
        ):
            table[:, column] = factor.data_ptr() + at
        table[:, 8], table[:, 9], table[:, 10] = matrices.rows, matrices.columns, matrices.rank
        table[:, 11] = 0 if number is None else number.data_ptr()
        tables.append(table)
    _run_table("low_rank_apply_average", updates[0].p, tables)
    return [None] * len(updates)


class Factor(NamedTuple):
    """All Q of a group of matrices, or all P with `transpose`."""

    matrices: Matrices
    transpose: bool
    flat: Tensor

    @property
    def table(self) -> np.ndarray:
        """A table of struct Matrix of csrc/common/orthogonalize.h."""
        of = self.matrices
        table = np.empty((len(of.rows), 3), np.int64)
        table[:, 0] = self.flat.data_ptr() + (of.p_at if self.transpose else of.q_at)
        table[:, 1], table[:, 2] = of.rows if self.transpose else of.columns, of.rank
        return table


def orthogonalize(factors: Sequence[Factor]) -> list[Tensor]:
    """`orthogonalize_` for the factors of several groups, in one call. Returns them."""
    _run_table("orthogonalize", factors[0].flat, [factor.table for factor in factors])
    return [factor.flat for factor in factors]


def abs_max_columns(factors: Sequence[Factor]) -> list[Tensor]:
    """The largest magnitudes of the columns of each factor, (factors, r) for each group, in one call."""
    ranks = [factor.matrices.rank for factor in factors]
    numels = [len(factor.matrices.rows) * rank for factor, rank in zip(factors, ranks)]
    out = torch.empty(sum(numels), dtype=torch.float32, device=factors[0].flat.device)
    _run_table("abs_max_columns", out, [factor.table for factor in factors], 0, out.data_ptr())
    return [part.view(-1, rank) for part, rank in zip(out.split_with_sizes(numels), ranks)]


def _run_table(name: str, where: Tensor, tables: Sequence[np.ndarray], *arguments: float) -> None:
    table = np.concatenate(tables) if len(tables) > 1 else tables[0]
    _native.run(name, where, table.__array_interface__["data"][0], len(table), *arguments)


# --- residuals


def add_residual(sums: Sequence[tuple[Sequence[Tensor], Tensor, Sequence[Tensor]]]) -> list[None]:
    """`ops.add_residual` for several groups, in one call.

    sums: (parts, residual, outs) of each. The parts are contiguous, of one type; the residual is flat. There is one out
    for all parts, contiguous, or one for each.
    """
    rows = []
    for parts, residual, outs in sums:
        dtype, at, to = _native.FLOATS.index(parts[0].dtype), residual.data_ptr(), outs[0].data_ptr()
        for i, part in enumerate(parts):
            n = part.numel()
            if len(outs) > 1:
                to = outs[i].data_ptr()
            rows.append((part.data_ptr(), at, to, n, dtype))
            at, to = at + 4 * n, to + 4 * n
    table = np.array(rows, np.int64)  # struct ResidualSum of csrc/common/add_residual.h
    _native.run("add_residual", sums[0][1], table.__array_interface__["data"][0], len(rows))
    return [None] * len(sums)


# --- tensors that get their old values back

_pattern_of = functools.lru_cache(pattern_of)  # not of 0: -0 would be the same key


def restore_unless_finite(
    number: Tensor, targets: Sequence[Tensor], sources: Sequence[Tensor | None], fill: float = 0.0
) -> None:
    """`ops.restore_unless_finite` of contiguous tensors. Those without a source are of one type, if `fill` is not 0."""
    if targets:
        table = np.empty((len(targets), 4), np.uint64)  # struct Restoration of csrc/common/restore.h
        table[:, 0], table[:, 2] = addresses(targets), list(map(attrgetter("nbytes"), targets))
        table[:, 1] = [0 if source is None else source.data_ptr() for source in sources]
        table[:, 3] = _pattern_of(fill, targets[0].dtype) if fill else 0
        _native.run("restore", number, number.data_ptr(), table.__array_interface__["data"][0], len(table))


def take_errors(of: Sequence[tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]]) -> list[None]:
    """Overwrite the residuals of several groups by their errors if a number is finite, in one call.

    of: (number, residuals, errors) of each. The number is that of all.
    """
    number = of[0][0]
    finite = torch.lt(number, math.inf, out=torch.empty_like(number))  # 1 if it is, otherwise 0: as float32
    infinite = finite.sub_(1).reciprocal_()  # if the number is finite; otherwise -1
    residuals, errors = [x for _, some, _ in of for x in some], [x for _, _, some in of for x in some]
    restore_unless_finite(infinite, residuals, errors)
    return [None] * len(of)


# --- lists of tensors, encoded one after the other in the body of one payload


def addresses(tensors: Sequence[Tensor]) -> np.ndarray:
    return np.fromiter(map(methodcaller("data_ptr"), tensors), np.uint64, len(tensors))


def numels(tensors: Sequence[Tensor]) -> np.ndarray:
    return np.fromiter(map(methodcaller("numel"), tensors), np.int64, len(tensors))


def keys_of(keys: Sequence[int], counts: Sequence[int]) -> np.ndarray:
    """A key of the random generator for each tensor of several lists, from one for each list.

    counts: of their tensors.
    """
    number = np.concatenate([*map(np.arange, counts)], dtype=np.uint64, casting="unsafe")
    return np.array(keys, np.uint64).repeat(counts) + number * np.uint64(0x9E3779B97F4A7C15)


def pack_signs(parts: Sequence[Tensor], keys: np.ndarray, outs: np.ndarray) -> Tensor:
    """`ops.pack_signs_all` to the addresses `outs`. parts: of one type. Returns the statistics, (parts, 2)."""
    table = np.empty((len(parts), 5), np.uint64)  # struct SignsSource of csrc/common/signs.h
    table[:, 0], table[:, 1], table[:, 2] = addresses(parts), _native.FLOATS.index(parts[0].dtype), numels(parts)
    table[:, 3], table[:, 4] = keys, outs
    statistics = torch.empty(2 * len(parts), dtype=torch.float32, device=parts[0].device)
    _run_table("signs_pack", statistics, [table], replays.address(statistics), statistics.data_ptr())
    return statistics.view(-1, 2)


def majority(ballots: np.ndarray, numels: np.ndarray, keys: np.ndarray, starts: np.ndarray, nbytes: int, where: Tensor,
             count: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ops.majority_all`.

    Args:
        ballots: (votes, voters), addresses of packed signs.
        numels, keys, starts: of the votes; `starts` are those of the winners in their memory, of `nbytes` bytes.
        where: a tensor on the device.

    Returns the memory of the winners (uint8), and with `count` for each vote and voter the number of signs that differ
    (int64).
    """
    winners = torch.empty(nbytes, dtype=torch.uint8, device=where.device)
    against = torch.empty(ballots.size if count else 0, dtype=torch.int64, device=where.device)
    table = np.empty((len(ballots), 3), np.uint64)  # struct SignsVote of csrc/common/signs.h
    table[:, 0], table[:, 1], table[:, 2] = numels, keys, np.uint64(winners.data_ptr()) + starts.astype(np.uint64)
    ballots = np.ascontiguousarray(ballots)
    results = replays.address(where), against.data_ptr() if count else 0
    _run_table("signs_majority", where, [table], ballots.__array_interface__["data"][0], ballots.shape[1], *results)
    return winners, against.view(len(ballots), -1)


def one_bit_packed(
    parts: Sequence[Tensor], rows: np.ndarray, keys: np.ndarray, outs: np.ndarray, means: np.ndarray
) -> Tensor:
    """`ops.one_bit_packed_all` to the addresses `outs` and `means`. rows: of each part. Returns max |x| of each."""
    table = np.empty((len(parts), 6), np.uint64)  # struct OneBitSource of csrc/common/one_bit.h
    table[:, 0], table[:, 1], table[:, 2] = addresses(parts), rows, numels(parts) // rows
    table[:, 3], table[:, 4], table[:, 5] = keys, outs, means
    most = torch.empty(len(parts), dtype=torch.float32, device=parts[0].device)
    _run_table("one_bit_packed", most, [table], replays.address(most), most.data_ptr())
    return most


def ternary_packed(parts: Sequence[Tensor], scales: Tensor, clips: Tensor, keys: np.ndarray, outs: np.ndarray) -> None:
    """`ops.ternary_packed_all` to the addresses `outs`. parts: of one type; scales, clips: (parts,), float32."""
    table = np.empty((len(parts), 7), np.uint64)  # struct TernarySource of csrc/common/ternary.h
    each = 4 * np.arange(len(parts), dtype=np.uint64)
    table[:, 0], table[:, 1], table[:, 2] = addresses(parts), _native.FLOATS.index(parts[0].dtype), numels(parts)
    table[:, 3], table[:, 4] = np.uint64(scales.data_ptr()) + each, np.uint64(clips.data_ptr()) + each
    table[:, 5], table[:, 6] = keys, outs
    _run_table("ternary_packed", parts[0], [table], replays.address(parts[0]))


def decode_sums(
    kernel: str, outs: Sequence[Tensor], add: bool, columns: Sequence[np.ndarray | int],
    weights: np.ndarray | float, fails: bool = True,
) -> int:  # fmt: skip
    """Run a decoder of weighted sums, of equally many terms each.

    Args:
        columns: the 8-byte fields of its terms but the last one, the weight: the first is (outs, terms of each), others
            are that or can be broadcast to it.
        weights: float64, alike.
        fails: whether the kernel can.

    Returns 1 plus the number of the term that it failed with; 0 if it did not, and on CUDA.

    Raises ValueError if a sum would be added to 16-bit floats, which are to be rounded once.
    """
    terms = np.empty((*np.asarray(columns[0]).shape, len(columns) + 1), np.uint64)
    for i, column in enumerate(columns):
        terms[..., i] = column
    terms.view(np.float64)[..., -1] = weights
    table = np.empty((len(outs), 5), np.int64)  # struct WeightedSum
    table[:, 0], table[:, 1], table[:, 2], table[:, 3] = addresses(outs), numels(outs), terms.shape[1], add
    table[:, 4] = types = list(map(_native.FLOATS.index, map(attrgetter("dtype"), outs)))
    if add and any(types):
        raise ValueError(f"{kernel}: got 16-bit outs, expected {torch.float32} to add to, or add=False")
    run = _native.run_failed if fails else _native.run
    rows, of_rows = table.__array_interface__["data"][0], terms.__array_interface__["data"][0]
    return run(kernel, outs[0], rows, len(table), of_rows) or 0


# --- the largest elements of vectors, and coded indices


def abs_max(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """`ops.abs_max_tensor` of each tensor, all of one type. Those on CUDA take one call."""
    if not tensors[0].is_cuda:
        return list(map(abs_max_tensor, tensors))
    most = torch.empty(len(tensors), dtype=torch.float32, device=tensors[0].device)
    rows = [(x.data_ptr(), x.numel(), 1) for x in tensors]
    table = np.array(rows, np.int64)  # struct Matrix of csrc/common/orthogonalize.h
    dtype = _native.FLOATS.index(tensors[0].dtype)
    _native.run("abs_max_columns", most, table.__array_interface__["data"][0], len(rows), dtype, most.data_ptr())
    return most.split_with_sizes([1] * len(rows))


def select_sampled(vectors: Sequence[Tensor], ks: Sequence[int], keys: Sequence[int]) -> tuple[Tensor, list[int]]:
    """`ops.select_sampled` of each vector: selections, (vectors, 16), and counts. Waits for the device, once."""
    selections = torch.empty((len(ks), 16), dtype=torch.uint8, device=vectors[0].device)
    counts = torch.empty(len(ks), dtype=torch.int64, device=selections.device)
    table = np.empty((len(ks), 6), np.uint64)  # struct SampledSource of csrc/common/selection.h
    table[:, 0], table[:, 1], table[:, 2], table[:, 3] = addresses(vectors), numels(vectors), ks, keys
    table[:, 4] = selections.data_ptr() + 16 * np.arange(len(ks))
    table[:, 5] = counts.data_ptr() + 8 * np.arange(len(ks))
    _run_table("select_sampled", counts, [table])
    return selections, counts.tolist()


def topk_abs(
    vectors: Sequence[Tensor], ks: Sequence[int], values: Sequence[Tensor], selections: Tensor | None = None
) -> Sequence[Tensor]:
    """`ops.topk_abs` of each vector, for k >= 1. Writes the values, and returns the indices.

    selections: of k >= 0 elements of each, (vectors, 16), in place of those of largest magnitude.
    """
    indices = torch.empty(sum(ks), dtype=torch.int32, device=vectors[0].device).split_with_sizes(ks)
    of_each = zip(vectors, ks, indices, values)
    rows = [(x.data_ptr(), x.numel(), k, 0, at.data_ptr(), to.data_ptr()) for x, k, at, to in of_each]
    table = np.array(rows, np.int64)  # struct TopkSource of csrc/common/topk_abs.h
    if selections is not None:
        table[:, 3] = selections.data_ptr() + 16 * np.arange(len(rows))
    _native.run("topk_abs", vectors[0], table.__array_interface__["data"][0], len(rows))
    return indices


def chunk_topk(
    vectors: Sequence[Tensor], counts: Sequence[int], ks: Sequence[int], chunk: int, records: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Tensor]:
    """`ops.chunk_topk` of vectors of one type. Writes the records.

    counts: of the elements that are kept of each.

    Returns the indices, and the largest level of each vector, up to its last 8 bits: not finite if an element is not.
    """
    table = np.empty((len(vectors), 5), np.uint64)  # struct ChunkSource of csrc/common/chunk_topk.h
    indices = torch.empty(sum(counts), dtype=torch.int32, device=vectors[0].device).split_with_sizes(counts)
    table[:, 0], table[:, 1], table[:, 2] = addresses(vectors), numels(vectors), ks
    table[:, 3], table[:, 4] = addresses(indices), addresses(records)
    most = torch.empty(len(vectors), dtype=torch.float32, device=vectors[0].device)
    _run_table("chunk_topk", most, [table], _native.FLOATS.index(vectors[0].dtype), chunk, most.data_ptr())
    return indices, most


def chunk_topk_values(
    records: Sequence[Tensor], of: Sequence[int], ks: Sequence[int], counts: Sequence[int], chunk: int
) -> tuple[Sequence[Tensor], int]:
    """`ops.chunk_topk_values` of the records of so many elements each, of which so many are kept.

    Returns the values, and 1 plus the number of the first records that are corrupt; 0 if there are none, and on CUDA.
    """
    values = torch.empty(sum(counts), dtype=torch.float32, device=records[0].device).split_with_sizes(counts)
    table = np.empty((len(records), 4), np.uint64)  # struct ChunkRecords of csrc/common/chunk_topk.h
    table[:, 0], table[:, 1], table[:, 2], table[:, 3] = addresses(records), of, ks, addresses(values)
    rows = table.__array_interface__["data"][0]
    return values, _native.run_failed("chunk_topk_values", records[0], rows, len(table), chunk)


def index_code_write(
    indices: Sequence[Tensor], of: Sequence[int], outs: Sequence[Tensor]
) -> Sequence[int] | Sequence[Tensor]:
    """`ops.index_code_write` of indices below each of `of`, without an error for invalid ones."""
    nbytes = torch.empty(len(outs), dtype=torch.int64, device=outs[0].device)
    rows = [(x.data_ptr(), x.numel(), n, out.data_ptr(), out.numel(), 0) for x, n, out in zip(indices, of, outs)]
    table = np.array(rows, np.int64)  # struct IndexSource of csrc/common/index_code.h
    table[:, 5] = nbytes.data_ptr() + 8 * np.arange(len(outs))
    _native.run("index_code_encode", nbytes, table.__array_interface__["data"][0], len(rows))
    return nbytes.unbind() if nbytes.is_cuda else nbytes.tolist()


def index_code_decode(streams: Sequence[Tensor], of: Sequence[int], counts: Sequence[int]) -> Tensor:
    """`ops.index_code_decode` of streams of so many indices below each of `of`: adjacent. Of corrupt ones, maybe 0."""
    out = torch.zeros(sum(counts), dtype=torch.int32, device=streams[0].device)
    table = np.empty((len(counts), 5), np.int64)  # struct IndexStream of csrc/common/index_code.h
    table[:, 0], table[:, 1], table[:, 2], table[:, 3] = addresses(streams), numels(streams), of, counts
    table[:, 4] = out.data_ptr() + 4 * (np.cumsum(counts) - counts)
    _native.run_failed("index_code_decode", out, table.__array_interface__["data"][0], len(table))
    return out


# --- selected coefficients of a transform (`ops.transform_*`), whose bitmaps and values are coded

_PART = np.dtype(  # struct TransformPart of csrc/common/transform.h
    [
        ("bitmap", "<u8"),
        ("packed", "<u8"),
        ("nbytes", "<i8"),
        ("k", "<i8"),
        ("wire", "<u8"),
        ("format", WORDS),
        ("padding", "V4"),
    ]
)
_MOST_PARTS = 16  # that are added up before they are transformed back
_ALIGN = 64  # of bitmaps, in bytes


def transform_select(
    xs: Sequence[Tensor], code: int, ks: Sequence[int], bitmaps: Sequence[Tensor], values: Sequence[Tensor],
    scratch: Sequence[Tensor],
) -> None:  # fmt: skip
    """`ops.transform_select` of each vector. xs: of one type."""
    dtype = _native.FLOATS.index(xs[0].dtype)
    rows = [
        (x.data_ptr(), dtype, x.numel(), k, room.data_ptr(), room.numel(), bitmap.data_ptr(), to.data_ptr())
        for x, k, room, bitmap, to in zip(xs, ks, scratch, bitmaps, values)
    ]
    table = np.array(rows, np.int64)  # struct TransformSource of csrc/common/transform.h
    _native.run("transform_select", xs[0], table.__array_interface__["data"][0], len(rows), code)


def range_float_fit(
    xs: Sequence[Tensor], bits: int, mantissa: int | None = None, limits: tuple[float, float] | None = None
) -> list[RangeFloat]:
    """`RangeFloat.fit` of the values of each tensor."""
    vmin, vmax = (1.0, -1.0) if limits is None else limits  # an empty range stands for that of x
    words = torch.empty((len(xs), 7), dtype=torch.int32, device=xs[0].device)
    table = np.empty((len(xs), 3), np.int64)  # struct RangeFit of csrc/common/range_float_fit.h
    table[:, 0] = words.data_ptr() + WORDS.itemsize * np.arange(len(xs))
    table[:, 1], table[:, 2] = addresses(xs), numels(xs)
    _run_table("range_float_fit", words, [table], bits, -1 if mantissa is None else mantissa, vmin, vmax)
    return [RangeFloat._of_words(own, bits) for own in words.unbind()]


def range_float_encode(
    xs: Sequence[Tensor], numbers: Sequence[RangeFloat], bits: int, keys: Sequence[int] | None, outs: Sequence[Tensor],
    outside: Tensor,
) -> None:  # fmt: skip
    """`RangeFloat.encode_packed` of each tensor. Adds the number of values outside to `outside`, int64."""
    x = xs[0]
    words = [number._words_on(x.device) for number in numbers]
    table = np.empty((len(xs), 6), np.uint64)  # struct RangeSource of csrc/common/range_float_fit.h
    table[:, 0], table[:, 1], table[:, 2] = addresses(words), addresses(xs), numels(xs)
    table[:, 3] = 0 if keys is None else keys
    table[:, 4], table[:, 5] = addresses(outs), outside.data_ptr()
    stochastic = keys is not None
    _run_table("range_float_encode_packed", x, [table], bits, stochastic, replays.address(x, stochastic))


def range_float_decode(
    wires: Sequence[Tensor], packed: Sequence[Tensor], bits: int, counts: Sequence[int]
) -> tuple[Sequence[Tensor], int]:
    """`RangeFloat.decode_packed` of several bit streams of so many codes each.

    Returns the values, and 1 plus the number of the first stream that is corrupt; 0 if there is none, and on CUDA.
    """
    values = torch.empty(sum(counts), dtype=torch.float32, device=packed[0].device).split_with_sizes(counts)
    table = np.empty((len(packed), 4), np.uint64)  # struct RangeCodes of csrc/common/range_float_fit.h
    table[:, 0], table[:, 1], table[:, 2], table[:, 3] = addresses(wires), addresses(packed), counts, addresses(values)
    rows = table.__array_interface__["data"][0]
    return values, _native.run_failed("range_float_decode_packed", packed[0], rows, len(table), bits)


def bitmap_code_write(
    bitmaps: Sequence[Tensor], of: Sequence[int], segments: Sequence[int], outs: Sequence[Tensor]
) -> Sequence[int] | Sequence[Tensor]:
    """`ops.bitmap_code_write` of bitmaps of so many elements."""
    nbytes = torch.empty(len(outs), dtype=torch.int64, device=outs[0].device)
    table = np.empty((len(outs), 5), np.int64)  # struct BitmapSource of csrc/common/bitmap_code.h
    table[:, 0], table[:, 1], table[:, 2], table[:, 3] = addresses(bitmaps), of, segments, addresses(outs)
    table[:, 4] = nbytes.data_ptr() + 8 * np.arange(len(outs))
    _run_table("bitmap_code_encode", nbytes, [table])
    return nbytes.unbind() if nbytes.is_cuda else nbytes.tolist()


def bitmap_code_decode(
    streams: np.ndarray, nbytes: np.ndarray, counts: np.ndarray, of: np.ndarray, segments: np.ndarray, where: Tensor
) -> tuple[np.ndarray, Tensor, int]:
    """`ops.bitmap_code_decode_all` of streams at these addresses.

    Args:
        nbytes: of each; on CUDA, the room for it suffices.
        counts, of: bits set in the bitmap of each, and all of them.

    Returns the addresses of the bitmaps, their memory, and 1 plus the number of the stream that is corrupt, or 0.
    """
    rows = -(-of // (8 * _ALIGN)) * _ALIGN
    ends = np.add.accumulate(rows)
    bitmaps = torch.empty(int(ends[-1]), dtype=torch.uint8, device=where.device)
    table = np.empty((len(streams), 6), np.int64)  # struct BitmapStream of csrc/common/bitmap_code.h
    table[:, 0], table[:, 1], table[:, 2] = streams, nbytes, counts
    table[:, 3] = begins = bitmaps.data_ptr() + ends - rows
    table[:, 4], table[:, 5] = of, segments
    arguments = (table.__array_interface__["data"][0], len(table), not where.is_cuda)
    return begins, bitmaps, _native.run_failed("bitmap_code_decode", where, *arguments)


def transform_parts(
    bitmaps: np.ndarray, packed: np.ndarray, nbytes: np.ndarray, k: Sequence[int] | np.ndarray,
    formats: np.ndarray | int, wires: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """A table of struct TransformPart: addresses of bitmaps and of codes, bytes and number of these, their formats.

    Args:
        formats: of dtype `WORDS`, or with `wires` their number of bits.
        wires: addresses of the 8 bytes that `RangeFloat.to_wire` writes, on the device. Decoding fails unless they are
            a format of so many bits.
    """
    table = np.zeros(len(bitmaps), _PART)
    table["bitmap"], table["packed"], table["nbytes"], table["k"] = bitmaps, packed, nbytes, k
    if wires is None:
        table["format"] = formats
    else:
        table["wire"], table["format"]["bits"] = wires, formats
    return table


def transform_decode(parts: np.ndarray, code: int, outs: Sequence[Tensor], weight: float, add: bool) -> int:
    """`ops.transform_decode` of a table of `transform_parts` to each of `outs`, of equally many parts.

    Returns 1 plus the number of the part with an invalid bitmap or format; 0 if there is none, and on CUDA.
    """
    parts = parts.reshape(len(outs), -1)
    each = parts.shape[1]
    table = np.zeros((len(outs), 5), np.int64)  # struct WeightedSum, of float32
    table[:, 0], table[:, 1] = addresses(outs), numels(outs)
    for first in range(0, each, _MOST_PARTS):
        some = np.ascontiguousarray(parts[:, first : first + _MOST_PARTS])
        table[:, 2], table[:, 3] = some.shape[1], add or first > 0
        arguments = (table.__array_interface__["data"][0], len(table), some.ctypes.data, code, weight)
        if failed := _native.run_failed("transform_decode", outs[0], *arguments):
            row, column = divmod(failed - 1, some.shape[1])
            return 1 + row * each + first + column
    return 0


# --- quantized vectors, and those of several ranks, at the addresses of their packed levels


def quantize_packed(
    xs: Sequence[Tensor], bits: int, bucket: int, norm: str, keys: Sequence[int], packed: np.ndarray,
    norms: np.ndarray, most: Tensor | None = None,
) -> None:  # fmt: skip
    """`ops.quantize_packed` of vectors of one type, to the addresses `packed` and `norms`. Writes max |x| to `most`."""
    lengths, where = numels(xs), xs[0]
    table = np.empty((len(xs), 5), np.uint64)  # struct QuantizeSource of csrc/common/quantize.h
    table[:, 0], table[:, 1], table[:, 2], table[:, 3], table[:, 4] = addresses(xs), lengths, keys, packed, norms
    arguments = (_native.FLOATS.index(where.dtype), bits, min(bucket, max(1, *lengths.tolist())), NORMS[norm])
    _run_table("quantize_packed", where, [table], *arguments, replays.address(where), _native.address(most))


def quantize_decode_sum(
    packed: np.ndarray, norms: np.ndarray, out: Tensor, bits: int, bucket: int, weight: float, add: bool = False,
    parts: int = 1,
) -> int:  # fmt: skip
    """`ops.quantize_decode_sum`. Returns 1 plus the number of a term with a corrupt norm; 0 if there is none.

    parts: of `out`, as `tensor_split` cuts them, with equally many terms each: those of the first part come first.
    """
    table = np.empty((len(packed), 2), np.uint64)  # struct QuantizedTerm of csrc/common/quantize.h
    table[:, 0], table[:, 1] = packed, norms
    rows, n = table.__array_interface__["data"][0], out.numel()
    each = len(table) // parts
    arguments = (rows, each, parts, n, bits, min(bucket, max(1, n)), weight, add, *_native.floats(out))
    return _native.run_failed("quantize_decode_sum", out, *arguments)


def elias_decode_sum(
    streams: np.ndarray, nbytes: np.ndarray, norms: np.ndarray, out: Tensor, bits: int, bucket: int, weight: float,
    add: bool,
) -> int:  # fmt: skip
    """`ops.elias_decode_sum` of streams at these addresses. Returns 1 plus the number of a corrupt one, or 0."""
    table = np.empty((len(streams), 3), np.uint64)  # struct EliasTerm of csrc/common/elias.h
    table[:, 0], table[:, 1], table[:, 2] = streams, nbytes, norms
    rows, n = table.__array_interface__["data"][0], out.numel()
    arguments = (rows, len(table), n, bits, min(bucket, max(1, n)), weight, add, out.data_ptr())
    return _native.run_failed("elias_decode_sum", out, *arguments)


def natural_encode(xs: Sequence[Tensor], keys: Sequence[int], outs: np.ndarray) -> Tensor:
    """`ops.natural_encode` of vectors of one type, to the addresses `outs`. Returns max |x| of each."""
    table = np.empty((len(xs), 4), np.uint64)  # struct NaturalSource of csrc/common/natural.h
    table[:, 0], table[:, 1], table[:, 2], table[:, 3] = addresses(xs), numels(xs), keys, outs
    most = torch.empty(len(xs), dtype=torch.float32, device=xs[0].device)
    dtype = _native.FLOATS.index(xs[0].dtype)
    _run_table("natural_encode", most, [table], dtype, replays.address(most), most.data_ptr())
    return most


def natural_decode_sum(payloads: np.ndarray, out: Tensor, weight: float, add: bool, parts: int = 1) -> int:
    """`ops.natural_decode_sum`. Returns 1 plus the number of a corrupt payload; 0 if there is none.

    parts: of `out`, as `tensor_split` cuts them, with equally many payloads each: those of the first part come first.
    """
    rows, each = payloads.__array_interface__["data"][0], len(payloads) // parts
    arguments = (rows, each, parts, out.numel(), weight, add, *_native.floats(out))
    return _native.run_failed("natural_decode_sum", out, *arguments)


# --- payloads of blocks (`ops.block_float_*`)


def block_float_encode(
    x: Tensor, bits: int, block: int, key: int | None, blocks: int, residual: Tensor | None, error: Tensor | None
) -> Tensor:
    """`ops.block_float_encode`."""
    out = torch.empty(blocks * (4 + block * bits // 8), dtype=torch.uint8, device=x.device)
    keys = np.array([] if key is None else [key], np.uint64)
    _native.run(
        "block_float_encode", x, *_native.floats(x), 0 if residual is None else residual.data_ptr(), 1, x.numel(),
        blocks, bits, block, 0 if key is None else keys.__array_interface__["data"][0],
        replays.address(x, key is not None), 0 if error is None else error.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out


def block_float_decode(
    payloads: Sequence[Tensor], each: int, out: Tensor, bits: int, block: int, weight: float = 1.0,
    start: Tensor | None = None,
) -> None:  # fmt: skip
    """`ops.block_float_decode` of payloads of consecutive elements, or the sum of `each` payloads for each of them."""
    table = addresses(payloads)
    blocks = payloads[0].numel() // (4 + block * bits // 8)
    _native.run(
        "block_float_decode", out, table.__array_interface__["data"][0], len(payloads) // each, each, blocks,
        out.numel(), bits, block, weight, 0 if start is None else start.data_ptr(), *_native.floats(out),
    )  # fmt: skip
