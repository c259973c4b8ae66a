"""What ranks compare before the first step: version, method, parameters, names of states, loss scaling, step counts.

Ranks that differ in them would wait for each other forever, or average tensors that do not belong together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _version
from ..collectives.fusion import as_real
from ..memory.names import original
from ..methods.base.compressor import Compressor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


def parameters_by_name(named_parameters: Iterable[tuple[str, Tensor]], what: str) -> dict[str, Tensor]:
    """The pairs of `model.named_parameters()` as a dict. Raises ValueError for anything else, and for equal names."""
    expected = "expected (name, tensor) pairs, as of model.named_parameters()"
    try:
        pairs = list(named_parameters)
    except TypeError:
        raise ValueError(f"{what}: got {type(named_parameters).__name__}, {expected}") from None
    for pair in pairs:
        name, tensor = pair if isinstance(pair, tuple) and len(pair) == 2 else (None, None)
        if not (isinstance(name, str) and isinstance(tensor, Tensor)):
            raise ValueError(f"{what}: got named_parameters of {type(pair).__name__}, {expected}")
    named = {original(name): tensor for name, tensor in pairs}
    if len(named) < len(pairs):
        raise ValueError(f"{what}: got named_parameters with equal names, expected a name for each parameter")
    return named


@torch.no_grad()
def digest(tensors: Iterable[Tensor]) -> int:
    """A number that changes with almost every change of these tensors: a weighted sum of their bits."""
    sums = [tensor.view(_BITS[tensor.element_size()]).sum(dtype=torch.int64) for tensor in map(as_real, tensors)]
    weighted = torch.stack(sums) * torch.arange(1, 2 * len(sums), 2, device=sums[0].device) if sums else None
    return 0 if weighted is None else int(weighted.sum()) % 2**64


def describe(
    compressor: Compressor,
    parameters: Iterable[tuple[str, Tensor]],
    prefix: str = "",
    taken: Sequence[str] = (),
    buckets: Any = None,
    compressed: Sequence[float] = (0, 0),
) -> bytes:
    """Describe this rank's configuration as a line of JSON, for `compare`.

    Args:
        prefix: of the names of the states.
        taken: prefixes of other parameters with these names. Neither is compared: ranks agree on a prefix.
        buckets: of the front end, in JSON types. They are not compared, but the front end sees those of all ranks.
        compressed: as of `Compressor.count_compressed`, not compared either.
    """
    shapes, steps = {}, {}
    for name, p in parameters:
        shapes[name] = f"{str(p.dtype).removeprefix('torch.')}{list(p.shape)}"
        steps[name] = compressor.step_of(name, p.shape, prefix)
    parts = compressor.parts
    description = {
        "version": _version.__version__,
        "method": repr(compressor),
        # A digest does not depend on how payloads travel.
        "digest": [compressor.digest, *(getattr(part, "exchange", None) for part in parts)],
        "parameters": shapes,
        "prefix": prefix,
        "taken": list(taken),
        "foreign": _foreign(compressor, set(shapes), prefix),
        "scaled": compressor.memory.loss_scale.scaler is not None,
        "skips": compressor.memory.skips_nonfinite,
        "exempt": sorted(compressor.exempted),
        "stray": _stray(compressor, set(shapes), prefix),
        "discards": compressor.announcement is not None,
        "choice": getattr(compressor, "choice", {}),  # of a method that chooses while training runs
        "steps": steps,
        "buckets": buckets,
        "compressed": list(compressed),
    }
    return json.dumps(description).encode() + b"\n"


def compare(descriptions: Sequence[bytes]) -> list[Any]:
    """Compare the descriptions of all ranks, in rank order. Returns them.

    Raises:
        RuntimeError: names both sides of the first difference; the same on all ranks.
    """
    first, *others = map(json.loads, descriptions)
    for rank, other in enumerate(others, start=1):
        if other["version"] != first["version"]:
            raise RuntimeError(
                f"rank {rank} runs gradzip {other['version']}, rank 0 gradzip {first['version']}; install the same "
                "version everywhere"
            )
        if other["digest"] != first["digest"]:
            raise RuntimeError(
                f"rank {rank} compresses with {other['method']}, rank 0 with {first['method']}; give all ranks the "
                "same method and the same arguments"
            )
        for name, theirs, ours in differences(other["parameters"], first["parameters"], "no such parameter"):
            raise RuntimeError(
                f"parameter {name!r}: rank {rank} has {theirs}, rank 0 has {ours}; build the same model on all ranks"
            )
        if other["scaled"] != first["scaled"]:
            follows, follows_not = (rank, 0) if other["scaled"] else (0, rank)
            raise RuntimeError(
                f"the compressor of rank {follows} follows a GradScaler, that of rank {follows_not} does not; call "
                "compressor.follow(scaler) on all ranks or on none"
            )
        if other["skips"] != first["skips"]:
            skips, skips_not = (rank, 0) if other["skips"] else (0, rank)
            raise RuntimeError(
                f"rank {skips} skips steps whose averages are not finite, rank {skips_not} does not; call "
                "compressor.skip_nonfinite() alike on all ranks"
            )
        exempt = [dict.fromkeys(of_rank["exempt"], "is exempt") for of_rank in (other, first)]
        for name, theirs, ours in differences(exempt[0], exempt[1], "is not"):
            raise RuntimeError(
                f"parameter {name!r} {theirs} on rank {rank}, {ours} on rank 0; call exempt_modules on all ranks alike"
            )
        if other["discards"] != first["discards"]:
            calls, calls_not = (rank, 0) if other["discards"] else (0, rank)
            raise RuntimeError(
                f"rank {calls} has called compressor.discarding(), rank {calls_not} has not; call it on all ranks "
                "before the first step, or on none"
            )
        for name, theirs, ours in differences(other["choice"], first["choice"], "none"):
            raise RuntimeError(
                f"parameter {name!r}: rank {rank} has chosen {theirs} for it, rank 0 {ours}; load the compressor's "
                "state on all ranks or on none"
            )
        for name, theirs, ours in differences(other["steps"], first["steps"], 0):
            raise RuntimeError(
                f"parameter {name!r}: rank {rank} has compressed it {theirs} times, rank 0 {ours} times; load the "
                "compressor's state on all ranks or on none (on all, if a backward pass has failed on some alone), and "
                "train elastically with gradzip.horovod.elastic_state in place of hvd.elastic.TorchState"
            )
    for rank, of_rank in enumerate((first, *others)):
        if of_rank["foreign"]:
            name = of_rank["prefix"] + next(iter(of_rank["parameters"]), "")
            got = f"states of {of_rank['foreign']!r} and others, which no parameter has"
            raise RuntimeError(
                f"rank {rank} has loaded {got}, expected names such as {name!r}: load those of this model"
            )
    return [first, *others]


def _foreign(compressor: Compressor, names: set[str], prefix: str) -> str | None:
    """The name of a loaded state, if no parameter has any of those."""
    loaded = compressor.loaded_names
    known = {prefix + name for name in names} | compressor.memory.names.names()
    return min(loaded) if loaded and loaded.isdisjoint(known) else None


def _stray(compressor: Compressor, names: set[str], prefix: str) -> str | None:
    """The name of an exempt parameter, if no parameter has any of those. Some may be frozen, or on other ranks."""
    exempt = compressor.exempted
    known = names | {name.removeprefix(prefix) for name in compressor.memory.names.names()} if exempt else names
    return min(exempt) if exempt and exempt.isdisjoint(known) else None


def differences(theirs: dict[str, Any], ours: dict[str, Any], default: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, their value, our value) where two ranks differ. default: the value of a parameter that one has not."""
    for name in ours | theirs:
        sides = theirs.get(name, default), ours.get(name, default)
        if sides[0] != sides[1]:
            yield name, *sides
