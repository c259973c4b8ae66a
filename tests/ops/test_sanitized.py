"""The kernels under the address and undefined-behaviour sanitizers, on hostile and awkward input.

A second build of the extension, kept in build/ and updated incrementally, runs the tests that pass arbitrary bytes to
decoders.
"""

import subprocess
import sys

import pytest

import sanitized
from sanitized import ROOT

# Files with these words in their names are left out: their tests start processes on the ordinary build.
LAUNCHERS = {"horovod", "elastic", "ddp", "contract", "examples", "ring"}
# Tests are selected by name: those with mutated, forged, truncated or arbitrary bytes, and those with awkward sizes.
SELECTION = "any_ or mutat or forge or corrupt or trunc or hostile or split_of or round_trip or awkward"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(sanitized.unavailable_reason() is not None, reason=str(sanitized.unavailable_reason()))
def test_decoders_stay_within_their_memory(tmp_path):
    package_dir = sanitized.build()
    check = (
        "import gradzip, sys, pytest\n"
        f"assert gradzip.__file__.startswith({str(package_dir)!r}), gradzip.__file__\n"
        "sys.exit(pytest.main(sys.argv[1:]))\n"
    )
    files = sorted(
        str(path) for path in (ROOT / "tests").rglob("test_*.py") if not LAUNCHERS & set(path.stem.split("_"))
    )
    run = subprocess.run(
        [sys.executable, "-c", check, "-q", "-x", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-k", SELECTION,
         "-m", "not slow", "--deselect", __file__, *files],
        cwd=tmp_path, env=sanitized.environment(package_dir), capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert run.returncode == 0, (run.stdout + run.stderr)[-6000:]
    assert " passed" in run.stdout
