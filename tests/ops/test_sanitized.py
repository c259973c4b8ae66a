"""The kernels under the address and undefined-behaviour sanitizers, on hostile and awkward input.

A second build of the extension, kept in build/ and updated incrementally, runs the tests that pass arbitrary bytes to
decoders, and tests/support/fuzz.py.
"""

import subprocess
import sys

import pytest

import fuzz
import sanitized
from fuzz import Case
from sanitized import ROOT

COVERS = ["csrc/**/*", "setup.py", "gradzip/**/*.py", "tests/ops/*.py", "tests/methods/*.py", "tests/support/*.py"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(900),  # the first one compiles all kernels in a fresh clone
    pytest.mark.skipif(sanitized.unavailable_reason() is not None, reason=str(sanitized.unavailable_reason())),
]

FOLDERS = ["ops", "methods"]  # of tests that run CPU kernels in their own process
OTHERS = {"test_cuda.py"}  # runs the CUDA kernels, compiled without sanitizers
# Tests are selected by name: those with mutated, forged, truncated or arbitrary bytes, and those with awkward sizes.
SELECTION = "_any_ or mutat or forge or corrupt or trunc or hostile or split_of or round_trip or awkward"


@pytest.fixture(scope="module")  # so that one worker runs these tests: another one would wait for the build
def package_dir():
    return sanitized.build()


def test_decoders_stay_within_their_memory(package_dir, tmp_path):
    check = (
        "import gradzip, sys, pytest\n"
        f"assert gradzip.__file__.startswith({str(package_dir)!r}), gradzip.__file__\n"
        "sys.exit(pytest.main(sys.argv[1:]))\n"
    )
    files = [path for folder in FOLDERS for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))]
    files = [str(path) for path in files if path.name not in OTHERS]
    run = subprocess.run(
        [sys.executable, "-c", check, "-q", "-x", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-k", SELECTION,
         "-m", "not slow", "--deselect", __file__, *files],
        cwd=tmp_path, env=sanitized.environment(package_dir), capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert run.returncode == 0, (run.stdout + run.stderr)[-6000:]
    assert " passed" in run.stdout


def test_any_payload_is_decoded_or_refused_in_time_and_memory(package_dir, tmp_path):
    """The payloads are the same in every run; `make fuzz` runs longer, with a new seed each time."""
    status, output = fuzz.fuzz(package_dir, tmp_path, "--seed", "0", "--trials", "1000", "--seconds", "200")
    assert status == 0, output[-6000:]
    tried, _, decoded, _, refused, *_ = output.splitlines()[-1].partition(": ")[2].split()
    assert int(tried) == 1000 > 5 * len(fuzz.SPECS) and int(decoded) > 100 and int(refused) > 100


def test_decoder_that_reads_past_the_end_is_caught(package_dir, tmp_path):
    """In a copy of the sources, one file is compiled without the guard at the end of a bit stream."""
    guarded = "const int64_t nbytes = ceil_div(n * bits, 8);\n  for (int64_t i = begin; i < end; i += kBitBlock) {"
    unguarded = guarded.replace("bits, 8)", "bits, 8) + 8")
    sanitized.copy_with_edit(tmp_path / "tree", "csrc/cpu/quantize.cpp", guarded, unguarded)
    broken_build = sanitized.build(tmp_path / "tree")
    spec = "qsgd:bits=16,coding=packed"
    status, output = fuzz.fuzz(broken_build, tmp_path, "--seed", "0", "--seconds", "60", "--method", spec)
    assert status != 0 and "ERROR: AddressSanitizer" in output, output[-6000:]
    # The payload is saved. It is caught again in the broken build, and harmless in the correct one.
    (finding,) = tmp_path.glob("finding-*")
    assert f"seed 0, trial {Case.from_bytes(finding.read_bytes()).trial};" in output and str(finding) in output
    status, output = fuzz.fuzz(broken_build, tmp_path, str(finding))
    assert status != 0 and "ERROR: AddressSanitizer" in output
    status, output = fuzz.fuzz(package_dir, tmp_path, str(finding))
    assert status == 0 and output.splitlines()[-1].startswith(f"{spec}, shape ")
