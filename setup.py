"""Builds the extension ``gradzip._C`` (everything else about the package is in pyproject.toml).

setuptools compiles one file after the other, all of them whenever one changed, and knows no ``.cu``. So only the
building of the one extension is ours: sources are compiled in parallel, and a source is compiled again only when it,
a header it includes, its command line or its compiler changed. The kernels take raw pointers: no torch is needed to
build, and one build serves every version of torch.

Environment: ``GRADZIP_CUDA``        auto (default: with CUDA when nvcc is found), 1 (fail without nvcc) or 0 (never)
             ``GRADZIP_CUDA_ARCHS``  compute capabilities to compile for, as in "80,90" (default: CUDA_ARCHS)
             ``GRADZIP_SANITIZE``    as in "address,undefined": a debug build with these sanitizers
             ``CUDA_HOME`` ``CXX`` ``CXXFLAGS`` ``LDFLAGS``  as everywhere
             ``MAX_JOBS``            compilers to run at a time (default: one per core)
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Turing to Hopper: what runs today's PyTorch. Later devices compile the PTX of the newest one when they first load it.
CUDA_ARCHS = ("75", "80", "86", "89", "90")

# No -march=native: a wheel runs on other machines too, so the kernels choose AVX2 or AVX-512 when they run.
# No multiply-add that the source does not spell out: CPU and CUDA codecs must agree to the bit, and nvcc gets
# -fmad=false for the same reason. errno and floating-point traps are never looked at, and would stop vectorisation.
HOST_FLAGS = ["-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
HOST_FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]


def fail(message: str) -> SystemExit:
    return SystemExit(f"gradzip build: {message}")


def first_line(command: list[str]) -> str:
    """What `command --version` says first: an object is compiled again when its compiler changed."""
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    return (done.stdout or done.stderr).strip().partition("\n")[0]


def find_cxx() -> list[str]:
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if not shutil.which(command[0]):
        raise fail(f"no C++ compiler: {command[0]!r} is not on PATH; install g++ (or clang++ and set CXX=clang++)")
    return command


def find_nvcc() -> str | None:
    """The CUDA compiler, or None where there is none or ``GRADZIP_CUDA=0`` says not to look."""
    wanted = os.environ.get("GRADZIP_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        raise fail(f"GRADZIP_CUDA={wanted!r} is not understood; expected auto, 0 or 1")
    if wanted == "0":
        return None
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    places = [*(f"{home}/bin/nvcc" for home in homes if home), "nvcc", "/usr/local/cuda/bin/nvcc"]
    found = next(filter(None, map(shutil.which, places)), None)
    if not found and wanted == "1":
        raise fail(
            f"GRADZIP_CUDA=1, but there is no nvcc (looked for {', '.join(places)}); "
            "install the CUDA toolkit or set CUDA_HOME, or build for the CPU only with GRADZIP_CUDA=0"
        )
    return found


def cuda_archs(nvcc: str) -> list[str]:
    """The compute capabilities to compile for, in ascending order, leaving out those this nvcc does not know."""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    known = re.findall(r"compute_(\d+)$", listed, re.MULTILINE)
    wanted = re.findall(r"\d+", os.environ.get("GRADZIP_CUDA_ARCHS", "").replace(".", "")) or CUDA_ARCHS
    archs = sorted({arch for arch in wanted if arch in known}, key=int)
    if not archs:
        raise fail(
            f"{nvcc} knows none of the compute capabilities {', '.join(wanted)}, only {', '.join(known)}; "
            "install a newer CUDA toolkit or set GRADZIP_CUDA_ARCHS"
        )
    return archs


def max_jobs() -> int:
    wanted = os.environ.get("MAX_JOBS")
    if not wanted:
        return len(os.sched_getaffinity(0))
    if not wanted.isdecimal() or int(wanted) == 0:
        raise fail(f"MAX_JOBS={wanted!r} is not understood; expected a number of compilers to run at a time")
    return int(wanted)


class BuildExtension(build_ext):
    """Compiles what changed, in parallel, then links."""

    def build_extension(self, ext: Extension) -> None:
        if sys.platform != "linux":
            raise fail(f"platform {sys.platform!r} is not supported; expected linux")
        # Imported here, so that commands that do not compile (sdist, metadata) need no pybind11.
        import pybind11

        nvcc = find_nvcc()
        archs = cuda_archs(nvcc) if nvcc else []
        sanitize = os.environ.get("GRADZIP_SANITIZE", "")
        cxx = find_cxx()
        jobs = max_jobs()

        host = [*HOST_FLAGS]
        if sanitize:
            host += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-g"]
        common = ["-std=c++17", "-O1" if sanitize else "-O3", "-Icsrc"]
        if nvcc:
            common.append("-DGRADZIP_CUDA")
        # As system headers they raise no warnings of ours, and are not looked at to see whether something changed:
        # their versions are part of each object's signature instead.
        includes = ["-isystem", sysconfig.get_path("include"), "-isystem", pybind11.get_include()]

        compile_cpp = [*cxx, *common, *host, *includes, *shlex.split(os.environ.get("CXXFLAGS", ""))]
        compile_cu: list[str] = []
        version = f"python {sys.version} pybind11 {pybind11.__version__} {first_line(cxx)}"
        if nvcc:
            compile_cpp.append(f'-DGRADZIP_CUDA_ARCHS="{" ".join(f"sm_{arch}" for arch in archs)}"')
            code = {arch: f"sm_{arch}" for arch in archs}
            code[archs[-1]] = f"[sm_{archs[-1]},compute_{archs[-1]}]"
            compile_cu = [nvcc, "-ccbin", shutil.which(cxx[0]) or cxx[0], *common, "-fmad=false"]
            compile_cu += [f"-gencode=arch=compute_{arch},code={code[arch]}" for arch in archs]
            # -Wextra finds fault with the host code that nvcc itself writes.
            compile_cu += [through_nvcc(flag) for flag in host if flag != "-Wextra"]
            compile_cu += ["-cudart=static", f"--threads={min(jobs, len(archs))}"]
            version += f" {first_line([nvcc])}"

        variant = f"{sys.implementation.cache_tag}-{'cuda' if nvcc else 'cpu'}" + (
            "-" + sanitize.replace(",", "-") if sanitize else ""
        )
        folder = Path("build") / variant
        sources = sorted(ext.sources) if nvcc else sorted(s for s in ext.sources if not s.endswith(".cu"))
        commands = {
            source: [*(compile_cu if source.endswith(".cu") else compile_cpp), "-c", source] for source in sources
        }
        compile_all(commands, folder, version, jobs)

        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # nvcc knows where its own runtime is, so it links where there are .cu files.
        flags = ["-pthread", *([f"-fsanitize={sanitize}"] if sanitize else [])]
        flags += shlex.split(os.environ.get("LDFLAGS", ""))
        linker = [*cxx, "-shared", *flags]
        if nvcc:
            linker = [*compile_cu[:3], "-cudart=static", "-shared", *map(through_nvcc, flags)]
        # Linked beside the old one and moved over it: a process that has the old one loaded keeps it whole.
        fresh = target.with_suffix(".new")
        run([*linker, *(str(object_of(source, folder)) for source in sources), "-o", str(fresh)], target.name)
        os.replace(fresh, target)


def through_nvcc(flag: str) -> str:
    """`flag` for the host compiler behind nvcc, which would take a bare comma for the end of it."""
    return "-Xcompiler=" + flag.replace(",", "\\,")


def object_of(source: str, folder: Path) -> Path:
    return folder / f"{source}.o"


def compile_all(commands: dict[str, list[str]], folder: Path, version: str, jobs: int) -> None:
    """Runs those of `commands` (one per source) whose object under `folder` is missing or out of date."""
    stale = {s: c for s, c in commands.items() if not up_to_date(object_of(s, folder), signature(c, version))}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(compile_one, s, c, object_of(s, folder), version) for s, c in stale.items()]
        for count, future in enumerate(concurrent.futures.as_completed(futures), 1):
            try:
                print(f"[{count}/{len(stale)}] {future.result()}", flush=True)
            except SystemExit:
                pool.shutdown(cancel_futures=True)
                raise


def compile_one(source: str, command: list[str], target: Path, version: str) -> str:
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_suffix(".new")
    start = time.time_ns()
    run([*command, "-MMD", "-MF", str(target.with_suffix(".d")), "-o", str(fresh)], source)
    target.with_suffix(".cmd").write_text(signature(command, version))
    # As old as what was read: a header saved while the compiler ran is newer.
    os.utime(fresh, ns=(start, start))
    # Last, so that an object that is there is whole, whenever the build was killed.
    os.replace(fresh, target)
    return source


def signature(command: list[str], version: str) -> str:
    return f"{shlex.join(command)}\n{version}\n"


def up_to_date(target: Path, expected: str) -> bool:
    """Whether `target` is there, was made by the `expected` command, and is newer than all it was made from."""
    try:
        if target.with_suffix(".cmd").read_text() != expected:
            return False
        _, _, needed = target.with_suffix(".d").read_text().replace("\\\n", " ").partition(": ")
        made = target.stat().st_mtime_ns
        return all(os.stat(path).st_mtime_ns < made for path in shlex.split(needed))
    except OSError:
        return False


def run(command: list[str], what: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise fail(f"{what} failed, exit status {done.returncode}\n{shlex.join(command)}\n{done.stdout}")
    if done.stdout.strip():
        print(f"{what}:\n{done.stdout}", flush=True)


def sources() -> list[str]:
    # Found here, not listed: adding a kernel is adding its file.
    here = Path(__file__).resolve().parent
    found = (path for pattern in ("*.cpp", "cpu/*.cpp", "cuda/*.cu") for path in (here / "csrc").glob(pattern))
    return sorted(path.relative_to(here).as_posix() for path in found)


if __name__ == "__main__":
    setup(ext_modules=[Extension("gradzip._C", sources())], cmdclass={"build_ext": BuildExtension})
