"""What .venv lacks: the steps that bootstrap.sh has to do, one "step<TAB>reason" per line; nothing when all is well.

usage: .venv/bin/python scripts/venv_state.py [check STEP... | repair | key | mark STEP]

  check STEP...  the steps to look at: packages, horovod, gradzip (default: all, as far as they can be told)
  repair         remove what a killed installation left, so that pip installs it again
  key            the name under which Horovod's wheel is cached: everything that a built one depends on
  mark STEP      note what a step was done for

It looks at what is really there (every installed file with its size, imports in a fresh process), so that a run killed
at any moment, an edited pin or a moved folder is found out. It needs nothing but pip, and takes about two seconds.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
SITE = Path(sysconfig.get_path("purelib"))
STEPS = ("packages", "horovod", "gradzip")

# Horovod's own variables that change what is built. It has others, that only change how a built one runs.
HOROVOD_BUILD = ("HOROVOD_BUILD_", "HOROVOD_CUDA_", "HOROVOD_GPU", "HOROVOD_NCCL_", "HOROVOD_WITH")

IMPORTS = """
import torch
print("packages", flush=True)
import horovod.torch as hvd
if not hvd.gloo_built():
    raise SystemExit("Horovod was built without Gloo")
print("horovod", flush=True)
"""


def pins(file: str) -> Iterator[Requirement]:
    for line in (SCRIPTS / file).read_text().splitlines():
        text = line.partition("#")[0].partition("--hash")[0].strip()
        if text:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate():
                yield requirement


def unmet(file: str) -> str | None:
    """The first pin of `file` that is not what is installed."""
    for requirement in pins(file):
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            return f"{requirement} is not installed"
        # A pin of 2.13.0 admits 2.13.0+cpu, as with pip.
        if not requirement.specifier.contains(installed):
            return f"{requirement.name} {installed} is installed, expected {requirement.specifier}"
    return None


def incomplete() -> Iterator[tuple[Path, str]]:
    """(dist-info folder, what is wrong) of each distribution that is not as its wheel was."""
    for info in sorted(SITE.glob("*.dist-info")):
        try:
            # pip writes RECORD last.
            with open(info / "RECORD", newline="") as rows:
                for name, _, size in csv.reader(rows):
                    if size and os.stat(SITE / name).st_size != int(size):
                        raise OSError(f"{name} has another size than installed")
        except OSError as error:
            yield info, f"{info.stem}: {error}"


def key() -> str:
    torch = importlib.metadata.version("torch")
    (horovod,) = (str(requirement.specifier).lstrip("=") for requirement in pins("horovod.txt"))
    recipe = hashlib.sha256((SCRIPTS / "build_horovod.sh").read_bytes())
    for name in sorted(os.environ):
        if name.startswith(HOROVOD_BUILD):
            recipe.update(f"{name}={os.environ[name]}\0".encode())
    libc = "-".join(platform.libc_ver())
    return (
        f"horovod-{horovod}-torch-{torch}-{sys.implementation.cache_tag}-{platform.machine()}-{libc}"
        f"-{recipe.hexdigest()[:8]}"
    )


def sources() -> str:
    """A digest of all that gradzip's extension and its installed metadata are made from."""
    digest = hashlib.sha256()
    inputs = [ROOT / "setup.py", ROOT / "pyproject.toml", *(p for p in (ROOT / "csrc").rglob("*") if p.is_file())]
    for path in sorted(inputs):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    for name in ("GRADZIP_CUDA", "GRADZIP_CUDA_ARCHS", "GRADZIP_SANITIZE", "CUDA_HOME", "CXX", "CXXFLAGS", "LDFLAGS"):
        digest.update(f"{name}={os.environ.get(name)}\0".encode())
    digest.update(f"{ROOT} {shutil.which('nvcc')}".encode())
    return digest.hexdigest()


def mark_of(step: str) -> tuple[Path, str]:
    return Path(sys.prefix) / f"{step}.done", {"horovod": key, "gradzip": sources}[step]()


def marked(step: str) -> bool:
    path, expected = mark_of(step)
    return path.is_file() and path.read_text() == expected


def extension_fault() -> str | None:
    """Why gradzip's extension does not load, looked at alone: `import gradzip` would run code that is being edited."""
    path = ROOT / "gradzip" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not path.is_file():
        return "not built"
    if os.environ.get("GRADZIP_SANITIZE"):
        return None  # loads only where the sanitizer's runtime is preloaded
    try:
        loader = importlib.machinery.ExtensionFileLoader("gradzip._C", str(path))
        spec = importlib.machinery.ModuleSpec("gradzip._C", loader, origin=str(path))
        loader.exec_module(importlib.util.module_from_spec(spec))
    except ImportError as error:
        return str(error)
    return None


def installed_from_here() -> bool:
    spec = importlib.util.find_spec("gradzip")
    return spec is not None and str(ROOT / "gradzip") in (spec.submodule_search_locations or ())


def check(steps: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    importing = None
    if {"packages", "horovod"} & {*steps}:
        importing = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", IMPORTS],
            cwd=SITE, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    # The files are looked at while the imports run.
    broken = {info.name.partition("-")[0]: fault for info, fault in incomplete()}
    imported, fault = "", "no reason given"
    if importing:
        imported, errors = importing.communicate()
        fault = (errors.strip().splitlines() or [f"the import ended with status {importing.returncode}"])[-1]
    for step in steps:
        others = [text for name, text in broken.items() if name not in ("horovod", "gradzip")]
        reason = None
        if step == "packages":
            reason = unmet("requirements.txt") or next(iter(others), None)
            reason = reason or (None if step in imported else f"import torch: {fault}")
        elif step == "horovod":
            reason = unmet("horovod.txt") or broken.get(step)
            reason = reason or (None if marked(step) else "it was built for other versions")
            reason = reason or (None if step in imported else f"import horovod.torch: {fault}")
        elif step == "gradzip":
            reason = None if installed_from_here() else "not installed"
            reason = reason or broken.get(step) or extension_fault()
            reason = reason or (None if marked(step) else "its sources changed")
        if reason:
            yield step, reason
            if step == "packages":
                return  # Horovod is built for what is installed then


def main(command: str = "check", *arguments: str) -> None:
    if command == "check":
        for step, reason in check(arguments or STEPS):
            print(f"{step}\t{reason}")
    elif command == "repair":
        for info, _ in incomplete():
            shutil.rmtree(info)
        for left in SITE.glob("~*"):  # what pip moves aside while it replaces a package
            shutil.rmtree(left, ignore_errors=True)
    elif command == "key":
        print(key())
    elif command == "mark":
        path, text = mark_of(*arguments)
        path.write_text(text)
    else:
        raise SystemExit(f"venv_state.py: unknown command {command!r}; expected check, repair, key or mark")


if __name__ == "__main__":
    main(*sys.argv[1:])
