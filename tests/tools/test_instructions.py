"""benchmarks/instructions.py: counts of instructions, and what it says without its tools."""

import os
import shutil
import sys

import pytest

import commands
from benchmarks import instructions

COVERS = ["benchmarks/instructions.*", "csrc/cpu/*", "csrc/common/*"]


def test_without_valgrind(tmp_path):
    done = commands.run(sys.executable, "-m", "benchmarks.instructions", env=os.environ | {"PATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "python -m benchmarks.instructions: error: no valgrind, which counts need; install it\n"


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("valgrind"), reason="no valgrind")
def test_counts(tmp_path):
    """A pass over memory executes less than one instruction for a float, and a transform at least its additions."""
    program = instructions.build(tmp_path)
    *listed, numel = commands.run(program).stdout.splitlines()
    kernels = ("abs_max", "transform Fourier 64", "transform_select Fourier 64, 15%")
    assert {*kernels} <= {*listed}
    abs_max, fourier, select = (instructions.per_element(program, kernel, int(numel)) for kernel in kernels)
    assert 1 / 8 < abs_max < 1, "eight floats in a register"
    assert 5 * 6 / 2 / 8 < fourier < select, "5/2 log2(64) flops, eight at a time"
