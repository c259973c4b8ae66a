"""Where the tensors of a list are in the body of a payload."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...ops import tensors as ops
from .gather import attribute_payload_errors, payload_source


class Layout(NamedTuple):
    """A head of numbers, and then the code of each tensor of a list. Sections begin at multiples of 16 bytes."""

    head: int  # bytes of the head, without padding
    starts: np.ndarray  # of the codes within the body, uint64
    nbytes: int  # of the body


@functools.lru_cache(maxsize=256)
def layout_of(head: int, numels: tuple[int, ...], code_nbytes: Callable[[int], int]) -> Layout:
    """The layout of a body. code_nbytes: the bytes of the code of so many elements."""
    sizes = [_padded(code_nbytes(numel)) for numel in numels]
    ends = np.cumsum([_padded(head), *sizes])
    return Layout(head, ends[:-1].astype(np.uint64), int(ends[-1]))


def new_payload(layout: Layout, device: torch.device) -> Tensor:
    """A payload for a body with this layout. Zeros stand between its sections until they are written."""
    return ops.new_payloads([layout.nbytes], device)[0]


def _padded(nbytes: int) -> int:
    return -(-nbytes // ops.PAYLOAD_ALIGN) * ops.PAYLOAD_ALIGN


def bodies(payloads: Sequence[ops.Payload], layout: Layout) -> np.ndarray:
    """The addresses of the bodies of payloads with this layout, uint64. Raises PayloadError for another length."""
    for rank, payload in enumerate(payloads):
        if payload.body.numel() != layout.nbytes:
            with attribute_payload_errors(payload_source(rank, len(payloads))):
                raise ops.PayloadError(
                    f"corrupt payload: got {payload.body.numel()} bytes after the header, expected {layout.nbytes}"
                )
    return np.array([payload.body.data_ptr() for payload in payloads], np.uint64)


def check_scales(payloads: Sequence[ops.Payload], layout: Layout) -> None:
    """Check that the heads of payloads are scales, float32. On a device, elements become NaN instead.

    Raises:
        PayloadError: a scale is no finite number >= 0.
    """
    if ops.on_device(payloads[0].body):
        return
    for rank, payload in enumerate(payloads):
        scales = payload.body[: layout.head].view(torch.float32)
        if not bool(((scales >= 0) & (scales < math.inf)).all()):
            with attribute_payload_errors(payload_source(rank, len(payloads))):
                raise ops.PayloadError(
                    f"corrupt payload: its scales are {scales.tolist()[:3]}, expected finite numbers >= 0"
                )
