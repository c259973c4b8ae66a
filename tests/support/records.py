"""What is known from earlier runs of the tests: seconds that each took, and tests of tooling that have passed.

Kept in tests.json, in gradzip's folder of caches.
"""

import functools
import hashlib
import json
import os
import subprocess
from pathlib import Path

from gradzip.ops.nvrtc import cache
from paths import ROOT

FEW_SECONDS = 0.5  # shorter tests are not recorded


def file():
    return cache.home().parent / "tests.json"


def load():
    """Return {"seconds": {test: seconds}, "passed": {test: digest}}; empty dicts if nothing readable is there."""
    try:
        records = json.loads(file().read_text())
        return {name: dict(records[name]) for name in ("seconds", "passed")}
    except (OSError, ValueError, KeyError, TypeError):
        return {"seconds": {}, "passed": {}}


def save(seconds, passed):
    """Update what is recorded of tests that ran. `passed` has a digest, or None for a test that has not passed."""
    new = {"seconds": seconds, "passed": passed}
    merged = {name: old | new[name] for name, old in load().items()}
    merged["seconds"] = {test: round(s, 1) for test, s in merged["seconds"].items() if s >= FEW_SECONDS}
    merged["passed"] = {test: digest for test, digest in merged["passed"].items() if digest}
    fresh = file().with_suffix(f".{os.getpid()}")
    try:
        fresh.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(merged, indent=1, sort_keys=True))
        fresh.replace(file())
    except OSError:  # such as a home that cannot be written to: the next run starts without records
        fresh.unlink(missing_ok=True)


def as_committed():
    """Return whether all files are as git has them."""
    try:
        status = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return False
    return status.returncode == 0 and not status.stdout


@functools.cache
def digest(test_file, *covered):
    """Return a hash of a test file and the files that it covers: patterns, relative to the repository."""
    paths = [Path(test_file)]
    for pattern in covered:
        found = sorted(path for path in ROOT.glob(pattern) if path.is_file())
        if not found:
            raise ValueError(f"{test_file}: COVERS has {pattern!r}, which matches no file")
        paths += found
    content = [f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in paths]
    return hashlib.sha256("\n".join(content).encode()).hexdigest()[:16]
