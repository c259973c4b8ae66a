"""AdamW whose second moment stands still while momenta are compressed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ..averaging import optimizer_hooks
from ..memory.state import Workspace
from ..ops.device import is_capturing
from . import on_device
from .base import Optimizer
from .on_device import local

# Options of torch.optim.AdamW that `AdamW` does not have.
_OTHER_OPTIONS = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")


class AdamW(Optimizer):
    """torch.optim.AdamW, whose second moment stands still while `Momentum` compresses.

    In the warm-up of `Momentum`, and for parameters that it does not compress, a step is that of torch.optim.AdamW,
    with the same bits; on a CUDA device, of torch.optim.AdamW(fused=True). Without `Momentum`, all steps are. When
    momenta are compressed, averages have the mean of gradients but not their squares. The second moment v then keeps
    its value of the T-th step, the last of the warm-up:

        m = beta1 m + (1 - beta1) g
        p = (1 - lr weight_decay) p
        p = p - lr clip(m / (1 - beta1^t) / (sqrt(v / (1 - beta2^T)) + eps))    where v is not 0

    m is the first moment that all ranks agreed on: `Momentum` hands back the g that leads to it.

    clip limits magnitudes to (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2)): 1.16 for betas = (0.9, 0.95), and
    7.3 for (0.9, 0.999). No gradients can move an element further in a step of AdamW, by the Cauchy-Schwarz inequality.
    If v stands still, momenta can. Units of a ReLU network that the warm-up hardly used have tiny v, but errors of
    compression as large as others have, and training diverges without the limit. There is none if beta1^2 >= beta2.

    Where v is 0, as for tokens that the warm-up has not seen, there is no scale to step by. Such elements are decayed
    only, for as long as momenta are compressed, and their m is 0. A warning names the parameter: give embeddings
    another method (`gradzip.recipes.adamw` does).

    The optimizer learns from the front end which averages are of compressed momenta: nothing else is to be set. With
    `LocalGroup`, call its `tell_optimizers`.

    Args:
        params, lr, betas, eps, weight_decay: as of torch.optim.AdamW, with the same defaults. beta1 must be the `beta`
            of `Momentum`.

    With `found_inf`, a step is skipped as that of torch's fused AdamW: on a CUDA device, without a wait of the host.
    Steps are counted on the host: `rollback_counts` corrects the counters.

    State dicts are those of torch.optim.AdamW, and each loads those of the other (docs/usage.md has how, from files of
    torch.distributed.checkpoint). They also have "exp_avg_sq_step", the number of steps that the second moment was
    learnt in. Loading resets nothing.

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
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check_options(param_group, "a param group")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch.optim.AdamW.

        Raises:
            ValueError: it is of an AdamW with amsgrad or maximize.
        """
        for group in state_dict["param_groups"]:
            _check_options(group, "a state dict")
        # torch would move this counter to the device of the parameter, in its dtype; numbers stay as they are.
        count = "exp_avg_sq_step"
        states = {i: {k: float(x) if k == count else x for k, x in s.items()} for i, s in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": states})
        # Horovod broadcasts states and options one by one, so all ranks have the same ones, whoever has loaded.
        for group in self.param_groups:
            for option in _OTHER_OPTIONS:
                group.pop(option, None)
        for state in self.state.values():
            if "exp_avg_sq" in state:  # a fused AdamW has counted on the device, for which the host would wait
                state["step"] = _count(float(state["step"]))
                state[count] = _count(state.get(count, float(state["step"])))

    def _check(self, group: dict[str, Any], gradients: dict[Tensor, Tensor]) -> None:
        for parameter in gradients:
            averaged, state = optimizer_hooks.averaged(parameter), self.state.get(parameter)
            # (Methods that apply momentum are refused: it is Momentum.)
            if averaged and averaged.warms_up and state and state["exp_avg_sq_step"] < state["step"]:
                got = f"got a second moment of {averaged.name!r} that stands still, as while Momentum compresses"
                raise ValueError(f"AdamW: {got}, but Momentum warms up: load the compressor's state of that step, too")
            if averaged and averaged.compressed_momentum and not state:
                got = f"got a compressed momentum as the first average of {averaged.name!r}, expected gradients first"
                what_to_do = "give Momentum more warmup_steps, or this parameter another method with PerLayer"
                raise ValueError(f"AdamW: {got}, of which to learn the second moment: {what_to_do}")

    def _new_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        """The state of a parameter, under the names of torch's AdamW, and one more."""
        return {
            "step": _count(0.0),
            "exp_avg_sq_step": _count(0.0),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }

    def _update(self, group: dict[str, Any], gradients: dict[Tensor, Tensor]) -> None:
        held, exact = _held(gradients)
        if exact:
            self._step_as_torch(group, exact)
        if held:
            self._step_held(group, held)

    def _update_on_device(
        self, group: dict[str, Any], gradients: dict[Tensor, Tensor], found_inf: Tensor | None
    ) -> list[Tensor]:
        if is_capturing(next(iter(gradients))):
            got = f"{type(self).__name__}: got a step to capture as a CUDA graph, whose replays do not count steps"
            raise RuntimeError(f"{got}, expected one outside of it, or one of torch.optim.AdamW(fused=True)")
        held, exact = _held(gradients)
        counters: list[Tensor] = []
        if exact:
            counters += self._step_fused(group, exact, found_inf)
        if held:
            counters += self._step_held_on_device(group, held, found_inf)
        return counters

    def _step_as_torch(self, group: dict[str, Any], gradients: dict[Tensor, Tensor]) -> None:
        states = [self.state[parameter] for parameter in gradients]
        torch._foreach_add_([state["exp_avg_sq_step"] for state in states], 1)
        beta1, beta2 = group["betas"]
        adamw(
            list(gradients), list(gradients.values()), [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states], [], [state["step"] for state in states], amsgrad=False,
            beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
            maximize=False,
        )  # fmt: skip

    def _step_fused(
        self, group: dict[str, Any], gradients: dict[Tensor, Tensor], found_inf: Tensor | None
    ) -> list[Tensor]:
        """A step of torch's fused AdamW. Returns the counters to increase."""
        states = [self.state[parameter] for parameter in gradients]
        counts = [float(state["step"]) for state in states]
        beta1, beta2 = group["betas"]
        moments = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        rows = [row for row in zip(*map(local, (gradients, gradients.values(), *moments)), counts) if row[0].numel()]
        if rows:
            parameters, averages, first, second, counts = map(list, zip(*rows))
            adamw(
                parameters, averages, first, second, [], on_device.fill(counts, parameters), fused=True,
                found_inf=found_inf, amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"],
                weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            )  # fmt: skip
        return [state[name] for state in states for name in ("step", "exp_avg_sq_step")]

    def _step_held(self, group: dict[str, Any], gradients: dict[Tensor, Tensor]) -> None:
        beta1, lr = group["betas"][0], float(group["lr"])
        rows = self._held_rows(group, gradients)
        torch._foreach_add_([self.state[parameter]["step"] for parameter in gradients], 1)
        # On a device together, which takes fewer launches. On a CPU one by one, in memory that stays in its caches.
        on_cpu, workspace = rows[0][0].device.type == "cpu", Workspace()

        def scratch(name: str, like: list[Tensor]) -> list[Tensor]:
            return [workspace.empty(name, x.shape, x.dtype, x.device) if on_cpu else torch.empty_like(x) for x in like]

        for some in [[row] for row in rows] if on_cpu else [rows]:
            parameters, averages, first, second, learnt, unbiased = map(list, zip(*some))
            divisors, signs = scratch("divisors", second), scratch("signs", second)
            torch._foreach_lerp_(first, averages, 1 - beta1)
            _set_divisors(group, first, second, learnt, unbiased, divisors, signs)
            torch._foreach_div_(divisors, signs)  # infinite where v is 0
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
            torch._foreach_addcdiv_(parameters, first, divisors, [-lr * factor for factor in unbiased])
            # There is no scale for it: once v is learnt again, a step would divide it by eps.
            torch._foreach_mul_(first, signs)

    def _step_held_on_device(
        self, group: dict[str, Any], gradients: dict[Tensor, Tensor], found_inf: Tensor | None
    ) -> list[Tensor]:
        """`_step_held` in other order: what may be skipped is written last. Returns the counters to increase."""
        rows = self._held_rows(group, gradients)
        parameters, averages, first, second, learnt, unbiased = map(list, zip(*rows))
        divisors, updates = ([torch.empty_like(x) for x in second] for _ in range(2))
        on_device.lerp(first, averages, 1 - group["betas"][0], found_inf=found_inf)
        _set_divisors(group, first, second, learnt, unbiased, divisors, updates)
        torch._foreach_mul_(updates, first)
        on_device.lerp(first, updates, 1.0, found_inf=found_inf)
        torch._foreach_div_(updates, divisors)
        torch._foreach_mul_(updates, unbiased)
        on_device.subtract(parameters, updates, float(group["lr"]), group["weight_decay"], found_inf=found_inf)
        return [self.state[parameter]["step"] for parameter in gradients]

    def _held_rows(self, group: dict[str, Any], gradients: dict[Tensor, Tensor]) -> list[tuple[Any, ...]]:
        """For each parameter: its shard here, average, moments, and what its moments were biased by or are."""
        beta1, beta2 = group["betas"]
        states = [self.state[parameter] for parameter in gradients]
        for parameter, state in zip(gradients, states):
            if state["exp_avg_sq_step"] == state["step"]:
                _warn_of_zeros(parameter, state["exp_avg_sq"])
        moments = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        learnt = [math.sqrt(1 - beta2 ** float(state["exp_avg_sq_step"])) for state in states]
        unbiased = [1 / (1 - beta1 ** (1 + float(state["step"]))) for state in states]
        return [*zip(*map(local, (gradients, gradients.values(), *moments)), learnt, unbiased)]


def _count(steps: float) -> Tensor:
    """A number of steps, on the host as in torch's optimizers, wherever torch makes tensors by default."""
    return torch.tensor(steps, device="cpu")


def _set_divisors(
    group: dict[str, Any],
    first: list[Tensor],
    second: list[Tensor],
    learnt: list[float],
    unbiased: list[float],
    divisors: list[Tensor],
    signs: list[Tensor],
) -> None:
    """Set the divisors of the first moments, large enough for the limit of updates, and the signs of the second ones.

    learnt, unbiased: sqrt(1 - beta2^T) and 1 / (1 - beta1^t), for each parameter.
    """
    largest = _largest_update(*group["betas"])
    torch._foreach_copy_(divisors, second)
    torch._foreach_sqrt_(divisors)
    torch._foreach_div_(divisors, learnt)
    torch._foreach_add_(divisors, group["eps"])
    torch._foreach_copy_(signs, first)
    torch._foreach_abs_(signs)
    torch._foreach_mul_(signs, [factor / largest for factor in unbiased])
    torch._foreach_maximum_(divisors, signs)
    torch._foreach_copy_(signs, second)
    torch._foreach_sign_(signs)


def _held(gradients: dict[Tensor, Tensor]) -> tuple[dict[Tensor, Tensor], dict[Tensor, Tensor]]:
    """The gradients that are of compressed momenta, and the others."""
    held = {p: gradient for p, gradient in gradients.items() if _compressed_momentum(p) is not None}
    return held, {p: gradient for p, gradient in gradients.items() if p not in held}


def _compressed_momentum(parameter: Tensor) -> optimizer_hooks.Averaged | None:
    """How the momentum of a parameter was averaged, if it was compressed; None: it has the average of a gradient."""
    found = optimizer_hooks.averaged(parameter)
    return found if found is not None and found.compressed_momentum else None


def _warn_of_zeros(parameter: Tensor, second: Tensor) -> None:
    """Warn of elements that are not going to train: their second moment is 0 when it begins to stand still."""
    (second,), found = local([second]), optimizer_hooks.averaged(parameter)
    if found is not None and (zeros := second.numel() - int(second.count_nonzero())):
        warnings.warn(
            f"AdamW: got {zeros} elements without a gradient in the warm-up, of {found.name!r} in shape "
            f"{list(second.shape)}, expected gradients for all: they do not train while momenta are compressed; exempt "
            "embeddings, as gradzip.recipes.adamw does, or warm up longer",
            stacklevel=2,
        )


def _check_options(group: dict[str, Any], where: str) -> None:
    """Raise ValueError if a param group has options of torch.optim.AdamW with which its steps would be others."""
    for option in ("amsgrad", "maximize"):
        if group.get(option):
            raise ValueError(f"AdamW: got {where} with {option} = True, expected one of AdamW without it")


def _largest_update(beta1: float, beta2: float) -> float:
    """How far AdamW can move an element in a step, in units of the learning rate, whatever its gradients are.

    With g_k the gradient k steps ago, m = (1 - beta1) sum beta1^k g_k and v = (1 - beta2) sum beta2^k g_k^2.
    """
    if beta1**2 >= beta2:
        return math.inf
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))
