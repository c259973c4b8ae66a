"""Compile the programs of tests/simt, which run CUDA kernels on the CPU. Cached in build/simt by content."""

from __future__ import annotations

import concurrent.futures
import fcntl
import functools
import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from unittest import mock

from paths import ROOT

Edits = Mapping[str, tuple[str, str]]

CSRC = ROOT / "csrc"
SIMT = ROOT / "tests" / "simt"
CACHE = ROOT / "build" / "simt"

PLAIN = ["-std=c++17", "-Og", "-pthread", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unknown-pragmas"]
ADDRESS = [*PLAIN, "-g1", "-fsanitize=address", "-fno-omit-frame-pointer"]
SANITIZED = [*ADDRESS, "-fsanitize=undefined", "-fno-sanitize-recover=all"]
# The address sanitizer detects accesses through such pointers; compiles faster.
SANITIZED += ["-fno-sanitize=null,object-size,vptr,pointer-overflow"]
RACES = [*PLAIN, "-g1", "-fsanitize=thread"]  # see tests/simt/races.h


Parts = list[str | bytes | Path]


def digest(parts: Parts) -> str:
    """Return a hash of what a file is made from. A path counts by its content."""
    total = hashlib.sha256()
    for part in parts:
        content = part.read_bytes() if isinstance(part, Path) else part if isinstance(part, bytes) else part.encode()
        total.update(hashlib.sha256(content).digest())
    return total.hexdigest()[:16]


def cached(name: str, parts: Parts, make) -> Path:
    """Return the file that `make(path)` writes. Reuse one made from the same parts."""
    target = CACHE / f"{digest(parts)}-{name}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(f"{target}.lock", "w") as lock:  # workers of pytest-xdist want the same files
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            fresh = CACHE / f"{os.getpid()}-{target.name}"
            make(fresh)
            os.replace(fresh, target)
    return target


def run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    assert done.returncode == 0 and not done.stdout, f"{' '.join(command)}\n{done.stdout}"


def sources(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())


def cpu_library() -> Path:
    """Archive the CPU kernels, which give the expected results: those of the extension if it was built here.

    Not sanitized: test_sanitized.py tests them.
    """
    used = sources(CSRC / "cpu", CSRC / "common")
    built = [f"build/{sys.implementation.cache_tag}-{kind}" for kind in ("cuda", "nvrtc", "cpu")]
    folder = next((path for path in built if (ROOT / path / "build.ninja").exists()), None)
    if folder is None:
        flags = ["-O1", "-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Icsrc"]
        return cached("cpu.a", [" ".join(flags), *used], lambda target: compile_kernels(flags, target))

    def make(target: Path) -> None:
        objects = [f"{folder}/csrc/cpu/{path.name}.o" for path in sorted((CSRC / "cpu").glob("*.cpp"))]
        run([setup_py()["find_ninja"](), "--quiet", "-f", f"{folder}/build.ninja", *objects])  # they may be old
        run(["ar", "rcs", str(target), *objects])

    return cached("cpu.a", [ROOT / folder / "build.ninja", *used], make)


def built_with_nvcc() -> bool:
    """Whether the extension was built here with CUDA. Ninja compiles what has changed since, before tests run."""
    return (ROOT / "build" / f"{sys.implementation.cache_tag}-cuda" / "build.ninja").exists()


def compile_kernels(flags: list[str], target: Path) -> None:
    """Compile the CPU kernels to an archive."""
    objects = {path: f"{target}-{path.stem}.o" for path in sorted((CSRC / "cpu").glob("*.cpp"))}
    with concurrent.futures.ThreadPoolExecutor(int(setup_py()["max_jobs"]())) as pool:
        list(pool.map(lambda item: run(["g++", *flags, "-c", str(item[0]), "-o", item[1]]), objects.items()))
    run(["ar", "rcs", str(target), *objects.values()])
    for path in objects.values():
        os.remove(path)


@functools.cache
def compiler() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True).stdout


@functools.cache
def dependencies(file: str) -> list[Path]:
    """The files that tests/simt/FILE includes, and itself."""
    command = ["g++", "-std=c++17", "-MM", f"-I{SIMT}", f"-I{CSRC}", str(SIMT / file)]
    rule = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sorted(Path(path) for path in rule.partition(":")[2].replace("\\\n", " ").split())


def edited(edits: Edits) -> dict[str, str]:
    """The texts of files of csrc after edits: (old text, new text), by path."""
    changed = {}
    for path, (old, new) in edits.items():
        text = (CSRC / path).read_text()
        assert text.count(old) == 1, f"{path} has {old!r} {text.count(old)} times"
        changed[path] = text.replace(old, new)
    return changed


def program_parts(name: str, edits: Edits = MappingProxyType({}), flags: list[str] = SANITIZED) -> Parts:
    """What decides about the executable of tests/simt/NAME.cpp: its text and those of all files that it includes."""
    changed = [f"{path}\n{text}" for path, text in edited(edits).items()]
    return [name, " ".join(flags), compiler(), cpu_library().name, *changed, *dependencies(f"{name}.cpp")]


def common_header(flags: list[str]) -> Path:
    """Precompile tests/simt/check.h, with which all programs begin. Return the path to include: it lacks the .gch."""
    included = [f"-I{SIMT}", f"-I{CSRC}", "-include", "check.h"]
    command = ["g++", *flags, *included, "-x", "c++-header", "/dev/null", "-o"]
    parts = [" ".join(command), compiler(), *dependencies("check.h")]
    return cached("check.h.gch", parts, lambda target: run([*command, str(target)])).with_suffix("")


def program(name: str, edits: Edits = MappingProxyType({}), flags: list[str] = SANITIZED) -> Path:
    """Build the executable of tests/simt/NAME.cpp, with some files of csrc edited."""
    library, changed, parts = cpu_library(), edited(edits), program_parts(name, edits, flags)

    def make(target: Path) -> None:
        folder = Path(f"{target}-edited")
        for path, text in changed.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        # The program includes the common header once more, which does nothing: do not edit what is in it.
        include = ["-include", str(common_header(flags)), *(f"-I{path}" for path in (folder, SIMT, CSRC))]
        run(["g++", *flags, *include, str(SIMT / f"{name}.cpp"), str(library), "-o", str(target)])
        shutil.rmtree(folder, ignore_errors=True)

    return cached(name, parts, make)


def launchers() -> list[str]:
    """The stems of the files of csrc/cuda that launch kernels."""
    return sorted(path.stem for path in (CSRC / "cuda").glob("*.cu") if path.stem != "device")


def kernels() -> dict[str, tuple[str, list[str], bool]]:
    """The kernels of csrc/kernels.h: the stem of its section, its parameters, and whether it needs scratch memory."""
    found, stem = {}, ""
    table = (CSRC / "kernels.h").read_text().partition("#ifdef KERNEL")[2]
    for section, workspace, name, parameters in re.findall(
        r"^// --- (\w+)$|^KERNEL(_WITH_WORKSPACE)?\((\w+), ([^;]*)\);", table, re.MULTILINE
    ):
        stem = section or stem
        if name:
            listed = [re.sub(r"\s+", " ", parameter.strip()) for parameter in parameters.split(",")]
            found[name] = stem, listed, bool(workspace)
    return found


def module() -> Path:
    """Build the extension `simt_cuda`: the CUDA launchers for Python, on host memory."""
    import pybind11  # not everybody who runs the tests builds the extension

    include = [f"-I{SIMT}", f"-I{CSRC}"]
    for path in (pybind11.get_include(), sysconfig.get_path("include")):
        include += ["-isystem", path]
    for header in ("cuda_runtime.h", *(f"cuda/{stem}.cu" for stem in launchers())):
        include += ["-include", header]
    command = ["g++", *PLAIN, "-shared", "-fPIC", "-fvisibility=hidden", *include, str(SIMT / "module.cpp"), "-o"]
    parts = [" ".join(command), *sources(CSRC), *sorted(SIMT.glob("*.h")), SIMT / "module.cpp"]
    return cached("simt_cuda.so", parts, lambda target: run([*command, str(target)]))


def setup_py() -> dict:
    """Return the functions of setup.py. Without setuptools, which would replace this process's distutils."""
    modules = {
        "setuptools": SimpleNamespace(Extension=object, setup=None),
        "setuptools.command.build_ext": SimpleNamespace(build_ext=object),
    }
    with mock.patch.dict(sys.modules, modules):
        return runpy.run_path(str(ROOT / "setup.py"))


def nvrtc_module() -> Path:
    """Build the extension `nvrtc_cuda`: the CUDA launchers of a build without nvcc, with the flags of setup.py."""
    import pybind11

    setup = setup_py()
    options = [*setup["HOST_FLAGS"], "-std=c++17", "-O1", "-Icsrc", "-DGRADZIP_CUDA", "-DGRADZIP_NVRTC"]
    include = [flag for path in (pybind11.get_include(), sysconfig.get_path("include")) for flag in ("-isystem", path)]
    launchers = sorted((CSRC / "cuda").glob("*.cu"))
    others = [CSRC / "nvrtc" / "driver.cpp", ROOT / "tests" / "simt" / "nvrtc" / "module.cpp"]
    parts = [" ".join(options), *sources(CSRC), others[1]]

    def make(target: Path) -> None:
        embedded = Path(f"{target}-sources.cpp")
        embedded.write_text(setup["kernel_sources"](CSRC))
        commands = [[*options, *setup["NVRTC_FLAGS"], "-c", str(path)] for path in launchers]
        commands += [[*options, *include, "-c", str(path)] for path in (*others, embedded)]
        objects = [f"{target}-{number}.o" for number in range(len(commands))]
        with concurrent.futures.ThreadPoolExecutor(int(setup_py()["max_jobs"]())) as pool:
            list(pool.map(lambda item: run(["g++", *item[0], "-o", item[1]]), zip(commands, objects)))
        run(["g++", "-shared", "-pthread", *objects, "-ldl", "-o", str(target)])
        for path in (*objects, embedded):
            os.remove(path)

    return cached("nvrtc_cuda.so", parts, make)


def stand_in_driver() -> Path:
    """Build the stand-in for NVIDIA's driver."""
    source = ROOT / "tests" / "simt" / "nvrtc" / "libcuda.cpp"
    command = ["g++", *PLAIN, "-shared", "-fPIC", str(source), "-o"]
    return cached("libcuda.so.1", [" ".join(command), source], lambda target: run([*command, str(target)]))
