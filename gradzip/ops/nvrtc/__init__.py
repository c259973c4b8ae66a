"""Compile gradzip's CUDA kernels at run time with NVRTC, for a build without nvcc.

A launcher of `gradzip._C` asks for the kernels of its module, a file of csrc/cuda, when it first launches one, without
those for other transforms (csrc/nvrtc/driver.cpp). `gradzip._C` also has the sources of the kernels, as they were when
it was built.

    python -m gradzip.ops.nvrtc 80 90    # compile all kernels for these compute capabilities, without a GPU
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence

from . import cache, library
from .library import Nvrtc, find

__all__ = ["Nvrtc", "compile_module", "find", "program"]

# No contraction to fused multiply-add: kernels give the bits of the CPU. Functions without attributes, which compute
# tables, are for the device.
OPTIONS = ("--std=c++17", "-fmad=false", "-default-device")
# NVRTC has no headers of C++: what the sources use of them.
STANDARD_HEADERS = {
    "cstdint": """#pragma once
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using uint64_t = unsigned long;
using uintptr_t = unsigned long;
""",
    "cstring": "#pragma once\nnamespace std {\nusing ::memcpy;\n}\n",
}

_log = logging.getLogger(__name__)


def compile_module(
    sources: Mapping[str, str], module: str, names: Sequence[str], capability: int, driver: int = 0
) -> tuple[bytes, dict[str, str]]:
    """Compile kernels for a compute capability, or read what was compiled before from the cache.

    Args:
        sources: text of files, by the path that others include.
        module: the file cuda/MODULE.cuh of the sources.
        names: expressions for kernels, as `gradzip::cuda::select_kernel<0>`.
        capability: 90 stands for 9.0.
        driver: version of the driver that is to load them, as 13000 for 13.0; 0 for any.

    Returns the cubin and the symbols in it of the names.

    Raises RuntimeError if there is no NVRTC, or none for this device, with what to do.
    """
    nvrtc = library.find(driver)
    if capability not in nvrtc.capabilities:
        raise RuntimeError(
            f"got a device of compute capability {_dotted(capability)}, for which NVRTC {nvrtc.version} ({nvrtc.path}) "
            f"cannot compile, expected one of {', '.join(map(_dotted, nvrtc.capabilities))}; install another release "
            "of NVRTC (pip install -U nvidia-cuda-nvrtc or nvidia-cuda-nvrtc-cu12), or build gradzip with nvcc"
        )
    digest = hashlib.sha256(json.dumps([sources, STANDARD_HEADERS], sort_keys=True).encode()).hexdigest()
    options = [*OPTIONS, f"-arch=sm_{capability}"]
    key = json.dumps([digest, module, sorted(names), options, nvrtc.version])

    def make() -> tuple[bytes, dict[str, str]]:
        _log.warning(
            "compiling the CUDA kernels of %s for compute capability %s with NVRTC %s: once, then they are kept in %s",
            module, _dotted(capability), nvrtc.version, cache.home(),
        )  # fmt: skip
        return nvrtc.compile(program(module), {**sources, **STANDARD_HEADERS}, options, names)

    return cache.fetch(f"{module}-sm_{capability}-{hashlib.sha256(key.encode()).hexdigest()[:16]}", key, make)


def program(module: str) -> str:
    """Return the program that has the kernels of a module. Names of kernels may leave out their types' namespace."""
    return f'#include "cuda/{module}.cuh"\nusing namespace gradzip::cuda;\n'


def _dotted(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"
