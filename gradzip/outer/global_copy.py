"""The copy of the parameters that all ranks share, and the outer optimizer, which steps it."""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..averaging import optimizer_hooks
from ..averaging.handshake import differences
from ..memory.names import original
from ..memory.state_dict import check_values, in_line
from ..methods.base.compressor import Compressor

MakeOptimizer: TypeAlias = Callable[[list[Tensor]], torch.optim.Optimizer]


def nesterov(params: list[Tensor]) -> torch.optim.Optimizer:
    """The outer optimizer of DiLoCo."""
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


class GlobalCopy:
    """Parameters as of the last exchange, in float32 or complex64, with an optimizer of their own.

    Args:
        parameters: by name. The copy starts with their values.
        make: makes the outer optimizer of the copy; None: the copy becomes the mean of the ranks' parameters.
        compressor: the method. If it applies momentum, the outer optimizer must have neither that nor weight decay.
        offload: whether the copy and the states of its optimizer are kept in host memory. The device holds those of the
            parameters in a step while it takes one, and otherwise at most two tensors.

    Attributes:
        tensors: the values, by name.
        stepped: the parameters of the optimizer, by name, always on the devices of the local ones. The same tensors
            without `offload`; with it, NaN that takes no memory, except within `step`.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        make: MakeOptimizer | None,
        compressor: Compressor,
        what: str,
        offload: bool = False,
    ) -> None:
        if not isinstance(offload, bool):
            raise ValueError(f"{what}: got offload = {in_line(offload)}, expected True or False")
        self._is_offloaded = offload
        self._placeholders: dict[str, Tensor] = {}  # what `stepped` are outside of a step, with `offload`
        self._kept: dict[str, set[str]] = {}  # of each parameter, the states that the optimizer itself has on the host
        self.tensors, self.stepped = {}, {}
        for name, parameter in parameters.items():
            local, dtype = parameter.detach(), torch.promote_types(parameter.dtype, torch.float32)
            if offload:
                self.tensors[name] = _on_host(local, dtype)
                self._placeholders[name] = local.new_full((), torch.nan, dtype=dtype).expand(local.shape)
                self.stepped[name] = local.new_empty(0, dtype=dtype).requires_grad_()
            else:
                self.tensors[name] = self.stepped[name] = local.to(dtype, copy=True).requires_grad_()
        copies = list(self.stepped.values())
        with self._stepped_on_host():
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
        return not all(
            torch.equal(value.to(parameters[name].dtype), parameters[name])
            for part in self.parts(names)
            for name, value in part.items()
        )

    @torch.no_grad()
    def take_over(self, parameters: Mapping[str, Tensor]) -> None:
        """Make local parameters the global ones."""
        for name, tensor in self.tensors.items():
            tensor.copy_(parameters[name])

    @torch.no_grad()
    def differences(self, parameters: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        """Global minus local parameters: in this direction, an optimizer subtracts them as it does gradients."""
        return {name: value - parameters[name] for part in self.parts(names) for name, value in part.items()}

    def parts(self, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
        """The values by name, on the devices of the parameters: all at once, or from host memory, one by one."""
        if not self._is_offloaded:
            yield {name: self.tensors[name].detach() for name in names}
            return
        for name in names:
            yield {name: self.tensors[name].to(self._placeholders[name].device)}

    def step(self, averages: Mapping[str, Tensor]) -> None:
        """Have the outer optimizer take a step, with average differences, by name, as gradients.

        It changes neither other parameters nor their states.
        """
        with contextlib.ExitStack() as stack:
            for name, average in averages.items():
                if self._is_offloaded:
                    stack.enter_context(self._on_device(name))
                self.stepped[name].grad = average
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
        for part in self.parts(names):
            values = list(part.values())
            if blend:
                values = [value.lerp(parameters[name].to(value.dtype), blend) for name, value in part.items()]
            torch._foreach_copy_([parameters[name] for name in part], values)

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
        with self._stepped_on_host():  # it takes states to where parameters are
            self.optimizer.load_state_dict(of_optimizer)
        self._kept.clear()
        for name, tensor in self.tensors.items():
            tensor.copy_(saved[name])

    # --- parameters of the optimizer whose memory comes and goes

    @contextlib.contextmanager
    def _stepped_on_host(self) -> Iterator[None]:
        """Give the optimizer the values in host memory, where it makes and loads states. With `offload` only."""
        for name in self._placeholders:
            self.stepped[name].data = self.tensors[name]
        try:
            yield
        finally:
            for name, placeholder in self._placeholders.items():
                self.stepped[name].data = placeholder

    @contextlib.contextmanager
    def _on_device(self, name: str) -> Iterator[None]:
        """Have a parameter and its states on the device, and take them back to host memory."""
        parameter, placeholder = self.stepped[name], self._placeholders[name]
        parameter.data = self.tensors[name].to(placeholder.device)
        try:
            kept = self._kept.get(name, self._kept_by_torch)
            state = self._state(name)
            for key, value in state.items():
                if isinstance(value, Tensor) and key not in kept:
                    state[key] = value.to(placeholder.device)
            yield
            state = self._state(name)
            self._kept[name] = {key for key, value in state.items() if isinstance(value, Tensor) and value.is_cpu}
        finally:
            self.tensors[name].copy_(parameter.detach())
            parameter.data = placeholder
            state = self._state(name)
            for key, value in state.items():
                if isinstance(value, Tensor) and not value.is_cpu:
                    state[key] = _on_host(value)

    def _state(self, name: str) -> dict[str, Any]:
        states: Mapping[Tensor, dict[str, Any]] = self.optimizer.state
        return states.get(self.stepped[name], {})

    @property
    def _kept_by_torch(self) -> set[str]:
        """The states that torch's optimizers do not take to the device of a parameter when they load them."""
        on_device = any(group.get("capturable") or group.get("fused") for group in self.optimizer.param_groups)
        return set() if on_device else {"step"}


def _on_host(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Copy a tensor to host memory, pinned if it is on a CUDA device."""
    pinned = tensor.is_cuda and torch.cuda.is_available()  # a stand-in for a device has no CUDA to pin memory
    return torch.empty_like(tensor, dtype=dtype, device="cpu", pin_memory=pinned).copy_(tensor)


def _comparable(value: Any) -> Any:
    """What JSON holds of an option. The representation of a function, for example, differs between processes."""
    return value.tolist() if isinstance(value, Tensor) else type(value).__name__
