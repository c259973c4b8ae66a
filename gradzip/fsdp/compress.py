"""Gradient shards averaged over their replicas, in FSDP2's all-reduce hook.

FSDP calls the hook with a module's reduced gradients when the last of them is computed, in the same order on all ranks.
As in `gradzip.ddp`, the hook starts the first collectives, and the rest happens at the end of the backward pass, which
writes the averages to the gradients. Where FSDP copies what the hook leaves behind (mixed precision with another
`reduce_dtype`, CPU offload, gradients to add to), the hook waits for the averages instead.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.weak import WeakIdKeyDictionary

from .. import decay_momentum, handshake, ops
from ..averaging import no_autocast
from ..buckets import Bucket, Plan, finish
from ..compressor import Compressor
from ..engines.torch import TorchEngine
from ..fusion import Round
from ..streams import home_streams, use_on_current_stream
from ..traffic import Traffic
from .shards import Shards


def compress(model: nn.Module, compressor: Compressor, group: dist.ProcessGroup) -> HookState:
    """Average the gradients of an FSDP model over replicas of its shards, compressed. Returns the state.

    Each parameter's shard is a gradient of its own: its rows on this rank. FSDP has averaged it over the ranks that
    share the model; the compressor averages it over the ranks that hold the same shard. Padding is not sent.

    Call it once, after `fully_shard` and before the first step. `backward()` raises errors such as `PayloadError`, and
    in the first step a RuntimeError that names both sides if ranks run different methods.

    Args:
        model: one whose modules are sharded over a mesh without replicas, as in `mesh["shard"]`, which may have a
            single rank. FSDP must not average over replicas itself.
        compressor: the method. Several models may share it.
        group: the ranks that hold the same shard, as in `mesh["replicate"].get_group()`.

    Raises:
        ValueError: no sharded module, or modules on a mesh with replicas, or on different meshes.
        RuntimeError: this torch has another FSDP2.
    """
    return HookState(model, compressor, group)


class HookState:
    """The averages of one model: what `compress` returns.

    It is a `torch.distributed.checkpoint.stateful.Stateful`: `dcp.save({"compressor": state, ...})` works.

    Under `compressor.follow(scaler)` one optimizer has to step all parameters of the model: a gradient that is not
    finite on any rank rolls back the step of all.
    """

    def __init__(self, model: nn.Module, compressor: Compressor, group: dist.ProcessGroup) -> None:
        if not isinstance(compressor, Compressor):
            raise TypeError(f"compress: got {compressor!r}, expected a compressor, such as gradzip.ACPSGD()")
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f'compress: got {group!r} as the group, expected one as of mesh["replicate"].get_group()')
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._modules = [
            Shards(module, name, names) for name, module in model.named_modules() if isinstance(module, FSDPModule)
        ]
        meshes = {mesh for shards in self._modules for mesh in shards.meshes}
        if len(meshes) != 1 or any(mesh.ndim > 1 for mesh in meshes):
            raise ValueError(
                f"compress: got a model with parameters on {len(meshes)} meshes of {[m.ndim for m in meshes]} "
                "dimensions, expected one of 1: call it after fully_shard, on models without tensor parallelism, and "
                "once for each mesh"
            )
        decay_momentum.prepare(compressor)
        self.compressor = compressor
        self.group = group
        (self._mesh,) = meshes
        self._prefix = _model_prefix(compressor, model) + (f"{self._shard}." if self._mesh.size() > 1 else "")
        self._streams = home_streams(compressor.memory.attachments)
        self._engine: TorchEngine | None = None
        self._plans: dict[int, Plan] = {}  # by the module's index
        self._backward = -1  # torch's number of the current backward pass
        # Of the current step:
        self._buckets: dict[int, Bucket] = {}  # in progress, by the module's index
        self._averaged: set[int] = set()  # the modules whose averages are done or in progress
        for i, shards in enumerate(self._modules):
            shards.module.set_all_reduce_hook(functools.partial(self._average, i))

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has sent, padding included, and bytes of its shards' gradients."""
        return self.compressor.traffic

    @property
    def _shard(self) -> str:
        """This rank's place in the mesh: the same on the ranks of the group, and different from all others."""
        return f"shard{self._mesh.get_local_rank()}of{self._mesh.size()}"

    # --- state

    def state_dict(self) -> dict[str, bytes]:
        """This rank's states, as bytes under a key of its own, in the form that distributed checkpoints need.

        `compressor.state_dict()` has the same as plain tensors.
        """
        buffer = io.BytesIO()
        torch.save(self.compressor.state_dict(), buffer)
        return {self._key: buffer.getvalue()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's states.

        Raises:
            ValueError: the state dict is that of another method, or has no states of this rank.
        """
        if self._key not in state_dict:
            raise ValueError(
                f"HookState.load_state_dict: got the states of {sorted(state_dict)}, expected those of {self._key!r}: "
                "load them on as many ranks, with the same mesh, as they were saved on"
            )
        loaded = torch.load(io.BytesIO(state_dict[self._key]), map_location="cpu", weights_only=True)
        self.compressor.load_state_dict(loaded)

    @property
    def _key(self) -> str:
        return f"{self._shard},replica{self.group.rank()}of{self.group.size()}"

    # --- a backward pass

    def _average(self, index: int, reduced: Tensor) -> None:
        """FSDP's all-reduce hook: average the gradients of a module, now or at the end of the backward pass."""
        use_on_current_stream(reduced)  # FSDP frees it on the stream of its reduce-scatter
        try:
            with no_autocast(reduced.device), self._streams.on(reduced):
                self._begin()
                if index in self._buckets:
                    self._run()  # FSDP is going to add to its gradients: a module that the model has run several times
                self._start(index, reduced)
                if not self._modules[index].writable(reduced):
                    self._run()
        except BaseException:
            self._buckets, self._averaged = {}, set()
            raise

    def _begin(self) -> None:
        """Schedule the end of the step, once in a backward pass."""
        number = torch._C._current_graph_task_id()
        if number != self._backward:
            self._backward = number
            # FSDP queued its own callback, which calls the last hooks, when this backward pass reached the model.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _start(self, index: int, reduced: Tensor) -> None:
        shards = self._modules[index]
        gradients = shards.gradients(reduced)
        if self._engine is None:
            self._engine = self._connect(reduced.device)
        plan = self._plan(index, gradients)
        for parameter, averaging in zip(shards.parameters(), plan.averagings):
            decay_momentum.register(parameter, averaging)
        tensors, rank, size = list(gradients.values()), self._engine.rank, self._engine.size
        routines = {
            (index, i): unit.average([tensors[j] for j in unit.indices], rank, size)
            for i, unit in enumerate(plan.units)
        }
        before = list(self._buckets.values())
        self._buckets[index] = Bucket(routines, Round.first(routines), self._engine, ",".join(gradients))
        if before:
            before[-1].gather_shards()
        self._averaged.add(index)

    def _plan(self, index: int, gradients: dict[str, Tensor]) -> Plan:
        """The units of a module: a new plan if other parameters are trained, or other methods are in charge."""
        plan, names = self._plans.get(index), list(gradients)
        if plan is None or plan.names != names or not plan.fits(self.compressor, plan.parameters):
            if plan is not None:
                assert self._engine is not None
                self._engine.capacities.clear()  # payloads may have other lengths now
            # One element stands for each gradient: the plan outlives them.
            shapes = [gradient.new_empty(1).expand(gradient.shape) for gradient in gradients.values()]
            plan = self._plans[index] = Plan.of(self.compressor, shapes, names, self._prefix)
        return plan

    def _run(self) -> None:
        """Run the routines in progress to their ends."""
        buckets, self._buckets = list(self._buckets.values()), {}
        assert self._engine is not None
        finish(buckets, self._engine)

    def _finish(self) -> None:
        """End the step. Called at the end of a backward pass, after FSDP has called all hooks."""
        averaged, self._averaged = self._averaged, set()
        if not averaged:
            return  # a backward pass within another one has ended the step
        assert self._engine is not None
        with no_autocast(self._engine.device), self._streams.on_all():
            if self._buckets:
                self._run()
            if self._rolled_back(averaged):
                self.compressor.skip_step()
            else:
                self.compressor.end_step(self._engine)

    def _rolled_back(self, averaged: set[int]) -> bool:
        """Whether GradScaler is going to skip the step; then the states of all parameters are rolled back."""
        if self.compressor.memory.scaler is None:
            return False
        gradients = [gradient for i in sorted(averaged) for gradient in self._modules[i].averages()]
        assert self._engine is not None
        skipped = torch.tensor([float(not ops.all_finite(gradients))], device=self._engine.device)
        dist.all_reduce(skipped, dist.ReduceOp.MAX, self._mesh.get_group())  # replicas have the same averages
        for unit in [unit for i in averaged for unit in self._plans[i].units]:
            unit.end_step(bool(skipped))
        return bool(skipped)

    def _connect(self, device: torch.device) -> TorchEngine:
        """Make the engine, and compare the configurations of all ranks."""
        engine = TorchEngine(self.group, self.traffic, device)
        places = [place.decode() for place in engine.allgather_bytes(self._shard.encode(), "place")]
        for rank, place in enumerate(places):
            if place != places[0]:
                raise RuntimeError(
                    f"rank {rank} of the group holds {place}, rank 0 {places[0]}; give compress the group of the "
                    'ranks that hold the same shard, as mesh["replicate"].get_group()'
                )
        named = [pair for shards in self._modules for pair in shards.named_parameters()]
        description = handshake.describe(self.compressor, named, self._prefix)
        handshake.compare(engine.allgather_bytes(description, "handshake"))
        return engine


def _model_prefix(compressor: Compressor, model: nn.Module) -> str:
    """A prefix that keeps the states of several models with one compressor apart; none for the first model."""
    new: tuple[Any, Iterator[int]] = WeakIdKeyDictionary(), itertools.count()
    models, numbers = compressor.memory.attachments.setdefault("fsdp", new)
    if model not in models:
        models[model] = next(numbers)
    return f"model{models[model]}." if models[model] else ""
