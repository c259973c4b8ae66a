"""`gradzip info`: what is installed, built and found."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gradzip
from gradzip.methods.base.registry import registered

from ..inspection.table import count

# Facts about one part of the installation; `{"error": reason}` if it is missing or broken.
Facts = dict[str, Any]


def add(commands: Any) -> None:
    """Add `gradzip info`."""
    parser = commands.add_parser(
        "info",
        help="what is installed, built and found here",
        description="Show the parts of this installation of gradzip, and the devices, engines and methods that it "
        "finds. Missing or broken parts are listed with the reason; the exit status is 0 in any case.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs and bug reports")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    report = installation()
    print(json.dumps(report, indent=2) if options.json else "\n".join(_lines(report)))
    return 0


def installation() -> dict[str, Facts]:
    """The report of `gradzip info` in JSON types. Initializes neither Horovod nor a process group."""
    probes: dict[str, Callable[[], Facts]] = {
        "gradzip": lambda: {"version": gradzip.__version__, "path": str(Path(gradzip.__file__).parent)},
        "python": _python,
        "extension": _extension,
        "cuda": _cuda,
        "torch": _torch,
        "horovod": _horovod,
        "methods": lambda: {name: method.__name__ for name, method in registered().items()},
    }
    report = {}
    for part, probe in probes.items():
        try:
            # Warnings of torch and Horovod, such as an old driver, are in the facts.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                report[part] = probe()
        except Exception as error:  # a part can be broken in any way; report the others
            report[part] = {"error": f"{type(error).__name__}: {error}"}
    return report


def _python() -> Facts:
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        models = (line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line)
        processor = next(models, processor)
    return {
        "version": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def _extension() -> Facts:
    from gradzip import _C

    return {"path": _C.__file__, "compiler": _C.compiler, "simd": _C.simd(), "simd_levels": _C.simd_levels()}


def _cuda() -> Facts:
    from gradzip import _C

    if not _C.cuda_built:
        return {"built": False}
    return {
        "built": True,
        "archs": _C.cuda_archs.split(),
        "nvrtc": _nvrtc(_C.cuda_driver_version()) if _C.cuda_nvrtc else None,
        "runtime": _cuda_version(_C.cuda_runtime_version()),
        "driver": _cuda_version(_C.cuda_driver_version()),
        "devices": _C.cuda_devices(),
    }


def _nvrtc(driver: int) -> Facts:
    """The NVRTC that compiles kernels in a build without nvcc."""
    from gradzip.ops.nvrtc import cache, find

    try:
        found = find(driver)
    except RuntimeError as error:
        return {"error": str(error)}
    return {"version": found.version, "path": found.path, "cache": str(cache.home())}


def _cuda_version(number: int) -> str | None:
    """Format a CUDA version, 1000 * major + 10 * minor. None for 0, which means that there is none."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _torch() -> Facts:
    distributed = torch.distributed
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "cuda_available": torch.cuda.is_available(),
        "threads": torch.get_num_threads(),
        "mkl": torch.backends.mkl.is_available(),
        "backends": {
            name: distributed.is_available() and getattr(distributed, f"is_{name}_available")()
            for name in ("gloo", "nccl", "mpi")
        },
    }


def _horovod() -> Facts:
    if importlib.util.find_spec("horovod") is None:
        return {"error": "not installed"}
    import horovod
    import horovod.torch as hvd

    # nccl_built() is NCCL's version number.
    return {
        "version": horovod.__version__,
        "path": str(Path(horovod.__file__).parent),
        "backends": {"gloo": hvd.gloo_built(), "nccl": bool(hvd.nccl_built()), "mpi": hvd.mpi_built()},
    }


def _lines(report: dict[str, Facts]) -> list[str]:
    """The report as text: a title for each part, and below it aligned names and values."""
    lines: list[str] = []

    def part(key: str, title: str, remedy: str, rows: Callable[[Facts], list[tuple[str, str]]]) -> None:
        facts = report[key]
        shown = [("unusable", facts["error"]), ("", remedy)] if "error" in facts else rows(facts)
        lines.append(f"{title} {facts.get('version', '')}".rstrip())
        lines.extend(f"  {name:<11} {value}".rstrip() for name, value in shown if name or value)

    part("gradzip", "gradzip", "", lambda own: [("path", own["path"])])
    part(
        "python",
        "Python",
        "",
        lambda python: [
            ("executable", python["executable"]),
            ("platform", python["platform"]),
            ("processor", f"{python['processor']}, {count(python['cores'], 'core')}"),
        ],
    )
    part(
        "extension",
        "kernels",
        "no method that compresses works without them; build them: pip install . in gradzip's source tree (needs g++)",
        lambda extension: [
            ("extension", extension["path"]),
            ("compiler", extension["compiler"]),
            ("SIMD", f"{extension['simd']} in use; available: {', '.join(extension['simd_levels'])}"),
            *_cuda_rows(report["cuda"]),
        ],
    )
    part(
        "torch",
        "torch",
        "",
        lambda torch_: [
            ("CUDA", _torch_cuda(torch_)),
            ("backends", _which(torch_["backends"])),
            ("threads", f"{torch_['threads']}, {'with' if torch_['mkl'] else 'without'} MKL"),
        ],
    )
    part(
        "horovod",
        "Horovod",
        "needed only for training with Horovod; gradzip's source tree builds it: scripts/bootstrap.sh",
        lambda horovod: [("path", horovod["path"]), ("backends", _which(horovod["backends"]))],
    )
    part("methods", "methods", "", lambda methods: [(name, _summary(name)) for name in methods])
    return lines


def _cuda_rows(cuda: Facts) -> list[tuple[str, str]]:
    if "error" in cuda:
        return [("CUDA", f"broken: {cuda['error']}")]
    if not cuda["built"]:
        return [("CUDA", "not built (GRADZIP_CUDA=0)")]
    driver = f"driver for CUDA {cuda['driver']}" if cuda["driver"] else "no driver found"
    nvrtc = cuda["nvrtc"]
    if nvrtc is None:
        rows = [("CUDA", f"built by nvcc for {', '.join(cuda['archs'])}; runtime {cuda['runtime']}, {driver}")]
    elif "error" in nvrtc:
        rows = [("CUDA", f"kernels cannot be compiled; {driver}"), ("", nvrtc["error"])]
    else:
        rows = [
            ("CUDA", f"built without nvcc: NVRTC {nvrtc['version']} compiles kernels at their first use; {driver}"),
            ("", f"NVRTC in {nvrtc['path']}"),
            ("", f"compiled kernels in {nvrtc['cache']}"),
        ]
    for i, d in enumerate(cuda["devices"]):
        rows.append(("", f"device {i}: {d['name']}, sm_{d['major']}{d['minor']}, {d['memory'] / 2**30:.0f} GiB"))
    return rows


def _torch_cuda(facts: Facts) -> str:
    if not facts["cuda"]:
        return "not in this build of torch"
    return f"{facts['cuda']}, {'available' if facts['cuda_available'] else 'but no device that it can use'}"


def _summary(name: str) -> str:
    method = registered()[name]
    first = (inspect.getdoc(method) or "no description").partition("\n\n")[0]
    return f"{method.__name__}: {' '.join(first.split())}"


def _which(present: dict[str, bool]) -> str:
    return ", ".join(name for name, there in present.items() if there) or "none"
