"""setup.py: which compilers and flags it chooses, and what the ninja file it writes compiles again."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

import commands
import gradzip
import simt_build
from kernel_resources import parse
from paths import ROOT

COVERS = ["setup.py"]
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


def test_type_checkers_see_every_method(setup):
    stub = setup["methods_stub"](ROOT / "gradzip" / "methods")
    imported = re.findall(r"^from \.(\w+) import (\w+) as \2$", stub, re.MULTILINE)
    assert {name: f"gradzip.methods.{stem}" for stem, name in imported} == {
        name: getattr(gradzip, name).__module__ for name in gradzip.methods.__all__
    }
    assert stub.endswith(f"\n__all__ = {gradzip.methods.__all__}\n")


def build(tree, **environment):
    variables = {**os.environ, "GRADZIP_CUDA": "0", **environment}
    return commands.run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=tree, env=variables)


def built(tree, **environment):
    """Build, and return what ninja made."""
    done = build(tree, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    made = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("[")]
    return sorted(name for name in made if name != LIBRARY) + [LIBRARY] * (LIBRARY in made)


def answer(tree):
    return int(commands.run(sys.executable, "-c", "from gradzip import _C; print(_C.answer)", cwd=tree).stdout)


def compiler(path, text):
    """A compiler of its own version, which runs `text` and then g++."""
    version = 'if [ "$1" = --version ]; then echo "c++ 1.0"; exit; fi'
    return str(commands.executable(path, f'#!/bin/sh\n{version}\n{text}\nexec g++ "$@"\n'))


def test_only_what_changed_is_built(tree, tmp_path):
    cxx = compiler(tmp_path / "c++", "")
    assert built(tree, CXX=cxx) == EVERYTHING
    assert answer(tree) == 41
    assert built(tree, CXX=cxx) == []

    (tree / ANSWER).write_text("int answer() { return 42; }\n")
    library = next(tree.glob("gradzip/_C*.so"))
    with open(library, "rb") as loaded:
        before = library.read_bytes()
        assert built(tree, CXX=cxx) == [ANSWER, LIBRARY]
        assert loaded.read() == before, "a process that has the old library loaded keeps it"
    library.unlink()
    assert built(tree, CXX=cxx) == []
    assert answer(tree) == 42

    (tree / "csrc" / "answer.h").touch()
    assert built(tree, CXX=cxx) == [BINDINGS, LIBRARY], "only one source includes the header"
    assert built(tree, CXX=cxx, CXXFLAGS="-DOTHER") == EVERYTHING, "other flags"
    Path(cxx).write_text(Path(cxx).read_text().replace("c++ 1.0", "c++ 1.1"))
    assert built(tree, CXX=cxx) == EVERYTHING, "another version of the compiler"
    (tree / ANSWER).rename(tree / "csrc/cpu/other.cpp")
    assert built(tree, CXX=cxx) == ["csrc/cpu/other.cpp", LIBRARY]


def test_killed_build_is_repaired(tree, tmp_path):
    """The compiler writes a part of an object; then it and ninja are killed."""
    cxx = compiler(tmp_path / "c++", 'for last; do :; done; echo half >"$last"; kill -9 $PPID $$')
    assert build(tree, CXX=cxx, MAX_JOBS="1").returncode != 0
    (half,) = tree.glob("build/*/csrc/**/*.o")
    assert half.read_text() == "half\n"
    compiler(tmp_path / "c++", "")
    assert built(tree, CXX=cxx) == EVERYTHING
    assert answer(tree) == 41


def test_compile_error_is_shown(tree):
    (tree / ANSWER).write_text("int answer() { return nonesuch; }\n")
    done = build(tree)
    assert done.returncode == 1
    assert "'nonesuch' was not declared" in done.stdout.replace("‘", "'").replace("’", "'")
    assert done.stderr == "gradzip build: ninja failed, exit status 1; what it printed is above\n"
    assert not list(tree.glob("gradzip/_C*"))


@pytest.mark.parametrize(
    ("step", "environment", "message"),
    [
        ("find_nvcc", {"GRADZIP_CUDA": "no"}, "GRADZIP_CUDA='no' is not understood; expected auto, 0, 1 or nvrtc"),
        ("find_nvcc", {"GRADZIP_CUDA": "1", "CUDA_HOME": "/none"}, "GRADZIP_CUDA=1, but there is no nvcc"),
        ("find_cxx", {"CXX": "nonesuch-c++"}, "'nonesuch-c++' is not on PATH; install g++"),
        ("max_jobs", {"MAX_JOBS": "many"}, "MAX_JOBS='many' is not understood; expected a number"),
        ("find_ninja", {}, "pip install ninja"),
    ],
)
def test_refused_settings(setup, monkeypatch, step, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "ninja", None)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(SystemExit, match=f"gradzip build: .*{re.escape(message)}"):
        setup[step]()


def test_cuda_compiler_and_architectures(setup, monkeypatch, tmp_path):
    """The nvcc of CUDA_HOME comes first; devices that it does not know are left out."""
    (tmp_path / "bin").mkdir()
    text = "#!/bin/sh\nprintf 'compute_70\\ncompute_75\\ncompute_80\\ncompute_100\\n'\n"
    nvcc = commands.executable(tmp_path / "bin" / "nvcc", text)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'no_gpu'}:{os.environ['PATH']}")
    (tmp_path / "no_gpu").mkdir()
    commands.executable(tmp_path / "no_gpu" / "nvidia-smi", "#!/bin/sh\necho No devices were found\nexit 6\n")
    assert setup["find_nvcc"]() == str(nvcc)
    assert setup["cuda_archs"](str(nvcc)) == ["75", "80"]
    monkeypatch.setenv("GRADZIP_CUDA_ARCHS", "10.0, 7.0")
    assert setup["cuda_archs"](str(nvcc)) == ["70", "100"]
    monkeypatch.setenv("GRADZIP_CUDA_ARCHS", "99")
    with pytest.raises(SystemExit, match="knows none of the compute capabilities 99, only 70, 75, 80, 100"):
        setup["cuda_archs"](str(nvcc))
    monkeypatch.setenv("GRADZIP_CUDA", "0")
    assert setup["find_nvcc"]() is None


@pytest.mark.parametrize(
    ("gpus", "archs"),
    [
        ("9.0 9.0", ["90"]),
        ("8.6 7.5", ["75", "86"]),
        ("8.6 12.0", ["86"]),  # nvcc does not know the newer one, which compiles PTX
        ("12.0", ["75", "80", "86", "90"]),
        ("7.0", ["75", "80", "86", "90"]),
        ("", ["75", "80", "86", "90"]),
    ],
)
def test_architectures_are_those_of_the_gpus_here(setup, monkeypatch, tmp_path, gpus, archs):
    known = "\n".join(f"compute_{arch}" for arch in (70, 75, 80, 86, 90))
    nvcc = commands.executable(tmp_path / "nvcc", f"#!/bin/sh\necho '{known}'\n")
    commands.executable(tmp_path / "nvidia-smi", f"#!/bin/sh\nprintf '%s\n' {gpus}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert setup["cuda_archs"](str(nvcc)) == archs
    monkeypatch.setenv("GRADZIP_CUDA_ARCHS", "all")
    assert setup["cuda_archs"](str(nvcc)) == ["75", "80", "86", "90"]


def test_builds_by_nvcc_are_announced(tree):
    """One line says for what it compiles, how long that takes, and how to choose, if there is no library yet."""
    toolkit = tree / "toolkit" / "bin"
    toolkit.mkdir(parents=True)
    text = 'case "$*" in *--list-gpu-arch*) echo compute_80; echo compute_90; exit;; esac\nexit 1\n'
    commands.executable(toolkit / "nvcc", f"#!/bin/sh\n{text}")
    (tree / "csrc" / "cuda").mkdir()
    for number in range(24):
        (tree / "csrc" / "cuda" / f"{number}.cu").touch()
    settings = {"GRADZIP_CUDA": "1", "CUDA_HOME": str(toolkit.parent), "GRADZIP_CUDA_ARCHS": "80,90", "MAX_JOBS": "2"}
    done = build(tree, **settings)
    assert done.returncode == 1  # it compiles nothing
    assert done.stdout.startswith("gradzip build: nvcc compiles 24 files for sm_80, sm_90, in about 3 min if 2 cores ")
    assert "GRADZIP_CUDA_ARCHS=80,90 (or all) chooses others" in done.stdout.splitlines()[0]
    for library in tree.glob("build/*"):
        (library / "_C.so").touch()
    assert "nvcc compiles" not in build(tree, **settings).stdout


def test_commands(setup, monkeypatch):
    """Nothing is specific to this machine, and no arithmetic is used that the source does not spell out."""
    pytest.importorskip("pybind11")
    monkeypatch.setenv("CXXFLAGS", "-DX='$ 1'")
    monkeypatch.setitem(setup["ninja_file"].__globals__, "cuda_archs", lambda nvcc: ["75", "80"])
    sources = [BINDINGS, "csrc/cuda/device.cu"]
    text = setup["ninja_file"](Path("build/x"), sources, "nvcc", "address,undefined")
    cpp, cu, link = (line for line in text.splitlines() if line.startswith("  command"))
    assert "-ffp-contract=off" in cpp and "-DX=$$ 1" in cpp
    for flag in ("-fmad=false", "-Xcompiler=-ffp-contract=off", "code=sm_75", "code=[sm_80,compute_80]"):
        assert flag in cu
    assert r"-Xcompiler=-fsanitize=address\,undefined" in cu and "-cudart=static" in link
    assert "-march" not in text and "fast-math" not in text

    text = setup["ninja_file"](Path("build/x"), sources, None, "", nvrtc=True)
    cpp, cu, _ = (line for line in text.splitlines() if line.startswith("  command"))
    assert all("-DGRADZIP_CUDA -DGRADZIP_NVRTC" in command and "-ffp-contract=off" in command for command in (cpp, cu))
    assert ".cu" not in setup["ninja_file"](Path("build/x"), sources, None, "")


def test_sources_of_kernels_are_written_into_the_library(setup, tmp_path):
    text = setup["kernel_sources"](ROOT / "csrc")
    rows = re.findall(r'^    \{"([\w/]+\.(?:cuh|h))", R"gradzip\((.*?)\)gradzip"\},\n', text, re.MULTILINE | re.DOTALL)
    assert len(rows) > 40 and all((ROOT / "csrc" / path).read_text() == content for path, content in rows)
    path = tmp_path / "sources.cpp"
    setup["write_changed"](path, text)
    os.utime(path, (1, 1))
    setup["write_changed"](path, text)
    assert path.stat().st_mtime == 1, "the same text does not make it newer than its object"


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
    settings = {"GRADZIP_CUDA": "1", "GRADZIP_CUDA_ARCHS": "80"}
    done = build(tree, **settings)
    shown = done.stdout + done.stderr
    assert done.returncode == 0 and "never referenced" in shown, shown
    assert "ptxas" not in shown and "stack frame" not in shown, shown
    (log,) = tree.glob("build/*/csrc/cuda/kernel.cu.o.ptxas")
    ((name, rows),) = parse(log.read_text()).items()
    assert "kernel" in name and rows.keys() == {"sm_80"}
    assert rows["sm_80"].registers > 0 and rows["sm_80"][1:] == (1024, 0)

    source.write_text(KERNEL.replace("int unused", "nonesuch unused"))
    done = build(tree, **settings)
    assert done.returncode == 1 and 'identifier "nonesuch" is undefined' in done.stdout + done.stderr
    log.unlink()
    source.write_text(KERNEL)
    assert build(tree, **settings).returncode == 0 and log.exists()
