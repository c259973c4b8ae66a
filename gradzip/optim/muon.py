"""Muon, with AdamW for what it does not suit, as one optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import on_device
from .adamw import AdamW
from .base import Optimizer

# The polynomial a x + b x^3 + c x^5 moves singular values in (0, 1] towards 1, fast rather than exactly.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_SMALLEST_NORM = 1e-7

# Options that a param group of the other kind does not have.
_OF_MUON = ("momentum", "nesterov")
_OF_ADAMW = ("betas", "eps")


class Muon(AdamW):
    """Muon for matrices, and AdamW for all other parameters, in one optimizer.

    Muon moves a matrix by the orthogonal matrix nearest to its momentum. With the averaged gradient G (rows, columns):

        M = momentum M + (1 - momentum) G
        U = momentum M + (1 - momentum) G with Nesterov's momentum, otherwise M
        P = (1 - lr weight_decay) P
        P = P - 0.2 sqrt(max(rows, columns)) lr orthogonal(U)

    The factor gives an update the root mean square of one of AdamW, so that both share a learning rate.

    Muon is for the matrices within a network. Give embeddings and the output layer to AdamW, too, as its authors do:

        optimizer = gradzip.optim.Muon([
            {"params": [p for p in model.blocks.parameters() if p.ndim == 2]},
            {"params": others, "adamw": True},
        ], lr=0.004)

    It is one optimizer, as Horovod's DistributedOptimizer and `gradzip.outer.LocalSteps` need it. Parameters of AdamW
    are stepped by `gradzip.optim.AdamW`.

    **Compression:** the average of a gradient is orthogonalized after the momentum. Its small singular values count as
    much as large ones, so that noise is amplified. docs/accuracy.md has what methods cost.

    Args:
        params: matrices, and param groups with ``"adamw": True``.
        lr: of both.
        momentum, nesterov: of Muon.
        betas, eps: of AdamW.
        weight_decay: of both, decoupled.

    Updates have the bits of ``torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`` and of torch.optim.AdamW on a CPU. On
    a CUDA device, those of matrices differ by rounding, and others are those of torch.optim.AdamW(fused=True). The
    product of matrices is computed in bfloat16.

    With `found_inf`, a step is skipped as that of `AdamW` is.

    Raises ValueError: a parameter of Muon is no matrix, or is a shard (DTensor).

    >>> import gradzip, torch
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = gradzip.optim.Muon([{"params": model.weight}, {"params": model.bias, "adamw": True}], lr=0.004)

    Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; the factor: Liu et al., Muon
    is Scalable for LLM Training, 2025, section 2.2.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        moments = {"momentum": momentum, "nesterov": nesterov, "betas": betas, "eps": eps}
        Optimizer.__init__(self, params, lr=lr, weight_decay=weight_decay, **moments)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters: matrices, or with ``"adamw": True`` any."""
        super().add_param_group({"adamw": False, **param_group})
        added = self.param_groups[-1]
        # Front ends see by its options which momentum a group has.
        for option in _OF_MUON if added["adamw"] else _OF_ADAMW:
            added.pop(option, None)
        for parameter in () if added["adamw"] else added["params"]:
            is_shard = hasattr(parameter, "to_local")
            if is_shard or parameter.ndim != 2:
                self.param_groups.pop()
                what = "that is a shard (DTensor)" if is_shard else f"of shape {list(parameter.shape)}"
                expected = 'expected a whole matrix; put it into a param group with "adamw": True'
                raise ValueError(f"Muon: got a parameter {what}, {expected}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class.

        Raises:
            ValueError: it is of another optimizer, or of other param groups.
        """
        saved, own = ([g.get("adamw") for g in groups] for groups in (state_dict["param_groups"], self.param_groups))
        if saved != own:
            got = f"got a state dict of param groups with adamw = {saved}"
            raise ValueError(f"Muon: {got}, expected {own}: load that of a Muon with the same groups")
        super().load_state_dict(state_dict)

    def _check(self, group: dict[str, Any], gradients: dict[Tensor, Tensor]) -> None:
        if group["adamw"]:
            super()._check(group, gradients)

    def _new_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        if group["adamw"]:
            return super()._new_state(group, parameter)
        return {"momentum_buffer": torch.zeros_like(parameter, memory_format=torch.preserve_format)}

    def _update(self, group: dict[str, Any], gradients: dict[Tensor, Tensor]) -> None:
        if group["adamw"]:
            super()._update(group, gradients)
            return
        lr, momentum = float(group["lr"]), group["momentum"]
        for parameter, gradient in gradients.items():
            buffer = self.state[parameter]["momentum_buffer"].lerp_(gradient, 1 - momentum)
            update = _orthogonal(gradient.lerp(buffer, momentum) if group["nesterov"] else buffer)
            parameter.mul_(1 - lr * group["weight_decay"])
            parameter.add_(update, alpha=-lr * _factor(parameter))

    def _update_on_device(
        self, group: dict[str, Any], gradients: dict[Tensor, Tensor], found_inf: Tensor | None
    ) -> list[Tensor]:
        if group["adamw"]:
            return super()._update_on_device(group, gradients, found_inf)
        lr, momentum, decay = float(group["lr"]), group["momentum"], group["weight_decay"]
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in gradients]
        on_device.lerp(buffers, list(gradients.values()), 1 - momentum, found_inf=found_inf)
        for (parameter, gradient), buffer in zip(gradients.items(), buffers):
            if factor := _factor(parameter):
                update = _orthogonal(gradient.lerp(buffer, momentum) if group["nesterov"] else buffer)
                update = torch.empty_like(parameter).copy_(update)
                on_device.subtract([parameter], [update], lr * factor, decay / factor, found_inf=found_inf)
        return []


def _factor(parameter: Tensor) -> float:
    """The root mean square of an update of AdamW, in units of the learning rate, to that of an orthogonal matrix."""
    return 0.2 * math.sqrt(max(parameter.shape))


def _orthogonal(matrix: Tensor) -> Tensor:
    """About U V^T of the singular value decomposition U S V^T, by five steps of a Newton-Schulz iteration."""
    x = matrix.bfloat16()
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if is_tall else x
