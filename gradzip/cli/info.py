"""`gradzip info`: what is installed, built and found here.

Show the parts of this installation of gradzip, and the devices and engines that it finds. Missing or broken parts are
listed with the reason; the exit status is 0 in any case. For a bug report, add what `python -m torch.utils.collect_env`
prints about the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import socket
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import gradzip
from gradzip.ops._native import remedy

# Facts about one part of the installation; `{"error": reason}` if it is missing or broken.
Facts = dict[str, Any]

# That gradzip has adapters for, or takes arrays of.
LIBRARIES = ("accelerate", "transformers", "lightning", "pytorch_lightning", "torchft", "cupy")

# What to do if a part is missing or broken.
REMEDIES: dict[str, Callable[[], str]] = {
    "extension": lambda: f"no method that compresses works without the kernels; {remedy()}",
    "horovod": lambda: "needed only for training with Horovod; gradzip's source tree builds it: scripts/bootstrap.sh",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`gradzip info` has no options of its own."""


def run(options: argparse.Namespace) -> None:
    """Print the facts of all parts. Initializes neither Horovod nor a process group."""
    probes: dict[str, Callable[[], Facts]] = {
        "gradzip": lambda: {"version": gradzip.__version__, "path": str(Path(gradzip.__file__).parent)},
        "extension": _extension,
        "cuda": _cuda,
        "torch": lambda: {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()},
        "horovod": _horovod,
        "libraries": _libraries,
    }
    # Warnings of torch and Horovod, such as an old driver, are in the facts.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = {part: _probed(probe) for part, probe in probes.items()}
    print(json.dumps(report, indent=2) if options.json else "\n".join(_lines(report)))


def _probed(probe: Callable[[], Facts]) -> Facts:
    """The facts, or the error: a part can be broken in any way, and the others are reported then."""
    try:
        return probe()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


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
        "nvrtc": _probed(_nvrtc) if _C.cuda_nvrtc else None,
        "runtime": _cuda_version(_C.cuda_runtime_version()),
        "driver": _cuda_version(_C.cuda_driver_version()),
        "devices": _C.cuda_devices(),
    }


def _nvrtc() -> Facts:
    """The NVRTC that compiles kernels in a build without nvcc."""
    from gradzip import _C
    from gradzip.ops.nvrtc import cache, find

    found = find(_C.cuda_driver_version())
    return {"version": found.version, "path": found.path, "cache": str(cache.home())}


def _cuda_version(number: int) -> str | None:
    """Format a CUDA version, 1000 * major + 10 * minor. None for 0, which means that there is none."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


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
        "address": _address(),
    }


def _address() -> str:
    """Where the ranks of this host listen: at the address of its name, whatever interface is set."""
    name = socket.gethostname()
    try:
        return f"{socket.getaddrinfo(name.encode(), None)[0][4][0]} of {name}"
    except OSError:
        return f"none: ranks crash in hvd.init() until the name of this host, {name}, has one (/etc/hosts, say)"


def _libraries() -> Facts:
    """The versions of those among LIBRARIES that are installed, without importing them."""
    packages = metadata.packages_distributions()  # CuPy has a package for each version of CUDA
    return {name: metadata.version(packages[name][0]) for name in LIBRARIES if name in packages}


def _lines(report: dict[str, Facts]) -> Iterator[str]:
    """The report as text: a title for each part, and below it aligned names and values."""
    for part, facts in report.items():
        yield f"{part} {facts.get('version', '') if facts else 'none'}".rstrip()
        for name, value in facts.items():
            if name != "version":
                yield f"  {name:<14} {_text(value)}"
        if "error" in facts and part in REMEDIES:
            yield f"  {REMEDIES[part]()}"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(of_name)}" for name, of_name in value.items())
    if isinstance(value, list):
        return "; ".join(map(_text, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
