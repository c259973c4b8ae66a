"""SGD for gradients that have momentum already."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import on_device
from .base import Optimizer

_BUFFER = "decay_momentum_buffer"


class DGCSGD(Optimizer):
    """SGD for `DGC`: for averages that have momentum already. Its momentum is that of weight decay alone.

    For the averaged gradient g, which has momentum, and the momentum d of the decay, which starts as 0:

        d = momentum d + weight_decay p
        p = p - lr (g + d)

    If g is u = momentum u + gradient, this is torch.optim.SGD(momentum=..., weight_decay=...): the sum of u and d is
    its buffer. torch.optim.SGD(weight_decay=...) would decay parameters 1 / (1 - momentum) times too slowly. Elements
    of the decay are neither dropped nor masked. It is float32 for parameters of 16 bits, in which it would drift.

    With `found_inf`, a step is skipped as that of torch's fused SGD: on a CUDA device, without a wait of the host.

    Args:
        params, lr, weight_decay: as of torch.optim.SGD.
        maximize: add lr g instead of subtracting it; the decay is subtracted.
        momentum: of the decay; give the momentum of the method.

    >>> import gradzip, torch
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = gradzip.optim.DGCSGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    Pass it to Horovod with the method, ``hvd.DistributedOptimizer(optimizer, compression=gradzip.DGC(momentum=0.9))``,
    or use it as it is with a model that has a hook of `gradzip.ddp` or `gradzip.fsdp`.

    Source: the optimizer of the same name in the published code of Lin, Han, Mao, Wang, Dally, Deep Gradient
    Compression, ICLR 2018.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, maximize=maximize)

    _widens = True

    def _new_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        return {_BUFFER: torch.zeros_like(parameter, dtype=_wide(parameter))} if group["weight_decay"] else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class. One of an earlier version may have buffers of 16 bits."""
        super().load_state_dict(state_dict)
        params = [group["params"] for group in self.param_groups]
        saved = [group["params"] for group in state_dict["param_groups"]]
        for parameter, key in zip(itertools.chain(*params), itertools.chain(*saved)):
            if (buffer := state_dict["state"].get(key, {}).get(_BUFFER)) is not None:  # which torch has rounded
                self.state[parameter][_BUFFER] = buffer.to(parameter.device, _wide(parameter), copy=True)

    def _update(self, group: dict[str, Any], gradients: dict[Tensor, Tensor]) -> None:
        lr, decay, buffers = group["lr"], group["weight_decay"], self._buffers(gradients)
        if buffers:
            decays = list(buffers.values())
            torch._foreach_mul_(decays, group["momentum"])
            torch._foreach_add_(decays, list(buffers), alpha=decay)
        torch._foreach_add_(list(gradients), list(gradients.values()), alpha=lr if group["maximize"] else -lr)
        if buffers:
            torch._foreach_add_(list(buffers), decays, alpha=-lr)

    def _update_on_device(
        self, group: dict[str, Any], gradients: dict[Tensor, Tensor], found_inf: Tensor | None
    ) -> list[Tensor]:
        lr, decay, momentum = float(group["lr"]), group["weight_decay"], group["momentum"]
        buffers = self._buffers(gradients)
        parameters, decays = on_device.local(buffers), on_device.local(buffers.values())
        if decay:
            alike = [p.to(d.dtype) for p, d in zip(parameters, decays)]
            on_device.subtract(decays, alike, -decay, (momentum - 1) / decay, found_inf=found_inf)
        else:
            on_device.subtract(decays, decays, 1 - momentum, found_inf=found_inf)
        rows = on_device.local(gradients), on_device.local(gradients.values())
        on_device.subtract(*rows, -lr if group["maximize"] else lr, found_inf=found_inf)
        on_device.subtract(parameters, [d.to(p.dtype) for p, d in zip(parameters, decays)], lr, found_inf=found_inf)
        return []

    def _buffers(self, gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        return {p: self.state[p][_BUFFER] for p in gradients if self.state.get(p)}


def _wide(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)
