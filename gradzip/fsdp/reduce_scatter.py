"""A quantized reduce-scatter for FSDP2: an all-to-all of encoded shards, which their owners add in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..averaging.session import Session
from ..collectives import AllToAll
from ..collectives.traffic import Traffic
from ..memory.state import Key
from ..memory.streams import no_autocast
from ..methods.base.compressor import Compressor
from .fixed_codec import fixed_codec


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
        self._codec = fixed_codec(compressor, "reduce_scatter")
        self._sessions: dict[dist.ProcessGroup, Session] = {}
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
            what_to_do = "with set_gradient_divide_factor, also call set_force_sum_reduction_for_comms(True)"
            raise ValueError(f"reduce_scatter: got a scaled or an asynchronous operation: {what_to_do}")
        with no_autocast(input_tensor.device):
            engine = (self._sessions.get(group) or self._connect(group, input_tensor.device)).engine
            shards = input_tensor.view(engine.size, -1).float()
            nbytes = self._codec.nbytes(shards.shape[1])
            payloads = torch.empty((engine.size, nbytes), dtype=torch.uint8, device=shards.device)
            names = (f"reduce_scatter[{i}]" for i in range(engine.size))
            keys = [Key(self._codec.method.seed, self._calls, name, engine.rank) for name in names]
            self._codec.encode_all(shards, keys, payloads)
            self._calls += 1
            sent = AllToAll(payloads.view(-1), (nbytes,) * engine.size, same_length=True)
            received = engine.run(sent, "reduce_scatter")
            total = output_tensor if output_tensor.dtype == torch.float32 else output_tensor.float()
            self._codec.decode_sum(received, total, 1.0 if op == dist.ReduceOp.SUM else 1.0 / engine.size)
            if total is not output_tensor:
                output_tensor.copy_(total)
        self.traffic.bytes_dense += input_tensor.nbytes

    def _connect(self, group: dist.ProcessGroup, device: torch.device) -> Session:
        session = self._sessions[group] = Session(self.compressor, "reduce_scatter")
        session.connect(session.torch_engine(group, device), {}, "handshake")
        return session
