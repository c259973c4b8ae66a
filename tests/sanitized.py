"""Build the package with the address and undefined-behaviour sanitizers, and run processes on that build."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def runtime():
    """Return the path of the compiler's address sanitizer library, or None if it has none."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return None
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    return found if os.path.isabs(found) else None


def why_not():
    """Return why a sanitized build is impossible here, or None if it is possible."""
    if not (ROOT / "gradzip").is_dir():
        return "the sources of the package, which it builds, are not here"
    return None if runtime() else "this compiler has no address sanitizer"


def environment(place, largest_mb=1024):
    """Return the environment of a process that imports the build in `place`.

    The process aborts at the first error that a sanitizer finds, and at an allocation above `largest_mb` MiB.
    """
    return os.environ | {
        "PYTHONPATH": str(place),
        "LD_PRELOAD": runtime(),
        # torch and Python keep memory until the end; what we look for is access, not leaks.
        "ASAN_OPTIONS": f"detect_leaks=0:abort_on_error=1:max_allocation_size_mb={largest_mb}",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }


def build(tree=ROOT):
    """Build what changed of a source tree. Return where the package lies: under the tree's build/, and kept there."""
    place = Path(tree) / "build" / "sanitized"
    place.mkdir(parents=True, exist_ok=True)
    with open(place.with_suffix(".lock"), "w") as lock:  # one process at a time
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [sys.executable, "setup.py", "-q", "build", "--build-lib", str(place)],
            cwd=tree, env=os.environ | {"GRADZIP_CUDA": "0", "GRADZIP_SANITIZE": "address,undefined"},
            capture_output=True, text=True,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the sanitized build failed:\n{done.stdout}{done.stderr}")
    return place


def broken(tree, file, sound, replaced):
    """Copy the sources and objects of a build to the folder `tree`. Replace `sound` in one source file."""
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
    if text.count(sound) != 1:
        raise ValueError(f"{file}: got {text.count(sound)} of {sound!r}, expected 1")
    source.write_text(text.replace(sound, replaced))
