"""Both directions of FSDP2, quantized, for all modules of a model in one call."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..memory.names import original
from ..methods.base.compressor import Compressor
from ..methods.base.group import is_compressed
from .all_gather import AllGather, DeltaGather, Passes
from .connections import Connections
from .reduce_scatter import reduce_scatter
from .shards import Gathered


class Quantized:
    """What `quantize` has set. With `reference="delta"`, a `torch.distributed.checkpoint.stateful.Stateful`.

    Attributes:
        modules: names of the modules; "" is the model itself.
        rounded: names of the parameters that are gathered as rounded weights.
        exact: names of those that are gathered as they are.
    """

    def __init__(self, gathers: dict[str, AllGather], modules: list[str], rounded: list[str], exact: list[str]) -> None:
        self.modules, self.rounded, self.exact = modules, rounded, exact
        self._deltas = {name: gather for name, gather in gathers.items() if isinstance(gather, DeltaGather)}

    def state_dict(self) -> dict[str, bytes]:
        """This rank's parts of the references, as bytes under a key of its own, as distributed checkpoints need them.

        Empty without references. A job that does not load it gathers the weights exactly in its first step.
        """
        if not self._deltas:
            return {}
        buffer = io.BytesIO()
        torch.save({name: gather.own for name, gather in self._deltas.items()}, buffer)
        return {self._key: buffer.getvalue()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's parts of the references, after or before the parameters: a resumed job has the same bits.

        Raises:
            ValueError: the state dict has none of this rank, or not those of these modules.
        """
        if not self._deltas:
            return
        if self._key not in state_dict:
            got = f"the references of {sorted(state_dict)}, expected those of {self._key!r}"
            raise ValueError(f"Quantized.load_state_dict: got {got}: load them on as many ranks, or not at all")
        loaded = torch.load(io.BytesIO(state_dict[self._key]), map_location="cpu", weights_only=True)
        if loaded.keys() != self._deltas.keys():
            got = f"the modules {sorted(loaded)}, expected {sorted(self._deltas)}"
            raise ValueError(f"Quantized.load_state_dict: got {got}")
        for name, own in loaded.items():
            if own is not None:
                self._deltas[name].load(own)

    @property
    def _key(self) -> str:
        rank, size = next(iter(self._deltas.values()))._gathered.place
        return f"shard{rank}of{size}"


def quantize(
    model: nn.Module,
    gather: Compressor | None = None,
    reduce: Compressor | None = None,
    *,
    keep: bool = False,
    reference: str | None = None,
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
        reference: "delta" gathers differences to the weights of the last gather, which each rank keeps whole, in the
            dtype in which they are gathered (`DeltaGather`): errors become smaller than steps of the optimizer, and the
            backward pass gathers nothing. For models that fit on each rank, sharded for their optimizer's state.

    Raises:
        ValueError: no sharded module, nothing to set, another method or reference, or a module whose parameters have
            several dtypes or meshes, encode themselves, or are sharded anew after the forward pass
            (`reshard_after_forward` as a number). No module is changed then.
        RuntimeError: this torch has another FSDP2.
    """
    modules: list[tuple[str, Any]] = [
        (name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)
    ]
    if not modules:
        raise ValueError("quantize: got a model without sharded modules, expected one after fully_shard")
    if gather is None and (reduce is None or keep):
        raise ValueError("quantize: got no method for the all-gathers, expected one: gather=gradzip.BlockFloat(...)")
    if reference not in (None, "delta") or (reference and (keep or gather is None)):
        got = f"got reference={reference!r} with gather={gather!r} and keep={keep}"
        raise ValueError(
            f"quantize: {got}, expected None, or 'delta' with a method for the all-gathers and without keep"
        )
    named = {original(name): parameter for name, parameter in model.named_parameters()}
    names: dict[Tensor, str] = {parameter: name for name, parameter in named.items()}
    gathers: dict[str, AllGather] = {}
    rounded: list[str] = []
    exact: list[str] = []
    scatters = None if reduce is None else reduce_scatter(reduce)
    if gather is not None:
        connections, passes = Connections(gather, "all_gather", named), Passes()
        exempt = frozenset(name for name, p in named.items() if not is_compressed(gather, name, p, ""))
        for name, module in modules:
            gathered = Gathered(module, name, names)
            if reference:
                gathers[name] = DeltaGather(gather, gathered, exempt, connections)
            else:
                gathers[name] = AllGather(gather, gathered, exempt, connections, passes if keep else None)
            exact += [parameter for parameter in gathered.numels if parameter in exempt]
            rounded += [parameter for parameter in gathered.numels if parameter not in exempt]
    for name, module in modules:
        if gather is not None:
            module.set_custom_all_gather(gathers[name])
            if keep:
                module.register_forward_pre_hook(passes.begin_forward, prepend=True)
        if scatters is not None:
            module.set_custom_reduce_scatter(scatters)
    return Quantized(gathers, [name for name, _ in modules], rounded, exact)
