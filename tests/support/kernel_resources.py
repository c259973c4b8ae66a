"""Registers, shared memory and spills of each CUDA kernel, and those recorded in tests/simt/kernel_resources.json.

The build keeps what ptxas printed about each source (setup.py), so that nothing is compiled here. Record anew after a
change of kernels or of nvcc: build with CUDA, then run this file. benchmarks/sass.py records instructions there.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from paths import ROOT

FOLDER = ROOT / "build" / f"{sys.implementation.cache_tag}-cuda"
RECORDED = ROOT / "tests" / "simt" / "kernel_resources.json"
BUILD = "GRADZIP_CUDA=1 python setup.py build_ext --inplace"
RECORD = "python tests/support/kernel_resources.py"

PTXAS = re.compile(
    r"^ptxas info +: Compiling entry function '(?P<kernel>\w+)' for '(?P<arch>sm_\w+)'$"
    r"|^ +(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads$"
    r"|^ptxas info +: Used (?P<registers>\d+) registers,(?: .*?(?P<shared>\d+) bytes smem)?.*$",
    re.MULTILINE,
)


class Resources(NamedTuple):
    """What one thread uses of registers, one block of static shared memory (bytes), one thread of spills (bytes)."""

    registers: int
    shared: int
    spills: int


class Instructions(NamedTuple):
    """Instructions of a kernel for sm_90, and those that a thread executes for each item (benchmarks/sass.py)."""

    kernel: int
    item: float


Kernels = dict[str, dict[str, Resources]]  # by name, then by architecture


def parse(printed: str) -> Kernels:
    """Return the resources of each mangled kernel name and architecture from the output of `ptxas -v`.

    The spills of a kernel include those of the functions that it calls. Raises ValueError if the output of several
    architectures is interleaved.
    """
    found: Kernels = {}
    kernel, arch, spills = "", "", 0
    for line in PTXAS.finditer(printed):
        if line["kernel"]:
            if kernel:
                raise ValueError(f"ptxas: got {line[0]!r} before the registers of {kernel} on {arch}")
            kernel, arch, spills = line["kernel"], line["arch"], 0
        elif line["stack"]:
            spills += int(line["stores"]) + int(line["loads"])
        else:
            if not kernel:
                raise ValueError(f"ptxas: got {line[0]!r} of no kernel")
            found.setdefault(kernel, {})[arch] = Resources(int(line["registers"]), int(line["shared"] or 0), spills)
            kernel = ""
    return found


def readable(mangled: list[str]) -> list[str]:
    """Return names as in the source, without namespace and parameters: `select_kernel<2>`."""
    done = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True)
    names = [without_parameters(name.removeprefix("void ")) for name in done.stdout.splitlines()]
    names = [name.replace("gradzip::cuda::", "").replace("gradzip::", "") for name in names]
    assert len(set(names)) == len(mangled), f"two kernels have the same name: {sorted(names)}"
    return names


def without_parameters(function: str) -> str:
    depth = 0
    for i, c in reversed(list(enumerate(function))):
        depth += (c == ")") - (c == "(")
        if c == "(" and depth == 0:
            return function[:i]
    return function


def is_built(*targets: Path) -> bool:
    """Whether the CUDA build has these files, made from the sources as they are."""
    ninja = shutil.which("ninja")
    if not (FOLDER / "build.ninja").exists() or not ninja:
        return False
    command = [ninja, "-n", "-f", str(FOLDER / "build.ninja"), *(str(target.relative_to(ROOT)) for target in targets)]
    return "no work to do" in subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout


def printed() -> str:
    """Return what nvcc printed in the CUDA build. Raises RuntimeError if there is none or it is stale."""
    logs = [FOLDER / f"csrc/cuda/{source.name}.o.ptxas" for source in sorted((ROOT / "csrc" / "cuda").glob("*.cu"))]
    if not is_built(*logs):
        raise RuntimeError(f"no CUDA build in {FOLDER.relative_to(ROOT)} that is up to date, or no ninja: {BUILD}")
    return "".join(log.read_text() for log in logs)


def built() -> Kernels:
    """Return the resources of all kernels of the CUDA build. Raises RuntimeError if there is none or it is stale."""
    found = parse(printed())
    return {name: dict(sorted(rows.items())) for name, rows in sorted(zip(readable(list(found)), found.values()))}


def nvcc_release() -> str:
    """Return the version of nvcc in the CUDA build, as in `13.0`."""
    return release_of((FOLDER / "build.ninja").read_text())


def release_of(version: str) -> str:
    found = re.search(r"release ([\d.]+), V", version)
    return found[1] if found else "unknown"


def load() -> tuple[str, Kernels]:
    recorded = json.loads(RECORDED.read_text())
    kernels = {
        name: {arch: Resources(*row) for arch, row in rows.items()} for name, rows in recorded["kernels"].items()
    }
    return recorded["nvcc"], kernels


def load_instructions() -> dict[str, Instructions]:
    rows = json.loads(RECORDED.read_text())["instructions"]
    return {name: Instructions(*row) for name, row in rows.items()}


def compare(got: Kernels, recorded: Kernels) -> list[str]:
    """Return a line for each kernel that uses more than recorded, is not recorded, or was recorded and is gone.

    Only architectures that are both compiled and recorded count.
    """
    problems = []
    for arch in sorted(archs(got) & archs(recorded)):
        for name in sorted(got.keys() | recorded.keys()):
            now, before = got.get(name, {}).get(arch), recorded.get(name, {}).get(arch)
            if now and before:
                more = [f"{n} {what}, recorded {m}" for what, n, m in zip(Resources._fields, now, before) if n > m]
                if more:
                    problems.append(f"{name} on {arch}: got {'; '.join(more)}. Use less, or record anew: {RECORD}")
            elif now:
                problems.append(f"{name} on {arch}: got {now}, expected a recorded kernel. Record it: {RECORD}")
            elif before:
                problems.append(f"{name} on {arch}: got no such kernel, recorded {before}. Record anew: {RECORD}")
    return problems


def archs(kernels: Kernels) -> set[str]:
    return {arch for rows in kernels.values() for arch in rows}


def record() -> None:
    kernels = built()
    missing = archs(load()[1]) - archs(kernels)
    if missing:
        raise RuntimeError(f"the build lacks {', '.join(sorted(missing))}, recorded before: set GRADZIP_CUDA_ARCHS=all")
    store(nvcc=nvcc_release(), kernels=kernels)
    print(f"{RECORDED.relative_to(ROOT)}: {len(kernels)} kernels")


def store(**fields: object) -> None:
    """Write fields of the file; others stay."""
    columns = {"columns": Resources._fields, "columns of instructions": Instructions._fields}
    recorded = json.loads(RECORDED.read_text()) | columns | fields
    lines = []
    for key in ("nvcc", "columns", "kernels", "columns of instructions", "instructions"):
        value = recorded[key]
        if isinstance(value, dict):
            rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in value.items())
            lines.append(f"  {json.dumps(key)}: {{\n{rows}\n  }}")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    try:
        record()
    except RuntimeError as reason:
        sys.exit(str(reason))
