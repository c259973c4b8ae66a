"""Updates on a CUDA device that a flag on the device can skip, without a wait of the host.

The flag, `found_inf`, is a float32 tensor of one element, as torch's GradScaler gives to fused optimizers: 1.0 skips an
update, 0.0 does not. A product with 0 is not enough, for gradients of skipped steps are NaN. torch's fused SGD without
momentum leaves memory untouched if the flag is set. All updates are thus written as steps of SGD.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The shards of DTensors, and all other tensors as they are."""
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def fits(parameter: Tensor, gradient: Tensor, state: Mapping[str, Any], widens: bool = False) -> bool:
    """Whether fused kernels take a parameter: real numbers on a CUDA device, with one dtype, layout and sharding.

    widens: whether states are float32 instead, if the parameter has 16 bits.
    """
    if not (parameter.is_cuda and parameter.is_floating_point()):
        return False
    others = [gradient, *(x for x in state.values() if isinstance(x, Tensor) and x.is_cuda)]  # counters are on the host
    sharding = getattr(parameter, "placements", None)
    if any(getattr(x, "placements", None) != sharding for x in others):
        return False
    own, *rest = local([parameter, *others])
    of_states = torch.promote_types(own.dtype, torch.float32) if widens else own.dtype
    dtypes = [own.dtype] + [of_states] * (len(rest) - 1)
    return all((x.device, x.dtype, x.stride()) == (own.device, d, own.stride()) for x, d in zip(rest, dtypes))


def subtract(
    targets: Sequence[Tensor],
    gradients: Sequence[Tensor],
    factor: float,
    decay: float = 0.0,
    *,
    found_inf: Tensor | None,
) -> None:
    """Compute targets -= factor (gradients + decay targets), each rounded once, unless `found_inf` is 1.0.

    Skipped targets keep all bits. Pairs have one device, dtype and layout. Neither allocates nor synchronises.
    """
    alike: defaultdict[Any, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for target, gradient in zip(targets, gradients):
        if target.numel():
            of = alike[target.device, target.dtype]
            of[0].append(target)
            of[1].append(gradient)
    for (device, _), (some, theirs) in alike.items():
        # Not `maximize`: on some devices it changes the sign of the decay, too.
        torch._fused_sgd_(
            some, theirs, [], weight_decay=decay, momentum=0.0, lr=factor, dampening=0.0, nesterov=False,
            maximize=False, is_first_step=False, grad_scale=None, found_inf=_moved(found_inf, device),
        )  # fmt: skip


def lerp(targets: Sequence[Tensor], ends: Sequence[Tensor], weight: float, *, found_inf: Tensor | None) -> None:
    """Compute targets += weight (ends - targets), unless `found_inf` is 1.0. A weight of 1 copies finite numbers."""
    subtract(targets, ends, -weight, -1.0, found_inf=found_inf)


def fill(numbers: Sequence[float], like: Sequence[Tensor]) -> list[Tensor]:
    """A float32 tensor of one element for each number, on the device of a tensor: one fill for all that are equal."""
    equal: defaultdict[Any, list[int]] = defaultdict(list)
    for i, (number, tensor) in enumerate(zip(numbers, like)):
        equal[number, tensor.device].append(i)
    filled: dict[int, Tensor] = {}
    for (number, device), indices in equal.items():
        made = torch.full((len(indices),), number, dtype=torch.float32, device=device)
        filled.update(zip(indices, made.unbind()))
    return [filled[i] for i in range(len(numbers))]


def _moved(found_inf: Tensor | None, device: torch.device) -> Tensor | None:
    return None if found_inf is None else found_inf.to(device, non_blocking=True)
