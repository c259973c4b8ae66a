"""setup.py: which compilers and flags it chooses, and what the ninja file it writes compiles again."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import simt_build
from test_kernel_resources import parse

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = ("GRADZIP_CUDA", "GRADZIP_CUDA_ARCHS", "GRADZIP_SANITIZE", "CUDA_HOME", "CUDA_PATH", "CXX", "CXXFLAGS")
MODULE = """
#include <Python.h>
#include "answer.h"
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "answer", answer());
  return module;
}
"""
BINDINGS, ANSWER, LIBRARY = EVERYTHING = ["csrc/bindings.cpp", "csrc/cpu/answer.cpp", "_C.so"]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def setup():
    return simt_build.setup_py()


@pytest.fixture
def tree(tmp_path):
    """setup.py with a small extension of two sources and a header, in a folder whose name has a space."""
    folder = tmp_path / "a tree"
    (folder / "csrc" / "cpu").mkdir(parents=True)
    (folder / "gradzip").mkdir()
    shutil.copy(ROOT / "setup.py", folder)
    (folder / BINDINGS).write_text(MODULE)
    (folder / "csrc" / "answer.h").write_text("int answer();\n")
    (folder / ANSWER).write_text("int answer() { return 41; }\n")
    (folder / "gradzip" / "__init__.py").touch()  # so that no other gradzip is imported
    project = '[project]\nname = "gradzip"\nversion = "0"\n\n[tool.setuptools]\npackages = []\n'
    (folder / "pyproject.toml").write_text(project)
    return folder


def build(tree, **environment):
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=tree, env={**os.environ, "GRADZIP_CUDA": "0", **environment}, capture_output=True, text=True,
    )  # fmt: skip


def built(tree, **environment):
    """Build, and return what ninja made."""
    done = build(tree, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    made = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("[")]
    return sorted(name for name in made if name != LIBRARY) + [LIBRARY] * (LIBRARY in made)


def answer(tree):
    command = [sys.executable, "-c", "from gradzip import _C; print(_C.answer)"]
    return int(subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout)


def compiler(path, text):
    """A compiler of its own version, which runs `text` and then g++."""
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "c++ 1.0"; exit; fi\n{text}\nexec g++ "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_only_what_changed_is_built(tree):
    assert built(tree) == EVERYTHING
    assert answer(tree) == 41
    assert built(tree) == []

    (tree / ANSWER).write_text("int answer() { return 42; }\n")
    library = next(tree.glob("gradzip/_C*.so"))
    with open(library, "rb") as loaded:
        before = library.read_bytes()
        assert built(tree) == [ANSWER, LIBRARY]
        assert loaded.read() == before, "a process that has the old library loaded keeps it"
    assert answer(tree) == 42
    library.unlink()
    assert built(tree) == []
    assert answer(tree) == 42

    (tree / "csrc" / "answer.h").touch()
    assert built(tree) == [BINDINGS, LIBRARY], "only one source includes the header"
    assert built(tree, CXXFLAGS="-DOTHER") == EVERYTHING, "other flags"


def test_other_compiler_version(tree, tmp_path):
    cxx = compiler(tmp_path / "c++", "")
    assert built(tree, CXX=cxx) == EVERYTHING
    script = Path(cxx).read_text()
    Path(cxx).write_text(script.replace("c++ 1.0", "c++ 1.1"))
    assert built(tree, CXX=cxx) == EVERYTHING
    assert built(tree, CXX=cxx) == []


def test_renamed_source(tree):
    built(tree)
    (tree / ANSWER).rename(tree / "csrc/cpu/other.cpp")
    assert built(tree) == ["csrc/cpu/other.cpp", LIBRARY]
    assert answer(tree) == 41


def test_killed_build_is_repaired(tree, tmp_path):
    """The compiler writes a part of an object; then it and ninja are killed."""
    cxx = compiler(tmp_path / "c++", "")
    built(tree, CXX=cxx)
    (tree / ANSWER).write_text("int answer() { return 42; }\n")
    compiler(tmp_path / "c++", 'for last; do :; done; echo half >"$last"; kill -9 $PPID $$')
    assert build(tree, CXX=cxx).returncode != 0
    (half,) = tree.glob(f"build/*/{ANSWER}.o")
    assert half.read_text() == "half\n"
    compiler(tmp_path / "c++", "")
    assert built(tree, CXX=cxx) == [ANSWER, LIBRARY]
    assert answer(tree) == 42


def test_compile_error_is_shown(tree):
    (tree / ANSWER).write_text("int answer() { return nonesuch; }\n")
    done = build(tree)
    assert done.returncode == 1
    assert "'nonesuch' was not declared" in done.stdout.replace("‘", "'").replace("’", "'")
    assert done.stderr == "gradzip build: ninja failed, exit status 1; what it printed is above\n"
    assert not list(tree.glob("gradzip/_C*"))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"GRADZIP_CUDA": "maybe"}, "GRADZIP_CUDA='maybe' is not understood; expected auto, 0, 1 or nvrtc"),
        ({"CXX": "nonesuch-c++"}, "'nonesuch-c++' is not on PATH; install g++"),
        ({"MAX_JOBS": "many"}, "MAX_JOBS='many' is not understood; expected a number"),
    ],
)
def test_refused_settings(tree, environment, message):
    done = build(tree, **environment)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_no_ninja(setup, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ninja", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="no ninja, .* pip install ninja"):
        setup["find_ninja"]()
    monkeypatch.setitem(sys.modules, "ninja", SimpleNamespace(BIN_DIR=str(tmp_path)))
    compiler(tmp_path / "ninja", "")
    assert setup["find_ninja"]() == str(tmp_path / "ninja")


def test_cuda_without_nvcc(setup, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert setup["find_nvcc"]() is None, "auto"
    monkeypatch.setenv("GRADZIP_CUDA", "1")
    with pytest.raises(SystemExit, match=r"GRADZIP_CUDA=1, but there is no nvcc .* install the CUDA toolkit"):
        setup["find_nvcc"]()


@pytest.fixture
def cuda(tmp_path):
    """A CUDA_HOME whose nvcc knows four architectures."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\nprintf 'compute_70\\ncompute_75\\ncompute_80\\ncompute_100\\n'\n")
    nvcc.chmod(0o755)
    return tmp_path


def test_cuda_of_cuda_home_comes_first(setup, monkeypatch, cuda):
    monkeypatch.setenv("CUDA_HOME", str(cuda))
    assert setup["find_nvcc"]() == f"{cuda}/bin/nvcc"
    monkeypatch.setenv("GRADZIP_CUDA", "0")
    assert setup["find_nvcc"]() is None


def test_architectures_are_those_nvcc_knows(setup, monkeypatch, cuda):
    nvcc = f"{cuda}/bin/nvcc"
    assert setup["cuda_archs"](nvcc) == ["75", "80"]
    monkeypatch.setenv("GRADZIP_CUDA_ARCHS", "10.0, 7.0")
    assert setup["cuda_archs"](nvcc) == ["70", "100"]
    monkeypatch.setenv("GRADZIP_CUDA_ARCHS", "99")
    with pytest.raises(SystemExit, match="knows none of the compute capabilities 99, only 70, 75, 80, 100"):
        setup["cuda_archs"](nvcc)


def test_commands(setup, monkeypatch, cuda):
    """Flags of the C++ and CUDA compilers and of the linker, with sanitizers."""
    pytest.importorskip("pybind11")
    monkeypatch.setenv("CXXFLAGS", "-DX='$ 1'")
    monkeypatch.setenv("LDFLAGS", "-Wl,-z,now")
    sources = [BINDINGS, "csrc/cuda/device.cu"]
    text = setup["ninja_file"](Path("build/x"), sources, f"{cuda}/bin/nvcc", "address,undefined")
    cpp, cu, link = (line for line in text.splitlines() if line.startswith("  command"))
    for flag in ("-ffp-contract=off", "-DGRADZIP_CUDA ", '-DGRADZIP_CUDA_ARCHS="sm_75 sm_80"', "-DX=$$ 1"):
        assert flag in cpp
    for flag in (
        "-fmad=false",
        "-Xcompiler=-ffp-contract=off",
        "code=sm_75",
        "code=[sm_80,compute_80]",
        "-DGRADZIP_CUDA ",
    ):
        assert flag in cu
    assert r"-Xcompiler=-fsanitize=address\,undefined" in cu
    assert r"-Xcompiler=-Wl\,-z\,now" in link and "-cudart=static" in link and "-shared" in link
    # Nothing specific to this machine, and no arithmetic that the source does not spell out.
    assert "-march" not in text and "fast-math" not in text

    text = setup["ninja_file"](Path("build/x"), sources, None, "")
    assert ".cu" not in text and "GRADZIP_CUDA" not in text


def test_commands_without_nvcc(setup):
    """The C++ compiler builds the launchers, with a header in place of CUDA's."""
    pytest.importorskip("pybind11")
    text = setup["ninja_file"](Path("build/x"), [BINDINGS, "csrc/cuda/select.cu"], None, "", nvrtc=True)
    cpp, cu, _ = (line for line in text.splitlines() if line.startswith("  command"))
    for command in (cpp, cu):
        assert "-DGRADZIP_CUDA -DGRADZIP_NVRTC" in command and "-ffp-contract=off" in command
    assert "-Icsrc/nvrtc -include cuda_runtime.h -x c++ -MD" in cu and "ptxas" not in text
    assert "build build/x/csrc/cuda/select.cu.o: cu csrc/cuda/select.cu\n" in text
    linked = next(line for line in text.splitlines() if line.startswith("build build/x/_C.so")).split()[3:]
    assert "build/x/csrc/nvrtc/driver.cpp.o" in linked and "build/x/sources.cpp.o" in linked


def test_sources_of_kernels_are_written_into_the_library(setup, tmp_path):
    text = setup["kernel_sources"](ROOT / "csrc")
    rows = re.findall(r'^    \{"(\w+/\w+\.(?:cuh|h))", R"gradzip\((.*?)\)gradzip"\},\n', text, re.MULTILINE | re.DOTALL)
    assert len(rows) > 40 and all((ROOT / "csrc" / path).read_text() == content for path, content in rows)
    path = tmp_path / "sources.cpp"
    setup["write_changed"](path, text)
    os.utime(path, (1, 1))
    setup["write_changed"](path, text)
    assert path.stat().st_mtime == 1, "the same text does not make it newer than its object"
    setup["write_changed"](path, "other")
    assert path.read_text() == "other"


KERNEL = """
__global__ void kernel(const float* x, float* y) {
  __shared__ float all[256];
  int unused;
  all[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = all[255 - threadIdx.x];
}
"""


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
def test_output_of_ptxas_is_kept_and_warnings_are_shown(tree):
    source = tree / "csrc" / "cuda" / "kernel.cu"
    source.parent.mkdir()
    source.write_text(KERNEL)
    done = build(tree, GRADZIP_CUDA="1", GRADZIP_CUDA_ARCHS="80")
    assert done.returncode == 0, done.stdout + done.stderr
    shown = done.stdout + done.stderr
    assert "never referenced" in shown and "ptxas" not in shown and "stack frame" not in shown, shown
    (log,) = tree.glob("build/*/csrc/cuda/kernel.cu.o.ptxas")
    ((name, rows),) = parse(log.read_text()).items()
    assert "kernel" in name and rows.keys() == {"sm_80"}
    assert rows["sm_80"].registers > 0 and rows["sm_80"][1:] == (1024, 0)

    source.write_text(KERNEL.replace("int unused", "nonesuch unused"))
    done = build(tree, GRADZIP_CUDA="1", GRADZIP_CUDA_ARCHS="80")
    assert done.returncode == 1 and 'identifier "nonesuch" is undefined' in done.stdout + done.stderr
    log.unlink()
    source.write_text(KERNEL)
    assert build(tree, GRADZIP_CUDA="1", GRADZIP_CUDA_ARCHS="80").returncode == 0 and log.exists()


def test_all_sources_are_found(setup):
    found = setup["sources"]()
    assert "csrc/bindings.cpp" in found
    assert "csrc/cuda/device.cu" in found
    assert len([source for source in found if source.startswith("csrc/cpu/")]) > 1
