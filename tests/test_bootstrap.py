"""scripts/bootstrap.sh: it installs what is missing, repairs what is damaged, and explains its failures.

The clone is a small one: its packages are wheels of one module, and a copy stands for the build of Horovod.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = "as bash cat cp env find flock g++ grep head ld make mkdir mv rm sed sha256sum sleep sort tail tee tr dirname"
UP_TO_DATE = "bootstrap: .venv is up to date\n"
FILES = {
    "scripts/requirements.txt": "torch==1\nnumpy==1\n",
    "scripts/horovod.txt": "horovod==3 --hash=sha256:0\n",
    "scripts/build_horovod.sh": "#!/bin/sh\necho >>../builds\n[ ! -e ../hang ] || sleep 60\ncp ../horovod-3* $2\n",
    "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    "backend.py": """import shutil
def build_editable(folder, *_):
    return shutil.copy("../wheels/gradzip-0-py3-none-any.whl", folder).rpartition("/")[2]
""",
    "setup.py": 'print(open("build.txt").read())\n',
    "build.txt": "ninja: no work to do.",
}


def wheel(folder, name, version, module):
    """Write a wheel of one module."""
    info = f"{name}-{version}.dist-info"
    files = {module: "x = 1\n", f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = "".join(f"{path},,{len(text)}\n" for path, text in files.items())
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


@pytest.fixture
def clone(tmp_path):
    """A clone in a folder whose name has a space. A file `hang` beside it makes the build of Horovod hang."""
    folder = tmp_path / "a clone"
    (folder / "scripts").mkdir(parents=True)
    (tmp_path / "wheels").mkdir()
    shutil.copy(ROOT / "scripts" / "bootstrap.sh", folder / "scripts")
    for name, text in FILES.items():
        (folder / name).write_text(text.replace("../", f"{tmp_path}/"))
    (folder / "scripts" / "build_horovod.sh").chmod(0o755)
    for name, version in (("torch", "1"), ("torch", "2"), ("numpy", "1"), ("gradzip", "0")):
        wheel(tmp_path / "wheels", name, version, f"{name}.py")
    wheel(tmp_path, "horovod", "3", "horovod/torch.py")
    return folder


@pytest.fixture
def path(tmp_path):
    """The whole PATH: a folder with `TOOLS`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS.split():
        (folder / tool).symlink_to(shutil.which(tool) or pytest.skip(f"no {tool} here"))
    return folder


def program(file, text):
    file.unlink(missing_ok=True)
    file.write_text(f"#!/bin/sh\n{text}")
    file.chmod(0o755)
    return file


def start(clone, path, **environment):
    environment = {
        "PATH": str(path), "HOME": str(clone.parent / "home"), "PYTHON": sys.executable, "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": (clone.parent / "wheels").as_uri(), **environment,
    }  # fmt: skip
    # No standard input: nothing may read from it.
    return subprocess.Popen(
        ["bash", "-c", 'exec "$0" <&-', clone / "scripts" / "bootstrap.sh"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def bootstrap(clone, path, **environment):
    run = start(clone, path, **environment)
    run.out, run.error = run.communicate(timeout=120)
    return run


def builds(clone):
    return (clone.parent / "builds").read_text().count("\n")


@pytest.mark.long
def test_repairs(clone, path):
    def works(steps):
        """Whether a run does these steps, and the next one none."""
        done = bootstrap(clone, path)
        assert done.returncode == 0, done.error
        assert [line.split()[0] for line in done.out.splitlines() if line.startswith("  ")] == steps.split()
        assert bootstrap(clone, path).out == UP_TO_DATE
        installed = clone / ".venv" / "bin" / "python"
        subprocess.run([installed, "-I", "-c", "import torch, horovod.torch, gradzip"], check=True)

    (clone.parent / "hang").touch()
    killed = start(clone, path)
    while not (clone.parent / "builds").exists():
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    (clone.parent / "hang").unlink()
    works("packages horovod gradzip")
    assert builds(clone) == 2

    site = next((clone / ".venv" / "lib").glob("python*/site-packages"))
    (site / "torch.py").write_text("x =")
    (site / "numpy-1.dist-info" / "RECORD").unlink()
    (site / "~umpy-1.dist-info").mkdir()
    (wheel,) = clone.parent.glob("home/.cache/gradzip/*/*.whl")
    wheel.write_bytes(wheel.read_bytes().replace(b"x = 1\n", b"x = 2\n", 1))
    works("packages horovod gradzip")
    assert not list(site.glob("~*"))
    assert (site / "numpy-1.dist-info" / "RECORD").exists()
    assert builds(clone) == 3, "the wheel in the cache was damaged"

    (clone / "scripts" / "requirements.txt").write_text("torch==2\nnumpy==1\n")
    works("packages horovod gradzip")
    assert (site / "torch-2.dist-info").exists()
    assert builds(clone) == 4, "for another torch"

    (clone / "build.txt").write_text("[1/2] csrc/x.cpp\n[2/2] _C.so\n")
    assert bootstrap(clone, path).out == f"  [1/2] csrc/x.cpp\n  [2/2] _C.so\n{UP_TO_DATE}"
    (clone / "build.txt").write_text("ninja: no work to do.")

    clone = clone.rename(clone.parent / "moved")
    works("venv packages horovod gradzip")
    assert builds(clone) == 4, "the wheel in the cache is used"


def test_runs_wait_for_each_other(clone, path):
    (clone / ".venv").mkdir()
    with open(clone / ".venv" / ".lock", "w") as lock:
        holder = subprocess.Popen(["flock", str(lock.fileno())], pass_fds=[lock.fileno()])
        holder.wait()
        waiting = start(clone, path, PYTHON="/none/python3")
        assert waiting.stdout.readline() == "bootstrap: waiting for another run\n"
        time.sleep(0.2)
        assert waiting.poll() is None
    assert "no usable Python" in waiting.communicate(timeout=60)[1]


def test_missing_tools(clone, path):
    def refused(*texts, **environment):
        """Whether a run fails with these texts, before it makes anything."""
        done = bootstrap(clone, path, **environment)
        assert done.returncode == 1
        assert not [text for text in texts if text not in done.error], done.error
        assert len(done.error.splitlines()) == 2, "one line says what is wrong, one what to do"
        assert not (clone / ".venv" / "bin").exists()

    refused("no usable Python (python3: ", "PYTHON=/path/to/python3.11", PYTHON="")
    refused("no usable Python (/none/python3: ", PYTHON="/none/python3")
    old = program(path / "old", f"exec '{sys.executable}' -c \"import sys; sys.version_info = (3, 8, 1); $2\"\n")
    refused("old: is Python 3.8.1, expected 3.10 to 3.13", PYTHON=old.name)
    bare = program(path / "bare", f"exec '{sys.executable}' -c \"import sys; sys.modules['ensurepip'] = None; $2\"\n")
    refused("bare: ", "ensurepip", "apt install python3-venv", PYTHON=bare.name)

    (path / "make").unlink()
    refused("no make", "apt install make")
    refused("'nonesuch-c++' does not compile C++17: ", "not found", "apt install g++", CXX="nonesuch-c++")
    program(path / "g++", "echo 'cannot execute cc1plus' >&2\nexit 1\n")
    refused("'g++' does not compile C++17: cannot execute cc1plus")


def test_no_network(clone, path):
    """A failing step shows the end of its log, the cause and the remedy."""
    done = bootstrap(
        clone, path, PIP_INDEX_URL="http://127.0.0.1:9/", PIP_RETRIES="1", PIP_NO_INDEX="0", PIP_FIND_LINKS=""
    )
    assert done.returncode == 1
    assert "  packages  installing" in done.out
    assert "The package index cannot be reached" in done.error
    log = clone / ".venv" / "log" / "packages.log"
    assert str(log) in done.error
    assert log.read_text().splitlines()[-1] in done.error


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("OSError: [Errno 28] No space left on device", "The disk is full"),
        ("Temporary failure in name resolution", "The package index cannot be reached"),
        ("ERROR: No matching distribution found for torch==2.13.0", "no such release for this Python"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM", "First error: ERROR: THESE PACKAGES DO NOT MATCH"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "ran out of memory"),
        ("CMake Error at CMakeLists.txt:1:\n  no such thing", "First error: CMake Error at CMakeLists.txt:1: no"),
        ("  a.cpp:30:9: error: 'zz' was not declared", "First error: a.cpp:30:9: error: 'zz' was not declared"),
        ("  gradzip build: GRADZIP_CUDA='x' is not understood", "First error: gradzip build: GRADZIP_CUDA='x'"),
    ],
)
def test_causes(tmp_path, log, cause):
    (tmp_path / "log").write_text(f"first\n{log}\nlast\n")
    script = f'source "{ROOT}/scripts/bootstrap.sh"; explain "{tmp_path / "log"}"'
    assert cause in subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
