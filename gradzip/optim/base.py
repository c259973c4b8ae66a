"""What the optimizers of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..memory.verdict import read_all
from . import on_device


class Optimizer(torch.optim.Optimizer):
    """Steps all parameters of a group together. Subclasses define `_update` and `_update_on_device`.

    **Skipped steps:** `step` reads the attribute `found_inf`, as torch's fused optimizers do: a float32 tensor of one
    element. If it is 1.0, parameters and states keep all bits, whatever the gradients are. On a CUDA device, the host
    does not wait for it: counters on the host count the step, and a parameter's first step makes its state. Call
    `rollback_counts` when the host knows that the step was skipped, before the next step and before `state_dict`.

    The host waits for `found_inf` if parameters are not of real numbers, or differ from their gradients or states in
    dtype or layout.

    `grad_scale` is not read: a GradScaler unscales gradients before `step`, and does not call it if it skips.
    """

    # Front ends set `found_inf` of optimizers whose class has this.
    reads_found_inf = True

    # Whether states of parameters of 16 bits are float32.
    _widens = False

    # What the last step has changed on the host, if the device may have skipped it.
    _counted: tuple[Tensor, ...] = ()
    _made: tuple[Tensor, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        """The state dict, once the host knows whether the device has skipped the last step."""
        read_all()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        read_all()
        state: dict[str, Any] = super().__getstate__()
        return state

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        name = type(self).__name__
        for option in ("lr", "eps", "weight_decay"):
            if not options.get(option, 0.0) >= 0:
                raise ValueError(f"{name}: got {option} = {options[option]!r}, expected a number >= 0")
        if not 0 <= options.get("momentum", 0.0) < 1:
            raise ValueError(f"{name}: got momentum = {options['momentum']!r}, expected a number in [0, 1)")
        betas = options.get("betas", (0.0, 0.0))  # of those with a second moment
        if not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"{name}: got betas = {betas!r}, expected two numbers in [0, 1)")
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._counted = self._made = ()
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None and not found_inf.is_cuda:
            if found_inf:
                return loss
            found_inf = None
        name = type(self).__name__
        groups = [(group, {p: p.grad for p in group["params"] if p.grad is not None}) for group in self.param_groups]
        for group, gradients in groups:  # before any parameter changes
            if any(gradient.is_sparse for gradient in gradients.values()):
                raise ValueError(f"{name}: got a sparse gradient, expected a dense one; use Embedding(sparse=False)")
            self._check(group, gradients)
        for group, gradients in groups:
            made = {p: state for p in gradients if not self.state.get(p) and (state := self._new_state(group, p))}
            self.state.update(made)
            if found_inf is not None:
                self._made += tuple(made)
            fitting = {p: g for p, g in gradients.items() if on_device.fits(p, g, self.state.get(p, {}), self._widens)}
            others = {p: g for p, g in gradients.items() if p not in fitting}
            if fitting:
                counters = self._update_on_device(group, fitting, found_inf)
                if counters:
                    torch._foreach_add_(counters, 1)
                if found_inf is not None:
                    self._counted += tuple(counters)
            if others and not (found_inf is not None and found_inf):
                self._update(group, others)
        return loss

    def rollback_counts(self) -> None:
        """Undo what the last step changed on the host, if `found_inf` on a device has skipped all else of it.

        Counters are as before it, and parameters whose first step it was have no state. Does nothing if the step had no
        `found_inf` on a device, or has been rolled back, or if a state dict was loaded since.
        """
        if self._counted:
            torch._foreach_sub_(self._counted, 1)
        for parameter in self._made:
            self.state.pop(parameter, None)
        self._counted = self._made = ()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what was loaded or copied."""
        super().__setstate__(state)
        self._counted = self._made = ()

    def _check(self, group: dict[str, Any], gradients: dict[Tensor, Tensor]) -> None:
        """Raise ValueError if `_update` cannot use these gradients."""

    def _new_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        """The state of a parameter before its first step; empty: it has none."""
        raise NotImplementedError

    def _update(self, group: dict[str, Any], gradients: dict[Tensor, Tensor]) -> None:
        """Update the parameters of a group that have gradients, and their states."""
        raise NotImplementedError

    def _update_on_device(
        self, group: dict[str, Any], gradients: dict[Tensor, Tensor], found_inf: Tensor | None
    ) -> list[Tensor]:
        """Do the same without waiting for a device, except for counters, if `found_inf` is not 1.0.

        Up to rounding, as it uses fused kernels. `on_device.fits` these parameters.

        Returns:
            The counters on the host to increase by 1.
        """
        raise NotImplementedError
