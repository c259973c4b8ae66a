"""Optimizers for compressed momenta, for sparse averages, and for gradients that have momentum already."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .averaging import optimizer_hooks


class _Optimizer(torch.optim.Optimizer):
    """Steps all parameters of a group together. Subclasses define `_update`."""

    def __init__(self, params: Iterable[Any], options: dict[str, Any], not_negative: Iterable[str]) -> None:
        for name in not_negative:
            if not options[name] >= 0:
                raise ValueError(f"{type(self).__name__}: got {name} = {options[name]!r}, expected a number >= 0")
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            gradients = {p: p.grad for p in group["params"] if p.grad is not None}
            if any(gradient.is_sparse for gradient in gradients.values()):
                raise ValueError(
                    f"{type(self).__name__}: got a sparse gradient, expected a dense one; use Embedding(sparse=False)"
                )
            if gradients:
                self._update(group, gradients)
        return loss

    def _update(self, group: dict[str, Any], gradients: dict[Tensor, Tensor]) -> None:
        """Update the parameters of a group that have gradients."""
        raise NotImplementedError


def _check_betas(name: str, betas: tuple[float, float]) -> None:
    if not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
        raise ValueError(f"{name}: got betas = {betas!r}, expected two numbers in [0, 1)")


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The shards of DTensors, and all other tensors as they are."""
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


# Options of torch.optim.AdamW that `AdamW` does not have.
_OTHER_OPTIONS = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")


class AdamW(_Optimizer):
    """torch.optim.AdamW, whose second moment stands still while `Momentum` compresses.

    In the warm-up of `Momentum`, and for parameters that it does not compress, a step is that of torch.optim.AdamW,
    with the same bits. Without `Momentum`, all steps are. When momenta are compressed, averages have the mean of
    gradients but not their squares. The second moment v then keeps its value of the T-th step, the last of the warm-up:

        m = beta1 m + (1 - beta1) g
        p = (1 - lr weight_decay) p
        p = p - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^T)) + eps)    where v is not 0

    m is the first moment that all ranks agreed on: `Momentum` hands back the g that leads to it. Where v is 0, as for
    characters that the warm-up has not seen, there is no scale to step by: compressed momenta are not 0 there, and the
    parameter would move by lr m / eps. Such elements are decayed only.

    The optimizer learns from the front end which averages are of compressed momenta: nothing else is to be set. With
    `LocalGroup`, call its `tell_optimizers`.

    Args:
        params, lr, betas, eps, weight_decay: as of torch.optim.AdamW, with the same defaults. beta1 must be the `beta`
            of `Momentum`.

    State dicts are those of torch.optim.AdamW, and each loads those of the other. They also have "exp_avg_sq_step", the
    number of steps that the second moment was learnt in. Loading resets nothing.

    Raises ValueError in a step: a parameter's first average is of compressed momenta, so that it has no second moment.

    >>> import gradzip, torch
    >>> compression = gradzip.Momentum(gradzip.SignSGD(majority=False), beta=0.9, warmup_steps=500)
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = gradzip.optim.AdamW(model.parameters(), lr=0.004, betas=(0.9, 0.95), weight_decay=0.1)

    Source: Loshchilov, Hutter, Decoupled Weight Decay Regularization, ICLR 2019; the second moment that stands still:
    Tang et al., 1-bit Adam, ICML 2021, Algorithm 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        _check_betas("AdamW", betas)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options, ("lr", "eps", "weight_decay"))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch.optim.AdamW.

        Raises:
            ValueError: it is of an AdamW with amsgrad or maximize.
        """
        for group in state_dict["param_groups"]:
            for option in ("amsgrad", "maximize"):
                if group.get(option):
                    raise ValueError(f"AdamW: got a state dict with {option} = True, expected one of AdamW without it")
        super().load_state_dict(state_dict)
        # Horovod broadcasts states and options one by one, so all ranks have the same ones, whoever has loaded.
        for group in self.param_groups:
            for option in _OTHER_OPTIONS:
                group.pop(option, None)
        for state in self.state.values():
            state.setdefault("exp_avg_sq_step", state["step"].clone())

    def _update(self, group: dict[str, Any], gradients: dict[Tensor, Tensor]) -> None:
        exact, held = {}, {}
        for parameter, gradient in gradients.items():
            averaged, state = optimizer_hooks.averaged(parameter), self.state[parameter]
            if averaged is None or not averaged.compressed_momentum:
                exact[parameter] = gradient
            elif state:
                held[parameter] = gradient
            else:
                raise ValueError(
                    f"AdamW: got a compressed momentum as the first average of {averaged.name!r}, expected gradients "
                    "first, of which to learn the second moment: give Momentum some warmup_steps"
                )
        if exact:
            self._step_as_torch(group, exact)
        if held:
            self._step_held(group, held)

    def _step_as_torch(self, group: dict[str, Any], gradients: dict[Tensor, Tensor]) -> None:
        states = [self._state(parameter) for parameter in gradients]
        torch._foreach_add_([state["exp_avg_sq_step"] for state in states], 1)
        beta1, beta2 = group["betas"]
        adamw(
            list(gradients), list(gradients.values()), [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states], [], [state["step"] for state in states], amsgrad=False,
            beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
            maximize=False,
        )  # fmt: skip

    def _step_held(self, group: dict[str, Any], gradients: dict[Tensor, Tensor]) -> None:
        states = [self.state[parameter] for parameter in gradients]
        learnt = [float(state["exp_avg_sq_step"]) for state in states]
        torch._foreach_add_([state["step"] for state in states], 1)
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        parameters, averages = _local(gradients), _local(gradients.values())
        first, second = (_local(state[name] for state in states) for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(first, averages, 1 - beta1)
        divisors = torch._foreach_sqrt(second)
        torch._foreach_div_(divisors, [math.sqrt(1 - beta2**steps) for steps in learnt])
        torch._foreach_add_(divisors, group["eps"])
        torch._foreach_div_(divisors, torch._foreach_sign(second))  # infinite where v is 0
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        rates = [-lr / (1 - beta1 ** float(state["step"])) for state in states]
        torch._foreach_addcdiv_(parameters, first, divisors, rates)

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        """The state of a parameter, under the names of torch's AdamW, and one more."""
        state = self.state[parameter]
        if not state:
            state["step"], state["exp_avg_sq_step"] = torch.tensor(0.0), torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


class AdaMomentum(_Optimizer):
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
        _check_betas("AdaMomentum", betas)
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


class DGCSGD(_Optimizer):
    """SGD for `DGC`: for averages that have momentum already. Its momentum is that of weight decay alone.

    For the averaged gradient g, which has momentum, and the momentum d of the decay, which starts as 0:

        d = momentum d + weight_decay p
        p = p - lr (g + d)

    If g is u = momentum u + gradient, this is torch.optim.SGD(momentum=..., weight_decay=...): the sum of u and d is
    its buffer. torch.optim.SGD(weight_decay=...) would decay parameters 1 / (1 - momentum) times too slowly. Elements
    of the decay are neither dropped nor masked.

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
        if not 0 <= momentum < 1:
            raise ValueError(f"DGCSGD: got momentum = {momentum!r}, expected a number in [0, 1)")
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, options, ("lr", "weight_decay"))

    def _update(self, group: dict[str, Any], gradients: dict[Tensor, Tensor]) -> None:
        lr, decay = group["lr"], group["weight_decay"]
        buffers = {p: self._buffer(p) for p in gradients if decay or p in self.state}
        if buffers:
            decays = list(buffers.values())
            torch._foreach_mul_(decays, group["momentum"])
            torch._foreach_add_(decays, list(buffers), alpha=decay)
        torch._foreach_add_(list(gradients), list(gradients.values()), alpha=lr if group["maximize"] else -lr)
        if buffers:
            torch._foreach_add_(list(buffers), decays, alpha=-lr)

    def _buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["decay_momentum_buffer"] = torch.zeros_like(parameter)
        return state["decay_momentum_buffer"]
