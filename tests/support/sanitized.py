"""Build the package with the address and undefined-behaviour sanitizers, and run processes on that build."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from paths import ROOT


def asan_library():
    """Return the path of the compiler's address sanitizer library, or None if there is none."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return None
    path = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    return path if os.path.isabs(path) else None


def unavailable_reason():
    """Return why a sanitized build is impossible here, or None if it is possible."""
    if not (ROOT / "gradzip").is_dir():
        return "the sources of the package, which it builds, are not here"
    return None if asan_library() else "this compiler has no address sanitizer"


def environment(package_dir, max_allocation_mb=1024):
    """Return the environment of a process that imports the build in `package_dir`.

    The process aborts at the first error that a sanitizer finds, and at an allocation above `max_allocation_mb` MiB.
    """
    return os.environ | {
        "PYTHONPATH": str(package_dir),
        "LD_PRELOAD": asan_library(),
        # torch and Python keep memory until they exit, so leaks are not checked.
        "ASAN_OPTIONS": f"detect_leaks=0:abort_on_error=1:max_allocation_size_mb={max_allocation_mb}",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }


def build(tree=ROOT):
    """Build a source tree with sanitizers. Return the package's folder under the tree's build/."""
    package_dir = Path(tree) / "build" / "sanitized"
    package_dir.mkdir(parents=True, exist_ok=True)
    with open(package_dir.with_suffix(".lock"), "w") as lock:  # one process at a time
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = subprocess.run(
            [sys.executable, "setup.py", "-q", "build", "--build-lib", str(package_dir)],
            cwd=tree, env=os.environ | {"GRADZIP_CUDA": "0", "GRADZIP_SANITIZE": "address,undefined"},
            capture_output=True, text=True,
        )  # fmt: skip
    if result.returncode:
        raise RuntimeError(f"the sanitized build failed:\n{result.stdout}{result.stderr}")
    return package_dir


def copy_with_edit(tree, file, old, new):
    """Copy the sources and built objects to the folder `tree`. Replace `old` by `new` in one source file."""
    for name in ("csrc", "gradzip", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        source, target = ROOT / name, Path(tree) / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    for folder in (ROOT / "build").glob("*-address-undefined"):
        shutil.copytree(folder, Path(tree) / "build" / folder.name)
    source = Path(tree) / file
    text = source.read_text()
    if text.count(old) != 1:
        raise ValueError(f"{file}: got {text.count(old)} of {old!r}, expected 1")
    source.write_text(text.replace(old, new))
