"""A quantized all-gather for FSDP2: ranks gather encoded shards, and all compute with the decoded weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import Gather
from ..collectives.traffic import Traffic
from ..memory.streams import no_autocast, use_on_current_stream
from ..methods.base.compressor import Compressor
from ..methods.block_float import BlockFloat
from ..ops import tensors as ops
from .connections import Connections
from .shards import FLOATING, Gathered


def all_gather(compressor: Compressor) -> AllGather:
    """An all-gather that sends quantized weights, for FSDP2's `set_custom_all_gather`.

        quantized = gradzip.fsdp.all_gather(gradzip.BlockFloat(bits=8, rounding="nearest"))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(quantized)

    Each rank encodes its shard, and gathers the payloads of all. All ranks, the owner of a shard too, compute with the
    decoded weights: those are the same bits on all ranks. The sharded parameters, which the optimizer updates, stay as
    they are. A weight is off by half a step of its block at most: 1/254 of the block's largest magnitude with 8 bits,
    1/14 with 4. The error does not add up over steps.

    All parameters are rounded, in blocks that know no boundaries. `quantize` leaves some exact.

    Args:
        compressor: `BlockFloat(rounding="nearest")`: the backward pass needs the weights of the forward pass.

    Raises:
        ValueError: another method, or one that exempts parameters.
    """
    if getattr(compressor, "exempted", None):
        expected = "expected none: gradzip.fsdp.quantize knows which they are"
        raise ValueError(f"all_gather: got a method with exempt parameters, {expected}")
    return AllGather(compressor)


class Passes:
    """Which forward pass of a model is in progress.

    Attributes:
        trains: whether a backward pass follows it. FSDP gathers without autograd.
    """

    trains = False

    def begin_forward(self, *_: object) -> None:
        """A hook of a module's forward pass, before FSDP's."""
        self.trains = torch.is_grad_enabled()


class AllGather:
    """What `all_gather` returns: an object as of torch's protocol of that name. Any number of modules may share it.

    Payload: the blocks of `BlockFloat`, then the elements of the exact parameters as they are. No header: lengths
    follow from the shape. If a weight is not finite, nor is its block. On a device, the host does not wait.
    Deterministic.

    Args:
        compressor: as of `all_gather`.
        gathered: of the only module that uses the object.
        exact: the names of its parameters that are not rounded.
        connections: of all modules of a model.
        keep: keep payloads from the forward pass to the backward pass, which then gathers nothing: if these passes do.
    """

    def __init__(
        self,
        compressor: Compressor,
        gathered: Gathered | None = None,
        exact: frozenset[str] = frozenset(),
        connections: Connections | None = None,
        keep: Passes | None = None,
    ) -> None:
        if not isinstance(compressor, BlockFloat) or compressor.rounding != "nearest":
            expected = "expected gradzip.BlockFloat(rounding='nearest'): both passes need the same weights"
            raise ValueError(f"all_gather: got {compressor!r}, {expected}")
        self.compressor = compressor
        self._gathered, self._exact, self._keep = gathered, exact, keep
        self._kept: list[Tensor] | None = None
        self._connections = connections or Connections(compressor, "all_gather")

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has sent, those to itself included, and bytes of its weights."""
        return self.compressor.traffic

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialized memory for what FSDP passes to the call."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather the shards of all ranks.

        Args:
            output_tensor: all shards, in rank order.
            input_tensor: this rank's shard, flat; may be its part of `output_tensor`.
            async_op: FSDP waits for nothing but the stream either way: on a device the call only queues its work.

        Raises:
            TypeError: weights that are not float32, bfloat16 or float16.
            RuntimeError: the ranks of the group use different methods; in the first call.
        """
        if input_tensor.dtype not in FLOATING:
            got = f"got weights of {input_tensor.dtype} (uint8: of several dtypes)"
            raise TypeError(f"all_gather: {got}, expected float32, bfloat16 or float16; shard others apart")
        with no_autocast(input_tensor.device):
            self._gather(output_tensor, input_tensor, group)
        self.traffic.bytes_dense += input_tensor.nbytes

    def _gather(self, output: Tensor, weights: Tensor, group: dist.ProcessGroup) -> None:
        """Write the decoded weights of all ranks to `output`."""
        gathered, kept = self._gathered, self._kept
        is_again = gathered is not None and gathered.is_again
        self._kept = None
        if is_again and kept:
            payloads = list(map(use_on_current_stream, kept))
        else:
            payloads = self._sent(self._encoded(*self._split(weights)), group)
            if self._keep and self._keep.trains and gathered and gathered.is_gathered_twice and not is_again:
                self._kept = payloads
        for payload, of_rank in zip(payloads, output.view(len(payloads), -1)):
            rounded, exact = self._split(of_rank)
            if values := self._decoded(payload, rounded, exact):
                torch._foreach_copy_(rounded, values)

    def _sent(self, payload: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
        """The payloads of all ranks, of one length."""
        return self._connections.engine(group, payload.device).run(Gather(payload, same_length=True), "all_gather")

    def _encoded(self, rounded: Sequence[Tensor], exact: Sequence[Tensor]) -> Tensor:
        """The payload of a rank's weights: of those to round, and of exact ones."""
        parts, method = [piece.contiguous().view(torch.uint8) for piece in exact], self.compressor
        if rounded:
            vector = torch.cat([piece.float() for piece in rounded])
            parts.insert(0, ops.block_float_encode(vector, method.bits, method.block))
        return torch.cat(parts)

    def _decoded(self, payload: Tensor, rounded: Sequence[Tensor], exact: Sequence[Tensor]) -> list[Tensor]:
        """The values (float32) of what a payload has of rounded weights. Writes the exact ones."""
        numels, method = list(map(Tensor.numel, rounded)), self.compressor
        end = ops.block_float_nbytes(-(-sum(numels) // method.block), method.bits, method.block) if numels else 0
        vector = torch.empty(sum(numels), device=payload.device)
        if numels:
            ops.block_float_decode([payload[:end]], vector, method.bits, method.block)
        for piece in exact:
            start, end = end, end + piece.nbytes
            piece.view(torch.uint8).copy_(payload[start:end])
        return list(vector.split_with_sizes(numels)) if numels else []

    def _split(self, weights: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views of a rank's weights: those that are rounded, and those that are exempt."""
        found: tuple[list[Tensor], list[Tensor]] = [], []
        if self._gathered is None:
            found[0].append(weights)
            return found
        numels = self._gathered.numels
        if sum(numels.values()) != weights.numel():
            got = f"got {weights.numel()} elements of module {self._gathered.name!r}"
            raise RuntimeError(f"all_gather: {got}, expected {sum(numels.values())}: call quantize after fully_shard")
        for name, piece in zip(numels, weights.split_with_sizes(list(numels.values()))):
            if piece.numel():
                found[name in self._exact].append(piece)
        return found


class DeltaGather(AllGather):
    """An all-gather that sends differences to the weights that all ranks have: the reference, which each keeps whole.

    The first gather is exact. Each later one encodes what a rank's weights are away from its part of the reference, and
    all ranks add what they decode. What rounding loses is a part of the next difference. Ranks gather once after each
    change of the parameters: other passes, such as the backward pass, take the reference.

    Memory: the gathered weights of the module, on each rank.
    """

    _gathered: Gathered

    def __init__(
        self, compressor: Compressor, gathered: Gathered, exact: frozenset[str], connections: Connections
    ) -> None:
        super().__init__(compressor, gathered, exact, connections)
        self._reference: Tensor | None = None
        self._own: Tensor | None = None  # this rank's part of the reference, as loaded
        self._version: tuple[int, ...] = ()  # of the parameters that are in the reference

    def _gather(self, output: Tensor, weights: Tensor, group: dist.ProcessGroup) -> None:
        version = self._gathered.version
        if self._reference is None:
            first = weights if self._own is None else self._own.to(weights)
            payloads = self._sent(first.contiguous().view(torch.uint8), group)
            self._reference = torch.cat(payloads).view(weights.dtype)
            self._version = () if self._own is not None else version
            self._own = None
        if version != self._version and not self._gathered.is_again:
            rows = self._reference.view(-1, weights.numel())
            mine, exact = self._split(weights)
            rounded, _ = self._split(rows[group.rank()])
            payloads = self._sent(self._encoded([a.float() - b for a, b in zip(mine, rounded)], exact), group)
            for payload, row in zip(payloads, rows):
                rounded, exact = self._split(row)
                if changes := self._decoded(payload, rounded, exact):
                    torch._foreach_add_(rounded, changes)
            self._version = version
        output.copy_(use_on_current_stream(self._reference))

    @property
    def own(self) -> Tensor | None:
        """A copy of this rank's part of the reference, on the CPU. None before the first gather."""
        if self._reference is None:
            return self._own
        rank, size = self._gathered.place
        return self._reference.view(size, -1)[rank].cpu().clone()

    def load(self, own: Tensor) -> None:
        """Load this rank's part of the reference. Ranks gather it, exactly, before the next difference."""
        self._reference, self._own = None, own
