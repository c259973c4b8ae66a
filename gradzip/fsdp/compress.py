"""Gradient shards averaged over their replicas, in FSDP2's all-reduce hook.

FSDP calls the hook with a module's reduced gradients when the last of them is computed, in the same order on all ranks.
As in `gradzip.ddp`, the hook starts the first collectives, and the rest happens at the end of the backward pass, which
writes the averages to the gradients. Where FSDP copies what the hook leaves behind (mixed precision with another
`reduce_dtype`, CPU offload, gradients to add to), the hook waits for the averages instead.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..averaging.buckets import Plan
from ..averaging.session import Session
from ..collectives.traffic import Traffic
from ..memory.streams import use_on_current_stream
from ..methods.base.compressor import Compressor
from .shards import Shards


def compress(model: nn.Module, compressor: Compressor, group: dist.ProcessGroup) -> ReplicaAverages:
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
    return ReplicaAverages(model, compressor, group)


class ReplicaAverages:
    """The averages of one model: what `compress` returns.

    It is a `torch.distributed.checkpoint.stateful.Stateful`: `dcp.save({"compressor": state, ...})` works.

    Under `compressor.follow(scaler)` one optimizer has to step all parameters of the model: a gradient that is not
    finite on any rank rolls back the step of all.
    """

    def __init__(self, model: nn.Module, compressor: Compressor, group: dist.ProcessGroup) -> None:
        self._session = Session(compressor, "compress")
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
        self.compressor = compressor
        self.group = group
        (self._mesh,) = meshes
        named = {name: parameter for parameter, name in names.items()}
        self._session.name_states(named, "model", f"{self._shard}." if self._mesh.size() > 1 else "")
        self._plans: dict[int, Plan] = {}  # by the module's index
        self._backward = -1  # torch's number of the current backward pass
        self._averaged: set[int] = set()  # the modules whose averages are done or in progress in the current step
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
                f"ReplicaAverages.load_state_dict: got the states of {sorted(state_dict)}, expected those of "
                f"{self._key!r}: load them on as many ranks, with the same mesh, as they were saved on"
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
            with self._session.on_stream_of(reduced):
                self._begin()
                if index in self._session.buckets:
                    self._run()  # FSDP is going to add to its gradients: a module that the model has run several times
                self._start(index, reduced)
                if not self._modules[index].writable(reduced):
                    self._run()
        except BaseException:
            self._averaged = set()
            self._session.drop()
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
        if self._session.engine is None:
            self._connect(reduced.device)
        plan = self._plan(index, gradients)
        self._session.check_optimizers(shards.parameters(), plan.averagings)
        self._session.start(index, plan.units, list(gradients.values()), ",".join(gradients))
        self._averaged.add(index)

    def _plan(self, index: int, gradients: dict[str, Tensor]) -> Plan:
        """The units of a module: a new plan if other parameters are trained, or other methods are in charge."""
        plan, names = self._plans.get(index), list(gradients)
        if plan is None or plan.names != names or not plan.fits(self.compressor, plan.parameters):
            # One element stands for each gradient: the plan outlives them.
            shapes = [gradient.new_empty(1).expand(gradient.shape) for gradient in gradients.values()]
            plan = self._plans[index] = self._session.plan(shapes, names)
        return plan

    def _run(self) -> None:
        """Run the routines in progress to their ends."""
        self._session.finish("round")

    def _finish(self) -> None:
        """End the step. Called at the end of a backward pass, after FSDP has called all hooks."""
        averaged, self._averaged = self._averaged, set()
        if not averaged:
            return  # a backward pass within another one has ended the step
        with self._session.on_all_streams(self._session.engine.device):
            if self._session.buckets:
                self._run()
            self._session.end(self._overflows(averaged))

    def _overflows(self, averaged: set[int]) -> bool:
        """Whether GradScaler is going to skip the step: then the states of all parameters are rolled back."""
        if self.compressor.memory.loss_scale.scaler is None:
            return False
        gradients = [gradient for i in sorted(averaged) for gradient in self._modules[i].averages()]
        mine = float(self._session.overflows(gradients))
        overflows = torch.tensor([mine], device=self._session.engine.device)
        dist.all_reduce(overflows, dist.ReduceOp.MAX, self._mesh.get_group())  # replicas have the same averages
        return bool(overflows)

    def _connect(self, device: torch.device) -> None:
        engine = self._session.torch_engine(self.group, device)
        places = [place.decode() for place in engine.allgather_bytes(self._shard.encode(), "place")]
        for rank, place in enumerate(places):
            if place != places[0]:
                raise RuntimeError(
                    f"rank {rank} of the group holds {place}, rank 0 {places[0]}; give compress the group of the "
                    'ranks that hold the same shard, as mesh["replicate"].get_group()'
                )
        named = dict(pair for shards in self._modules for pair in shards.named_parameters())
        self._session.connect(engine, named, "handshake")
