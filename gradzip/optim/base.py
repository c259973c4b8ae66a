"""What the optimizers of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Optimizer(torch.optim.Optimizer):
    """Steps all parameters of a group together. Subclasses define `_update`."""

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
        name = type(self).__name__
        groups = [(group, {p: p.grad for p in group["params"] if p.grad is not None}) for group in self.param_groups]
        for group, gradients in groups:  # before any parameter changes
            if any(gradient.is_sparse for gradient in gradients.values()):
                raise ValueError(f"{name}: got a sparse gradient, expected a dense one; use Embedding(sparse=False)")
            self._check(group, gradients)
        for group, gradients in groups:
            if gradients:
                self._update(group, gradients)
        return loss

    def _check(self, group: dict[str, Any], gradients: dict[Tensor, Tensor]) -> None:
        """Raise ValueError if `_update` cannot use these gradients."""

    def _update(self, group: dict[str, Any], gradients: dict[Tensor, Tensor]) -> None:
        """Update the parameters of a group that have gradients."""
        raise NotImplementedError
