"""`python -m gradzip.ops.nvrtc 80 90`: compile all kernels for these compute capabilities, into the cache."""

from __future__ import annotations

import sys

from gradzip import _C

from . import compile_module


def units() -> dict[tuple[str, str], list[str]]:
    """Return the kernels that the launchers ask for, by module and unit: those that are compiled together."""
    found: dict[tuple[str, str], list[str]] = {}
    for module, name, _, unit in _C.cuda.kernels():
        found.setdefault((module, unit), []).append(name)
    return dict(sorted(found.items()))


def main(arguments: list[str]) -> None:
    if not getattr(_C, "cuda_nvrtc", False):
        sys.exit("this build of gradzip compiles no kernels at run time: its CUDA kernels are nvcc's, or it has none")
    capabilities = [int(argument.replace(".", "")) for argument in arguments]
    if not capabilities:
        sys.exit("usage: python -m gradzip.ops.nvrtc CAPABILITY...    for example 80 90")
    for capability in capabilities:
        for (module, _), names in units().items():
            compile_module(_C.cuda.sources(), module, names, capability)


if __name__ == "__main__":
    main(sys.argv[1:])
