"""One file for the states of all ranks.

>>> import gradzip
>>> compressor = gradzip.TopK(theta=0.99)
>>> merged = merge([compressor.state_dict()])  # all ranks': hvd.allgather_object(compressor.state_dict(), name="state")
>>> compressor.load_state_dict(shard(merged, rank=0, size=1))
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any


def merge(state_dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state dicts of all ranks, in rank order, as one of plain tensors: what they have in common, once."""
    if not state_dicts or isinstance(state_dicts, Mapping):
        got = "a single state dict" if state_dicts else "no state dicts"
        raise ValueError(f"merge: got {got}, expected a list of one for each rank")
    methods = [state_dict.get("method") for state_dict in state_dicts]
    if len(set(methods)) > 1:
        raise ValueError(f"merge: got the states of {methods}, expected those of one method")
    halves = [split(state_dict) for state_dict in state_dicts]
    return {"method": methods[0], "common": halves[0][0], "ranks": [own for _, own in halves]}


def shard(merged: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """One rank's state dict, for its compressor's `load_state_dict`, from what `merge` returned.

    In a group of another size than the saved one it holds what all ranks had in common; what a rank had not sent yet
    is dropped, with a warning.
    """
    if "common" not in merged or "ranks" not in merged:
        raise ValueError(f"shard: got a dict of {sorted(merged)}, expected what gradzip.checkpoint.merge returned")
    if not 0 <= rank < size:
        raise ValueError(f"shard: got rank = {rank} of {size}, expected one from 0 to {size - 1}")
    saved = merged["ranks"]
    if size == len(saved):
        return join(merged["common"], saved[rank], rank, size)
    warnings.warn(
        f"shard: the states of {len(saved)} ranks for {size}: what ranks had not sent yet is dropped", stacklevel=2
    )
    return join(merged["common"], None, rank, size)


def split(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What all ranks have in common, and what is this one's own."""
    if "parts" in state_dict:
        halves = [split(part) for part in state_dict["parts"]]
        return {**state_dict, "parts": [common for common, _ in halves]}, {"parts": [own for _, own in halves]}
    is_own = state_dict["of_this_rank"]
    states = state_dict["states"].items()
    common = {name: {k: v for k, v in values.items() if k not in is_own} for name, values in states}
    own = {name: {k: v for k, v in values.items() if k in is_own} for name, values in states}
    return {**state_dict, "states": common}, {"states": own}


def join(common: Mapping[str, Any], own: Mapping[str, Any] | None, rank: int, size: int) -> dict[str, Any]:
    """The state dict of rank `rank` of `size`, of two halves as `split` returns them; `own` may be missing."""
    if "parts" in common:
        owns = [None] * len(common["parts"]) if own is None else own["parts"]
        return {**common, "parts": [join(c, o, rank, size) for c, o in zip(common["parts"], owns)]}
    owned = {} if own is None else own["states"]
    place = {"rank": rank, "size": size}
    return {**common, "states": {n: {**v, **owned.get(n, {}), **place} for n, v in common["states"].items()}}
