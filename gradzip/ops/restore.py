"""Tensors that get their old values back if a step turns out not to be finite."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import _native


class Restoration(NamedTuple):
    """A tensor to overwrite.

    target: dense, any dtype: its elements fill its memory, in any order. source: what it gets, of the same dtype, shape
    and strides; None for `fill` in all elements (of complex numbers, in both parts), 0 if the dtype is not a
    floating-point or complex one.
    """

    target: Tensor
    source: Tensor | None
    fill: float = 0.0


def restore_unless_finite(number: Tensor, restorations: Sequence[Restoration]) -> None:
    """Overwrite tensors if a number is inf or NaN; leave them as they are if it is finite.

    number: float32, 1 element. All tensors are on its device; those that are written to overlap no other. On CUDA in
    one launch for 96 of them, which does not wait for the device, and reads nothing but the number if that is finite.

    Raises ValueError, before anything is written, for tensors that do not fit.

    >>> x = torch.ones(3)
    >>> restore_unless_finite(torch.tensor(2.0), [Restoration(x, None)])
    >>> restore_unless_finite(torch.tensor(torch.inf), [Restoration(x[1:], None)])
    >>> x
    tensor([1., 0., 0.])
    """
    number = _native.check(number, torch.float32, "restore_unless_finite: number", 1)
    device = number.device
    table = array("Q")  # struct Restoration of csrc/common/restore.h
    for target, source, fill in restorations:
        _check_target(target, device)
        if source is not None:
            _check_source(source, target)
        pattern = 0 if source is not None else pattern_of(fill, target.dtype)
        nbytes = target.numel() * target.element_size()
        table.extend((target.data_ptr(), _native.address(source), nbytes, pattern))
    if restorations:
        _native.run("restore", number, number.data_ptr(), table.buffer_info()[0], len(restorations))


def _check_target(target: Tensor, device: torch.device) -> None:
    what = "restore_unless_finite: target"
    if not isinstance(target, Tensor):
        raise ValueError(f"{what}: got {type(target).__name__}, expected a torch tensor")
    if target.device != device:
        raise ValueError(f"{what}: got a tensor on {target.device}, expected one on {device} like the number")
    if not target.is_contiguous() and not _is_dense(target):
        raise ValueError(
            f"{what}: got shape {tuple(target.shape)} and strides {target.stride()}, expected dense memory"
        )
    if target.is_conj() or target.is_neg():
        raise ValueError(f"{what}: got a lazily conjugated or negated view, expected a tensor to write to")
    if getattr(target, _native.READ_ONLY, False):
        raise ValueError(f"{what}: got a read-only array, expected one to write to; pass a copy")


def _check_source(source: Tensor, target: Tensor) -> None:
    got, expected = [
        (x.dtype, tuple(x.shape), _strides(x), x.device, x.is_conj(), x.is_neg()) for x in (source, target)
    ]
    if got == expected:
        return
    shown = [f"{x.dtype} of shape {tuple(x.shape)} and strides {x.stride()} on {x.device}" for x in (source, target)]
    lazy = ", lazily conjugated or negated" if source.is_conj() or source.is_neg() else ""
    raise ValueError(f"restore_unless_finite: source: got {shown[0]}{lazy}, expected {shown[1]} like its target")


def _strides(x: Tensor) -> list[int]:
    """The strides that matter: others have one element only, or are those of an empty tensor."""
    return [stride for size, stride in zip(x.shape, x.stride()) if size > 1] if x.numel() else []


def _is_dense(x: Tensor) -> bool:
    """Whether the elements of x fill its memory, each its own, in any order."""
    numel = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride()) if size > 1):
        if stride != numel:
            return False
        numel *= size
    return True


def pattern_of(fill: float, dtype: torch.dtype) -> int:
    """8 bytes of elements of a dtype that are all `fill`."""
    if not fill and str(fill) != "-0.0":
        return 0
    if not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"restore_unless_finite: got fill = {fill} for {dtype}, expected 0")
    part = dtype.to_real() if dtype.is_complex else dtype
    whole = torch.full((8 // part.itemsize,), fill, dtype=torch.float64, device="cpu").to(part)
    return int.from_bytes(bytes(whole.view(torch.uint8).tolist()), "little")
