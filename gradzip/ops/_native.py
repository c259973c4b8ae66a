"""The way from checked tensors to the kernels' raw pointers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


def on_cuda(x: Tensor) -> bool:
    """Whether the CUDA kernels are for x."""
    return x.device.type == "cuda"


@contextmanager
def _stream(device: torch.device) -> Iterator[int]:
    """Makes `device` the current one; its current stream, as an address."""
    with torch.cuda.device(device):
        yield torch.cuda.current_stream(device).cuda_stream


def launch(
    name: str, device: torch.device, *arguments: float, workspace_for: int | tuple[int, ...] | None = None
) -> None:
    """Queues a primitive of csrc/cuda/ops.h on the current stream of `device`, and does not wait for it.

    workspace_for: the sizes for which it is asked what workspace it needs, where it takes one.
    """
    module = kernels().cuda
    with _stream(device) as stream:
        if workspace_for is None:
            getattr(module, name)(*arguments, stream)
        else:
            # Freed when the call returns: whoever gets the memory next is queued behind.
            sizes = workspace_for if isinstance(workspace_for, tuple) else (workspace_for,)
            nbytes = getattr(module, f"{name}_workspace")(*sizes)
            workspace = torch.empty(nbytes, dtype=torch.uint8, device=device)
            getattr(module, name)(*arguments, workspace.data_ptr(), stream)


def run(
    name: str,
    where: Tensor,
    *arguments: float,
    flag: bool = False,
    workspace_for: int | tuple[int, ...] | None = None,
) -> Any:
    """Calls the primitive that takes the same arguments on both devices, on that of the tensor `where`.

    Returns what the CPU's returns. On CUDA, where nothing waits, None, or with `flag` what it reports failure by: int32
    of 1 element, 0 if it did not fail.
    """
    if not on_cuda(where):
        return getattr(kernels(), name)(*arguments, threads())
    failed = torch.zeros(1, dtype=torch.int32, device=where.device) if flag else None
    extra = () if failed is None else (failed.data_ptr(),)
    launch(name, where.device, *arguments, *extra, workspace_for=workspace_for)
    return failed


def check(
    x: Any,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    what: str,
    numel: int | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """`x`, contiguous, if it is a tensor of that dtype, number of elements and device, one that there are kernels for;
    ValueError with got and expected."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{what}: got {type(x).__name__}, expected a torch tensor")
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if x.dtype not in dtypes:
        raise ValueError(f"{what}: got {x.dtype}, expected {' or '.join(map(str, dtypes))}")
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{what}: got a tensor on {x.device}, expected one on the CPU or a CUDA device")
    if on_cuda(x) and not kernels().cuda_built:
        raise ValueError(
            f"{what}: got a tensor on {x.device}, but this build of gradzip has kernels for the CPU only; "
            "build it where nvcc is"
        )
    if device is not None and x.device != device:
        raise ValueError(f"{what}: got a tensor on {x.device}, expected one on {device} like the others")
    if numel is not None and x.numel() != numel:
        raise ValueError(f"{what}: got {x.numel()} elements, expected {numel}")
    # Conjugation and negation may be pending: kernels read memory as it is.
    return x.resolve_conj().resolve_neg().contiguous()


def output(out: Tensor | None, numel: int, dtype: torch.dtype, device: torch.device, what: str = "out") -> Tensor:
    """`out`, checked, or a new tensor: results are written where the caller wants them."""
    if numel < 0:
        raise ValueError(f"{what}: got {numel} elements to write, expected a number >= 0")
    if out is None:
        return torch.empty(numel, dtype=dtype, device=device)
    return in_place(out, dtype, what, numel, device)


def in_place(
    x: Any, dtype: torch.dtype, what: str, numel: int | None = None, device: torch.device | None = None
) -> Tensor:
    """`x`, checked, for a kernel to write to: it must be contiguous itself."""
    checked = check(x, dtype, what, numel, device)
    if checked is x:
        return x
    raise ValueError(f"{what}: got strides {x.stride()}, expected a contiguous tensor")
