"""The copy of the parameters that all ranks share, and the outer optimizer, which steps it."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..averaging import optimizer_hooks
from ..averaging.handshake import differences
from ..collectives.fusion import as_real
from ..memory.names import original
from ..memory.state_dict import check_values
from ..methods.base.compressor import Compressor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by the bytes of an element

MakeOptimizer: TypeAlias = Callable[[list[Tensor]], torch.optim.Optimizer]


def nesterov(params: list[Tensor]) -> torch.optim.Optimizer:
    """The outer optimizer of DiLoCo."""
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


@torch.no_grad()
def digest(tensors: Iterable[Tensor]) -> int:
    """A number that changes with almost every change of these tensors: a weighted sum of their bits."""
    sums = [tensor.view(_BITS[tensor.element_size()]).sum(dtype=torch.int64) for tensor in map(as_real, tensors)]
    weighted = torch.stack(sums) * torch.arange(1, 2 * len(sums), 2, device=sums[0].device) if sums else None
    return 0 if weighted is None else int(weighted.sum()) % 2**64


class GlobalCopy:
    """Parameters as of the last exchange, in float32 or complex64, with an optimizer of their own.

    Args:
        parameters: by name. The copy starts with their values.
        make: makes the outer optimizer of the copy; None: the copy becomes the mean of the ranks' parameters.
        compressor: the method. If it applies momentum, the outer optimizer must have neither that nor weight decay.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], make: MakeOptimizer | None, compressor: Compressor, what: str
    ) -> None:
        self.tensors = {
            name: parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True).requires_grad_()
            for name, parameter in parameters.items()
        }
        copies = list(self.tensors.values())
        self.optimizer = torch.optim.SGD(copies, lr=1.0) if make is None else make(copies)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(f"{what}: outer returned {type(self.optimizer).__name__}, expected an optimizer of torch")
        stepped = [id(p) for group in self.optimizer.param_groups for p in group["params"]]
        if sorted(stepped) != sorted(map(id, copies)):
            raise ValueError(f"{what}: outer returned an optimizer of other parameters, expected those it is given")
        for method in (part for part in compressor.parts if part.optimizer_momentum):
            for group in self.optimizer.param_groups:
                if option := optimizer_hooks.applied_option(self.optimizer, group):
                    got = f"got {type(method).__name__}, which applies momentum {method.optimizer_momentum}, and"
                    expected = "expected 0: pass outer=lambda params: torch.optim.SGD(params, lr=0.7)"
                    raise ValueError(f"{what}: {got} an outer optimizer with {option} = {group[option]}, {expected}")

    @property
    def options(self) -> str:
        """The class of the outer optimizer and the options of its param groups, which ranks compare."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return f"{type(self.optimizer).__name__} {json.dumps(groups, default=_comparable)}"

    @torch.no_grad()
    def differs(self, parameters: Mapping[str, Tensor], names: Iterable[str]) -> bool:
        """Whether local parameters are not the global ones, rounded to their types. Waits for the device."""
        return not all(torch.equal(self.tensors[name].to(parameters[name].dtype), parameters[name]) for name in names)

    @torch.no_grad()
    def take_over(self, parameters: Mapping[str, Tensor]) -> None:
        """Make local parameters the global ones."""
        torch._foreach_copy_(list(self.tensors.values()), [parameters[name] for name in self.tensors])

    @torch.no_grad()
    def differences(self, parameters: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        """Global minus local parameters: in this direction, an optimizer subtracts them as it does gradients."""
        return {name: self.tensors[name] - parameters[name] for name in names}

    def step(self, averages: Mapping[str, Tensor]) -> None:
        """Have the outer optimizer take a step, with average differences, by name, as gradients.

        It changes neither other parameters nor their states.
        """
        for name, average in averages.items():
            self.tensors[name].grad = average
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def write(self, parameters: Mapping[str, Tensor], names: Iterable[str] | None = None, blend: float = 0.0) -> None:
        """Set local parameters to the global ones, rounded to their types.

        Args:
            names: default: all.
            blend: weight of the local parameters: local = global + blend * (local - global).
        """
        names = list(self.tensors if names is None else names)
        values: list[Tensor] = [self.tensors[name].detach() for name in names]
        if blend:
            values = [value.lerp(parameters[name].to(value.dtype), blend) for name, value in zip(names, values)]
        torch._foreach_copy_([parameters[name] for name in names], values)

    def restart(self, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, rank: int) -> None:
        """Have a rank whose parameters are not finite go on from the global ones."""
        warnings.warn(
            f"got parameters that are not finite on rank {rank}, expected finite ones: it restarts from the global "
            f"parameters, with a fresh state of {type(optimizer).__name__}",
            stacklevel=2,
        )
        self.write(parameters)
        optimizer.state.clear()

    def state_dict(self) -> dict[str, Any]:
        return {
            "parameters": {name: tensor.detach().clone() for name, tensor in self.tensors.items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], what: str) -> None:
        """Load what `state_dict` has returned: all of it, or nothing.

        Raises:
            ValueError: it is that of other parameters, or malformed, or has values that are not finite.
        """
        try:
            saved: dict[str, Tensor] = {original(name): tensor for name, tensor in state_dict["parameters"].items()}
            of_optimizer = copy.deepcopy(state_dict["optimizer"])  # it would step in these tensors
            moments = [(name, value) for of_one in of_optimizer["state"].values() for name, value in of_one.items()]
            [group["params"] for group in of_optimizer["param_groups"]]
            theirs, ours = ({name: list(tensor.shape) for name, tensor in of.items()} for of in (saved, self.tensors))
        except (AttributeError, KeyError, TypeError) as error:
            got = f"got malformed global parameters or a malformed state of their optimizer ({error!r})"
            raise ValueError(f"{what}: {got}, expected what state_dict() returned") from None
        for name, got, expected in differences(theirs, ours, "no such parameter"):
            raise ValueError(f"{what}: parameter {name!r}: got {got}, expected {expected}: load that of the same model")
        for name, tensor in self.tensors.items():
            check_values(saved[name], tensor.dtype, f"{what}: parameter {name!r}")
        for name, value in moments:
            if isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point()):
                check_values(value, None, f"{what}: {name} of the outer optimizer")
        self.optimizer.load_state_dict(of_optimizer)
        for name, tensor in self.tensors.items():
            tensor.copy_(saved[name])


def _comparable(value: Any) -> Any:
    """What JSON holds of an option. The representation of a function, for example, differs between processes."""
    return value.tolist() if isinstance(value, Tensor) else type(value).__name__
