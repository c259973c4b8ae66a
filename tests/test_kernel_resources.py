"""Registers, shared memory and spills of each CUDA kernel, compared with those in kernel_resources.json.

The build keeps what ptxas printed about each source (setup.py), so that nothing is compiled here. Record anew after a
change of kernels or of nvcc: build with CUDA, then run this file.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / f"{sys.implementation.cache_tag}-cuda"
RECORDED = Path(__file__).parent / "kernel_resources.json"
BUILD = "GRADZIP_CUDA=1 python setup.py build_ext --inplace"
RECORD = "python tests/test_kernel_resources.py"

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


def built() -> Kernels:
    """Return the resources of all kernels of the CUDA build. Raises RuntimeError if there is none or it is stale."""
    ninja = shutil.which("ninja")
    if not (FOLDER / "build.ninja").exists() or not ninja:
        raise RuntimeError(f"no CUDA build in {FOLDER.relative_to(ROOT)}, or no ninja: {BUILD}")
    logs = [FOLDER / f"csrc/cuda/{source.name}.o.ptxas" for source in sorted((ROOT / "csrc" / "cuda").glob("*.cu"))]
    command = [ninja, "-n", "-f", FOLDER / "build.ninja", *(log.relative_to(ROOT) for log in logs)]
    dry = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if "no work to do" not in dry.stdout:
        raise RuntimeError(f"the CUDA build in {FOLDER.relative_to(ROOT)} is out of date: {BUILD}")
    found = parse("".join(log.read_text() for log in logs))
    return {name: dict(sorted(rows.items())) for name, rows in sorted(zip(readable(list(found)), found.values()))}


def nvcc_release() -> str:
    """Return the version of nvcc in the CUDA build, as in `13.0`."""
    found = re.search(r"release ([\d.]+), V", (FOLDER / "build.ninja").read_text())
    return found[1] if found else "unknown"


def load() -> tuple[str, Kernels]:
    recorded = json.loads(RECORDED.read_text())
    kernels = {
        name: {arch: Resources(*row) for arch, row in rows.items()} for name, rows in recorded["kernels"].items()
    }
    return recorded["nvcc"], kernels


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
    missing = (archs(load()[1]) if RECORDED.exists() else set()) - archs(kernels)
    if missing:
        raise RuntimeError(f"the build lacks {', '.join(sorted(missing))}, recorded before: unset GRADZIP_CUDA_ARCHS")
    rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(rows)}" for name, rows in kernels.items())
    head = f'  "nvcc": "{nvcc_release()}",\n  "columns": {json.dumps(Resources._fields)},\n'
    RECORDED.write_text(f'{{\n{head}  "kernels": {{\n{rows}\n  }}\n}}\n')
    print(f"{RECORDED.relative_to(ROOT)}: {len(kernels)} kernels")


def test_kernels_use_no_more_than_recorded():
    try:
        got = built()
    except RuntimeError as reason:
        pytest.skip(str(reason))
    release, recorded = load()
    if release != nvcc_release():
        pytest.skip(f"built with nvcc {nvcc_release()}, recorded with {release}: other compilers use other registers")
    problems = compare(got, recorded)
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


PRINTED = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN7gradzip4cuda6kernelILi2EEEvPKfl' for 'sm_80'
ptxas info    : Function properties for _ZN7gradzip4cuda6kernelILi2EEEvPKfl
    16 bytes stack frame, 12 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 36 registers, used 1 barriers, 16 bytes cumulative stack size, 16648 bytes smem, 392 bytes cmem[0]
ptxas info    : Compile time = 828.719 ms
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN7gradzip4cuda6kernelILi2EEEvPKfl' for 'sm_90'
ptxas info    : Function properties for _ZN7gradzip4cuda6kernelILi2EEEvPKfl
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers
ptxas info    : Compile time = 346.876 ms
"""
NAME = "_ZN7gradzip4cuda6kernelILi2EEEvPKfl"


def test_output_of_ptxas_is_understood():
    assert parse(PRINTED) == {NAME: {"sm_80": Resources(36, 16648, 44), "sm_90": Resources(30, 0, 0)}}
    lines = PRINTED.splitlines()
    for interleaved in (lines[:2] + lines[7:], lines[4:]):
        with pytest.raises(ValueError, match="ptxas: got"):
            parse("\n".join(interleaved))


@pytest.mark.skipif(not shutil.which("c++filt"), reason="no c++filt")
def test_names_are_those_of_the_source():
    names = [NAME, "_ZN7gradzip4cuda12other_kernelEPFvPfEl"]
    assert readable(names) == ["kernel<2>", "other_kernel"]


@pytest.mark.parametrize(
    ("now", "line"),
    [
        ({"sm_80": Resources(36, 8, 0)}, None),
        ({"sm_80": Resources(30, 0, 0), "sm_90": Resources(30, 8, 0)}, None),
        ({"sm_80": Resources(37, 8, 0)}, "kernel<2> on sm_80: got 37 registers, recorded 36. Use less, or record anew"),
        ({"sm_80": Resources(36, 9, 4)}, "kernel<2> on sm_80: got 9 shared, recorded 8; 4 spills, recorded 0. Use"),
        ({"sm_75": Resources(99, 8, 0)}, None),
    ],
)
def test_more_than_recorded_is_a_line(now, line):
    recorded = {"kernel<2>": {"sm_80": Resources(36, 8, 0), "sm_90": Resources(30, 8, 0)}}
    problems = compare({"kernel<2>": now}, recorded)
    assert len(problems) == (line is not None)
    assert not line or re.match(line, problems[0])


def test_new_and_missing_kernels_are_lines():
    here = {"sm_80": Resources(36, 8, 0)}
    lost, new = compare({"a": here, "c": here}, {"a": here, "b": here})
    assert re.match(r"b on sm_80: got no such kernel, recorded Resources\(.*Record anew: python tests/", lost)
    assert re.match(r"c on sm_80: got Resources\(.*expected a recorded kernel. Record it: python tests/", new)


if __name__ == "__main__":
    try:
        record()
    except RuntimeError as reason:
        sys.exit(str(reason))
