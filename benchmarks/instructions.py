"""Count the instructions that kernels execute for an element, on one thread with AVX2, by Valgrind.

A kernel that takes longer than copies of its data, and executes many instructions, is bound by those. Counts do not
depend on the machine's load. Needs valgrind, which knows no AVX-512, and a build (`make bootstrap`).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.common.arguments import Parser, output_file
from benchmarks.common.results import ROOT, provenance, write_json

EXAMPLES = """\
examples:
  python -m benchmarks.instructions                       half a minute
  python -m benchmarks.instructions --json benchmarks/results/instructions.json
"""
TIMES = (1, 3)  # calls of a kernel: the difference has neither the start of the program nor making the data


def builds() -> list[Path]:
    """The folders with the objects of the extension, without those for sanitizers (setup.py)."""
    found = sorted(ROOT.glob("build/*/csrc/cpu"))
    return [folder for folder in found if re.fullmatch(r"[^-]+-[^-]+-(cuda|nvrtc|cpu)", folder.parts[-3])]


def build(folder: Path) -> Path:
    """Link benchmarks/instructions.cpp with the objects of the extension."""
    program = folder / "instructions"
    objects = builds()[0].glob("*.cpp.o")
    command = ["g++", "-std=c++17", "-O2", "-pthread", f"-I{ROOT}/csrc", f"{ROOT}/benchmarks/instructions.cpp"]
    subprocess.run([*command, *map(str, objects), "-o", program], check=True)
    return program


def executed(program: Path, kernel: str, times: int) -> int:
    """The instructions of a run."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", program, kernel, str(times)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found, done.stderr
    return int(found[1])


def per_element(program: Path, kernel: str, numel: int) -> float:
    few, many = (executed(program, kernel, times) for times in TIMES)
    return (many - few) / (TIMES[1] - TIMES[0]) / numel


def main() -> int:
    parser = Parser("instructions", __doc__, EXAMPLES)
    parser.add_argument("--json", metavar="PATH", type=output_file, help="write the counts and their provenance")
    args = parser.parse_args()
    for tool in ("valgrind", "g++"):
        if not shutil.which(tool):
            parser.fail(f"no {tool}, which counts need; install it")
    if not builds():
        parser.fail(f"{ROOT}/build has no objects of the extension; run make bootstrap")
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        listed = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
        *kernels, numel = listed
        rows = []
        for kernel in track(kernels, "Counting", console=Console(stderr=True), transient=True):
            each = per_element(program, kernel, int(numel))
            rows.append({"kernel": kernel, "instructions_per_element": round(each, 2)})
    for row in rows:
        print(f"{row['kernel']:36} {row['instructions_per_element']:8.2f}")
    if args.json:
        write_json(args.json, {"provenance": {**provenance(), "simd": "avx2", "numel": int(numel)}, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
