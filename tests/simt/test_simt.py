"""The CUDA kernels and launchers, compiled for the CPU with tests/simt/simt.h and compared with the CPU kernels."""

import re
import shutil
import subprocess

import pytest

import simt_build
from simt_build import CSRC

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")


def run_program(path, *arguments):
    return subprocess.run([path, *arguments], capture_output=True, text=True, timeout=250)


SLOWEST = ["elias", "index_code", "orthogonalize", "quantize", "compact", "low_rank"]
NOT_KERNELS = {"faults", "racy", "module"}
OTHERS = {path.stem for path in simt_build.SIMT.glob("*.cpp")} - NOT_KERNELS - {*SLOWEST}
PROGRAMS = [*SLOWEST, *sorted(OTHERS)]


@pytest.mark.parametrize("sanitized", [False, pytest.param(True, marks=pytest.mark.long)], ids=["plain", "sanitized"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_give_the_bits_of_the_cpu(name, sanitized, request, unless_passed):
    """In several orders of blocks and threads. With --long, under sanitizers, which find more, instead."""
    if not sanitized and request.config.getoption("--long"):
        pytest.skip("runs under sanitizers")
    flags = simt_build.SANITIZED if sanitized else simt_build.PLAIN
    unless_passed(simt_build.program_parts(name, flags=flags))
    result = run_program(simt_build.program(name, flags=flags))
    assert result.returncode == 0 and not result.stderr, result.stderr[-4000:]


def without_barriers(code):
    return re.sub(r"\n? *__syncthreads\(\);", "", code)


# By name: a program, a file of csrc/cuda, code in it, what replaces it (None: it loses its barriers), and the error.
BROKEN = {
    # Without the barrier, a thread that is still clearing erases the counts of another.
    "barrier after clearing": ("select", "select.cuh", "counts[i] = 0;\n  __syncthreads();", None, "select, k ="),
    "barrier of a scan": ("compact", "block/block.cuh", "partial[warp()] = upto;\n  __syncthreads();", None,
        "compact: set bits: item 0"),
    "barrier between tiles": ("pack_bits", "pack_bits.cuh", "packed + first / 8 * bits);\n    __syncthreads();", None,
        "pack_bits, bits ="),
    "barrier in a branch": ("bitmap", "block/bitmap_tiles.cuh", "if (threadIdx.x == 0) counts[tile] = set;",
        "if (warp() == 0) __syncthreads(), counts[tile] = set;", "simt: .*(barrier|waits|has ended)"),
    "tail too short": ("abs_max", "block/block.cuh", "if (thread < n - tail) f", "if (thread < n - tail - 1) f",
        "abs_max: item"),
    "tail too long": ("bitmap", "block/marks.cuh", "value[u] = i < n ?", "value[u] = i <= n ?", "heap-buffer-overflow"),
    "last block too early": ("payload", "block/block.cuh", "== blocks - 1;", "== blocks - 2;",
        "payload_(seal|verify): "),
    "word written whole at the end": ("range_float", "block/bit_stream.cuh", "first >= 0 && first + 4 <= nbytes",
        "first >= 0", "heap-buffer-overflow"),
    "barrier after staging": ("low_rank", "low_rank.cuh", "stage_factor<R>(q, begin, factor);\n    __syncthreads();",
        None, "low_rank_project"),
    "parts in the order of arrival": ("low_rank", "low_rank.cuh",
        "last_block(tickets + block / parts, parts)", "(!tickets || part != parts - 1)",
        "low_rank_project"),
    "barrier between products": ("low_rank", "low_rank.cuh", "      }\n      __syncthreads();\n    }\n  }\n};", None,
        "low_rank_apply_average: [em]"),
    "blocks that trust the table": ("index_code", "index_code.cuh", " && end_byte <= opened.nbytes - table", "",
        "heap-buffer-overflow"),
    "a bit past the segment": ("bitmap_code", "bitmap_code.cuh", "valid &= !(word & ~mask);", "",
        "bitmap_code_decode of other bytes: failed"),
    "a segment past the room for one": ("bitmap_code", "bitmap_code.cuh",
        "if (place >= uint32_t(kMostSegment)) return false;", "", "out of bounds|of other bytes"),
    "zeros of codes that other lanes begin": ("bitmap_code", "bitmap_code.cuh", "uint32_t(clear >> k) + fixed", "fixed",
        "bitmap_code_encode( of several)?: item"),
    "where codes begin, not put right": ("bitmap_code", "bitmap_code.cuh",
        "skip = lane() ? before : 0;", "skip = before * 0;",
        "bitmap_code_decode( of several)?: "),
    "segments that trust the table": ("bitmap_code", "bitmap_code.cuh",
        "if (end > nbytes ||", "if ((end > nbytes && nbytes < 0) ||",
        "heap-buffer-overflow|bitmap_code_decode of other bytes: failed"),
    "a candidate too few": ("chunk_topk", "chunk_topk.cuh", "listed - below >= uint32_t(count)",
        "listed - below > uint32_t(count)", "chunk_topk"),
    "candidates past the end": ("chunk_topk", "chunk_topk.cuh", "(1u << (size - mine)) - 1 : 0u",
        "(1u << (size - mine)) - 1 : 1u", "heap-buffer-overflow"),
    "indices beyond the end": ("index_code", "index_code.cuh", "return *last + 1 == end;", "return true;",
        "heap-buffer-overflow|failed: item 0"),
    "barrier before a tile's norms": ("quantize", "block/quantize_tile.cuh", "    __syncthreads();\n    tile_norms",
        None, "quantize_packed of vectors: item 0 of"),
    "barrier after a tile's norms": ("quantize", "block/quantize_tile.cuh", "buckets.first);\n    __syncthreads();",
        None, "quantize_packed of vectors: item"),
    "barrier before a chunk's tokens": ("elias", "elias.cuh", "words[w] = 0;\n  __syncthreads();", None,
        "elias_encode, levels"),
    "a run past the end": ("elias", "elias.cuh", "if (next >= count) return;", "if (next > count) return;",
        "elias_decode"),
    "ties to one side": ("signs", "signs.cuh", "if (voters % 2 == 0 && equal)", "if (equal)", "signs_majority of"),
    "a byte of no trits": ("ternary", "ternary.cuh", "valid && byte[j] <= kTopByte", "valid && byte[j] <= kTopByte + 1",
        "ternary_decode_add of a byte"),
    "barrier between stages": ("transform", "transform_tile.cuh",
        "at[i * apart + pitch] = v[i][1];\n    });\n    __syncthreads();", None, "transform(_inverse)? of"),
    "barrier before a tile": ("transform", "transform_tile.cuh",
        "groups = int(t.groups_of(count));\n    __syncthreads();", None, "transform(_select)? of|heap-buffer-overflow"),
    "rows past the last": ("transform", "transform_rows.cuh", "__ballot_sync(kAllLanes, inside && set)",
        "__ballot_sync(kAllLanes, (inside || true) && set)", "transform_select: |heap-buffer-overflow"),
    "too few codes for a bitmap": ("transform", "transform.cuh", "set != table.of[part].count ||",
        "set < table.of[part].count ||", "transform_decode of an invalid part"),
    "barrier between rounds": ("atom_probabilities", "atom_probabilities.cuh",
        "if (gridDim.x > 1) return;\n    __syncthreads();", None,
        "atom_probabilities, budget =|barrier|waits|has ended"),
    "ticket of the next round": ("atom_probabilities", "atom_probabilities.cuh", "state->ticket = 0;", "",
        "atom_probabilities, budget ="),
    "a stratum too many": ("random_indices", "random_indices.cuh", "if (i < k) indices", "if (i <= k) indices",
        "heap-buffer-overflow|random_indices of"),
    "blocks of the part before": ("add_residual", "block/table.cuh", "first_block <= blockIdx.x) ++index",
        "first_block < blockIdx.x) ++index", "add_residual: item"),
    "a word past the target": ("restore", "restore.cuh", "aligned ? nbytes / 16", "aligned ? nbytes / 16 + 1",
        "heap-buffer-overflow"),
    "misaligned wide load": ("select", "block/block.cuh", "reinterpret_cast<const float4*>(x + head)",
        "reinterpret_cast<const float4*>(x)", "misaligned|heap-buffer-overflow|item"),
}  # fmt: skip


# One of each kind: a missing barrier, a barrier that not all threads reach, an access out of bounds.
SAMPLE = ["barrier after clearing", "barrier in a branch", "a stratum too many"]


@pytest.mark.parametrize(
    "case", [*SAMPLE, *(pytest.param(c, marks=pytest.mark.long) for c in BROKEN if c not in SAMPLE)]
)
def test_broken_kernels_are_caught(case, unless_passed):
    name, file, code, broken, message = BROKEN[case]
    edits = {f"cuda/{file}": (code, without_barriers(code) if broken is None else broken)}
    detectors = {"misaligned": simt_build.SANITIZED, "overflow": simt_build.ADDRESS}
    flags = next((detectors[error] for error in detectors if error in message), simt_build.PLAIN)
    unless_passed(simt_build.program_parts(name, edits, flags))
    result = run_program(simt_build.program(name, edits, flags))
    assert result.returncode != 0 and re.search(message, result.stderr), (result.returncode, result.stderr[-4000:])


FAULTS = {
    "exit": "thread 40: has ended while thread 0 waits at line",
    "barriers": "is at the barrier of line",
    "warp-and-barrier": "__syncwarp at line .* but only fffffff7 came",
    "collectives": "other lanes of its warp at",
    "left-out": "leaves out lane",
    "outside": "reads lane 20, outside of mask 0000ffff",
    "missing-barrier": "reads what is not there yet",
    "shared-bounds": "index 64 out of bounds",
    "dynamic-bounds": "heap-buffer-overflow",
    "block-size": "cannot launch 1 x 1 blocks of 48 x 1 threads",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_reported(fault, unless_passed):
    unless_passed(simt_build.program_parts("faults"))
    program = simt_build.program("faults")
    assert run_program(program, "none").returncode == 0
    result = run_program(program, fault)
    assert result.returncode != 0 and re.search(FAULTS[fault], result.stderr), result.stderr[-4000:]


KERNELS = sorted(path.relative_to(CSRC / "cuda").as_posix() for path in (CSRC / "cuda").rglob("*.cuh"))


def includes(path):
    return re.findall(r'#include ([<"].*[>"])', path.read_text())


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_files_have_no_host_code(name):
    """Kernel files include only other kernel files and common headers, and use neither std:: nor streams.

    Building blocks include no kernel file of a primitive.
    """
    kernels = r"cuda/block/\w+\.cuh" if name.startswith("block/") else r"cuda/(block/)?\w+\.cuh"
    for include in includes(CSRC / "cuda" / name):
        assert re.fullmatch(rf'"({kernels}|common/\w+\.h)"', include), include
    text = (CSRC / "cuda" / name).read_text()
    assert "std::" not in text and "cudaStream_t" not in text


def test_common_headers_include_no_library():
    for path in (CSRC / "common").glob("*.h"):
        for include in includes(path):
            assert re.fullmatch(r'"common/\w+\.h"|<cstdint>|<cstring>', include), f"{path.name}: {include}"


@pytest.mark.long
def test_kernel_files_include_what_they_use(tmp_path):
    """Each compiles by itself, after the header that stands for CUDA: precompiled, as it takes longer than they do."""
    flags = [*simt_build.PLAIN, f"-I{tmp_path}", f"-I{simt_build.SIMT}", f"-I{CSRC}"]
    header = simt_build.SIMT / "cuda_runtime.h"
    simt_build.run(["g++", *flags, "-w", "-x", "c++-header", str(header), "-o", str(tmp_path / "cuda_runtime.h.gch")])
    for name in KERNELS:
        command = ["g++", *flags, "-include", "cuda_runtime.h", "-include", f"cuda/{name}"]
        simt_build.run([*command, "-fsyntax-only", "-x", "c++", "/dev/null"])


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
@pytest.mark.skipif(simt_build.built_with_nvcc(), reason="nvcc has compiled them for the extension")
@pytest.mark.parametrize("name", sorted(path.name for path in (CSRC / "cuda").glob("*.cu")))
def test_nvcc_compiles(name, unless_passed, tmp_path):
    """Without warnings, for the oldest supported architecture."""
    command = ["nvcc", "-std=c++17", "-arch=sm_75", "-fmad=false", "-ptx", f"-I{CSRC}", str(CSRC / "cuda" / name), "-o"]
    unless_passed([" ".join(command), *simt_build.sources(CSRC / "cuda", CSRC / "common")])
    simt_build.run([*command, str(tmp_path / "ptx")])
