"""Codecs whose payloads have no header, and a length that follows from the number of elements alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from ..memory.state import Key
from ..methods.base.compressor import Compressor
from ..methods.block_float import BlockFloat
from ..methods.quantize import QSGD
from ..ops import tensors as ops


class FixedCodec(ABC):
    """Encodes with a method's arguments, and decodes into a sum. Does not wait for the device."""

    def __init__(self, method: Any) -> None:
        self.method = method

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Bytes of the payload of `numel` elements: a multiple of 4."""

    @abstractmethod
    def encode_all(self, shards: Tensor, keys: list[Key], payloads: Tensor) -> None:
        """Encode the rows of `shards` (float32), each with its key, to those of `payloads` (uint8)."""

    @abstractmethod
    def decode_sum(self, payloads: list[Tensor], out: Tensor, weight: float) -> None:
        """Write weight * the sum of decoded payloads, added in order, to `out` (float32, flat).

        If an element of a gradient was not finite, neither is the sum of its block.
        """


class _BlockFloat(FixedCodec):
    """The blocks of `BlockFloat`."""

    def nbytes(self, numel: int) -> int:
        bits, block = self.method.bits, self.method.block
        return ops.block_float_nbytes(-(-numel // block), bits, block)

    def encode_all(self, shards: Tensor, keys: list[Key], payloads: Tensor) -> None:
        bits = [key.bits for key in keys] if self.method.rounding == "stochastic" else None
        ops.block_float_encode_all(shards, self.method.bits, self.method.block, bits, payloads)

    def decode_sum(self, payloads: list[Tensor], out: Tensor, weight: float) -> None:
        ops.block_float_decode_sum(payloads, out, self.method.bits, self.method.block, weight)


class _QSGD(FixedCodec):
    """The norms (float32) and packed levels of `QSGD`, padded to 4 bytes."""

    def nbytes(self, numel: int) -> int:
        return -(-self._ends(numel)[1] // 4) * 4

    def encode_all(self, shards: Tensor, keys: list[Key], payloads: Tensor) -> None:
        method, bits = self.method, [key.bits for key in keys]
        _, norms = ops.quantize_packed_all(shards, method.bits, method.bucket, method.norm, bits, payloads)
        payloads[:, self._ends(shards.shape[1])[1] :].zero_()
        largest = torch.cat(ops.abs_max_all(list(shards)))
        norms.add_(largest[:, None] * 0.0)  # NaN if an element is not finite, which levels do not show

    def decode_sum(self, payloads: list[Tensor], out: Tensor, weight: float) -> None:
        norms_end, end = self._ends(out.numel())
        terms = [(payload[norms_end:end], payload[:norms_end].view(torch.float32)) for payload in payloads]
        # On a device, a norm that is not finite gives NaN.
        if not ops.on_device(out) and not all(bool(norms.isfinite().all()) for _, norms in terms):
            out.fill_(torch.nan)
        else:
            ops.quantize_decode_sum(terms, out, self.method.bits, self.method.bucket, weight)

    def _ends(self, numel: int) -> tuple[int, int]:
        """Where the norms of a payload end, and where its levels do."""
        norms_end = 4 * ops.num_buckets(numel, self.method.bucket)
        return norms_end, norms_end + ops.packed_nbytes(numel, self.method.bits)


def fixed_codec(compressor: Compressor, what: str) -> FixedCodec:
    """The codec of a compressor. Raises ValueError, which starts with `what`, for one that has none."""
    if isinstance(compressor, BlockFloat):
        return _BlockFloat(compressor)
    if isinstance(compressor, QSGD) and compressor.coding == "packed":
        return _QSGD(compressor)
    expected = "expected gradzip.BlockFloat() or gradzip.QSGD(coding='packed')"
    raise ValueError(f"{what}: got {compressor!r}, {expected}, whose payloads have a fixed length")
