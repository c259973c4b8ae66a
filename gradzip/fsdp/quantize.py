"""Both directions of FSDP2, quantized, for all modules of a model in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..memory.names import original
from ..methods.base.compressor import Compressor
from . import rank_state
from .all_gather import AllGather, DeltaGather, Passes
from .connections import Connections
from .reduce_scatter import Feedback, ReduceScatter
from .shards import Gathered, Reduced, collectives_of, replicas_of, sharded_modules


class Quantized:
    """What `quantize` has set.

    It is a `torch.distributed.checkpoint.stateful.Stateful`: `dcp.save({"quantized": set_up, ...})` works. A job that
    does not load it gathers its weights exactly at first, draws other random numbers, and begins with residuals of 0.

    Attributes:
        modules: names of the modules; "" is the model itself.
        rounded: names of the parameters that are gathered as rounded weights.
        exact: names of those that are gathered as they are.
    """

    def __init__(
        self, gathers: Mapping[str, AllGather], scatters: Mapping[str, ReduceScatter], modules: list[str],
        rounded: list[str], exact: list[str],
    ) -> None:  # fmt: skip
        self.modules, self.rounded, self.exact = modules, rounded, exact
        deltas = {name: gather for name, gather in gathers.items() if isinstance(gather, DeltaGather)}
        self._parts: dict[str, Mapping[str, Any]] = {"references": deltas, "reductions": scatters}

    def state_dict(self) -> dict[str, bytes]:
        """This rank's parts of references, numbers of random draws and residuals, as bytes under a key of its own."""
        state = {part: {name: one.state() for name, one in of.items()} for part, of in self._parts.items()}
        return rank_state.saved(self._key, state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's state, of the same checkpoint as the parameters: a resumed job has the same bits.

        Raises:
            ValueError: the state dict has none of this rank, or not that of these modules.
        """
        state = rank_state.loaded(self._key, state_dict, "Quantized")
        for part, of in self._parts.items():
            if state[part].keys() != of.keys():
                got = f"got {part} of the modules {sorted(state[part])}, expected {sorted(of)}"
                raise ValueError(f"Quantized.load_state_dict: {got}: set up the model as in the job that saved it")
        for part, of in self._parts.items():
            for name, one in of.items():
                one.load(state[part][name])

    @property
    def _key(self) -> str:
        return f"rank{dist.get_rank()}of{dist.get_world_size()}"


class _Told:
    """A reduce-scatter that tells when it is called."""

    def __init__(self, reduce_scatter: Any, tell: Callable[[], None]) -> None:
        self._reduce_scatter, self._tell = reduce_scatter, tell
        self.allocate = reduce_scatter.allocate

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._tell()
        return self._reduce_scatter(*arguments, **options)


def quantize(
    model: nn.Module,
    gather: Compressor | None = None,
    reduce: Compressor | None = None,
    *,
    keep: bool = False,
    reference: str | None = None,
    error_feedback: bool = False,
) -> Quantized:
    """Quantize what FSDP2 sends: weights that ranks gather, and gradients that they reduce.

        method = gradzip.BlockFloat(bits=8, rounding="nearest").exempt_modules(model, "embedding")
        gradzip.fsdp.quantize(model, gather=method, reduce=gradzip.BlockFloat(bits=8))

    Call it once, after `fully_shard` and before the first step, on all ranks alike. Sharded parameters, which the
    optimizer updates and checkpoints save, are not rounded: a job may be resumed with another method, or without.

    Args:
        gather: `BlockFloat(rounding="nearest")`, for the all-gathers (`all_gather`). What it leaves uncompressed of
            gradients stays exact: parameters of one dimension, small ones, and those of `exempt_modules`. None: FSDP's.
        reduce: the method of the reduce-scatters (`reduce_scatter`), without exempt parameters. None: FSDP's.
        keep: keep the encoded weights of a forward pass, of all ranks, until the backward pass, which then gathers
            nothing: half of the all-gathers, for 1.02 bytes (8 bits) or .52 (4) a parameter on each rank. For modules
            with `reshard_after_forward=True`.
        reference: "delta" gathers differences to the weights of the last gather, which each rank keeps whole, in the
            dtype in which they are gathered (`DeltaGather`): errors become smaller than steps of the optimizer, and the
            backward pass gathers nothing. For models that fit on each rank, sharded for their optimizer's state.
        error_feedback: each rank adds what rounding has lost of its gradients to the next ones. For `BlockFloat`.
            Memory on each rank: 4 bytes for each parameter of the whole model, not of its shards, and as much again
            within a backward pass; with `Hierarchical` and n ranks on a node, 1/n of that.

    Raises:
        ValueError: no sharded module, nothing to set, another method or reference, exempt parameters or
            error_feedback="owner" where they would have no effect, a module that is quantized already, or one whose
            parameters have several dtypes or meshes, or encode themselves. No module is changed then.
        RuntimeError: this torch has another FSDP2.
    """
    modules = sharded_modules(model)
    if not modules:
        raise ValueError("quantize: got a model without sharded modules, expected one after fully_shard")
    if gather is None and (reduce is None or keep):
        raise ValueError("quantize: got no method for the all-gathers, expected one: gather=gradzip.BlockFloat(...)")
    if reference not in (None, "delta") or (reference and (keep or gather is None)):
        got = f"got reference={reference!r} with gather={gather!r} and keep={keep}"
        raise ValueError(
            f"quantize: {got}, expected None, or 'delta' with a method for the all-gathers and without keep"
        )
    if error_feedback and reduce is None:
        raise ValueError("quantize: got error_feedback=True without a method for the reduce-scatters, expected one")
    ours = (*([AllGather] if gather is not None else []), *([ReduceScatter, _Told] if reduce is not None else []))
    for name, module in modules:
        if any(isinstance(one, ours) for one in collectives_of(module)):
            raise ValueError(f"quantize: got module {name!r}, which is quantized already, expected one call")
    named = {original(name): parameter for name, parameter in model.named_parameters()}
    names: dict[Tensor, str] = {parameter: name for name, parameter in named.items()}
    gathers: dict[str, AllGather] = {}
    scatters: dict[str, ReduceScatter] = {}
    in_use: dict[str, Any] = {}  # of what reduces gradients
    rounded: list[str] = []
    exact: list[str] = []
    passes = Passes()
    if reduce is not None:
        connections = Connections(reduce, "reduce_scatter")
        replicas = next(filter(None, (replicas_of(module) for _, module in modules)), None)
        feedback = Feedback(reduce, replicas) if error_feedback else None
        for name, module in modules:
            draws, reduced = f"reduce_scatter of {name!r}", Reduced(module, names) if feedback else None
            scatters[name] = ReduceScatter(reduce, draws, connections, feedback, reduced)
        in_use |= scatters
    if gather is not None:
        connections = Connections(gather, "all_gather", named)
        exempt = frozenset(name for name, p in named.items() if not gather.is_compressed(name, p))
        for name, module in modules:
            gathered = Gathered(module, name, names)
            if reference:
                gathers[name] = delta = DeltaGather(gather, gathered, exempt, connections, passes)
                if gathered.reduce_scatter is not None:  # there are parameters
                    in_use[name] = _Told(in_use.get(name, gathered.reduce_scatter), delta.reduced)
            else:
                gathers[name] = AllGather(gather, gathered, exempt, connections, passes if keep else None)
            exact += [parameter for parameter in gathered.numels if parameter in exempt]
            rounded += [parameter for parameter in gathered.numels if parameter not in exempt]
    for name, module in modules:
        if gather is not None:
            module.set_custom_all_gather(gathers[name])
        if name in in_use:
            module.set_custom_reduce_scatter(in_use[name])
        if keep or reference:
            module.register_forward_pre_hook(passes.begin_forward, prepend=True)
            module.register_forward_hook(passes.end_forward, always_call=True)
    return Quantized(gathers, scatters, [name for name, _ in modules], rounded, exact)
