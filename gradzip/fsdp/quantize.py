"""Both directions of FSDP2, quantized, for all modules of a model in one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..memory.names import original
from ..methods.base.compressor import Compressor
from ..methods.base.group import is_compressed
from .all_gather import AllGather, Shared
from .reduce_scatter import reduce_scatter
from .shards import Gathered


@dataclass(frozen=True)
class Quantized:
    """What `quantize` has set.

    Attributes:
        modules: names of the modules; "" is the model itself.
        rounded: names of the parameters that are gathered as rounded weights.
        exact: names of those that are gathered as they are.
    """

    modules: list[str]
    rounded: list[str]
    exact: list[str]


def quantize(
    model: nn.Module, gather: Compressor | None = None, reduce: Compressor | None = None, *, keep: bool = False
) -> Quantized:
    """Quantize what FSDP2 sends: weights that ranks gather, and gradients that they reduce.

        method = gradzip.BlockFloat(bits=8, rounding="nearest").exempt_modules(model, "embedding")
        gradzip.fsdp.quantize(model, gather=method, reduce=gradzip.BlockFloat(bits=8))

    Call it once, after `fully_shard` and before the first step, on all ranks alike. Sharded parameters, which the
    optimizer updates and checkpoints save, are not rounded: a job may be resumed with another method, or without.

    Args:
        gather: `BlockFloat(rounding="nearest")`, for the all-gathers (`all_gather`). What it leaves uncompressed of
            gradients stays exact: parameters of one dimension, small ones, and those of `exempt_modules`. None: FSDP's.
        reduce: the method of the reduce-scatters (`reduce_scatter`). None: FSDP's.
        keep: keep the encoded weights of a forward pass, of all ranks, until the backward pass, which then gathers
            nothing: half of the all-gathers, for 1.02 bytes (8 bits) or .52 (4) a parameter on each rank. For modules
            with `reshard_after_forward=True`.

    Raises:
        ValueError: no sharded module, nothing to set, another method, or a module whose parameters have several dtypes
            or meshes, encode themselves, or are sharded anew after the forward pass (`reshard_after_forward` as a
            number). No module is changed then.
        RuntimeError: this torch has another FSDP2.
    """
    modules: list[tuple[str, Any]] = [
        (name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)
    ]
    if not modules:
        raise ValueError("quantize: got a model without sharded modules, expected one after fully_shard")
    if gather is None and (reduce is None or keep):
        raise ValueError("quantize: got no method for the all-gathers, expected one: gather=gradzip.BlockFloat(...)")
    named = {original(name): parameter for name, parameter in model.named_parameters()}
    names: dict[Tensor, str] = {parameter: name for name, parameter in named.items()}
    gathers, scatters, rounded, exact = {}, None if reduce is None else reduce_scatter(reduce), [], []
    if gather is not None:
        shared = Shared(gather, named)
        exempt = frozenset(name for name, p in named.items() if not is_compressed(gather, name, p, ""))
        for name, module in modules:
            gathered = Gathered(module, name, names)
            gathers[name] = AllGather(gather, gathered, exempt, keep, shared)
            exact += [parameter for parameter in gathered.numels if parameter in exempt]
            rounded += [parameter for parameter in gathered.numels if parameter not in exempt]
    for name, module in modules:
        if gather is not None:
            module.set_custom_all_gather(gathers[name])
            if keep:
                module.register_forward_pre_hook(shared.begin_forward, prepend=True)
        if scatters is not None:
            module.set_custom_reduce_scatter(scatters)
    return Quantized([name for name, _ in modules], rounded, exact)
