"""scripts/bootstrap.sh and scripts/integrations.sh: they install what is missing, repair what is damaged, and explain
their failures.

The clone is a small one: its packages are wheels of one module, and a copy stands for the build of Horovod.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import pytest

import commands
from paths import ROOT

COVERS = ["scripts/bootstrap.sh", "scripts/integrations.sh"]
UP_TO_DATE = "bootstrap: .venv is up to date\n"
FILES = {
    "scripts/bootstrap.sh": (ROOT / "scripts" / "bootstrap.sh").read_text(),
    "scripts/integrations.sh": (ROOT / "scripts" / "integrations.sh").read_text(),
    "scripts/integrations.txt": "library>=1,<2\ntorch\n",
    "scripts/requirements.txt": "torch==1\nnumpy==1\n",
    "scripts/horovod.txt": "horovod==3 --hash=sha256:0\n",
    # A file `hang` beside the clone makes the build hang; `builds` has a line for each build.
    "scripts/build_horovod.sh": '#!/bin/sh\necho >>"$HOME/builds"\n[ ! -e "$HOME/hang" ] || sleep 60\n'
    'cp "$HOME"/horovod-3* "$2"\n',
    "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    "backend.py": "import shutil\ndef build_editable(folder, *_):\n"
    '    return shutil.copy("../gradzip-0-py3-none-any.whl", folder).rpartition("/")[2]\n',
    "setup.py": 'print("ninja: no work to do.")\n',
}


def wheel(folder, name, version):
    """Write a wheel of one module."""
    info = f"{name}-{version}.dist-info"
    module = "horovod/torch.py" if name == "horovod" else f"{name}.py"
    files = {module: "x = 1\n", f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = "".join(f"{path},,{len(text)}\n" for path, text in files.items())
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


@pytest.fixture
def clone(tmp_path):
    """A clone in a folder whose name has a space. The folder above it has the wheels, and is the home."""
    folder = tmp_path / "a clone"
    (folder / "scripts").mkdir(parents=True)
    for name, text in FILES.items():
        commands.executable(folder / name, text)
    for package in ("torch-1", "torch-2", "numpy-1", "gradzip-0", "horovod-3", "library-1"):
        wheel(tmp_path, *package.split("-"))
    return folder


def start(clone, script="bootstrap", **environment):
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(clone.parent), "PYTHON": sys.executable,
        "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": clone.parent.as_uri(), **environment,
    }  # fmt: skip
    # No standard input: nothing may read from it.
    return subprocess.Popen(
        [shutil.which("bash"), "-c", 'exec "$0" <&-', clone / "scripts" / f"{script}.sh"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def bootstrap(clone, script="bootstrap", **environment):
    process = start(clone, script, **environment)
    stdout, stderr = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@pytest.mark.long
def test_repairs(clone):
    def works(steps, builds):
        """Whether a run does these steps, Horovod was built so often by now, and the next run does nothing."""
        done = bootstrap(clone)
        assert done.returncode == 0, done.stderr
        assert [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")] == steps.split()
        assert (clone.parent / "builds").read_text().count("\n") == builds
        assert bootstrap(clone).stdout == UP_TO_DATE
        installed = clone / ".venv" / "bin" / "python"
        subprocess.run([installed, "-I", "-c", "import torch, horovod.torch, gradzip"], check=True)

    (clone.parent / "hang").touch()
    killed = start(clone)
    while not (clone.parent / "builds").exists():
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    (clone.parent / "hang").unlink()
    works("packages horovod gradzip", builds=2)

    site = next((clone / ".venv" / "lib").glob("python*/site-packages"))
    (site / "torch.py").write_text("x =")
    (site / "numpy-1.dist-info" / "RECORD").unlink()
    (cached,) = clone.parent.glob(".cache/gradzip/*/*.whl")
    cached.write_bytes(cached.read_bytes().replace(b"x = 1\n", b"x = 2\n", 1))
    works("packages horovod gradzip", builds=3)  # the wheel in the cache was damaged
    assert (site / "numpy-1.dist-info" / "RECORD").exists()

    (clone / "scripts" / "requirements.txt").write_text("torch==2\nnumpy==1\n")
    works("packages horovod gradzip", builds=4)  # for another torch
    assert (site / "torch-2.dist-info").exists()

    clone = clone.rename(clone.parent / "moved")
    works("venv packages horovod gradzip", builds=4)  # from the cache


@pytest.mark.long
def test_integrations_are_beside_the_packages(clone):
    """They are repaired, and made anew where .venv was; the versions of .venv stay."""

    def works(steps):
        done = bootstrap(clone, "integrations")
        assert done.returncode == 0, done.stderr
        assert [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")] == steps.split()
        assert bootstrap(clone, "integrations").stdout == "integrations: .venv-integrations is up to date\n"
        code = "import gradzip, importlib.metadata as m, library, torch; print(m.version('torch'), torch.__file__)"
        installed = [clone / ".venv-integrations" / "bin" / "python", "-I", "-c", code]
        assert subprocess.run(installed, check=True, capture_output=True, text=True).stdout.startswith(
            f"1 {clone / '.venv'}/"
        )

    commands.check_refusal(bootstrap(clone, "integrations"), 1, "no .venv", "Run scripts/bootstrap.sh first")
    assert bootstrap(clone).returncode == 0
    works("layer packages")
    next(clone.glob(".venv-integrations/lib/python*/site-packages/library.py")).unlink()
    works("packages")
    clone = clone.rename(clone.parent / "moved")
    assert bootstrap(clone).returncode == 0
    works("layer packages")


def test_runs_wait_for_each_other(clone):
    (clone / ".venv").mkdir()
    with open(clone / ".venv" / ".lock", "w") as lock:
        subprocess.run(["flock", str(lock.fileno())], pass_fds=[lock.fileno()], check=True)
        waiting = start(clone, PYTHON="/none/python3")
        assert waiting.stdout.readline() == "bootstrap: waiting for another run\n"
        time.sleep(0.2)
        assert waiting.poll() is None
    assert "no usable Python" in waiting.communicate(timeout=60)[1]


def test_missing_tools_are_named_before_anything_is_made(clone, tmp_path):
    def refused(*texts, **environment):
        done = bootstrap(clone, **environment)
        commands.check_refusal(done, 1, *texts)
        assert not (clone / ".venv" / "bin").exists()

    refused("no usable Python (/none/python3: ", "PYTHON=/path/to/python3.11", PYTHON="/none/python3")
    text = f"#!/bin/sh\nexec '{sys.executable}' -c \"import sys; sys.version_info = (3, 8, 1); $2\"\n"
    old = commands.executable(tmp_path / "old", text)
    refused("old: is Python 3.8.1, expected 3.10 to 3.13", PYTHON=str(old))
    refused("'nonesuch-c++' does not compile C++17: ", "not found", "apt install g++", CXX="nonesuch-c++")


def test_failing_step_shows_its_log_and_the_cause(clone):
    done = bootstrap(clone, PIP_INDEX_URL="http://127.0.0.1:9/", PIP_RETRIES="0", PIP_NO_INDEX="0", PIP_FIND_LINKS="")
    assert done.returncode == 1 and "  packages  installing" in done.stdout
    log = clone / ".venv" / "log" / "packages.log"
    assert str(log) in done.stderr and log.read_text().splitlines()[-1] in done.stderr
    assert "The package index cannot be reached" in done.stderr


def test_causes(tmp_path):
    for log, cause in {
        "OSError: [Errno 28] No space left on device": "The disk is full",
        "ERROR: No matching distribution found for torch==2.13.0": "no such release for this Python",
        "c++: fatal error: Killed signal terminated program cc1plus": "ran out of memory",
        "CMake Error at CMakeLists.txt:1:\n  no such thing": "First error: CMake Error at CMakeLists.txt:1: no",
    }.items():
        (tmp_path / "log").write_text(f"first\n{log}\nlast\n")
        script = f'source "{ROOT}/scripts/bootstrap.sh"; explain "{tmp_path / "log"}"'
        assert cause in commands.run("bash", "-c", script).stdout
