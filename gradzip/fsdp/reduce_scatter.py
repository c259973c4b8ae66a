"""A quantized reduce-scatter for FSDP2: an all-to-all of encoded shards, which their owners add in float32."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import AllToAll
from ..collectives.engine import Engine
from ..collectives.node_chunks import NodeChunks
from ..collectives.requests import Scope
from ..collectives.routines import Done, step
from ..collectives.traffic import Traffic
from ..memory.state import Key
from ..methods.base.compressor import Compressor
from ..methods.block_float import BlockFloat
from ..methods.hierarchical import Hierarchical
from ..methods.quantize import QSGD
from ..ops import tensors as ops
from .backward_pass import BackwardPass
from .connections import Connections, check_method
from .shards import Reduced

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # before torch 2.13


def reduce_scatter(compressor: Compressor) -> ReduceScatter:
    """A reduce-scatter that sends quantized gradients, for FSDP2's `set_custom_reduce_scatter`.

        quantized = gradzip.fsdp.reduce_scatter(gradzip.BlockFloat(bits=8))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(quantized)

    Each rank encodes its gradient of each shard, and sends it to the shard's owner, which adds what it receives in
    float32. An element is rounded once on each rank, and the sum not at all: the error of the mean is at most the mean
    of the ranks' errors, and its expectation is 0 (but for `BlockFloat(rounding="nearest")`, which is biased).

    With `Hierarchical(BlockFloat(...))`, the ranks of a node add their gradients in float32 first. Each sends its part
    of their mean to the ranks with its place on other nodes: with n ranks on each node, 1/n of the bytes between nodes.
    With one node, gradients are reduced uncompressed.

    Args:
        compressor: `BlockFloat`, or `QSGD` with coding="packed": others have no payloads of a fixed length. Or
            `Hierarchical` with one of these. Its own `error_feedback` has no effect: `quantize` has one.

    Raises:
        ValueError: another method, or one that exempts parameters or has error_feedback="owner".
    """
    return ReduceScatter(compressor)


class Feedback:
    """The steps of the residuals of a model. A step is a backward pass.

    If a reduced gradient is not finite on any rank, no residual of any rank changes; nor if the backward pass fails. On
    a device, the host does not wait to know it.

    Args:
        compressor: `BlockFloat`.
        replicas: the ranks that hold the same shards, if FSDP averages over them.

    Raises:
        ValueError: another method.
    """

    def __init__(self, compressor: Compressor, replicas: dist.ProcessGroup | None = None) -> None:
        if not isinstance(_codec_of(compressor), _BlockFloat):
            got = f"got error feedback with {compressor!r}"
            raise ValueError(f"reduce_scatter: {got}, expected gradzip.BlockFloat(), whose errors stay bounded")
        self._compressor, self._replicas = compressor, replicas
        self._pass = BackwardPass("reduce_scatter", self._finish, self._drop)
        # Of the step in progress: residuals before it, and magnitudes of reduced gradients, by group.
        self.former: dict[ReduceScatter, Tensor | None] = {}
        self._magnitudes: dict[dist.ProcessGroup, list[Tensor]] = {}

    def begin(self, module: ReduceScatter, shards: Tensor) -> None:
        """Called before the gradients of a module are encoded."""
        loss_scale = self._compressor.memory.loss_scale
        if self._pass.begin():
            loss_scale.begin_step()
        module.prepare(loss_scale.value, shards)
        self.former.setdefault(module, module.residual)

    def reduced(self, gradients: Tensor, group: dist.ProcessGroup) -> None:
        """Called with the reduced gradients of this rank."""
        self._magnitudes.setdefault(group, []).append(ops.largest_magnitudes([gradients]))

    def _finish(self) -> None:
        """End the step."""
        former, magnitudes, self.former, self._magnitudes = self.former, self._magnitudes, {}, {}
        pairs = [(module.residual, before) for module, before in former.items()]
        restorations = [ops.Restoration(now, before) for now, before in pairs if now is not None]
        device = restorations[0].target.device
        with self._compressor.streams.on_all(device):
            number = torch.zeros(1, device=device)
            for group, of_group in magnitudes.items():
                number += torch.cat(of_group).amax().float() * 0  # NaN if one is not finite
                dist.all_reduce(number, group=group)
            if self._replicas is not None:
                dist.all_reduce(number, group=self._replicas)
            ops.restore_unless_finite(number, restorations)

    def _drop(self) -> None:
        """Undo the step in progress, if there is one: its backward pass has failed."""
        for module, before in self.former.items():
            module.residual = before
        self.former, self._magnitudes = {}, {}


class ReduceScatter:
    """What `reduce_scatter` returns: an object as of torch's protocol of that name. Any number of modules may share it,
    unless it has error feedback.

    If a gradient is not finite on any rank, neither is the mean of its block. On a device, the host does not wait.

    Payload: for each rank, the blocks of `BlockFloat`, or the norms (float32) and packed levels of `QSGD`, padded to 4
    bytes. No header: lengths follow from the shape.

    Deterministic for the compressor's seed, the name, and the number of calls so far.

    Args:
        compressor: as of `reduce_scatter`.
        name: of the random draws.
        connections: of all modules of a model.
        feedback: of all modules of a model. None: no error feedback.
        reduced: of the only module that uses the object, for error feedback.

    Attributes:
        residual: what rounding has lost of this rank's gradients: a row for each rank that it sends to, float32.
    """

    def __init__(
        self,
        compressor: Compressor,
        name: str = "reduce_scatter",
        connections: Connections | None = None,
        feedback: Feedback | None = None,
        reduced: Reduced | None = None,
    ) -> None:
        self.compressor = compressor
        self.residual: Tensor | None = None
        self._reduced = reduced
        self._numels: dict[str, int] = {}  # of the residual, by parameter
        self._scale = 1.0  # of the residual: the loss scale
        self._codec = _codec_of(compressor)
        check_method(compressor, "reduce_scatter")
        self._name, self._feedback = name, feedback
        self._connections = connections or Connections(compressor, "reduce_scatter")
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
            RuntimeError: the ranks of the group use different methods; in the first call. With error feedback: a
                gradient of another size than before, or none of a backward pass.
        """
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM) or async_op:
            divides = "with set_gradient_divide_factor, also call set_force_sum_reduction_for_comms(True)"
            got = "got a scaled or an asynchronous operation"
            raise ValueError(f"reduce_scatter: {got}, expected AVG or SUM: {divides}")
        with self.compressor.streams.on(input_tensor):
            engine = self._connections.engine(group, input_tensor.device)
            chunks = self._connections.node_chunks(group)
            if chunks is not None and chunks.nodes == 1:
                self.traffic.count(input_tensor.nbytes, engine.wire_shares[AllToAll], "node")
                _reduce_scatter(output_tensor, input_tensor, op, group)
            else:
                shards, summands = input_tensor.view(engine.size, -1), 1
                if shards.dtype not in ops.HALF or chunks is not None or self._feedback is not None:
                    shards = shards.float()
                if chunks is not None:
                    shards, summands = _mean_of_node(shards, chunks, engine), chunks.places
                weight = float(summands) if op == dist.ReduceOp.SUM else 1.0 / len(shards)
                self._reduce(output_tensor, shards, weight, engine, "all" if chunks is None else "peers")
                if self._feedback is not None:
                    self._feedback.reduced(output_tensor, group)
        self.traffic.bytes_dense += input_tensor.nbytes

    def _reduce(self, out: Tensor, shards: Tensor, weight: float, engine: Engine, scope: Scope) -> None:
        """Write the weighted sum of this rank's shard over the ranks of a scope to `out`.

        shards: of each of these ranks, as rows, float32, or without error feedback 16-bit floats.
        """
        ranks = len(shards)
        payloads = torch.empty((ranks, self._codec.nbytes(shards.shape[1])), dtype=torch.uint8, device=shards.device)
        names = (f"{self._name}[{i}]" for i in range(ranks))
        keys = [Key(self._codec.method.seed, self._calls, name, engine.rank) for name in names]
        self._calls += 1
        if self._feedback is None:
            self._codec.encode_all(shards, keys, payloads)
        else:
            self._feedback.begin(self, shards)
            residual, self.residual = self.residual, torch.empty_like(shards)
            self._codec.encode_all(shards, keys, payloads, residual=residual, error=self.residual)
        lengths = (payloads.shape[1],) * ranks
        received = engine.run(AllToAll(payloads.view(-1), lengths, same_length=True, scope=scope), "reduce_scatter")
        written = (torch.float32, *(ops.HALF if ranks <= ops.MOST_HALF_TERMS else ()))
        total = out if out.dtype in written else out.float()
        self._codec.decode_sum(received, total, weight)
        if total is not out:
            out.copy_(total)

    # --- state

    def prepare(self, scale: float, shards: Tensor) -> None:
        """Make the residual, which may have been loaded, one of these gradients, with this loss scale.

        A parameter that was frozen has none; what a parameter had is dropped when it is frozen.
        """
        assert self._reduced is not None
        numels = self._reduced.numels
        if (expected := sum(numels.values())) != shards.shape[1]:
            got = f"got {shards.shape[1]} elements of gradients, expected {expected}"
            raise RuntimeError(f"{self._name}: {got}; if some got none, call set_reduce_scatter_unused_params(True)")
        if self.residual is not None:
            self.residual = self.residual.to(shards.device)
            if scale != self._scale:
                self.residual = self.residual * (scale / self._scale)
            if numels != self._numels:
                kept = dict(zip(self._numels, self.residual.split_with_sizes(list(self._numels.values()), 1)))
                none = {name: shards.new_zeros(len(shards), numels[name]) for name in numels.keys() - kept.keys()}
                self.residual = torch.cat([{**kept, **none}[name] for name in numels], 1)
        self._scale, self._numels = scale, numels

    def state(self) -> dict[str, Any]:
        """What a resumed job needs for the same bits: the number of calls, and the residual before a step that has not
        ended."""
        former = {} if self._feedback is None else self._feedback.former
        residual = former.get(self, self.residual)
        return {
            "calls": self._calls, "scale": self._scale, "numels": self._numels,
            "residual": None if residual is None else residual.cpu(),
        }  # fmt: skip

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` has returned. Without error feedback, the residual is dropped.

        Raises:
            ValueError: it is of other shards.
        """
        residual = None
        if self._feedback is not None and self._reduced is not None:
            own, residual = self._reduced.numels, state["residual"]
            numels = state.get("numels") or own  # none in a checkpoint of 0.3.0
            expected = sum((numels | own)[name] for name in numels)
            if residual is not None and residual.shape[1] != expected:
                what = f"got a residual of {residual.shape[1]} elements for each rank, expected {expected}"
                raise ValueError(f"{self._name}: {what}: load the state of this model, with the same mesh")
            self._feedback.former.pop(self, None)  # of a backward pass that has failed
            self._numels = numels
        self._calls, self._scale, self.residual = state["calls"], state["scale"], residual


def _mean_of_node(shards: Tensor, chunks: NodeChunks, engine: Engine) -> Tensor:
    """The mean over the ranks of this node of the shards of its place on each node.

    shards: of all ranks, as rows, float32. Returns those of the ranks with this place, as rows.
    """
    of_places = shards.view(chunks.nodes, chunks.places, -1).transpose(0, 1)
    routine, result = chunks.scatter(of_places.reshape(-1)), None
    while not isinstance(item := step(routine, result), Done):
        result = engine.run(item, "reduce_scatter.node")
    mean: Tensor = item.result
    return mean.view(chunks.nodes, -1)


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
    def encode_all(self, shards: Tensor, keys: list[Key], payloads: Tensor, **feedback: Tensor | None) -> None:
        """Encode the rows of `shards` (float32 or 16-bit), each with its key, to those of `payloads` (uint8).

        feedback: `residual` and `error` as of `ops.block_float_encode_all`, for `BlockFloat`.
        """

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

    def encode_all(self, shards: Tensor, keys: list[Key], payloads: Tensor, **feedback: Tensor | None) -> None:
        method, bits = self.method, [key.bits for key in keys] if self.method.rounding == "stochastic" else None
        ops.block_float_encode_all(shards, method.bits, method.block, bits, payloads, **feedback)

    def decode_sum(self, payloads: list[Tensor], out: Tensor, weight: float) -> None:
        ops.block_float_decode_sum(payloads, out, self.method.bits, self.method.block, weight)


class _QSGD(_Codec):
    """The norms (float32) and packed levels of `QSGD`, padded to 4 bytes."""

    def nbytes(self, numel: int) -> int:
        return -(-self._ends(numel)[1] // 4) * 4

    def encode_all(self, shards: Tensor, keys: list[Key], payloads: Tensor, **feedback: Tensor | None) -> None:
        method, bits = self.method, [key.bits for key in keys]
        most = torch.empty(len(shards), dtype=torch.float32, device=shards.device)
        _, norms = ops.quantize_packed_all(shards, method.bits, method.bucket, method.norm, bits, payloads, most)
        payloads[:, self._ends(shards.shape[1])[1] :].zero_()
        norms.add_(most[:, None] * 0.0)  # NaN if an element is not finite, which levels do not show

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
    if isinstance(compressor, Hierarchical):
        return _codec_of(compressor.inner)
    if isinstance(compressor, BlockFloat):
        return _BlockFloat(compressor)
    if isinstance(compressor, QSGD) and compressor.coding == "packed":
        return _QSGD(compressor)
    expected = "expected gradzip.BlockFloat() or gradzip.QSGD(coding='packed'), whose payloads have a fixed length"
    raise ValueError(f"reduce_scatter: got {compressor!r}, {expected}")
