"""Build the extension ``gradzip._C``. Everything else about the package is in pyproject.toml.

setuptools compiles one file after the other, all of them whenever one changed, and does not know ``.cu``. So this file
writes ``build/VARIANT/build.ninja`` and runs ninja: a source is compiled again when it, a header it includes, its
command line or its compiler changed. The kernels take raw pointers: no torch is needed to build, and one build serves
every version of torch.

Without nvcc, the C++ compiler builds the launchers of the CUDA kernels, with the kernels' sources inside the library;
gradzip/ops/nvrtc compiles these where there is a GPU.

Environment: ``GRADZIP_CUDA``        auto (default: nvcc if it is found, else nvrtc), 1 (fail without nvcc), nvrtc (even
                                 if there is an nvcc) or 0 (no CUDA kernels)
             ``GRADZIP_CUDA_ARCHS``  compute capabilities to compile for, as in "80,90", or "all" of CUDA_ARCHS
                                 (default: those of the GPUs that nvidia-smi finds; all, if it finds none)
             ``GRADZIP_SANITIZE``    as in "address,undefined": a debug build with these sanitizers
             ``CUDA_HOME`` ``CXX`` ``CXXFLAGS`` ``LDFLAGS``  as usual
             ``MAX_JOBS``            sources to compile at a time (default: one per core)
"""

from __future__ import annotations

import filecmp
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Turing to Hopper. Later devices compile the PTX of the newest one when they first load it.
CUDA_ARCHS = ("75", "80", "86", "89", "90")
NVCC_SECONDS = 5  # that a core takes for the host's part of a file, and for each compute capability

# No -march=native: a wheel also runs on other machines, so the kernels choose AVX2 or AVX-512 at run time.
# No contraction to fused multiply-add (nvcc: -fmad=false): CPU and CUDA codecs must agree to the bit.
# The kernels never read errno or floating-point traps, which would prevent vectorisation.
HOST_FLAGS = ["-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
HOST_FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
# A .cu as C++. nvcc also includes cuda_runtime.h before all else.
NVRTC_FLAGS = ["-Wno-unknown-pragmas", "-Icsrc/nvrtc", "-include", "cuda_runtime.h", "-x", "c++"]

# The comment at the end of a command is not executed; a change of it makes ninja run the command again.
COMPILE = """\
rule {name}
  command = {command} -MD -MF $out.d -c $in -o $out {log}# {versions}
  depfile = $out.d
  deps = gcc
  description = $in
"""
# $out.ptxas keeps the resources that kernels use, for tests/simt/test_kernel_resources.py. All other output is printed.
PTXAS_LOG = "2>$out.ptxas; status=$$?; sed '/^ptxas info /d; / bytes stack frame, /d' $out.ptxas >&2; exit $$status "
LINK = """\
rule link
  command = {command} $in -o $out # {versions}
  description = _C.so
"""


def fail(message: str) -> SystemExit:
    return SystemExit(f"gradzip build: {message}")


def version(compiler: list[str]) -> str:
    """Return the line of `compiler --version` that has the version number."""
    done = subprocess.run([*compiler, "--version"], capture_output=True, text=True)
    found = re.search(r".*\d\.\d.*", done.stdout)
    return found[0] if found else "unknown version"


def find_cxx() -> list[str]:
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if not shutil.which(command[0]):
        raise fail(f"no C++ compiler: {command[0]!r} is not on PATH; install g++ (or clang++ and set CXX=clang++)")
    return command


def find_nvcc() -> str | None:
    """Return the path of the CUDA compiler, or None if there is none or ``GRADZIP_CUDA`` is 0 or nvrtc."""
    wanted = os.environ.get("GRADZIP_CUDA", "auto")
    if wanted not in ("auto", "0", "1", "nvrtc"):
        raise fail(f"GRADZIP_CUDA={wanted!r} is not understood; expected auto, 0, 1 or nvrtc")
    if wanted in ("0", "nvrtc"):
        return None
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    places = [*(f"{home}/bin/nvcc" for home in homes if home), "nvcc", "/usr/local/cuda/bin/nvcc"]
    found = next(filter(None, map(shutil.which, places)), None)
    if not found and wanted == "1":
        raise fail(
            f"GRADZIP_CUDA=1, but there is no nvcc (looked for {', '.join(places)}); "
            "install the CUDA toolkit or set CUDA_HOME, or have kernels compiled at run time with GRADZIP_CUDA=nvrtc"
        )
    return found


def gpus() -> set[str]:
    """Return the compute capabilities of this machine's GPUs. Empty if nvidia-smi is not there, or too old to know."""
    smi = shutil.which("nvidia-smi")
    query = ["--query-gpu=compute_cap", "--format=csv,noheader"]
    listed = subprocess.run([smi, *query], capture_output=True, text=True).stdout if smi else ""
    return {major + minor for major, minor in re.findall(r"^(\d+)\.(\d)$", listed, re.MULTILINE)}


def cuda_archs(nvcc: str) -> list[str]:
    """Return the compute capabilities to compile for, in ascending order, without those this nvcc does not know."""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    known = re.findall(r"compute_(\d+)$", listed, re.MULTILINE)
    setting = os.environ.get("GRADZIP_CUDA_ARCHS", "")
    wanted: Iterable[str] = re.findall(r"\d+", setting.replace(".", "")) or CUDA_ARCHS
    if not setting:
        # GPUs that are newer than this nvcc compile the PTX, older ones than CUDA_ARCHS have no use for it.
        wanted = {arch for arch in gpus() if arch in known and int(arch) >= int(CUDA_ARCHS[0])} or CUDA_ARCHS
    archs = sorted({arch for arch in wanted if arch in known}, key=int)
    if not archs:
        raise fail(
            f"{nvcc} knows none of the compute capabilities {', '.join(wanted)}, only {', '.join(known)}; "
            "install a newer CUDA toolkit or set GRADZIP_CUDA_ARCHS"
        )
    return archs


def announcement(sources: list[str], archs: list[str], jobs: str) -> str:
    """Return a line about what nvcc is going to do: it takes most of the time of a build."""
    count = sum(source.endswith(".cu") for source in sources)
    seconds = NVCC_SECONDS * count * (1 + len(archs)) / int(jobs)
    return (
        f"gradzip build: nvcc compiles {count} files for {', '.join(f'sm_{arch}' for arch in archs)}, in about "
        f"{math.ceil(seconds / 60)} min if {jobs} cores are idle; GRADZIP_CUDA_ARCHS=80,90 (or all) chooses others, "
        "GRADZIP_CUDA=nvrtc compiles at run time, GRADZIP_CUDA=0 is for CPUs alone"
    )


def find_ninja() -> str:
    """Return the path of ninja: of the Python package, else the one on PATH."""
    try:
        from ninja import BIN_DIR
    except ImportError:
        BIN_DIR = ""
    found = (BIN_DIR and shutil.which("ninja", path=BIN_DIR)) or shutil.which("ninja")
    if not found:
        raise fail("no ninja, which runs the compilers; install it: pip install ninja")
    return found


def max_jobs() -> str:
    wanted = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    if not wanted.isdecimal() or int(wanted) == 0:
        raise fail(f"MAX_JOBS={wanted!r} is not understood; expected a number of sources to compile at a time")
    return wanted


def kernel_sources(csrc: Path) -> str:
    """Return C++ with the text of all files that kernels are in, for csrc/nvrtc/sources.h."""
    paths = sorted([*(csrc / "common").glob("*.h"), *(csrc / "cuda").rglob("*.cuh")])
    names = [path.relative_to(csrc).as_posix() for path in paths]
    rows = [f'    {{"{name}", R"gradzip({(csrc / name).read_text()})gradzip"}},\n' for name in names]
    return (
        '#include "nvrtc/sources.h"\n\nnamespace gradzip::driver {\n\n'
        f"const Source sources[] = {{\n{''.join(rows)}    {{nullptr, nullptr}}}};\n\n}}  // namespace gradzip::driver\n"
    )


def ninja_file(folder: Path, sources: list[str], nvcc: str | None, sanitize: str, nvrtc: bool = False) -> str:
    """Return the text of build.ninja, which builds `folder`/_C.so.

    With `nvrtc`, the C++ compiler builds the CUDA launchers, and `folder`/sources.cpp has the sources of the kernels.
    """
    import pybind11  # here, so that commands that do not compile (sdist, metadata) do not need it

    cxx = find_cxx()
    host = [*HOST_FLAGS]
    link = ["-pthread", *shlex.split(os.environ.get("LDFLAGS", ""))]
    if sanitize:
        host += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-g1"]
        link.append(f"-fsanitize={sanitize}")
    defined = ["-DGRADZIP_CUDA"] * bool(nvcc or nvrtc) + ["-DGRADZIP_NVRTC"] * nvrtc
    common = ["-std=c++17", "-O0" if sanitize else "-O3", "-Icsrc", *defined]
    # As system headers they raise no warnings of ours.
    includes = ["-isystem", sysconfig.get_path("include"), "-isystem", pybind11.get_include()]
    commands = {"cpp": [*cxx, *common, *host, *includes, *shlex.split(os.environ.get("CXXFLAGS", ""))]}
    versions = version(cxx)
    if nvcc:
        archs = cuda_archs(nvcc)
        commands["cpp"].append(f'-DGRADZIP_CUDA_ARCHS="{" ".join(f"sm_{arch}" for arch in archs)}"')
        driver = [nvcc, "-ccbin", shutil.which(cxx[0]) or cxx[0], "-cudart=static"]
        code = {arch: f"sm_{arch}" for arch in archs}
        code[archs[-1]] = f"[sm_{archs[-1]},compute_{archs[-1]}]"
        gencode = [f"-gencode=arch=compute_{arch},code={code[arch]}" for arch in archs]
        # -Wextra warns about the host code that nvcc generates. --threads=2: ninja keeps the cores busy but at the end.
        host = [through_nvcc(flag) for flag in host if flag != "-Wextra"]
        commands["cu"] = [*driver, *common, "-fmad=false", "-Xptxas=-v", *gencode, *host, "--threads=2"]
        versions += f", {version([nvcc])}"
    elif nvrtc:
        commands["cu"] = [*cxx, *common, *host, *NVRTC_FLAGS]
        sources = [*sources, "csrc/nvrtc/driver.cpp", f"{folder}/sources.cpp"]
    linker = [*driver, *map(through_nvcc, link)] if nvcc else [*cxx, *link]

    # 1.11 is the first ninja that repairs the output of a killed command.
    text = f"ninja_required_version = 1.11\nbuilddir = {folder}\n"
    for name, command in commands.items():
        log = PTXAS_LOG if name == "cu" and nvcc else ""
        text += COMPILE.format(name=name, command=quoted(command), log=log, versions=versions)
    text += LINK.format(command=quoted([*linker, "-shared"]), versions=versions)
    compiled = [source for source in sources if source.endswith(tuple(commands))]
    objects = {f"{folder}/{source.removeprefix(f'{folder}/')}.o": source for source in compiled}
    for target, source in objects.items():
        rule = source.rpartition(".")[2]
        text += f"build {target}{f' | {target}.ptxas' if rule == 'cu' and nvcc else ''}: {rule} {source}\n"
    return text + f"build {folder}/_C.so: link {' '.join(objects)}\n"


def methods_stub(folder: Path) -> str:
    """Return the text of methods/__init__.pyi: type checkers do not see what methods/__init__.py finds at run time."""
    pattern = re.compile(r"^@register\(.*?^class (\w+)", re.MULTILINE | re.DOTALL)
    found = {name: path.stem for path in sorted(folder.glob("*.py")) for name in pattern.findall(path.read_text())}
    imports = "".join(f"from .{stem} import {name} as {name}\n" for name, stem in found.items())
    return f"{imports}\n__all__ = {sorted(found)}\n"


def write_changed(path: Path, text: str) -> None:
    """Write the file unless it has this text already: ninja compiles files that are newer than their objects."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def quoted(command: list[str]) -> str:
    return shlex.join(command).replace("$", "$$")


def through_nvcc(flag: str) -> str:
    """Return `flag` for the host compiler behind nvcc. A bare comma would end it."""
    return "-Xcompiler=" + flag.replace(",", "\\,")


class BuildExtension(build_ext):
    def run(self) -> None:
        super().run()
        stub = Path(self.get_ext_fullpath(self.extensions[0].name)).parent / "methods" / "__init__.pyi"
        stub.parent.mkdir(exist_ok=True)
        write_changed(stub, methods_stub(Path("gradzip/methods")))

    def build_extension(self, ext: Extension) -> None:
        if sys.platform != "linux":
            raise fail(f"platform {sys.platform!r} is not supported; expected linux")
        ninja, jobs, nvcc = find_ninja(), max_jobs(), find_nvcc()
        nvrtc = not nvcc and os.environ.get("GRADZIP_CUDA") != "0"
        sanitize = os.environ.get("GRADZIP_SANITIZE", "")
        kind = "cuda" if nvcc else "nvrtc" if nvrtc else "cpu"
        folder = Path("build") / "-".join([sys.implementation.cache_tag, kind, *filter(None, sanitize.split(","))])
        folder.mkdir(parents=True, exist_ok=True)
        if nvcc and not (folder / "_C.so").exists():
            print(announcement(ext.sources, cuda_archs(nvcc), jobs), flush=True)
        (folder / "build.ninja").write_text(ninja_file(folder, ext.sources, nvcc, sanitize, nvrtc))
        if nvrtc:
            write_changed(folder / "sources.cpp", kernel_sources(Path("csrc")))
        # The compilers of a killed build keep the lock of bootstrap.sh, which they inherit.
        done = subprocess.run([ninja, "-f", folder / "build.ninja", "-j", jobs], close_fds=False)
        if done.returncode:
            raise fail(f"ninja failed, exit status {done.returncode}; what it printed is above")
        built, target = folder / "_C.so", Path(self.get_ext_fullpath(ext.name))
        # Compared by size and time. Moved over the old library: a process that has that one loaded keeps it whole.
        if not (target.exists() and filecmp.cmp(built, target)):
            target.parent.mkdir(parents=True, exist_ok=True)
            fresh = target.with_suffix(".new")
            shutil.copy2(built, fresh)
            os.replace(fresh, target)


def sources() -> list[str]:
    # Found here, not listed: to add a kernel is to add its file.
    here = Path(__file__).resolve().parent
    found = (path for pattern in ("*.cpp", "cpu/*.cpp", "cuda/*.cu") for path in (here / "csrc").glob(pattern))
    return sorted(path.relative_to(here).as_posix() for path in found)


if __name__ == "__main__":
    setup(ext_modules=[Extension("gradzip._C", sources())], cmdclass={"build_ext": BuildExtension})
