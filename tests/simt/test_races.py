"""Data races of the CUDA kernels: compiled for the CPU, with GPU threads as threads of the thread sanitizer.

tests/simt/races.h describes what orders accesses and what is not detected.
"""

import functools
import re
import subprocess
from types import MappingProxyType

import pytest

import simt_build
from test_simt import PROGRAMS, run_program

# Little history: reports name both accesses, but the stack of the earlier one only if it was recent. The stacks of
# lanes that share a thread are mixed: only their first frames are meaningful.
OPTIONS = "halt_on_error=1:exitcode=66:history_size=0"


@functools.cache
def missing() -> str | None:
    """Return why the thread sanitizer does not work here, or None if it does."""

    def make(target):
        command = ["g++", *simt_build.RACES, "-x", "c++", "-", "-o", str(target)]
        done = subprocess.run(command, input="int main() {}", capture_output=True, text=True)
        if done.returncode:
            raise OSError(done.stderr.strip().splitlines()[-1])

    try:
        done = subprocess.run([simt_build.cached("no_races", simt_build.RACES, make)], capture_output=True, text=True)
    except OSError as error:
        return f"no thread sanitizer: {error}"
    return f"the thread sanitizer does not run here: {done.stderr.strip()[:200]}" if done.returncode else None


@pytest.fixture(autouse=True)
def _options(monkeypatch):
    if missing():
        pytest.skip(missing())
    monkeypatch.setenv("TSAN_OPTIONS", OPTIONS)


def races(name, *arguments, edits=MappingProxyType({})):
    """Run tests/simt/NAME.cpp. Return the accesses of the race that it has, or an empty string."""
    done = run_program(simt_build.program(name, edits, simt_build.RACES), *arguments)
    if done.returncode == 66:
        accesses = done.stderr.partition("Location is")[0].replace(f"{simt_build.ROOT}/", "")
        return "\n".join(re.findall(r"^ +(?:.* of size .*|#[01] .*)$", accesses, re.MULTILINE))
    assert done.returncode == 0 and not done.stderr, (done.returncode, done.stderr[-4000:])
    return ""


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_have_no_races(name, unless_passed):
    """On fewer sizes than in test_simt.py; the largest has more tiles than the grid has blocks."""
    unless_passed(simt_build.program_parts(name, flags=simt_build.RACES))
    found = races(name)
    assert not found, found


# Within a block, between blocks; then more of both.
SAMPLE = ["barrier", "atomic"]
OTHERS = ["second barrier", "warp", "read", "overlap", "flag", "fence"]


@pytest.mark.parametrize("kernel", [*SAMPLE, *(pytest.param(kernel, marks=pytest.mark.long) for kernel in OTHERS)])
def test_races_are_reported(kernel, unless_passed):
    """Missing: a barrier, fence or __syncwarp; an atomic for a plain read or write; a gap between blocks."""
    unless_passed(simt_build.program_parts("racy", flags=simt_build.RACES))
    assert races("racy", kernel) == ""
    found = races("racy", kernel, "racy")
    assert "#0 kernel tests/simt/racy.cpp" in found, found or "no race"


# What the emulation alone does not detect, since it runs blocks one after the other.
BROKEN = {
    "first barrier of a sum": (
        "bitmap",
        {"cuda/block/block.cuh": ("value = warp_sum(value);\n  __syncthreads();", "value = warp_sum(value);")},
    ),
    "barrier before the votes of a tile": (
        "transform",
        {"cuda/transform_rows.cuh": ("__syncthreads();  // nobody reads the votes of the last tile\n", "\n")},
    ),
    "fences of the last block": (
        "select",
        {
            "cuda/block/block.cuh": (
                "  __threadfence();\n  __syncthreads();\n"
                "  if (threadIdx.x == 0) last = atomicAdd(ticket, 1u) == blocks - 1;\n"
                "  __syncthreads();\n  __threadfence();\n  return last;",
                "  __syncthreads();\n  if (threadIdx.x == 0) last = atomicAdd(ticket, 1u) == blocks - 1;"
                "\n  __syncthreads();\n  return last;",
            )
        },
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", BROKEN)
def test_races_of_broken_kernels_are_reported(case, unless_passed):
    name, edits = BROKEN[case]
    unless_passed(simt_build.program_parts(name, edits, simt_build.RACES))
    found = races(name, edits=edits)
    assert "cuda/" in found, found or "no race"
