"""Gradient shards averaged over their replicas, in FSDP2's all-reduce hook.

FSDP calls the hook with a module's reduced gradients when the last of them is computed, in the same order on all ranks.
As in `gradzip.ddp`, the hook starts the first collectives, on a device for several small modules together. The rest
happens at the end of the backward pass, which writes the averages to the gradients. Where FSDP copies what the hook
leaves behind (mixed precision with another `reduce_dtype`, CPU offload), the hook waits for the averages instead.

FSDP's options, which ranks share, decide on that: all ranks run the same collectives in the same order. What one rank
alone may have waits for the averages at the end of the backward pass: gradients to add to, and hooks that read them.

FSDP reduces the gradients of some modules in callbacks at the end of the backward pass, one for each root. Modules that
are sharded without their parents are roots. The step ends behind all callbacks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..averaging.buckets import Plan, bucket_nbytes
from ..averaging.handshake import differences
from ..averaging.session import Session
from ..collectives.traffic import Traffic
from ..memory.names import original
from ..memory.streams import use_on_current_stream
from ..memory.verdict import Verdict
from ..methods.base.compressor import Compressor
from . import rank_state
from .backward_pass import BackwardPass
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
        ValueError: no sharded module, or modules on a mesh with replicas, or on different meshes; or a parameter that
            is trained and in no sharded module.
        RuntimeError: this torch has another FSDP2.
    """
    return ReplicaAverages(model, compressor, group)


class ReplicaAverages:
    """The averages of one model: what `compress` returns.

    It is a `torch.distributed.checkpoint.stateful.Stateful`: `dcp.save({"compressor": state, ...})` works.

    If an average is not finite on any rank, the step is skipped for all parameters of the model, shards of all ranks
    included (`Compressor.skip_nonfinite`).
    """

    def __init__(self, model: nn.Module, compressor: Compressor, group: dist.ProcessGroup) -> None:
        self._session = Session(compressor, "compress")
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f'compress: got {group!r} as the group, expected one as of mesh["replicate"].get_group()')
        names: dict[Tensor, str] = {p: original(name) for name, p in model.named_parameters()}
        self._modules = [
            Shards(module, name, names) for name, module in model.named_modules() if isinstance(module, FSDPModule)
        ]
        members = [member for shards in self._modules for member in shards.members]
        meshes = {parameter.sharded_param.device_mesh for _, parameter in members}
        if len(meshes) != 1 or any(mesh.ndim > 1 for mesh in meshes):
            got = f"a model with parameters on {len(meshes)} meshes of {[m.ndim for m in meshes]} dimensions"
            raise ValueError(f"compress: got {got}, expected one of 1: call it after fully_shard, once for each mesh")
        self.compressor = compressor
        self.group = group
        (self._mesh,) = meshes
        named = {name: parameter for parameter, name in names.items()}
        self._session.name_states(named, "model", f"{self._shard}." if self._mesh.size() > 1 else "")
        sharded = dict(members)
        self._unsharded = {name: parameter for name, parameter in named.items() if name not in sharded}
        self._check_unsharded()
        self._plans: dict[tuple[int, ...], Plan] = {}  # by the indices of the modules
        self._least_nbytes = 0.0  # of gradients that are averaged together, once the ranks have met
        self._waiting: dict[int, dict[str, Tensor]] = {}  # in a backward pass: gradients of modules
        self._pass = BackwardPass("compress", self._finish, self._drop)
        self._copied: set[int] = set()  # modules whose gradients FSDP makes of the averages, by copying
        self._sums: list[Tensor] = []  # of averages and earlier gradients, which may not have been finite
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
        return rank_state.saved(self._key, self.compressor.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's states.

        Raises:
            ValueError: the state dict is that of another method, or has no states of this rank.
        """
        self.compressor.load_state_dict(rank_state.loaded(self._key, state_dict, "ReplicaAverages"))

    @property
    def _key(self) -> str:
        return f"{self._shard},replica{self.group.rank()}of{self.group.size()}"

    # --- a backward pass

    def _average(self, index: int, reduced: Tensor) -> None:
        """FSDP's all-reduce hook: average the gradients of a module, now or at the end of the backward pass."""
        use_on_current_stream(reduced)  # FSDP frees it on the stream of its reduce-scatter
        with self._or_drop(), self.compressor.streams.on(reduced):
            if self._pass.begin():
                self._check_unsharded()
            if index in itertools.chain(self._waiting, *self._session.buckets):
                self._run()  # a module that the model has run several times
            shards = self._modules[index]
            self._waiting[index] = shards.gradients(reduced)
            if self._session.engine is None:
                self._connect(reduced.device)
            if sum(x.nbytes for of_module in self._waiting.values() for x in of_module.values()) >= self._least_nbytes:
                self._start()
            if shards.writable(reduced):
                shards.set_aside()
            else:
                self._copied.add(index)
                self._run()

    def _check_unsharded(self) -> None:
        """Refuse parameters that FSDP does not reduce. Frozen ones may be trained later."""
        for name, parameter in self._unsharded.items():
            if parameter.requires_grad:
                got = f"got parameter {name!r}, which is trained and in no module of fully_shard"
                raise ValueError(f"compress: {got}; call fully_shard on a module that has it, or freeze it")

    def _start(self) -> None:
        """Start to average the gradients of the modules that wait."""
        waiting, self._waiting, session = self._waiting, {}, self._session
        indices = tuple(waiting)
        gradients = {name: gradient for of_module in waiting.values() for name, gradient in of_module.items()}
        parameters = [parameter for index in indices for parameter in self._modules[index].parameters()]
        plan, names = self._plans.get(indices), list(gradients)
        # A new plan if other parameters are trained, or other methods are in charge.
        if plan is None or plan.names != names or not plan.fits(self.compressor, plan.parameters):
            # One element stands for each gradient: the plan outlives them.
            shapes = [gradient.new_empty(1).expand(gradient.shape) for gradient in gradients.values()]
            plan = self._plans[indices] = session.plan(shapes, names)
        session.start(indices, plan.groups, parameters, list(gradients.values()), ",".join(names))

    def _run(self) -> None:
        """Run the routines in progress to their ends."""
        if self._waiting:
            self._start()
        self._session.finish("round")
        for shards in self._modules:
            self._sums += shards.add_averages()

    def _finish(self) -> None:
        """End the step. Called at the end of a backward pass, after FSDP has called all hooks."""
        with self._or_drop(), self.compressor.streams.on_all(self._session.engine.device):
            if self._waiting or self._session.buckets:
                self._run()
            self._session.end(skipped := self._is_skipped())
            self._session.complete(skipped)
        # In about the order in which FSDP reduces modules.
        for parameter, hook in [call for shards in reversed(self._modules) for call in shards.restore_hooks()]:
            hook(parameter)

    @contextlib.contextmanager
    def _or_drop(self) -> Iterator[None]:
        """Run the block. An error drops the step."""
        try:
            yield
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        """Drop the step in progress, if there is one: its backward pass has failed."""
        self._copied, self._sums, self._waiting = set(), [], {}
        for shards in self._modules:
            shards.drop()
        self._session.drop()

    def _is_skipped(self) -> Verdict | bool:
        """Whether the step is skipped, because an average is not finite on any rank of the mesh."""
        copied, self._copied = sorted(self._copied), set()
        sums, self._sums = self._sums, []
        if not self._session.checks:
            return self._session.is_skipped()
        of_copied = [gradient for i in copied for gradient in self._modules[i].averages()]
        return self._session.is_skipped([*of_copied, *sums], self._agree if self._mesh.size() > 1 else None)

    def _agree(self, number: Tensor) -> Tensor:
        """NaN if it is not finite on any rank of the mesh, otherwise 0. Replicas have the same averages."""
        number = number * 0
        dist.all_reduce(number, group=self._mesh.get_group())
        return number

    def _connect(self, device: torch.device) -> None:
        shards = self._mesh.get_group() if self._mesh.size() > 1 else None
        engine = self._session.torch_engine(self.group, device, shards)
        mine = json.dumps([self._shard, {shards.name: shards.options for shards in self._modules}])
        of_ranks = [json.loads(place) for place in engine.allgather_bytes(mine.encode(), "place")]
        first = of_ranks[0]
        for rank, other in enumerate(of_ranks):
            if other[0] != first[0]:
                what_to_do = 'give compress the group of those that hold the same, as mesh["replicate"].get_group()'
                raise RuntimeError(f"rank {rank} of the group holds {other[0]}, rank 0 {first[0]}; {what_to_do}")
            for name, theirs, ours in differences(other[1], first[1], "no fully_shard"):
                got = f"module {name!r}: rank {rank} of the group has {theirs}, rank 0 {ours}"
                raise RuntimeError(f"{got}; call fully_shard alike on all ranks")
        named = dict(pair for shards in self._modules for pair in shards.named_parameters())
        cap_mb, *_ = self._session.connect(engine, named, "handshake", self.compressor.bucket_cap_mb)
        if device.type == "cuda":
            self._least_nbytes = bucket_nbytes(cap_mb, named.values(), 0.0)
            engine.bucket_nbytes = max(type(engine).bucket_nbytes or 0.0, self._least_nbytes)
