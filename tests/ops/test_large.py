"""Kernels with more than 2^31 elements, on memory that is mapped many times: they number elements with 64 bits."""

import ctypes
import mmap
import os

import pytest
import torch

from gradzip import ops

pytestmark = pytest.mark.long

COVERS = ["csrc/*", "csrc/common/*", "csrc/cpu/*", "gradzip/ops/*.py"]

CHUNK = 1 << 24  # elements that share memory
NBYTES = 4 * CHUNK
READ_WRITE, MAP_FIXED = mmap.PROT_READ | mmap.PROT_WRITE, 0x10
TAIL = 5000
START = 1 << 31  # of the tail
NUMEL = START + TAIL


@pytest.fixture
def folded():
    """Make a float32 tensor of which all chunks are the same memory, but for the tail: folded(tail, numel)."""
    libc, mapped = ctypes.CDLL(None, use_errno=True), []
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def make(tail, numel=NUMEL):
        file, chunks = os.memfd_create("folded"), -(-numel // CHUNK)
        os.ftruncate(file, 2 * NBYTES)
        at = libc.mmap(None, NBYTES * chunks, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        mapped.append((at, NBYTES * chunks))
        for chunk in range(chunks):
            where, offset = at + NBYTES * chunk, NBYTES * (chunk == chunks - 1)
            assert libc.mmap(where, NBYTES, READ_WRITE, mmap.MAP_SHARED | MAP_FIXED, file, offset) == where
        os.close(file)
        tensor = torch.frombuffer((ctypes.c_float * numel).from_address(at), dtype=torch.float32)
        tensor[-len(tail) :] = tail
        return tensor

    yield make
    for at, nbytes in mapped:
        libc.munmap(at, nbytes)


def tail_of(seed):
    return torch.randn(TAIL, generator=torch.Generator().manual_seed(seed))


def test_magnitudes(folded):
    tail = tail_of(0)
    x = folded(tail)
    assert ops.abs_max(x) == tail.abs().max()
    assert torch.equal(ops.bucket_norms(x, 1 << 20, "max")[-1:], ops.bucket_norms(tail, None, "max"))


def test_signs(folded):
    tail = tail_of(1)
    packed, alone = ops.pack_signs(folded(tail)), ops.pack_signs(tail)
    assert torch.equal(packed[START // 8 :], alone)
    out = folded(torch.zeros(TAIL))
    ops.signs_decode_add(packed, out, 2.0)
    assert torch.equal(out[START:], 2.0 * tail.sign())


def test_blocks(folded):
    tail = tail_of(2)
    packed, alone = (ops.block_float_encode(x, 2) for x in (folded(tail), tail))
    assert torch.equal(packed[-len(alone) :], alone)
    out, wanted = folded(torch.zeros(TAIL)), torch.empty(TAIL)
    ops.block_float_decode([packed], out, 2)
    ops.block_float_decode([alone], wanted, 2)
    assert torch.equal(out[START:], wanted) and out[:CHUNK].abs().max() < 1e-30  # half a step


def test_levels(folded):
    """Each rounds to zero or to the largest magnitude, with the draws of its number."""
    tail = tail_of(3)
    term = ops.quantize_packed(folded(tail), 2, 8192, "max", key=7)
    out, most = folded(torch.zeros(TAIL)), tail.abs().max()
    ops.quantize_decode_sum([term], out, 2, 8192)
    levels = out[START:] / most
    assert torch.equal(levels, levels.abs() * tail.sign())
    share = (tail.abs() / most).mean()  # of a variance below share / TAIL
    assert levels.abs().unique().tolist() == [0, 1] and abs(levels.abs().mean() - share) < 5 * (share / TAIL) ** 0.5


def test_transforms(folded):
    tail, transform = tail_of(4), ops.Transform.dct(8)
    bitmap, values = ops.transform_select(folded(tail), transform, 100)
    few, wanted = ops.transform_select(tail, transform, 100)
    assert torch.equal(values, wanted) and torch.equal(bitmap[START // 8 :], few)


def test_projections(folded):
    """Of a matrix with 2^16 rows, and then those of the tail."""
    columns, tail = 1 << 15, torch.randn(3 << 15, generator=torch.Generator().manual_seed(5))
    m = folded(tail, START + len(tail)).view(-1, columns)
    factor = torch.randn(columns, 1, generator=torch.Generator().manual_seed(6))
    p, wanted = ops.low_rank_project(m, None, factor), ops.low_rank_project(tail.view(-1, columns), None, factor)
    assert torch.equal(p[-3:], wanted) and not p[:-3].any()


def test_the_largest_number_of_indices(folded):
    numel = 2**31 - 2**8
    tail = tail_of(7)
    indices, values = ops.topk_abs(folded(tail, numel), 50)
    assert torch.equal(values, tail[indices - (numel - TAIL)])
    assert values.abs().min() == tail.abs().topk(50).values.min()
    stream = ops.index_code_encode(indices, numel)
    assert torch.equal(ops.index_code_decode(stream, numel), indices)
