"""scripts/bootstrap.sh: what it says when something is missing, and that it does nothing twice."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# All that the script runs, besides a Python, a C++ compiler and make.
TOOLS = "awk bash cat date dirname env find flock getconf grep mkdir mktemp mv rm sed tail tar tr"


@pytest.fixture
def clone(tmp_path):
    """A copy of the scripts, in a folder whose name has a space."""
    folder = tmp_path / "a clone"
    shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def path(tmp_path):
    """A folder with `TOOLS`, make and a compiler (which runs `as` and `ld`): the whole PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in [*TOOLS.split(), "make", "g++", "as", "ld"]:
        (folder / tool).symlink_to(shutil.which(tool) or pytest.skip(f"no {tool} here"))
    return folder


def program(file, text):
    file.unlink(missing_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


def bootstrap(clone, path, **environment):
    environment = {"PATH": str(path), "HOME": str(clone / "home"), "PYTHON": sys.executable, **environment}
    return subprocess.run(
        [clone / "scripts" / "bootstrap.sh"], env=environment, capture_output=True, text=True, timeout=120
    )


def refused(done, *texts):
    """That the run failed with these texts, before it had made anything."""
    assert done.returncode == 1, done
    for text in texts:
        assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 2, "one line says what is wrong, one what to do"


def test_no_compiler(clone, path):
    (path / "g++").unlink()
    refused(bootstrap(clone, path), "no C++ compiler: 'g++' is not on PATH", "apt install g++")
    refused(bootstrap(clone, path, CXX="nonesuch-c++"), "'nonesuch-c++' is not on PATH")
    assert not (clone / ".venv" / "bin").exists()


def test_compiler_that_does_not_compile(clone, path):
    program(path / "g++", "#!/bin/sh\necho 'cannot execute cc1plus' >&2\nexit 1\n")
    refused(bootstrap(clone, path), "does not compile C++17", "cannot execute cc1plus", "apt install g++")


def test_no_make(clone, path):
    (path / "make").unlink()
    refused(bootstrap(clone, path), "no make", "apt install make")


def test_no_python(clone, path):
    refused(bootstrap(clone, path, PYTHON=""), "no usable Python (python3: not found;", "PYTHON=/path/to/python3.11")
    refused(bootstrap(clone, path, PYTHON="/none/python3"), "no usable Python (/none/python3: not found)")


def test_python_of_the_wrong_version(clone, path):
    old = 'import sys; sys.version_info = (3, 8, 1, "final", 0); exec(sys.stdin.read())'
    program(path / "python3", f"#!/bin/sh\nexec '{sys.executable}' -c '{old}'\n")
    refused(bootstrap(clone, path, PYTHON="python3"), "python3: is Python 3.8.1, expected 3.10 to 3.13")


def test_python_without_venv(clone, path):
    bare = 'import sys; sys.modules["ensurepip"] = None; exec(sys.stdin.read())'
    program(path / "python3", f"#!/bin/sh\nexec '{sys.executable}' -c '{bare}'\n")
    refused(bootstrap(clone, path, PYTHON="python3"), "python3: has no", "apt install python3-venv")


def test_no_network(clone, path):
    """A failing step shows the end of its log, the cause and the remedy; what was done before it is kept."""
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "1", "PIP_CONFIG_FILE": os.devnull}
    done = bootstrap(clone, path, **nowhere)
    assert done.returncode == 1
    assert "packages  installing" in done.stdout
    assert "The package index cannot be reached" in done.stderr
    assert "PIP_INDEX_URL" in done.stderr
    log = clone / ".venv" / "log" / "packages.log"
    assert str(log) in done.stderr
    assert log.read_text().splitlines()[-1] in done.stderr

    again = bootstrap(clone, path, **nowhere)
    assert again.returncode == 1
    assert "venv  " not in again.stdout, "the environment was there"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("OSError: [Errno 28] No space left on device", "The disk is full"),
        ("Temporary failure in name resolution", "The package index cannot be reached"),
        ("ERROR: No matching distribution found for torch==2.13.0", "no such release for this Python"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM", "byte for byte"),
        ("x.cc:1:10: fatal error: Python.h: No such file or directory", "Python's headers are missing"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "ran out of memory"),
        ("CMake Error at CMakeLists.txt:1:\n  no such thing", "CMake refused: CMake Error at CMakeLists.txt:1: no"),
        ("  a.cpp:30:9: error: 'zz' was not declared", "First error: a.cpp:30:9: error: 'zz' was not declared"),
        ("  gradzip build: GRADZIP_CUDA='x' is not understood", "gradzip build: GRADZIP_CUDA='x'"),
    ],
)
def test_causes(tmp_path, log, cause):
    (tmp_path / "log").write_text(f"first\n{log}\nlast\n")
    assert cause in shell(f'explain "{tmp_path / "log"}"')


def test_corrupt_wheel_is_not_used(tmp_path):
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x.py", "x = 1\n" * 100)
    answer = f'python={sys.executable}; intact "{wheel}" && echo whole || echo corrupt'
    assert shell(answer) == "whole\n"
    whole = wheel.read_bytes()
    wheel.write_bytes(whole.replace(b"x = 1\n", b"x = 2\n", 1))
    assert shell(answer) == "corrupt\n"
    wheel.write_bytes(whole[:-40])
    assert shell(answer) == "corrupt\n"
    wheel.unlink()
    assert shell(answer) == "corrupt\n"


def shell(text):
    """What the functions of bootstrap.sh print."""
    command = ["bash", "-c", f'source "{ROOT}/scripts/bootstrap.sh"; {text}']
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_incomplete_distributions_are_found(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("venv_state", ROOT / "scripts" / "venv_state.py")
    state = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(state)
    monkeypatch.setattr(state, "SITE", tmp_path)

    info = tmp_path / "thing-1.0.dist-info"
    info.mkdir()
    assert [name for name, _ in state.incomplete()] == [info], "RECORD is written last"
    (tmp_path / "thing.py").write_text("x = 1\n")
    (info / "RECORD").write_text("thing.py,sha256=x,6\n__pycache__/thing.pyc,,\n")
    assert list(state.incomplete()) == []
    (tmp_path / "thing.py").write_text("x =")
    assert [reason for _, reason in state.incomplete()] == ["thing-1.0: thing.py has another size than installed"]
    state.main("repair")
    assert not info.exists()


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="the tests do not run in .venv")
def test_second_run_does_nothing():
    state = subprocess.run([sys.executable, ROOT / "scripts" / "venv_state.py"], capture_output=True, text=True)
    if state.stdout:
        pytest.skip(f"scripts/bootstrap.sh has something to do: {state.stdout}")
    # Closed, not empty: nothing may read from it.
    command = f"'{ROOT}/scripts/bootstrap.sh' <&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout == "bootstrap: .venv is up to date\n", done.stdout + done.stderr
    assert done.returncode == 0
