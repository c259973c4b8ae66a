"""The kernels under the address and undefined-behaviour sanitizers, on hostile and awkward input, for a bounded time.

A second build of the extension, kept in build/ and compiled again only where something changed, runs the tests that
feed decoders anything at all.
"""

import subprocess
import sys

import pytest

import sanitized
from sanitized import ROOT

# Which tests: all whose names say that they mutate, forge, truncate or try any bytes, and the awkward sizes.
# Whose tests start processes of the usual build.
LAUNCHERS = {"horovod", "elastic", "ddp", "contract", "examples", "ring"}
SELECTION = "any_ or mutat or forge or corrupt or trunc or hostile or split_of or round_trip or awkward"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(sanitized.why_not() is not None, reason=str(sanitized.why_not()))
def test_decoders_stay_within_their_memory(tmp_path):
    place = sanitized.build()
    check = (
        "import gradzip, sys, pytest\n"
        f"assert gradzip.__file__.startswith({str(place)!r}), gradzip.__file__\n"
        "sys.exit(pytest.main(sys.argv[1:]))\n"
    )
    files = sorted(
        str(path) for path in (ROOT / "tests").glob("test_*.py") if not LAUNCHERS & set(path.stem.split("_"))
    )
    run = subprocess.run(
        [sys.executable, "-c", check, "-q", "-x", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-k", SELECTION,
         "-m", "not slow", "--deselect", __file__, *files],
        cwd=tmp_path, env=sanitized.environment(place), capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert run.returncode == 0, (run.stdout + run.stderr)[-6000:]
    assert " passed" in run.stdout
