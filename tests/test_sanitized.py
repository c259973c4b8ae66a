"""The kernels under the address and undefined-behaviour sanitizers, on hostile and awkward input, for a bounded time.

A second build of the extension, kept in build/ and compiled again only where something changed, runs the tests that
feed decoders anything at all.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLACE = ROOT / "build" / "sanitized"

# Which tests: all whose names say that they mutate, forge, truncate or try any bytes, and the awkward sizes.
SELECTION = "any_ or mutat or forge or corrupt or trunc or hostile or split_of or round_trip or awkward"


def library(name):
    """Where the compiler keeps a sanitizer's runtime, or nothing where it has none."""
    path = subprocess.run(
        [os.environ.get("CXX", "g++"), f"-print-file-name={name}"], capture_output=True, text=True
    ).stdout
    return path.strip() if os.path.isabs(path.strip()) else None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_decoders_stay_within_their_memory(tmp_path):
    if not (ROOT / "gradzip").is_dir():
        pytest.skip("the sources of the package, which it builds, are not here")
    runtime = library("libasan.so")
    if runtime is None or shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("this compiler has no address sanitizer")
    environment = dict(os.environ, GRADZIP_CUDA="0", GRADZIP_SANITIZE="address,undefined")
    build = subprocess.run(
        [sys.executable, "setup.py", "-q", "build", "--build-lib", str(PLACE)],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert build.returncode == 0, build.stdout + build.stderr
    environment |= {
        "PYTHONPATH": str(PLACE),
        "LD_PRELOAD": runtime,
        # torch and Python keep memory until the end; what we look for is access, not leaks.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
    check = (
        "import gradzip, sys, pytest\n"
        f"assert gradzip.__file__.startswith({str(PLACE)!r}), gradzip.__file__\n"
        "sys.exit(pytest.main(sys.argv[1:]))\n"
    )
    files = sorted(str(path) for path in (ROOT / "tests").glob("test_*.py") if "horovod" not in path.name)
    run = subprocess.run(
        [sys.executable, "-c", check, "-q", "-x", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-k", SELECTION,
         "-m", "not slow", "--deselect", __file__, *files],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert run.returncode == 0, (run.stdout + run.stderr)[-6000:]
    assert " passed" in run.stdout
