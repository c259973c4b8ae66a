"""setup.py: which compilers, which flags, and that it compiles what changed and nothing else."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

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


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def setup(monkeypatch):
    """The functions of setup.py. Without setuptools, which would replace this process's distutils."""
    monkeypatch.setitem(sys.modules, "setuptools", SimpleNamespace(Extension=object, setup=None))
    monkeypatch.setitem(sys.modules, "setuptools.command.build_ext", SimpleNamespace(build_ext=object))
    return runpy.run_path(str(ROOT / "setup.py"))


@pytest.fixture
def tree(tmp_path):
    """setup.py over a small extension of two sources and a header, in a folder whose name has a space."""
    folder = tmp_path / "a tree"
    (folder / "csrc" / "cpu").mkdir(parents=True)
    (folder / "gradzip").mkdir()
    shutil.copy(ROOT / "setup.py", folder)
    (folder / "csrc" / "bindings.cpp").write_text(MODULE)
    (folder / "csrc" / "answer.h").write_text("int answer();\n")
    (folder / "csrc" / "cpu" / "answer.cpp").write_text("int answer() { return 41; }\n")
    (folder / "gradzip" / "__init__.py").touch()  # so that it is not another gradzip that is imported
    project = '[project]\nname = "gradzip"\nversion = "0"\n\n[tool.setuptools]\npackages = []\n'
    (folder / "pyproject.toml").write_text(project)
    return folder


def build(tree, **environment):
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=tree, env={**os.environ, "GRADZIP_CUDA": "0", **environment}, capture_output=True, text=True,
    )  # fmt: skip


def compiled(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line.split()[-1] for line in done.stdout.splitlines() if line.startswith("["))


def answer(tree):
    command = [sys.executable, "-c", "from gradzip import _C; print(_C.answer)"]
    return int(subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout)


def test_only_what_changed_is_compiled(tree):
    both = ["csrc/bindings.cpp", "csrc/cpu/answer.cpp"]
    assert compiled(build(tree)) == both
    assert answer(tree) == 41
    assert compiled(build(tree)) == []

    (tree / "csrc" / "cpu" / "answer.cpp").write_text("int answer() { return 42; }\n")
    assert compiled(build(tree)) == ["csrc/cpu/answer.cpp"]
    assert answer(tree) == 42

    (tree / "csrc" / "answer.h").touch()
    assert compiled(build(tree)) == ["csrc/bindings.cpp"], "it includes the header"
    assert compiled(build(tree, CXXFLAGS="-DOTHER")) == both, "other flags"


def test_compile_error_is_shown(tree):
    (tree / "csrc" / "cpu" / "answer.cpp").write_text("int answer() { return nonesuch; }\n")
    done = build(tree)
    assert done.returncode == 1
    assert "gradzip build: csrc/cpu/answer.cpp failed, exit status 1" in done.stderr
    assert "'nonesuch' was not declared" in done.stderr.replace("‘", "'").replace("’", "'")
    assert "Traceback" not in done.stderr
    assert not list(tree.glob("gradzip/_C*"))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"GRADZIP_CUDA": "maybe"}, "GRADZIP_CUDA='maybe' is not understood; expected auto, 0 or 1"),
        ({"CXX": "nonesuch-c++"}, "'nonesuch-c++' is not on PATH; install g++"),
        ({"MAX_JOBS": "many"}, "MAX_JOBS='many' is not understood; expected a number"),
    ],
)
def test_refused_settings(tree, environment, message):
    done = build(tree, **environment)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_cuda_without_nvcc(setup, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert setup["find_nvcc"]() is None, "auto"
    monkeypatch.setenv("GRADZIP_CUDA", "1")
    with pytest.raises(SystemExit, match=r"GRADZIP_CUDA=1, but there is no nvcc .* install the CUDA toolkit"):
        setup["find_nvcc"]()


def test_cuda_of_cuda_home_comes_first(setup, monkeypatch, tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert setup["find_nvcc"]() == str(nvcc)
    monkeypatch.setenv("GRADZIP_CUDA", "0")
    assert setup["find_nvcc"]() is None


def test_architectures_are_those_nvcc_knows(setup, monkeypatch, tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\nprintf 'compute_70\\ncompute_75\\ncompute_80\\ncompute_100\\n'\n")
    nvcc.chmod(0o755)
    assert setup["cuda_archs"](str(nvcc)) == ["75", "80"]
    monkeypatch.setenv("GRADZIP_CUDA_ARCHS", "10.0, 7.0")
    assert setup["cuda_archs"](str(nvcc)) == ["70", "100"]
    monkeypatch.setenv("GRADZIP_CUDA_ARCHS", "99")
    with pytest.raises(SystemExit, match="knows none of the compute capabilities 99, only 70, 75, 80, 100"):
        setup["cuda_archs"](str(nvcc))


def test_flags_keep_results_the_same_everywhere(setup):
    """Nothing of this machine's own, and no arithmetic the source does not spell out."""
    flags = setup["HOST_FLAGS"]
    assert "-ffp-contract=off" in flags
    assert not [flag for flag in flags if flag.startswith("-march") or "fast-math" in flag]
    assert "-fmad=false" in (ROOT / "setup.py").read_text()


def test_all_sources_are_found(setup):
    found = setup["sources"]()
    assert "csrc/bindings.cpp" in found
    assert "csrc/cuda/device.cu" in found
    assert len([source for source in found if source.startswith("csrc/cpu/")]) > 1
