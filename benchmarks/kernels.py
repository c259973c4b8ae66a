"""Benchmark the primitives against a copy of the data and against the same computation in torch ops.

Absolute times on shared machines are noise, so every row is a ratio: copy, ours and peer run in turns, and the medians
are compared. `x copy` is our time divided by the time of copying the input (read + write): 1.0 is memory speed for a
primitive that reads and writes as much. `x peer` is the peer's time divided by ours. A primitive whose result is wrong
is not timed.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradzip
from benchmarks.common.arguments import Parser, at_least, output_file
from benchmarks.common.results import RESULTS, ROOT, Blocks, provenance, replace_blocks, stored, write_json
from benchmarks.common.tables import goal, markdown
from gradzip import ops
from gradzip.cli.models import MODELS
from gradzip.memory.state import Key

EXAMPLES = """\
examples:
  python -m benchmarks.kernels                                 all primitives, 25.6 M floats, 2 threads
  python -m benchmarks.kernels --only 'select|compact' --rounds 15
  python -m benchmarks.kernels --device cuda --json results.json
  python -m benchmarks.kernels --write                         the table of docs/benchmarks.md; measures nothing
"""
PAGE, FILE = ROOT / "docs" / "benchmarks.md", RESULTS / "kernels_cpu.json"
FILE_OF_FAST_MEMORY = RESULTS / "kernels_cpu_avx512.json"  # of another machine: --json names it
START = "<!-- table of kernels: python -m benchmarks.kernels --write -->\n\n"


CUDA_CALLS = 20  # in one measurement, at most
CUDA_MS = 200  # a measurement, about, but for three calls that take longer
CUDA_CLOCK = 2e9  # cycles a second of the fastest device, about

NUMEL = {"cpu": 25_600_000, "cuda": 1 << 27}  # a device copies 25.6 million floats in 70 us: too little to time


@dataclass
class Case:
    """A primitive on an input."""

    name: str
    ours: Callable[[], object]
    peer: Callable[[], object]
    peer_name: str
    valid: Callable[[], bool]
    nbytes: int  # what the algorithm must read and write
    # Goals: the largest ratio to the time of a copy, the least speed-up over the peer.
    most_copies: float | None = None
    least_speedup: float | None = None
    data: Tensor | None = None  # what to copy for comparison, if not the floats that all cases share


def cases(n: int, device: str) -> Iterator[Case]:
    x = torch.randn(n, device=device)
    yield Case(
        "abs_max", lambda: ops.abs_max(x), lambda: x.abs().max(), "x.abs().max()",
        lambda: float(ops.abs_max(x)) == float(x.abs().max()), 4 * n, 1.0, 2.0,
    )  # fmt: skip
    infinite, before = torch.full((1,), torch.inf, device=device), torch.zeros_like(x)

    def restored(target: Tensor) -> Tensor:
        ops.restore_unless_finite(infinite, [ops.Restoration(target, x)])
        return target

    yield Case(
        "restore", lambda: restored(before), lambda: torch.where(infinite.isfinite(), before, x), "torch.where",
        lambda: torch.equal(restored(torch.zeros_like(x)), x), 8 * n,
    )  # fmt: skip
    for share in (0.01, 0.15):
        yield from selection_cases(x, max(1, int(share * n)), f" {share:.0%}")
    number = ops.RangeFloat.fit(x, 10)
    packed = torch.empty(ops.packed_nbytes(n, 10), dtype=torch.uint8, device=device)
    yield Case(
        "range_float encode+pack", lambda: number.encode_packed(x, packed), lambda: range_float_torch(x, number),
        "torch integer ops", lambda: range_float_is_right(x, number, packed), 4 * n + packed.numel(), 2.0, 4.0,
    )  # fmt: skip
    codes = torch.randint(0, 1024, (n,), dtype=torch.int32, device=device)
    yield Case(
        "pack_bits 10", lambda: ops.pack_bits(codes, 10, out=packed), lambda: pack_torch(codes, 10), "torch int64 ops",
        lambda: torch.equal(ops.unpack_bits(ops.pack_bits(codes, 10), 10, n), codes), 4 * n + packed.numel(), 2.0, 4.0,
    )  # fmt: skip
    yield from transform_cases(x)
    yield from method_cases(x)
    yield from index_cases(x, max(1, n // 100))
    yield from bitmap_code_cases(x, max(1, n * 15 // 100))
    yield from quantizing_cases(x)
    for bits in (8, 4):
        yield from block_float_cases(x, bits)
    yield from natural_cases(x)
    yield from sampling_cases(x, max(1, n // 100))
    yield from low_rank_cases(device)


def selection_cases(x: Tensor, k: int, suffix: str) -> Iterator[Case]:
    n = x.numel()
    threshold = ops.select_threshold(x, k)
    expected = torch.topk(x.abs(), k)
    yield Case(
        "select" + suffix, lambda: ops.select(x, k), lambda: torch.topk(x.abs(), k, sorted=False), "torch.topk",
        lambda: bool(ops.select_threshold(x, k) == expected.values[-1]), 4 * n, 4.0, 20.0 if k <= n // 50 else None,
    )  # fmt: skip
    t = float(threshold)
    yield Case(
        "compact" + suffix, lambda: ops.compact(x, t), lambda: x[x.abs() >= t], "x[x.abs() >= t]",
        lambda: torch.equal(ops.compact(x, t)[0], x[x.abs() >= t]), 4 * n + n // 8 + 4 * k, 2.0, 6.0,
    )  # fmt: skip
    values, bitmap = ops.compact(x, t)
    out = torch.empty_like(x)
    index = (x.abs() >= t).nonzero().view(-1)

    def scatter() -> Tensor:
        return torch.zeros(n, device=x.device).index_put_((index,), values)

    yield Case(
        "expand" + suffix, lambda: ops.expand(values, bitmap, n, out=out), scatter, "zeros().index_put_()",
        lambda: torch.equal(ops.expand(values, bitmap, n), scatter()), 4 * n + n // 8 + 4 * k, 2.0, None,
    )  # fmt: skip


def index_cases(x: Tensor, k: int) -> Iterator[Case]:
    n = x.numel()
    indices, values = ops.topk_abs(x, k)
    expected = torch.topk(x.abs(), k).indices.sort().values

    def topk() -> tuple[Tensor, Tensor]:
        found = torch.topk(x.abs(), k).indices
        return found, x[found]

    yield Case(
        "topk_abs 1%", lambda: ops.topk_abs(x, k), topk, "torch.topk, x[i]",
        lambda: torch.equal(ops.topk_abs(x, k)[0].long(), expected), 4 * n + 8 * k, 4.0, 10.0,
    )  # fmt: skip
    in_chunks = x[: n // 4096 * 4096].view(-1, 4096)
    yield Case(
        "chunk_topk 1.5%", lambda: ops.chunk_topk(x, 61, 4096), lambda: in_chunks.abs().topk(61, 1), "torch.topk",
        lambda: torch.equal(
            ops.chunk_topk(in_chunks, 61, 4096)[0].long().view(-1, 61) % 4096,
            in_chunks.abs().topk(61, 1).indices.sort().values,
        ), 4 * n + n // 4096 * 264, 4.0, 3.0,
    )  # fmt: skip
    stream = ops.index_code_encode(indices, n)
    yield Case(
        "index_code_encode 1%", lambda: ops.index_code_encode(indices, n), lambda: indices.diff().to(torch.int16),
        "diff, int16", lambda: torch.equal(ops.index_code_decode(stream, n), indices), 4 * k + stream.numel(),
    )  # fmt: skip
    out, wanted = torch.zeros_like(x), torch.zeros_like(x).index_add_(0, indices, values)
    yield Case(
        "index_code_decode_add 1%", lambda: ops.index_code_decode_add(stream, values, out),
        lambda: out.index_add_(0, indices, values), "index_add_ of decoded ones",
        lambda: decoded(lambda acc: ops.index_code_decode_add(stream, values, acc), wanted), 12 * k + stream.numel(),
    )  # fmt: skip


def decoded(decode_add: Callable[[Tensor], object], wanted: Tensor) -> bool:
    out = torch.zeros_like(wanted)
    decode_add(out)
    return torch.equal(out, wanted)


def bitmap_code_cases(x: Tensor, k: int) -> Iterator[Case]:
    n = x.numel()
    bitmap = ops.bitmap(x, ops.select(x, k))
    out, back = torch.empty(ops.bitmap_code_capacity(n), dtype=torch.uint8, device=x.device), torch.empty_like(bitmap)
    stream, indices = ops.bitmap_code_encode(bitmap, n), ops.index_code_encode(bitmap, n)

    def valid() -> bool:
        return torch.equal(ops.bitmap_code_decode(stream, n, k), bitmap) and stream.numel() < 0.64 * n / 8

    yield Case(
        "bitmap_code_encode 15%", lambda: ops.bitmap_code_encode(bitmap, n, out=out),
        lambda: ops.index_code_encode(bitmap, n), "index_code_encode", valid, bitmap.numel() + stream.numel(), 0.6,
    )  # fmt: skip
    yield Case(
        "bitmap_code_decode 15%", lambda: ops.bitmap_code_decode(stream, n, k, out=back),
        lambda: ops.index_code_decode(indices, n), "index_code_decode", valid, bitmap.numel() + stream.numel(), 0.5,
    )  # fmt: skip


def quantizing_cases(x: Tensor) -> Iterator[Case]:
    n, bucket, key = x.numel(), 512, 12345
    packed = torch.empty(ops.packed_nbytes(n, 4), dtype=torch.uint8, device=x.device)
    norms = torch.empty(ops.num_buckets(n, bucket), device=x.device)
    acc = torch.zeros_like(x)

    def unbiased(decode_add: Callable[[Tensor], object], bound: float) -> bool:
        """Whether each error is at most the distance between levels, and the mean error at most 7 standard errors."""
        out = torch.zeros_like(x)
        decode_add(out)
        error = (out - x)[: n // bucket * bucket]
        standard_error = error.std().item() / n**0.5
        return bool(error.abs().max() <= bound) and abs(error.mean().item()) < 7 * standard_error

    def qsgd() -> tuple[Tensor, Tensor]:
        """The same levels in torch ops, in place if possible; two to a byte."""
        rows = x[: n // bucket * bucket].view(-1, bucket)
        norm = rows.norm(dim=1, keepdim=True)
        level = (rows.abs() * (7 / norm)).add_(torch.rand_like(rows)).floor_().to(torch.uint8)
        level |= (rows < 0).to(torch.uint8) << 3
        pairs = level.view(-1, 2)
        return pairs[:, 0] | pairs[:, 1] << 4, norm

    def encode() -> None:
        ops.quantize_packed(x, 4, bucket, "l2", key, out=packed, norms=norms)

    encode()
    step = norms.max().item() / 7
    yield Case(
        "quantize_packed 4 bits", encode, qsgd, "torch ops, rand_like",
        lambda: unbiased(lambda o: ops.quantize_decode_add(packed, norms, o, 4, bucket), step), 4 * n + n // 2,
        4.0, 8.0,
    )  # fmt: skip
    pairs, norm = qsgd()

    def decode_pairs() -> Tensor:
        codes = torch.stack((pairs & 15, pairs >> 4), 1).view(-1, bucket)
        return acc[: codes.numel()].add_(((codes & 7).float() * (norm / 7) * (1 - 2 * (codes >> 3).float())).view(-1))

    yield Case(
        "quantize_decode_add 4 bits", lambda: ops.quantize_decode_add(packed, norms, acc, 4, bucket), decode_pairs,
        "torch ops", lambda: unbiased(lambda o: ops.quantize_decode_add(packed, norms, o, 4, bucket), step),
        8 * n + n // 2,
    )  # fmt: skip
    ranks, out = 4, torch.empty_like(x)

    def loop() -> None:
        acc.zero_()
        for _ in range(ranks):
            ops.quantize_decode_add(packed, norms, acc, 4, bucket, 1 / ranks)

    def decode_sum(to: Tensor) -> None:
        ops.quantize_decode_sum([(packed, norms)] * ranks, to, 4, bucket, 1 / ranks)

    yield Case(
        f"quantize_decode_sum 4 bits, {ranks} ranks", lambda: decode_sum(out), loop, "quantize_decode_add for each",
        lambda: unbiased(decode_sum, step), 4 * n + ranks * n // 2, None, 1.0,
    )  # fmt: skip
    shards = x[: n // ranks * ranks].view(ranks, -1)
    sizes = 4 * ops.num_buckets(shards.shape[1], bucket), ops.packed_nbytes(shards.shape[1], 4)
    payloads, keys = torch.empty((ranks, -(-sum(sizes) // 4) * 4), dtype=torch.uint8, device=x.device), range(ranks)
    sections = [(row[: sizes[0]].view(torch.float32), row[sizes[0] : sum(sizes)]) for row in payloads.clone()]

    def encode_each() -> None:
        for row, row_key, (own_norms, levels) in zip(shards, keys, sections):
            ops.quantize_packed(row, 4, bucket, "l2", row_key, out=levels, norms=own_norms)

    def encode_all() -> tuple[Tensor, Tensor]:
        return ops.quantize_packed_all(shards, 4, bucket, "l2", keys, payloads)

    def rows_are_right() -> bool:
        encode_each()
        return all(
            torch.equal(levels, got) and torch.equal(own_norms, got_norms)
            for (own_norms, levels), got, got_norms in zip(sections, *encode_all())
        )

    yield Case(
        f"quantize_packed_all 4 bits, {ranks} shards", encode_all, encode_each, "quantize_packed for each",
        rows_are_right, 4 * n + n // 2, 4.0, None,
    )  # fmt: skip
    stream, _ = ops.elias_quantize(x, 4, bucket, "l2", key)
    yield Case(
        "elias_quantize 4 bits", lambda: ops.elias_quantize(x, 4, bucket, "l2", key), qsgd, "torch ops, not coded",
        lambda: unbiased(lambda o: ops.elias_decode_add(stream, norms, o, 4, bucket), step), 4 * n + stream.numel(),
        4.0, 8.0,
    )  # fmt: skip
    yield Case(
        "elias_decode_add 4 bits", lambda: ops.elias_decode_add(stream, norms, acc, 4, bucket), decode_pairs,
        "torch ops, not coded", lambda: unbiased(lambda o: ops.elias_decode_add(stream, norms, o, 4, bucket), step),
        8 * n + stream.numel(),
    )  # fmt: skip
    yield Case(
        "bucket_norms l2, whole", lambda: ops.bucket_norms(x), lambda: torch.linalg.vector_norm(x, dtype=torch.float64),
        "vector_norm in double", lambda: abs(ops.bucket_norms(x).item() / x.double().norm().item() - 1) < 2**-23, 4 * n,
    )  # fmt: skip
    scale = float(ops.abs_max(x))
    trits = ops.ternary_packed(x, scale, key=key)
    yield Case(
        "ternary_packed", lambda: ops.ternary_packed(x, scale, key=key),
        lambda: torch.sign(x).mul_(torch.rand_like(x) * scale < x.abs()).to(torch.int8), "torch ops, a byte each",
        lambda: unbiased(lambda o: ops.ternary_decode_add(trits, scale, o), scale), 4 * n + n // 5,
    )  # fmt: skip
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=x.device)
    whole = torch.where(x == 0, 1.0, x)[: n // 8 * 8]  # a zero has no sign: a coin decides

    def signs() -> Tensor:
        return ((whole < 0).view(-1, 8) * weights).sum(1, dtype=torch.uint8)

    yield Case(
        "pack_signs", lambda: ops.pack_signs(whole), signs, "torch ops",
        lambda: torch.equal(ops.pack_signs(whole), signs()), 4 * n + n // 8,
    )  # fmt: skip
    votes = [ops.pack_signs(torch.randn_like(x)) for _ in range(3)]
    yield Case(
        "majority of 3", lambda: ops.majority(votes, n), lambda: votes[0] & votes[1] | votes[2] & (votes[0] | votes[1]),
        "torch bit ops",
        lambda: torch.equal(ops.majority(votes, n), votes[0] & votes[1] | votes[2] & (votes[0] | votes[1])), n // 2,
    )  # fmt: skip


def block_float_cases(x: Tensor, bits: int) -> Iterator[Case]:
    """Stochastic rounding with blocks of 256; with error feedback in place, as in a step."""
    n, block, key, top = x.numel(), 256, 12345, (1 << (bits - 1)) - 1
    payload = ops.block_float_encode(x, bits, block, key)
    shards = x[: n // 4 * 4].view(4, -1)
    all_keys = [key + i for i in range(4)]
    payloads = ops.block_float_encode_all(shards, bits, block, all_keys)

    def encode_each() -> list[Tensor]:
        return [ops.block_float_encode(row, bits, block, k, out=p) for row, k, p in zip(shards, all_keys, payloads)]

    corrected, residual, out = x.clone(), torch.zeros_like(x), torch.empty_like(x)
    rows = x[: n // block * block].view(-1, block)

    def encode_torch() -> tuple[Tensor, Tensor]:
        """The same in torch ops, in place if possible; a code to a byte."""
        step = rows.abs().amax(1, keepdim=True) / top
        return (rows / step).add_(torch.rand_like(rows)).floor_().to(torch.int8), step

    codes, step = encode_torch()

    def valid() -> bool:
        """Whether each error is at most a step, and the mean error at most 7 standard errors."""
        ops.block_float_decode([payload], out, bits, block)
        error = (out - x)[: rows.numel()].view(rows.shape)
        return bool((error.abs() <= 1.0001 * step).all()) and abs(error.mean()) < 7 * error.std() / n**0.5

    def valid_error() -> bool:
        corrected.copy_(x)
        ops.block_float_encode(corrected, bits, block, key, residual=residual, error=corrected)
        return valid() and torch.equal(x - out, corrected)

    yield Case(
        f"block_float_encode {bits} bits", lambda: ops.block_float_encode(x, bits, block, key, out=payload),
        encode_torch, "torch ops, rand_like", valid, 4 * n + payload.numel(), 1.5, 8.0,
    )  # fmt: skip
    yield Case(
        f"block_float_encode_all {bits} bits, 4 shards",
        lambda: ops.block_float_encode_all(shards, bits, block, all_keys, payloads), encode_each,
        "block_float_encode for each",
        lambda: torch.equal(ops.block_float_encode_all(shards, bits, block, all_keys), torch.stack(encode_each())),
        4 * n + payloads.numel(), 1.5, None,
    )  # fmt: skip
    yield Case(
        f"block_float_encode {bits} bits, error",
        lambda: ops.block_float_encode(
            corrected, bits, block, key, residual=residual, error=corrected, out=payload
        ),
        encode_torch, "torch ops, rand_like, no error", valid_error, 12 * n + payload.numel(), None, 6.0,
    )  # fmt: skip
    ops.block_float_encode(x, bits, block, key, out=payload)
    yield Case(
        f"block_float_decode {bits} bits", lambda: ops.block_float_decode([payload], out, bits, block),
        lambda: codes * step, "torch ops, from bytes", valid, 4 * n + payload.numel(), 1.5,
    )  # fmt: skip
    yield Case(
        f"block_float_decode_sum {bits} bits, 2 ranks",
        lambda: ops.block_float_decode_sum([payload, payload], out, bits, block, 0.5),
        lambda: (codes * step).add_(codes * step).mul_(0.5), "torch ops, from bytes", valid,
        4 * n + 2 * payload.numel(), 1.5,
    )  # fmt: skip


def natural_cases(x: Tensor) -> Iterator[Case]:
    """Powers of two, and the same bits by the operations of torch and other primitives."""
    n, key, ranks = x.numel(), 12345, 4
    packed, out, acc = ops.natural_encode(x, key)[0], torch.empty_like(x), torch.empty_like(x)

    def encode_torch() -> tuple[Tensor, Tensor]:
        bits = x.view(torch.int32)
        mantissa = (bits & 0x7FFFFF).float().mul_(2.0**-23)
        codes = (bits >> 23).add_(ops.unpack_bits(ops.bernoulli(mantissa, key), 1, n))
        codes -= ((codes & 255) == 255).int()
        return ops.pack_bits(codes, 9), ops.abs_max_tensor(x)

    def decode_torch() -> Tensor:
        acc.zero_()
        for _ in range(ranks):
            acc.add_((ops.unpack_bits(packed, 9, n) << 23).view(torch.float32), alpha=1 / ranks)
        return acc

    def decode_sum() -> Tensor:
        ops.natural_decode_sum([packed] * ranks, out, 1 / ranks)
        return out

    yield Case(
        "natural_encode", lambda: ops.natural_encode(x, key, packed), encode_torch, "torch ops",
        lambda: torch.equal(ops.natural_encode(x, key)[0], encode_torch()[0]), 4 * n + packed.numel(), None, 3.0,
    )  # fmt: skip
    yield Case(
        f"natural_decode_sum {ranks} ranks", decode_sum, decode_torch, "torch ops",
        lambda: torch.equal(decode_sum(), decode_torch()), 4 * n + ranks * packed.numel(), None, 3.0,
    )  # fmt: skip


def sampling_cases(x: Tensor, k: int) -> Iterator[Case]:
    n, key = x.numel(), 12345

    def algorithm_1() -> Tensor:
        """The paper's algorithm: sorted atoms, p = 1 down to the first atom that exceeds the rest of the budget."""
        magnitudes, order = x.abs().double().sort(descending=True)
        tails = magnitudes.flip(0).cumsum(0).flip(0)
        left = k - torch.arange(n, device=x.device)
        first = int((magnitudes * left <= tails).int().argmax())
        p = torch.ones_like(magnitudes)
        p[first:] = magnitudes[first:] * (left[first] / tails[first])
        return torch.empty_like(x).scatter_(0, order, p.float())

    yield Case(
        "atom_probabilities 1%", lambda: ops.atom_probabilities(x, k), algorithm_1, "torch sort and cumsum",
        lambda: torch.allclose(ops.atom_probabilities(x, k), algorithm_1(), rtol=1e-6), 8 * n,
    )  # fmt: skip
    p = x.abs().clamp(max=1)

    def drawn_share() -> bool:
        share = ops.bitmap_count(ops.bernoulli(p, key), n) / n
        return abs(share - p.double().mean().item()) < 7 * 0.5 / n**0.5

    yield Case(
        "bernoulli", lambda: ops.bernoulli(p, key), lambda: torch.bernoulli(p), "torch.bernoulli, a float each",
        drawn_share, 4 * n + n // 8,
    )  # fmt: skip

    def one_of_each_stratum() -> bool:
        indices = ops.random_indices(n, k, key, x.device).long()
        return indices.numel() == k and bool(((indices.diff() > 0) & (indices.diff() <= 2 * -(-n // k))).all())

    yield Case(
        "random_indices 1%", lambda: ops.random_indices(n, k, key, x.device),
        lambda: torch.randperm(n, device=x.device)[:k], "torch.randperm", one_of_each_stratum, 4 * k,
    )  # fmt: skip


def low_rank_cases(device: str) -> Iterator[Case]:
    for rank, most_copies, least_speedup in ((4, 4.0, 6.0), (32, None, 1.3)):
        yield low_rank_case(4096, rank, most_copies, least_speedup, device)
    for name, model, rank in (("ResNet-50 r=4", "resnet50", 4), ("BERT-base r=32", "bert-base", 32)):
        matrices = [torch.randn(rows, rank, device=device) for rows, _ in matrix_shapes(model)]
        yield orthogonalize_case(name, matrices)


def low_rank_case(n: int, r: int, most_copies: float | None, least_speedup: float, device: str) -> Case:
    m, q = torch.randn(n, n, device=device), torch.randn(n, r, device=device)
    ops.orthogonalize_(q)  # so that steps only move the gradient between m and e
    e, p = torch.zeros_like(m), torch.empty(n, r, device=device)
    state = {"m": m.clone(), "e": torch.zeros_like(m)}

    def step() -> None:
        ops.low_rank_project(e, m, q, out=p)
        ops.low_rank_apply_average_all([(m, e, p, q, p, q)])

    def plain() -> None:
        """The usual implementation."""
        m = state["m"]
        m += state["e"]
        p = m @ q
        state["e"] = m - p @ q.t()
        state["m"] = p @ q.t()

    def valid() -> bool:
        gradient, residual = m.double(), e.double()
        step()
        corrected = gradient + residual
        wanted = (corrected @ q.double()) @ q.double().t()
        pairs = ((m, wanted), (e, corrected - wanted))
        return all(torch.allclose(x.double(), y, rtol=1e-4, atol=1e-3) for x, y in pairs)

    name = f"low-rank step {n}^2 r={r}"
    return Case(name, step, plain, "torch ops", valid, 24 * n * n, most_copies, least_speedup, m)


def matrix_shapes(model: str) -> list[tuple[int, int]]:
    """The shapes (n, m) of the gradients that low-rank methods compress. model: a name in MODELS."""
    return [(p.shape[0], p.numel // p.shape[0]) for p in MODELS[model]() if len(p.shape) > 1]


def orthogonalize_case(name: str, matrices: list[Tensor]) -> Case:
    # Orthonormal matrices do not change, at the same cost: no new copies are needed.
    ours = [matrix.clone() for matrix in matrices]

    def valid() -> bool:
        ops.orthogonalize_(ours)
        tall = [q for q in ours if q.shape[0] >= q.shape[1]]
        eyes = [torch.eye(q.shape[1], device=q.device) for q in tall]
        return all(torch.allclose(q.t() @ q, eye, atol=1e-5) for q, eye in zip(tall, eyes))

    return Case(
        f"orthogonalize {name}", lambda: ops.orthogonalize_(ours), lambda: [torch.linalg.qr(x) for x in matrices],
        "loop of torch.linalg.qr", valid, 8 * sum(x.numel() for x in matrices),
        None, 2.0, torch.cat([x.view(-1) for x in matrices]),
    )  # fmt: skip


def dct_matrix(n: int) -> Tensor:
    """The orthonormal DCT-II of n elements."""
    k, i = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    matrix = torch.cos(torch.pi * (2 * i + 1) * k / (2 * n)) * (2 / n) ** 0.5
    matrix[0] *= 0.5**0.5
    return matrix


def transform_cases(x: Tensor) -> Iterator[Case]:
    matrix = torch.kron(dct_matrix(3), dct_matrix(3)).float().to(x.device)
    yield from transform_case(
        "DCT 3x3", x, ops.Transform.dct(3, 3), lambda rows: rows @ matrix.t(), lambda c: c @ matrix, "x @ dct"
    )
    yield from transform_case(
        "Fourier 64", x, ops.Transform.fourier(64), lambda rows: torch.fft.rfft(rows, norm="ortho"),
        lambda c: torch.fft.irfft(c, n=64, norm="ortho"), "rfft",
    )  # fmt: skip


def transform_case(
    name: str,
    x: Tensor,
    transform: ops.Transform,
    forward: Callable[[Tensor], Tensor],
    inverse: Callable[[Tensor], Tensor],
    peer_name: str,
) -> Iterator[Case]:
    """15 % of the coefficients; `forward` and `inverse` are the same transform of rows in torch ops."""
    x = x[: x.numel() // transform.length * transform.length]
    n, groups = x.numel(), transform.groups(x.numel())
    rows, k = x.view(-1, transform.length), round(0.15 * groups)
    scratch = torch.empty(k + k // 2, 1 if transform.group == 1 else 3, device=x.device).view(-1)
    bitmap, values = ops.transform_select(x, transform, k, scratch=scratch)

    def selected() -> tuple[Tensor, Tensor]:
        coefficients = forward(rows)
        magnitudes = coefficients.abs()
        mask = magnitudes >= torch.topk(magnitudes.view(-1), k, sorted=False).values.min()
        return mask, coefficients[mask]

    def energies() -> Tensor:
        energies = forward(rows).abs().double().square()
        if transform.group == 2:  # a pair for two frequencies, and one for the first and the last bin
            energies[:, 0] += energies[:, -1]
            energies = torch.cat((energies[:, :1], 2 * energies[:, 1:-1]), 1)
        return energies.view(-1)

    def selects_the_best() -> bool:
        kept, best = values.double().square().sum(), torch.topk(energies(), k).values.sum()
        return ops.bitmap_count(bitmap, groups) == k and abs(float(kept / best) - 1) < 1e-5

    yield Case(
        f"transform_select {name}",
        lambda: ops.transform_select(x, transform, k, bitmap, values, scratch), selected, f"{peer_name}, topk, mask",
        selects_the_best, 4 * n + bitmap.numel() + 4 * values.numel(),
    )  # fmt: skip
    number = ops.RangeFloat.fit(values, 10)
    codes = number.encode(values)
    part = ops.TransformPart(bitmap, ops.pack_bits(codes, 10), k, number)
    out, dense = torch.empty_like(x), torch.zeros_like(forward(rows))
    at, some = selected()[0].view(-1).nonzero().view(-1), selected()[1]

    def scatter() -> Tensor:
        dense.zero_().view(-1).index_put_((at,), some)
        return inverse(dense)

    def off_by_what_was_not_sent() -> bool:
        """Whether the error is what was dropped and the rounding of the rest, which are orthogonal."""
        ops.transform_decode([part], transform, out, 1.0)
        dropped = x.double().square().sum() - values.double().square().sum()
        rounding = (number.decode(codes) - values).double().square().sum()
        return abs(float((out - x).double().square().sum() / (dropped + rounding)) - 1) < 1e-5

    yield Case(
        f"transform_decode {name}", lambda: ops.transform_decode([part], transform, out, 1.0), scatter,
        f"index_put_, inverse {peer_name}, no codes", off_by_what_was_not_sent,
        4 * n + bitmap.numel() + part.packed.numel(),
    )  # fmt: skip


def method_cases(x: Tensor) -> Iterator[Case]:
    """Whole methods, with their default arguments: FFTRange on a matrix, DCTRange on convolutions of 3x3."""
    x = x[: x.numel() // 576 * 576]
    matrix = torch.kron(dct_matrix(3), dct_matrix(3)).float().to(x.device)
    rows = x.view(-1, 64)
    yield from method_case(
        "FFTRange", gradzip.FFTRange(), rows, lambda: torch.fft.rfft(rows, norm="ortho"),
        lambda c: torch.fft.irfft(c, n=64, norm="ortho"), "rfft, topk, mask",
    )  # fmt: skip
    kernels = x.view(-1, 9)
    yield from method_case(
        "DCTRange", gradzip.DCTRange(), x.view(-1, 64, 3, 3), lambda: kernels @ matrix.t(), lambda c: c @ matrix,
        "x @ dct, topk, mask",
    )  # fmt: skip


def method_case(
    name: str,
    codec: gradzip.FFTRange | gradzip.DCTRange,
    grad: Tensor,
    forward: Callable[[], Tensor],
    inverse: Callable[[Tensor], Tensor],
    peer_name: str,
) -> Iterator[Case]:
    """`forward` and `inverse` are the same transform in torch ops."""
    key, n = Key(0, 0, "x", 0), grad.numel()
    payload = codec.encode(grad, key)
    nbytes = 4 * n + payload.numel()

    def peer_encode() -> tuple[Tensor, Tensor]:
        """The same in torch ops: transform, top-k, mask, gather, 16-bit values."""
        coefficients = forward().view(-1)
        power = coefficients.abs()
        mask = power >= torch.topk(power, int(0.15 * power.numel()), sorted=False).values.min()
        kept = coefficients[mask]
        return mask, torch.view_as_real(kept).half() if kept.is_complex() else kept.half()

    def peer_decode(mask: Tensor, values: Tensor) -> Tensor:
        dense = torch.zeros_like(template)
        dense.view(-1)[mask] = torch.view_as_complex(values.float()) if dense.is_complex() else values.float()
        return inverse(dense)

    template = forward()
    encoded = peer_encode()

    def valid() -> bool:
        """Whether the error is that of the peer, or up to 2 % more: values have fewer bits."""
        error = (codec.decode([payload], [(n,)])[0] - grad.view(-1)).norm()
        return bool(0.98 < error / (peer_decode(*encoded).view(-1) - grad.view(-1)).norm() < 1.02)

    yield Case(
        f"{name} encode", lambda: codec.encode(grad, key), peer_encode, peer_name, valid, nbytes, 3.0, 8.0
    )  # fmt: skip
    yield Case(
        f"{name} decode", lambda: codec.decode([payload], [(n,)])[0], lambda: peer_decode(*encoded), "mask, inverse",
        valid, nbytes, 3.0,
    )  # fmt: skip
    yield Case(
        f"{name} round trip", lambda: codec.decode([codec.encode(grad, key)], [(n,)])[0],
        lambda: peer_decode(*peer_encode()), "both", valid, 2 * nbytes, 6.0, 8.0,
    )  # fmt: skip


def range_float_torch(x: Tensor, number: ops.RangeFloat) -> Tensor:
    shift = 23 - number.mantissa
    t = ((x.abs().view(torch.int32) + (1 << (shift - 1))) >> shift) - number.pbase + 1
    index = torch.where(t > 0, t, (x.abs() >= number.eps / 2).int())
    index = torch.minimum(index, torch.where(x < 0, number.negative, number.positive))
    return index + torch.where((x < 0) & (index > 0), number.positive, 0)


def range_float_is_right(x: Tensor, number: ops.RangeFloat, packed: Tensor) -> bool:
    number.encode_packed(x, packed)
    return torch.equal(ops.unpack_bits(packed, 10, x.numel()), range_float_torch(x, number).int())


def pack_torch(codes: Tensor, bits: int) -> Tensor:
    """Six codes of ten bits per 64-bit word: possible without a kernel, but not a dense stream."""
    per_word = 64 // bits
    words = torch.nn.functional.pad(codes.long(), (0, -codes.numel() % per_word)).view(-1, per_word)
    return (words << (bits * torch.arange(per_word, device=codes.device))).sum(1)


def timed_on_cuda(function: Callable[[], object]) -> float:
    """Milliseconds of one call, the mean of several.

    The device is kept busy while the host queues the calls, so that it does not wait for the host between them: a call
    may take the host longer than the device.
    """
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    seconds = time.perf_counter() - start  # to queue it, unless it waits for the device
    torch.cuda.synchronize()
    calls = max(3, min(CUDA_CALLS, round(CUDA_MS / 1000 / (time.perf_counter() - start))))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int(1.5 * seconds * calls * CUDA_CLOCK))
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def timed(function: Callable[[], object], device: str) -> float:
    """Milliseconds of one call."""
    if device == "cuda":
        return timed_on_cuda(function)
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)


def measure(case: Case, x: Tensor, rounds: int, device: str) -> dict[str, Any]:
    """The row of a case; times in milliseconds."""
    data = x if case.data is None else case.data
    out = torch.empty_like(data)
    functions = [lambda: out.copy_(data), case.ours, case.peer]
    for function in functions:
        function()
    times = [[timed(function, device) for function in functions] for _ in range(rounds)]
    copy_ms, ms, peer_ms = (statistics.median(column) for column in zip(*times))
    return {
        "name": case.name, "ms": ms, "gb_per_s": case.nbytes / ms / 1e6, "copy_ms": copy_ms, "copies": ms / copy_ms,
        "peer": case.peer_name, "peer_ms": peer_ms, "speedup": peer_ms / ms, "most_copies": case.most_copies,
        "least_speedup": case.least_speedup,
    }  # fmt: skip


def blocks() -> Blocks:
    """The block of docs/benchmarks.md: the kernels that miss a goal."""
    return {(PAGE, START): "\n\n".join(map(_missed, (FILE, FILE_OF_FAST_MEMORY))) + "\n"}


def _missed(file: Path) -> str:
    with stored(file) as content:
        about, rows = content["provenance"], content["rows"]
    goals = {
        row["name"]: (goal(row["copies"], row["most_copies"], most=True), goal(row["speedup"], row["least_speedup"]))
        for row in rows
    }
    missed = [row for row in rows if any(met.startswith("MISSED") for met in goals[row["name"]])]
    count = sum(bool(met) for of_row in goals.values() for met in of_row)
    cells = [
        [row["name"], f"{row['ms']:.1f}", f"{row['copies']:.2f}", of_row[0], f"{row['speedup']:.1f}", of_row[1]]
        for row in missed
        for of_row in [goals[row["name"]]]
    ]
    lines = [
        f"{len(missed)} of {len(rows)} kernels miss a goal, of {count} goals. {about['numel'] / 1e6:.1f} million "
        f"floats, of which a copy takes {statistics.median(row['copy_ms'] for row in rows):.1f} ms; "
        f"{about['threads']} threads, {about['simd']} (`{file.name}`):",
        "",
        *markdown(["kernel", "ms", "time of a copy", "goal", "times as fast as torch", "goal"], cells),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = Parser("kernels", __doc__, EXAMPLES)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--numel", type=int, help=f"floats (default: {NUMEL['cpu']}, on cuda {NUMEL['cuda']})")
    parser.add_argument("--threads", type=at_least(1), default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=at_least(1), default=9, help="turns of copy, ours, peer (default: %(default)s)"
    )
    parser.add_argument("--only", metavar="REGEX", default="", help="cases whose name contains a match")
    parser.add_argument("--json", metavar="PATH", type=output_file, help="write the rows and their provenance")
    parser.add_argument("--write", action="store_true", help="write the table of docs/benchmarks.md, and time nothing")
    args = parser.parse_args()
    if args.write:
        replace_blocks(blocks())
        return
    if args.numel is None:
        args.numel = NUMEL[args.device]
    if args.numel < 4096 or args.numel % 2:
        parser.error(f"got --numel {args.numel}, expected an even number of at least 4096")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    about = {
        **provenance(args.device), "threads": args.threads, "numel": args.numel, "rounds": args.rounds,
    }  # fmt: skip
    print("  ".join(f"{key} {value}" for key, value in about.items()))
    print(f"{'primitive':32} {'ms':>9} {'GB/s':>8} {'x copy':>8} {'':16} {'x peer':>8} {'':17} peer")
    x = torch.randn(args.numel, device=args.device)
    rows: list[dict[str, Any]] = []
    missed: list[str] = []
    wrong: list[str] = []
    for case in cases(args.numel, args.device):
        if not re.search(args.only, case.name):
            continue
        if not case.valid():
            wrong.append(case.name)
            continue
        row = measure(case, x, args.rounds, args.device)
        rows.append(row)
        goals = goal(row["copies"], row["most_copies"], most=True), goal(row["speedup"], row["least_speedup"])
        missed += [row["name"] for met in goals if met.startswith("MISSED")]
        print(
            f"{row['name']:32} {row['ms']:9.2f} {row['gb_per_s']:8.1f} {row['copies']:8.2f} {goals[0]:16} "
            f"{row['speedup']:8.1f} {goals[1]:17} {row['peer']}",
            flush=True,
        )
        if args.json:  # after each row: a run that is stopped leaves what it has measured
            write_json(args.json, {"provenance": about, "rows": rows})
    if missed:
        print(f"{len(missed)} goals missed: {', '.join(missed)}")
    if wrong:
        parser.fail(f"the result is wrong, so it is not timed: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
