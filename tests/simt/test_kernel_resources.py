"""Registers, shared memory and spills of each CUDA kernel, compared with those in kernel_resources.json."""

import re
import shutil

import pytest

from kernel_resources import Resources, built, compare, load, nvcc_release, parse, printed, readable


def test_nvcc_printed_no_warnings():
    try:
        lines = printed().splitlines()
    except RuntimeError as reason:
        pytest.skip(str(reason))
    assert not [line for line in lines if not re.match("ptxas info |    .* bytes stack frame, ", line)]


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
