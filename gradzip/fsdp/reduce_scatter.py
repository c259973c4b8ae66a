"""A quantized reduce-scatter for FSDP2: an all-to-all of encoded shards, which their owners add in float32."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import AllToAll
from ..collectives.traffic import Traffic
from ..memory.state import Key
from ..memory.streams import no_autocast
from ..methods.base.compressor import Compressor
from ..methods.block_float import BlockFloat
from ..methods.quantize import QSGD
from ..ops import tensors as ops
from .connections import Connections


def reduce_scatter(compressor: Compressor) -> ReduceScatter:
    """A reduce-scatter that sends quantized gradients, for FSDP2's `set_custom_reduce_scatter`.

        quantized = gradzip.fsdp.reduce_scatter(gradzip.BlockFloat(bits=8))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(quantized)

    Each rank encodes its gradient of each shard, and sends it to the shard's owner, which adds what it receives in
    float32. An element is rounded once on each rank, and the sum not at all: the error of the mean is at most the mean
    of the ranks' errors, and its expectation is 0 (but for `BlockFloat(rounding="nearest")`, which is biased).

    There is no error feedback, whatever the compressor's `error_feedback` is: a residual would have the size of the
    whole gradient on each rank, which FSDP avoids.

    Args:
        compressor: `BlockFloat`, or `QSGD` with coding="packed". Others have no payloads of a fixed length.

    Raises:
        ValueError: another method.
    """
    return ReduceScatter(compressor)


class ReduceScatter:
    """What `reduce_scatter` returns: an object as of torch's protocol of that name. Any number of modules may share it.

    If a gradient is not finite on any rank, neither is the mean of its block. On a device, the host does not wait.

    Payload: for each rank, the blocks of `BlockFloat`, or the norms (float32) and packed levels of `QSGD`, padded to 4
    bytes. No header: lengths follow from the shape.

    Deterministic for the compressor's seed, and the number of calls so far.
    """

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self._codec = _codec_of(compressor)
        self._connections = Connections(compressor, "reduce_scatter")
        self._calls = 0

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has sent, those to itself included, and bytes of the gradients."""
        return self.compressor.traffic

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialized memory for what FSDP passes to the call."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Reduce `input_tensor`, and write this rank's shard of the result to `output_tensor`.

        Args:
            output_tensor: a shard, flat.
            input_tensor: all shards, concatenated in rank order.
            op: AVG or SUM.
            async_op: must be False. On a device the call only queues its work, on the current stream.

        Raises:
            ValueError: another operation.
            RuntimeError: the ranks of the group use different methods; in the first call.
        """
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM) or async_op:
            divides = "with set_gradient_divide_factor, also call set_force_sum_reduction_for_comms(True)"
            got = "got a scaled or an asynchronous operation"
            raise ValueError(f"reduce_scatter: {got}, expected AVG or SUM: {divides}")
        with no_autocast(input_tensor.device):
            engine = self._connections.engine(group, input_tensor.device)
            shards = input_tensor.view(engine.size, -1)
            if shards.dtype not in ops.HALF:
                shards = shards.float()
            nbytes = self._codec.nbytes(shards.shape[1])
            payloads = torch.empty((engine.size, nbytes), dtype=torch.uint8, device=shards.device)
            names = (f"reduce_scatter[{i}]" for i in range(engine.size))
            keys = [Key(self._codec.method.seed, self._calls, name, engine.rank) for name in names]
            self._codec.encode_all(shards, keys, payloads)
            self._calls += 1
            sent = AllToAll(payloads.view(-1), (nbytes,) * engine.size, same_length=True)
            received = engine.run(sent, "reduce_scatter")
            written = (torch.float32, *(ops.HALF if engine.size <= ops.MOST_HALF_TERMS else ()))
            total = output_tensor if output_tensor.dtype in written else output_tensor.float()
            self._codec.decode_sum(received, total, 1.0 if op == dist.ReduceOp.SUM else 1.0 / engine.size)
            if total is not output_tensor:
                output_tensor.copy_(total)
        self.traffic.bytes_dense += input_tensor.nbytes


class _Codec(ABC):
    """Encodes with a method's arguments, and decodes into a sum. Does not wait for the device.

    Payloads have no header, and a length that follows from the number of elements alone.
    """

    def __init__(self, method: Any) -> None:
        self.method = method

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Bytes of the payload of `numel` elements: a multiple of 4."""

    @abstractmethod
    def encode_all(self, shards: Tensor, keys: list[Key], payloads: Tensor) -> None:
        """Encode the rows of `shards` (float32 or 16-bit), each with its key, to those of `payloads` (uint8)."""

    @abstractmethod
    def decode_sum(self, payloads: list[Tensor], out: Tensor, weight: float) -> None:
        """Write weight * the sum of decoded payloads, added in order, to `out` (flat, float32 or 16-bit).

        If an element of a gradient was not finite, neither is the sum of its block.
        """


class _BlockFloat(_Codec):
    """The blocks of `BlockFloat`."""

    def nbytes(self, numel: int) -> int:
        bits, block = self.method.bits, self.method.block
        return ops.block_float_nbytes(-(-numel // block), bits, block)

    def encode_all(self, shards: Tensor, keys: list[Key], payloads: Tensor) -> None:
        bits = [key.bits for key in keys] if self.method.rounding == "stochastic" else None
        ops.block_float_encode_all(shards, self.method.bits, self.method.block, bits, payloads)

    def decode_sum(self, payloads: list[Tensor], out: Tensor, weight: float) -> None:
        ops.block_float_decode_sum(payloads, out, self.method.bits, self.method.block, weight)


class _QSGD(_Codec):
    """The norms (float32) and packed levels of `QSGD`, padded to 4 bytes."""

    def nbytes(self, numel: int) -> int:
        return -(-self._ends(numel)[1] // 4) * 4

    def encode_all(self, shards: Tensor, keys: list[Key], payloads: Tensor) -> None:
        method, bits = self.method, [key.bits for key in keys]
        _, norms = ops.quantize_packed_all(shards, method.bits, method.bucket, method.norm, bits, payloads)
        payloads[:, self._ends(shards.shape[1])[1] :].zero_()
        largest = torch.linalg.vector_norm(shards, math.inf, dim=1, dtype=torch.float32)
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


def _codec_of(compressor: Compressor) -> _Codec:
    if isinstance(compressor, BlockFloat):
        return _BlockFloat(compressor)
    if isinstance(compressor, QSGD) and compressor.coding == "packed":
        return _QSGD(compressor)
    expected = "expected gradzip.BlockFloat() or gradzip.QSGD(coding='packed'), whose payloads have a fixed length"
    raise ValueError(f"reduce_scatter: got {compressor!r}, {expected}")
