"""The way from checked tensors to the kernels' raw pointers."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

try:
    from gradzip import _C
except ImportError as error:  # reported when a kernel is called, so that `import gradzip` always works
    _missing: ImportError | None = error
else:
    _missing = None


def kernels() -> ModuleType:
    """The compiled module; RuntimeError with what to do when it was not built."""
    if _missing is not None:
        raise RuntimeError(
            f"gradzip's compiled kernels cannot be loaded ({_missing}); build them with `pip install .` "
            "in the gradzip source tree (needs g++)"
        ) from _missing
    return _C


def threads() -> int:
    return torch.get_num_threads()


def check(x: Any, dtype: torch.dtype | tuple[torch.dtype, ...], what: str, numel: int | None = None) -> Tensor:
    """`x`, contiguous, if it is a CPU tensor of that dtype and number of elements; ValueError with got and expected."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{what}: got {type(x).__name__}, expected a torch tensor")
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if x.dtype not in dtypes:
        raise ValueError(f"{what}: got {x.dtype}, expected {' or '.join(map(str, dtypes))}")
    if x.device.type != "cpu":
        raise ValueError(f"{what}: got a tensor on {x.device}, but this build of gradzip has kernels for the CPU only")
    if numel is not None and x.numel() != numel:
        raise ValueError(f"{what}: got {x.numel()} elements, expected {numel}")
    # Conjugation and negation may be pending: kernels read memory as it is.
    return x.resolve_conj().resolve_neg().contiguous()


def output(out: Tensor | None, numel: int, dtype: torch.dtype, what: str = "out") -> Tensor:
    """`out`, checked, or a new tensor: results are written where the caller wants them."""
    if numel < 0:
        raise ValueError(f"{what}: got {numel} elements to write, expected a number >= 0")
    if out is None:
        return torch.empty(numel, dtype=dtype)
    return in_place(out, dtype, what, numel)


def in_place(x: Any, dtype: torch.dtype, what: str, numel: int | None = None) -> Tensor:
    """`x`, checked, for a kernel to write to: it must be contiguous itself."""
    checked = check(x, dtype, what, numel)
    if checked is x:
        return x
    raise ValueError(f"{what}: got strides {x.stride()}, expected a contiguous tensor")
