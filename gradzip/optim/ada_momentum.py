"""AdamW whose second moment is that of the momentum, for sparse averages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .base import Optimizer


class AdaMomentum(Optimizer):
    """AdamW whose second moment is that of the momentum, not of the gradients.

    For the averaged gradient g, the momentum m, which starts as the first gradient, and the second moment v:

        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) m^2
        p = p - lr (m / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p)

    `TopK` with error feedback sends an element rarely, and then the sum of many gradients. AdamW divides by the root
    mean square of these few large numbers, so that parameters move less than without compression. A second moment of
    the momentum sees them spread over steps.

    Replicas stay bit-identical, because all ranks see the same averages. Use it as any optimizer of torch, also in
    ``hvd.DistributedOptimizer`` and with a GradScaler.

    Args:
        params, lr, eps, weight_decay: as of torch.optim.AdamW.
        betas: decay rates of m and v. The defaults suit `TopK(theta=0.96, bits=4)`. Error feedback delays gradients,
            which is a momentum of its own: beta1 is less than without compression. 1 / (1 - beta2) steps should be
            more than an element waits, 1 / (1 - theta) steps on average.

    >>> import gradzip, torch
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = gradzip.optim.AdaMomentum(model.parameters(), lr=0.002, weight_decay=0.1)

    Source: Adam with decoupled weight decay is of Loshchilov, Hutter, Decoupled Weight Decay Regularization, ICLR 2019;
    the second moment of the momentum, of Wang et al., Rethinking Adam: A Twofold Exponential Moving Average Approach,
    2021. docs/accuracy.md has what it is worth.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.7, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options, ("lr", "eps", "weight_decay"))

    def _update(self, group: dict[str, Any], gradients: dict[Tensor, Tensor]) -> None:
        beta1, beta2 = group["betas"]
        states = [self._state(parameter, gradient) for parameter, gradient in gradients.items()]
        momenta = [state["exp_avg"] for state in states]
        torch._foreach_lerp_(momenta, list(gradients.values()), 1 - beta1)
        # AdamW's own update without momentum, for which a gradient is its own first moment.
        adamw(
            list(gradients), momenta, momenta, [state["exp_avg_sq"] for state in states], [],
            [state["step"] for state in states], amsgrad=False, beta1=0.0, beta2=beta2, lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip

    def _state(self, parameter: Tensor, gradient: Tensor) -> dict[str, Any]:
        """The state of a parameter, under the names of torch's AdamW."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = gradient.clone()
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state
