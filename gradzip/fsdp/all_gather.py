"""A quantized all-gather for FSDP2: ranks gather encoded shards, and all compute with the decoded weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import Gather
from ..collectives.engine import Engine
from ..collectives.traffic import Traffic
from ..memory.streams import no_autocast, use_on_current_stream
from ..methods.base.compressor import Compressor
from ..methods.block_float import BlockFloat
from ..ops import tensors as ops
from .connections import Connections, check_method
from .shards import FLOATING, Gathered, begins_pass

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13


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
        compressor: `BlockFloat(rounding="nearest")`: the backward pass needs the weights of the forward pass. Its
            `error_feedback` has no effect.

    Raises:
        ValueError: another method, or one that exempts parameters or has error_feedback="owner".
    """
    return AllGather(compressor)


class Passes:
    """The forward passes of a model.

    Attributes:
        trains: whether a backward pass follows the one in progress. FSDP gathers without autograd.
        deltas: the gathers of the model that send differences.
    """

    def __init__(self) -> None:
        self.trains = False
        self.deltas: list[DeltaGather] = []
        self._outermost: Any = None  # module of the pass in progress

    def begin_forward(self, module: Any, *_: object) -> None:
        """A hook of each module's forward pass, before FSDP's."""
        self.trains = torch.is_grad_enabled()
        if begins_pass(module):
            self._outermost = module
            self._forget()

    def end_forward(self, module: Any, *_: object) -> None:
        """A hook of each module's forward pass, after FSDP's, also if it has failed."""
        if module is self._outermost:
            self._outermost = None
            self._forget()

    def _forget(self) -> None:
        for delta in self.deltas:
            delta.has_changed = None

    def agree(self, asks: DeltaGather, engine: Engine, device: torch.device) -> None:
        """Have the ranks of a group agree on whether a module has changed: once in a pass for all. The host waits.

        Modules that are gathered where no hook tells of a pass, as by `unshard()` and in the methods of
        `register_fsdp_forward_method`, ask one by one.
        """
        asking = [asks]
        if self._outermost is not None:
            asking = [delta for delta in self.deltas if delta.engine is engine and not delta.is_reduced]
        flags = torch.tensor([delta.is_written for delta in asking], dtype=torch.uint8).to(device)
        of_ranks = engine.run(Gather(flags, same_length=True), "changed")
        for delta, has_changed in zip(asking, torch.stack(of_ranks).amax(0).tolist()):
            delta.has_changed = bool(has_changed)


class AllGather:
    """What `all_gather` returns: an object as of torch's protocol of that name. Any number of modules may share it.

    Payload: the blocks of `BlockFloat`, then the elements of the exact parameters as they are. No header: lengths
    follow from the shape. If a weight is not finite, nor is its block. On a device, the host does not wait.
    Deterministic. With `reshard_after_forward` as a number, backward passes gather the decoded weights as they are.

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
        check_method(compressor, "all_gather", exempts=gathered is not None)
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
        if self._gathered is not None and self._gathered.is_among_few:
            self.traffic.count(input_tensor.nbytes, group.size() - 1)
            _all_gather(output_tensor, input_tensor, group)
        else:
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
        self._decode(payloads, output.view(len(payloads), -1), torch._foreach_copy_)

    def _sent(self, payload: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
        """The payloads of all ranks, of one length."""
        engine = self._connections.engine(group, payload.device)
        payloads: list[Tensor] = engine.run(Gather(payload, same_length=True), "all_gather")
        return payloads

    def _encoded(self, rounded: Sequence[Tensor], exact: Sequence[Tensor]) -> Tensor:
        """The payload of a rank's weights: of those to round, and of exact ones."""
        parts, method = [piece.contiguous().view(torch.uint8) for piece in exact], self.compressor
        if rounded:
            vector = torch.cat([piece.float() for piece in rounded])
            parts.insert(0, ops.block_float_encode(vector, method.bits, method.block))
        return torch.cat(parts)

    def _decode(
        self, payloads: Sequence[Tensor], rows: Tensor, write: Callable[[list[Tensor], list[Tensor]], object]
    ) -> None:
        """Decode the payloads of all ranks in one call.

        rows: of the weights, one for each rank. write: called with the views of rounded weights, and decoded values
            (float32). Exact weights are copied.
        """
        splits, method = list(map(self._split, rows)), self.compressor
        numels = list(map(Tensor.numel, splits[0][0]))
        blocks = -(-sum(numels) // method.block)
        end = ops.block_float_nbytes(blocks, method.bits, method.block)
        if numels:
            values = torch.empty((len(rows), blocks * method.block), device=rows.device)
            ops.block_float_decode([payload[:end] for payload in payloads], values, method.bits, method.block)
            of_ranks = (row[: sum(numels)].split_with_sizes(numels) for row in values)
            write([piece for rounded, _ in splits for piece in rounded], list(itertools.chain.from_iterable(of_ranks)))
        exact = [[piece.view(torch.uint8) for piece in of_rank] for _, of_rank in splits]
        if exact[0]:
            nbytes = list(map(Tensor.numel, exact[0]))
            copies = (payload[end:].split_with_sizes(nbytes) for payload in payloads)
            torch._foreach_copy_(
                list(itertools.chain.from_iterable(exact)), list(itertools.chain.from_iterable(copies))
            )

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
    all ranks add what they decode. What rounding loses is a part of the next difference. Where nothing has changed,
    ranks take the reference.

    All ranks must decide alike whether to gather. FSDP runs the same passes of a module on all of them, so they need
    not ask:

    * In a backward pass, a module has the weights of its forward pass.
    * Once its gradients have been reduced, a module gathers in its next forward pass. That is each step of a training.

    Any other forward pass may find new weights, or not: in an evaluation, between backward passes that accumulate
    gradients without reducing them, of a frozen module. An optimizer's step, an EMA swap or a loaded checkpoint writes
    parameters of this rank, maybe of no other. There, ranks tell each other whether torch has counted a write: in the
    first such module of a pass for all, one byte each, for which the host waits.

    Memory: the gathered weights of the module, on each rank.

    Attributes:
        engine: of the group, once it has gathered.
        is_reduced: whether gradients of the module have been reduced since the last gather.
        has_changed: whether its weights have been written on any rank, as the ranks have agreed in this pass. None:
            they have not, or not since the last gather.
    """

    _gathered: Gathered

    def __init__(
        self,
        compressor: Compressor,
        gathered: Gathered,
        exact: frozenset[str],
        connections: Connections,
        passes: Passes,
    ) -> None:
        super().__init__(compressor, gathered, exact, connections)
        self._passes = passes
        passes.deltas.append(self)
        self.engine: Engine | None = None
        self.is_reduced = False
        self.has_changed: bool | None = None
        self._reference: Tensor | None = None
        self._loaded: Mapping[str, Any] | None = None  # of this rank, until the ranks have gathered it
        self._version: tuple[int, ...] = ()  # of the parameters that are in the reference

    @property
    def is_written(self) -> bool:
        """Whether this rank's parameters have been written since the last gather."""
        return self._gathered.version != self._version

    def _gather(self, output: Tensor, weights: Tensor, group: dist.ProcessGroup) -> None:
        is_again = self._gathered.is_again
        if self._reference is None:
            self._reference = self._exact_reference(weights, group)
        elif not (is_again or self.is_reduced) and self.has_changed is None:
            self._passes.agree(self, self._connections.engine(group, weights.device), weights.device)
        if not is_again and (self.has_changed or self.is_reduced):
            # A difference from what is not finite is not finite, also when the weight is again.
            rows = self._reference.view(-1, weights.numel()).nan_to_num_(0.0, 0.0, 0.0)
            mine, exact = self._split(weights)
            rounded, _ = self._split(rows[group.rank()])
            payloads = self._sent(self._encoded([a.float() - b for a, b in zip(mine, rounded)], exact), group)
            self._decode(payloads, rows, torch._foreach_add_)
            self._version = self._gathered.version
        if not is_again:
            self.has_changed, self.is_reduced = None, False
        output.copy_(use_on_current_stream(self._reference))

    def _exact_reference(self, weights: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The parts of all ranks: as loaded, where they are, and otherwise the weights. The host waits."""
        loaded, self._loaded = self._loaded, None
        part, is_due = weights, False
        if loaded is not None:
            part, is_due = loaded["part"].to(weights), loaded.get("weights") != self._gathered.digest
        with torch.inference_mode(False), torch.no_grad():  # later passes write to it
            sent = torch.cat([part, weights.new_full((1,), float(is_due))]).view(torch.uint8)
            of_ranks = torch.stack(self._sent(sent, group)).view(weights.dtype)
            reference = of_ranks[:, :-1].reshape(-1)
        self.engine = self._connections.engine(group, weights.device)
        self._version = () if is_due else self._gathered.version
        self.is_reduced, self.has_changed = False, bool(of_ranks[:, -1].any())
        return reference

    def reduced(self) -> None:
        """Called when gradients of the module are reduced."""
        self.is_reduced = True

    def state(self) -> Mapping[str, Any] | None:
        """This rank's part of the reference, and a digest of the weights in it: None if the next forward pass gathers.

        None before the first gather.
        """
        if self._reference is None or self.engine is None:
            return self._loaded
        part = self._reference.view(self.engine.size, -1)[self.engine.rank].cpu().clone()
        is_due = self.is_reduced or self.is_written
        return {"part": part, "weights": None if is_due else self._gathered.digest}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Load what `state` has returned. Ranks gather it, exactly, before the next difference.

        Raises:
            ValueError: it has another number of elements.
        """
        expected = sum(self._gathered.numels.values())
        got = expected if state is None else state["part"].numel()
        if got != expected:
            what = f"got {got} elements of module {self._gathered.name!r}, expected {expected}"
            raise ValueError(f"Quantized.load_state_dict: {what}: load the state of this model, with the same mesh")
        self._reference, self._loaded = None, state
