"""benchmarks/instructions.py: counts of instructions, and what it says without its tools."""

import json
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
def test_counts(monkeypatch, tmp_path, capsys):
    """A pass over memory executes less than one instruction for a float, and a transform at least its additions."""
    path = tmp_path / "instructions.json"
    monkeypatch.setattr(sys, "argv", ["instructions.py", "--json", str(path)])
    assert instructions.main() == 0
    counts = {row["kernel"]: row["instructions_per_element"] for row in json.loads(path.read_text())["rows"]}
    assert 1 / 8 < counts["abs_max"] < 1, "eight floats in a register"
    fourier = counts["transform Fourier 64"]
    assert 5 * 6 / 2 / 8 < fourier < counts["transform_select Fourier 64, 15%"], "5/2 log2(64) flops, eight at a time"
    assert "transform Fourier 64" in capsys.readouterr().out
