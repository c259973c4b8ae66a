"""Codecs whose payloads have no header, and a length that follows from the number of elements alone."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ..memory.state import Key
from ..methods.base.compressor import Compressor
from ..methods.block_float import BlockFloat
from ..methods.quantize import QSGD
from ..ops import tensors as ops


class FixedCodec(ABC):
    """Encodes with a method's arguments, and decodes into a sum. Does not wait for the device."""

    seed: int  # of the random draws

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

    def __init__(self, method: BlockFloat) -> None:
        self.seed = method.seed
        self._bits, self._block = method.bits, method.block
        self._stochastic = method.rounding == "stochastic"

    def nbytes(self, numel: int) -> int:
        return ops.block_float_nbytes(-(-numel // self._block), self._bits, self._block)

    def encode_all(self, shards: Tensor, keys: list[Key], payloads: Tensor) -> None:
        bits = [key.bits for key in keys] if self._stochastic else None
        ops.block_float_encode_all(shards, self._bits, self._block, bits, payloads)

    def decode_sum(self, payloads: list[Tensor], out: Tensor, weight: float) -> None:
        ops.block_float_decode_sum(payloads, out, self._bits, self._block, weight)


class _QSGD(FixedCodec):
    """The norms (float32) and packed levels of `QSGD`, padded to 4 bytes."""

    def __init__(self, method: QSGD) -> None:
        self.seed = method.seed
        self._bits, self._bucket, self._norm = method.bits, method.bucket, method.norm

    def nbytes(self, numel: int) -> int:
        return -(-self._ends(numel)[1] // 4) * 4

    def encode_all(self, shards: Tensor, keys: list[Key], payloads: Tensor) -> None:
        bits = [key.bits for key in keys]
        _, norms = ops.quantize_packed_all(shards, self._bits, self._bucket, self._norm, bits, payloads)
        payloads[:, self._ends(shards.shape[1])[1] :].zero_()
        largest = torch.cat(ops.abs_max_all(list(shards)))
        norms.add_(largest[:, None] * 0.0)  # NaN if an element is not finite, which levels do not show

    def decode_sum(self, payloads: list[Tensor], out: Tensor, weight: float) -> None:
        terms = [(levels, norms) for norms, levels in (self._sections(payload, out.numel()) for payload in payloads)]
        # On a device, a norm that is not finite gives NaN.
        if not ops.on_device(out) and not all(bool(norms.isfinite().all()) for _, norms in terms):
            out.fill_(torch.nan)
        else:
            ops.quantize_decode_sum(terms, out, self._bits, self._bucket, weight)

    def _ends(self, numel: int) -> tuple[int, int]:
        norms_end = 4 * ops.num_buckets(numel, self._bucket)
        return norms_end, norms_end + ops.packed_nbytes(numel, self._bits)

    def _sections(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        norms_end, end = self._ends(numel)
        return payload[:norms_end].view(torch.float32), payload[norms_end:end]


def fixed_codec(compressor: Compressor, what: str) -> FixedCodec:
    """The codec of a compressor. Raises ValueError, which starts with `what`, for one that has none."""
    if isinstance(compressor, BlockFloat):
        return _BlockFloat(compressor)
    if isinstance(compressor, QSGD) and compressor.coding == "packed":
        return _QSGD(compressor)
    raise ValueError(
        f"{what}: got {compressor!r}, expected gradzip.BlockFloat() or gradzip.QSGD(coding='packed'), whose payloads "
        "have a fixed length"
    )
