"""The shards that FSDP2 reduces together. All that gradzip reads of FSDP2's private fields is in this file."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..averaging.handshake import digest

# Of a parameter, of a group of them, and of modules.
_FIELDS = ("sharded_param", "sharded_size", "contiguous_sharded_stride", "padded_sharded_param_size")
_GROUP_FIELDS = (
    "mp_policy", "offload_policy", "_training_state", "_reshard_after_forward", "_use_post_forward_mesh",
    "is_sharded_post_forward", "_all_gather_comm", "_reduce_scatter_comm",
)  # fmt: skip
_STATE_FIELDS = ("_state_ctx.iter_forward_root",)
_MODULE_FIELDS = ("_get_fsdp_state", "set_all_reduce_hook")

FLOATING = (torch.float32, torch.bfloat16, torch.float16)  # dtypes in which weights can be gathered, rounded


def _groups_of(module: FSDPModule) -> list[Any]:
    """FSDP's groups of the parameters of a module: one, but none without parameters, and several for several meshes.

    Raises:
        RuntimeError: this torch has another FSDP2.
    """
    try:
        operator.attrgetter(*_MODULE_FIELDS)(FSDPModule)
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        groups = [state._fsdp_param_group] if groups is None else groups
        operator.attrgetter(*_STATE_FIELDS)(state)
        found = [group for group in groups if group is not None]
        for group in found:
            operator.attrgetter("fsdp_params", "mesh_info.replicate_mesh_dim", *_GROUP_FIELDS)(group)
        for parameter in (parameter for group in found for parameter in group.fsdp_params):
            operator.attrgetter(*_FIELDS)(parameter)
    except AttributeError as error:
        raise RuntimeError(
            f"gradzip.fsdp: torch {torch.__version__} has another FSDP2 (no {error.name}), expected one as of "
            "torch 2.13: install that, or average with gradzip.ddp"
        ) from None
    return found


def sharded_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """The modules of `fully_shard`, with their names: of those that are sharded together, the first."""
    found = {
        module._get_fsdp_state(): (name, module)
        for name, module in reversed(list(model.named_modules()))
        if isinstance(module, FSDPModule)
    }
    return list(reversed(found.values()))


def collectives_of(module: FSDPModule) -> list[Any]:
    """What gathers the parameters of a module, and what reduces their gradients."""
    return [one for group in _groups_of(module) for one in (group._all_gather_comm, group._reduce_scatter_comm)]


def begins_pass(module: Any) -> bool:
    """Whether a module, whose forward pass is to begin, is the outermost one of a pass.

    Where a pass has failed, FSDP takes it for one in progress until its outermost module has run again.
    """
    state = module._get_fsdp_state()
    return state._state_ctx.iter_forward_root in (None, state)


def replicas_of(module: FSDPModule) -> dist.ProcessGroup | None:
    """The ranks that hold the same shards of a module, if FSDP averages over them itself."""
    for group in _groups_of(module):
        return getattr(group.mesh_info, "replicate_process_group", None)
    return None


class Shards:
    """This rank's shards of the parameters of one FSDP module, whose gradients FSDP reduces as one flat tensor.

    Args:
        module: after `fully_shard`.
        names: of all parameters of the model.

    Attributes:
        members: all parameters of the module, as FSDP holds them, with their names.

    Raises:
        RuntimeError: this torch has another FSDP2.
        ValueError: the parameters are on a mesh on which FSDP all-reduces the gradients itself.
    """

    def __init__(self, module: FSDPModule, name: str, names: dict[Tensor, str]) -> None:
        self.module = module
        self.name = name
        self._groups = _groups_of(module)
        members = [parameter for group in self._groups for parameter in group.fsdp_params]
        if any(group.mesh_info.replicate_mesh_dim is not None for group in self._groups):
            got = f"got module {name!r} on a mesh with a dimension of replicas, which FSDP averages itself"
            raise ValueError(f'compress: {got}; expected fully_shard(module, mesh=mesh["shard"])')
        if len(self._groups) > 1:
            expected = "expected one: call fully_shard without a shard_placement_fn that returns meshes"
            raise ValueError(f"compress: got module {name!r} with parameters on several meshes, {expected}")
        unknown = [tuple(p.sharded_param.shape) for p in members if p.sharded_param not in names]
        if unknown:
            got = f"got module {name!r} with a parameter of shape {unknown[0]} that is not among model.parameters()"
            raise ValueError(f"compress: {got}, expected the model after fully_shard and before a forward pass")
        self.members: list[tuple[str, Any]] = [(names[parameter.sharded_param], parameter) for parameter in members]
        self._earlier: list[tuple[Any, Any]] = []  # parameters, and gradients to add the averages to
        # Parameters, their dicts of hooks, and what was in those.
        self._hooks: list[tuple[DTensor, dict[int, Any], dict[int, Any]]] = []

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """Names and local shards, as plain tensors, of the parameters that are trained and not empty on this rank."""
        return [(name, p.sharded_param.to_local()) for name, p in self._held()]

    def parameters(self) -> list[DTensor]:
        """The parameters of `named_parameters`, as the optimizer knows them."""
        return [p.sharded_param for _, p in self._held()]

    def averages(self) -> list[Tensor]:
        """The gradients of `parameters` as FSDP has left them: their local shards."""
        return [p.sharded_param.grad.to_local() for _, p in self._held()]

    def gradients(self, reduced: Tensor) -> dict[str, Tensor]:
        """Views of the gradients of `named_parameters` in what FSDP has reduced, without the padding between them.

        Raises:
            RuntimeError: some parameters got no gradient. `reduced` does not tell which.
        """
        trained = self._trained()
        numels = [p.padded_sharded_param_size.numel() for _, p in trained]
        if sum(numels) != reduced.numel():
            got = f"module {self.name!r}: got {reduced.numel()} elements of gradients, expected {sum(numels)}"
            raise RuntimeError(f"{got}; if some got none, call model.set_reduce_scatter_unused_params(True)")
        return {
            name: piece.as_strided(p.sharded_size, p.contiguous_sharded_stride)
            for (name, p), piece in zip(trained, reduced.split_with_sizes(numels))
            if p.sharded_size.numel()
        }

    def writable(self, reduced: Tensor) -> bool:
        """Whether FSDP makes the memory of `reduced` the gradients, where averages may be written after the hook.

        Otherwise FSDP casts, divides or copies to the host what the hook leaves in `reduced`. Its options decide, which
        all ranks share.
        """
        (group,) = self._groups
        return (
            reduced.dtype == getattr(group, "_orig_dtype", None)
            and reduced.dtype in (torch.float32, torch.bfloat16)  # others are divided after the hook
            and not getattr(group, "force_sum_reduction_for_comms", True)
            and not any(getattr(p, "offload_to_cpu", True) for _, p in self._trained())
        )

    @property
    def options(self) -> str:
        """The options of FSDP on which `writable` depends."""
        for group in self._groups:  # none if the parameters are all in submodules that are sharded
            sums = getattr(group, "force_sum_reduction_for_comms", True)
            return f"{group.mp_policy}, {group.offload_policy}, force_sum_reduction_for_comms={sums}"
        return ""

    # --- between the hook and the end of the backward pass

    def set_aside(self) -> None:
        """Set aside what FSDP would do after the hook, when the averages are not there yet.

        It would add to the gradients of earlier backward passes, and call hooks that read the gradients.
        """
        for _, p in self._trained():
            parameter = p.sharded_param
            if parameter.grad is not None:
                self._earlier.append((parameter, parameter.grad))
                parameter.grad = None
            hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
            if hooks:
                self._hooks.append((parameter, hooks, dict(hooks)))
                hooks.clear()

    def add_averages(self) -> list[Tensor]:
        """Add the averages, which are written, to the gradients of earlier backward passes. Returns the sums."""
        sums = []
        for parameter, gradient in self._earlier:
            sums.append(gradient.to_local().add_(parameter.grad.to_local()))
            parameter.grad = gradient
        self._earlier = []
        return sums

    def restore_hooks(self) -> list[tuple[DTensor, Any]]:
        """Give the parameters back their hooks. Returns the calls to make: parameters and hooks."""
        restored, self._hooks = self._hooks, []
        for _, hooks, of_parameter in restored:
            hooks.update(of_parameter)
        return [(parameter, hook) for parameter, _, of_parameter in restored for hook in of_parameter.values()]

    def drop(self) -> None:
        """Drop a backward pass that has failed, and its gradients."""
        self._earlier = []
        self.restore_hooks()

    def _trained(self) -> list[tuple[str, Any]]:
        return [(name, p) for name, p in self.members if p.sharded_param.requires_grad]

    def _held(self) -> list[tuple[str, Any]]:
        """Those of `_trained` that are not empty on this rank."""
        return [(name, p) for name, p in self._trained() if p.sharded_size.numel()]


class Reduced:
    """What FSDP reduces of one module: for each rank, the gradients of its shards, as one flat tensor.

    Args:
        module: after `fully_shard`.
        names: of all parameters of the model.
    """

    def __init__(self, module: FSDPModule, names: dict[Tensor, str]) -> None:
        self._members = [(names[p.sharded_param], p) for group in _groups_of(module) for p in group.fsdp_params]

    @property
    def numels(self) -> dict[str, int]:
        """Elements of a shard, padding included, of the parameters that are trained now, in the order of the tensor."""
        return {name: p.padded_sharded_param_size.numel() for name, p in self._members if p.sharded_param.requires_grad}


class Gathered:
    """What FSDP gathers before the passes of one module: each rank's shards of its parameters, as one flat tensor.

    Args:
        module: after `fully_shard`.
        names: of all parameters of the model.

    Attributes:
        numels: elements of a rank's shard, padding included, by the parameter's name, in the order of the tensor.

    Raises:
        RuntimeError: this torch has another FSDP2.
        ValueError: the parameters are on several meshes, of several dtypes, of one that is not in FLOATING, or encode
            themselves.
    """

    def __init__(self, module: FSDPModule, name: str, names: dict[Tensor, str]) -> None:
        groups = _groups_of(module)
        self._group = groups[0] if groups else None
        members = groups[0].fsdp_params if groups else []
        self.name = name
        self.numels = {names[p.sharded_param]: p.padded_sharded_param_size.numel() for p in members}
        if len(groups) > 1:
            raise ValueError(f"quantize: got module {name!r} with parameters on several meshes, expected one mesh")
        if any(hasattr(p.sharded_param.to_local(), "fsdp_pre_all_gather") for p in members):
            raise ValueError(f"quantize: got module {name!r} whose parameters encode themselves, expected plain ones")
        dtypes = {groups[0].mp_policy.param_dtype or p.sharded_param.dtype for p in members}
        if len(dtypes) > 1 or not dtypes.issubset(FLOATING):
            got = f"got module {name!r} with parameters of {sorted(map(str, dtypes))}"
            raise ValueError(f"quantize: {got}, expected float32, bfloat16 or float16; shard others apart")

    @property
    def version(self) -> tuple[int, ...]:
        """What changes if a parameter is written in place, whether as FSDP's or as this rank's shard."""
        parameters = [p.sharded_param for p in self._group.fsdp_params] if self._group else []
        return tuple(version for p in parameters for version in (p._version, p.to_local()._version))

    @property
    def is_again(self) -> bool:
        """Whether a backward pass gathers what its forward pass has gathered before."""
        return self._group is not None and self._group._training_state.name == "PRE_BACKWARD"

    @property
    def is_gathered_twice(self) -> bool:
        """Whether FSDP frees the parameters after a forward pass, and all ranks gather them again in the backward pass.

        With `reshard_after_forward` as a number, that many ranks keep the gathered ones (`is_among_few`).
        """
        group = self._group
        return group is not None and group._reshard_after_forward and not group._use_post_forward_mesh

    @property
    def is_among_few(self) -> bool:
        """Whether what FSDP gathers now are parts of gathered parameters, which fewer ranks have kept."""
        return self._group is not None and self._group.is_sharded_post_forward

    @property
    def digest(self) -> int:
        """A number that changes with almost every change of this rank's shards. The host waits."""
        return digest(p.sharded_param.to_local() for p in self._group.fsdp_params) if self._group else 0

    @property
    def reduce_scatter(self) -> Any:
        """What reduces the gradients now."""
        return self._group and self._group._reduce_scatter_comm
