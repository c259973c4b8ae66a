"""One file for the states of all ranks.

>>> import gradzip
>>> compressor = gradzip.TopK(theta=0.99)
>>> merged = merge([compressor.state_dict()])  # all ranks': hvd.allgather_object(compressor.state_dict(), name="state")
>>> compressor.load_state_dict(shard(merged, rank=0, size=1))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .methods import REGISTRY

_METHODS = {method.__name__: method for method in REGISTRY.values()}


def merge(state_dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state dicts of all ranks, in rank order, as one of plain tensors: what they have in common, once."""
    if not state_dicts:
        raise ValueError("merge: got no state dicts, expected one for each rank")
    methods = [state_dict.get("method") for state_dict in state_dicts]
    if len(set(methods)) > 1:
        raise ValueError(f"merge: got the states of {methods}, expected those of one method")
    first, *others = state_dicts
    return {"method": methods[0], "ranks": [dict(first), *map(_own, others)]}


def shard(merged: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """One rank's state dict, for its compressor's `load_state_dict`, from what `merge` returned.

    In a group of another size than the saved one it holds what all ranks had in common: what a rank had not sent yet
    is dropped, with a warning at the first step.
    """
    ranks = merged.get("ranks")
    if not isinstance(ranks, (list, tuple)) or not ranks:
        raise ValueError(f"shard: got a dict of {sorted(merged)}, expected what gradzip.checkpoint.merge returned")
    if not 0 <= rank < size:
        raise ValueError(f"shard: got rank = {rank} of {size}, expected one from 0 to {size - 1}")
    return _with_own(ranks[0], ranks[rank]) if size == len(ranks) else dict(ranks[0])


def _own(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """What is this rank's own."""
    if "parts" in state_dict:
        return {"parts": [_own(part) for part in state_dict["parts"]]}
    own = _METHODS[state_dict["method"]].of_this_rank
    return {"states": {n: {k: v for k, v in s.items() if k in own} for n, s in state_dict["states"].items()}}


def _with_own(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    if "parts" in common:
        return {**common, "parts": [_with_own(c, o) for c, o in zip(common["parts"], own["parts"])]}
    return {**common, "states": {name: {**s, **own["states"][name]} for name, s in common["states"].items()}}
