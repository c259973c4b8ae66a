"""Find NVRTC, NVIDIA's library that compiles CUDA at run time, and call it."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

# One of them comes with each build of PyTorch for CUDA.
PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc-cu11")
NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2")  # of the releases since 11.2
INSTALL = "pip install nvidia-cuda-nvrtc (for a driver of CUDA 12: nvidia-cuda-nvrtc-cu12)"


class Nvrtc:
    """A loaded NVRTC. Raises OSError if it cannot be loaded."""

    def __init__(self, path: str) -> None:
        for builtins in Path(path).parent.glob("libnvrtc-builtins.so.*"):  # which it finds only if they are loaded
            ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        self.path = path
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        capabilities = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", capabilities)
        self.capabilities = tuple(capabilities)  # 75 stands for 7.5

    def compile(
        self, text: str, headers: Mapping[str, str], options: Sequence[str], names: Sequence[str]
    ) -> tuple[bytes, dict[str, str]]:
        """Return the cubin of a program, and the symbols in it of the kernels with these names.

        Raises RuntimeError, with NVRTC's messages, if the program has errors.
        """
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram", ctypes.byref(program), text.encode(), b"kernels.cu", len(headers),
            _strings(headers.values()), _strings(headers),
        )  # fmt: skip
        try:
            for name in names:
                self._call("nvrtcAddNameExpression", program, name.encode())
            if self._library.nvrtcCompileProgram(program, len(options), _strings(options)):
                log = self._read("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
                raise RuntimeError(f"NVRTC {self.version} cannot compile gradzip's kernels: {log}")
            symbols = {}
            for name in names:
                symbol = ctypes.c_char_p()
                self._call("nvrtcGetLoweredName", program, name.encode(), ctypes.byref(symbol))
                symbols[name] = (symbol.value or b"").decode()
            return self._read("CUBIN", program), symbols
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _read(self, what: str, program: ctypes.c_void_p) -> bytes:
        nbytes = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(nbytes))
        buffer = ctypes.create_string_buffer(nbytes.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, name: str, *arguments: object) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name}: {self._library.nvrtcGetErrorString(status).decode()}")


def _strings(values: object) -> object:
    encoded = [value.encode() for value in values]  # type: ignore[attr-defined]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def candidates() -> list[str]:
    """Return paths of NVRTC: in Python packages, in CUDA toolkits, then names for the loader to search for."""
    found = []
    for package in PACKAGES:
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            continue
        found += [str(file.locate()) for file in files if file.name in NAMES]
    for home in filter(None, (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda", sys.prefix)):
        found += [f"{home}/{folder}/{name}" for name in NAMES for folder in ("lib64", "lib")]
    return [path for path in found if Path(path).exists()] + list(NAMES)


@functools.cache
def load(path: str) -> Nvrtc | None:
    """Return the NVRTC at the path; None if there is none that works."""
    try:
        return Nvrtc(path)
    except (OSError, AttributeError):  # AttributeError: lacks a function
        return None


def find(driver: int = 0) -> Nvrtc:
    """Return the first NVRTC whose kernels the driver can load: of no newer major release of CUDA.

    Args:
        driver: the driver's version, as 13000 for 13.0; 0 for any.

    Raises RuntimeError if there is none, with what to install.
    """
    newer = None
    for path in candidates():
        major = int(re.findall(r"\.so\.(\d+)", path)[-1])
        if driver and major > driver // 1000:
            newer = newer or load(path)
        elif nvrtc := load(path):
            return nvrtc
    if newer:
        raise RuntimeError(
            f"got NVRTC {newer.version} ({newer.path}) and a driver for CUDA {driver // 1000}.{driver % 1000 // 10}, "
            f"expected an NVRTC that is no newer than the driver; {INSTALL}"
        )
    raise RuntimeError(
        f"gradzip was built without nvcc, and there is no NVRTC to compile its CUDA kernels; {INSTALL}, or build "
        "gradzip where nvcc is"
    )
