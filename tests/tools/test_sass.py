"""benchmarks/sass.py: which instructions and loops it finds, and what it says if it cannot."""

import shutil
import subprocess
import sys

import pytest

import kernel_resources
from benchmarks import sass
from benchmarks.sass import WORK, SassError, Work, loops, parse, per_item
from paths import ROOT

COVERS = ["benchmarks/sass.py", "tests/support/kernel_resources.py"]

# A loop with a branch and a loop inside; a block behind the end that belongs to it; a divergent path, and padding.
SASS = """\
\t\tFunction : _Z1fPf
\t.headerflags\t@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                     /* 0x00000a00ff017b82 */
                                                                              /* 0x000fe20000000800 */
        /*0010*/                   S2R R2, SR_TID.X ;                         /* 0x0000000000027919 */
        /*0020*/                   ISETP.GE.U32.AND P0, PT, R2, UR4, PT ;     /* 0x0000000402007c0c */
        /*0030*/               @P0 BRA 0xc0 ;                                 /* 0x0000000000000000 */
        /*0040*/                   IADD3 R3, R3, 0x1, RZ ;                    /* 0x0000000000000000 */
        /*0050*/              @!P1 BRA 0xa0 ;                                 /* 0x0000000000000000 */
        /*0060*/                   FFMA R4, R4, R4, R3 ;                      /* 0x0000000000000000 */
        /*0070*/                   BRA.DIV UR4, 0xf0 ;                        /* 0x0000000000000000 */
        /*0080*/                   SHFL.BFLY PT, R5, R4, 0x1, 0x1f ;          /* 0x0000000000000000 */
        /*0090*/               @P2 BRA 0x60 ;                                 /* 0x0000000000000000 */
        /*00a0*/               @P3 BRA 0xd0 ;                                 /* 0x0000000000000000 */
        /*00b0*/               @P0 BRA 0x40 ;                                 /* 0x0000000000000000 */
        /*00c0*/                   EXIT ;                                     /* 0x000000000000794d */
        /*00d0*/                   MUFU.RCP R6, R6 ;                          /* 0x0000000000000000 */
        /*00e0*/                   BRA 0xb0 ;                                 /* 0x0000000000000000 */
        /*00f0*/                   WARPSYNC.COLLECTIVE R9, 0x100 ;            /* 0x0000000000000000 */
        /*0100*/                   BRA 0x90 ;                                 /* 0x0000000000000000 */
        /*0110*/                   BRA 0x110;                                 /* 0xfffffffc00fc7947 */
        /*0120*/                   NOP;                                       /* 0x0000000000007918 */
\t\tFunction : _Z1gv
        /*0000*/                   LDC R1, c[0x0][0x28] ;                     /* 0x00000a00ff017b82 */
        /*0010*/                   EXIT ;                                     /* 0x000000000000794d */
        /*0020*/                   BRA 0x20;                                  /* 0xfffffffc00fc7947 */
"""


def test_loops_are_those_of_the_control_flow():
    kernels = parse(SASS)
    assert list(kernels) == ["_Z1fPf", "_Z1gv"]
    code = kernels["_Z1fPf"]
    assert len(code) == 17 and code[3] == (0x30, "@P0", "BRA", "0xc0")
    outer, inner = loops(code)
    assert [each.address for each in inner.own] == [0x60, 0x70, 0x80, 0x90]
    # 0xd0 and 0xe0 are behind the end of the kernel, but within the loop; the lanes at 0xf0 have diverged.
    assert [each.address for each in outer.own] == [0x40, 0x50, 0xA0, 0xB0, 0xD0, 0xE0]
    assert inner.parent is outer and outer.parent is None and outer.header == 0x40


def test_instructions_an_item():
    kernels = parse(SASS)
    assert per_item(kernels["_Z1fPf"], Work(1, "element")) == 10
    assert per_item(kernels["_Z1fPf"], Work(3, "element", {2: 2.5})) == 5.4  # 16 / 3, rounded up
    # The blocks of 0xd0 and 0xe0, and of 0x60 to 0x80.
    assert per_item(kernels["_Z1fPf"], Work(1, "element", skips="MUFU.RCP")) == 8
    assert per_item(kernels["_Z1fPf"], Work(1, "element", skips="FFMA")) == 7
    assert per_item(kernels["_Z1gv"], Work(1, "element")) == 2, "a kernel without loops"


def test_errors_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(
        SassError, match="^no cuobjdump; pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm, or put"
    ):
        sass.find_tool("cuobjdump")
    monkeypatch.setattr(sys, "argv", ["sass", "unknown"])
    with pytest.raises(SystemExit):
        sass.main()
    error = "error: got 'unknown', expected the path of a .cu file, or the name of one in csrc/cuda\n"
    assert capsys.readouterr().err.endswith(error)


def test_everything_with_a_statement_is_recorded():
    recorded = kernel_resources.load_instructions()
    assert set(recorded) == {name for kernels in WORK.values() for name in kernels}


@pytest.fixture
def _tools():
    try:
        sass.find_tool("cuobjdump")
        sass.find_tool("nvdisasm")
        sass.find_nvcc()
    except SassError as reason:
        pytest.skip(str(reason))


@pytest.mark.usefixtures("_tools")
@pytest.mark.parametrize("stem", WORK)
def test_kernels_execute_no_more_instructions_than_recorded(stem, unless_passed):
    """With another nvcc they may: its counts are not compared."""
    if sass.nvcc_release() != kernel_resources.load()[0]:
        pytest.skip(f"got nvcc {sass.nvcc_release()}, recorded with {kernel_resources.load()[0]}")
    unless_passed([*(ROOT / path for path in COVERS), *sass.parts(ROOT / f"csrc/cuda/{stem}.cu", [])])
    recorded = kernel_resources.load_instructions()
    for name, (_, each) in sass.count(stem).items():
        assert each <= recorded[name].item, f"{name}: use less, or record anew: python -m benchmarks.sass --write"


@pytest.mark.long
@pytest.mark.usefixtures("_tools")
def test_sources_are_compiled_with_the_flags_of_the_build(tmp_path):
    """Without -fmad=false, nvcc would contract a product and a sum."""
    (tmp_path / "mine.cuh").write_text("__global__ void mine(float* x, float y) { x[0] = x[0] * y + x[1]; }\n")
    (tmp_path / "mine.cu").write_text('#include "mine.cuh"\n')
    command = [sys.executable, "-m", "benchmarks.sass", "-I", tmp_path, tmp_path / "mine.cu", "--loops"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("`mine`, "), done.stderr
    kernels = sass.disassemble(sass.object_of(tmp_path / "mine.cu", [str(tmp_path)]))
    opcodes = {each.opcode for each in kernels["mine"]}
    assert {"FMUL", "FADD"} <= opcodes and not any(opcode.startswith("FFMA") for opcode in opcodes)
    (tmp_path / "mine.cu").write_text("not C++\n")
    with pytest.raises(SassError, match="^nvcc mine.cu: .*error"):
        sass.object_of(tmp_path / "mine.cu", [])
