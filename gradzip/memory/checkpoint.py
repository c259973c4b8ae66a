"""One checkpoint of all ranks: merge their state dicts, and get each rank's state dict (shard) back.

State dicts are those of compressors, or those of `gradzip.outer.LocalSteps`. With FSDP2, all ranks are those that hold
the same shard of the model.

>>> import gradzip
>>> compressor = gradzip.TopK(theta=0.99)
>>> state_dicts = [compressor.state_dict()]  # hvd.allgather_object(compressor.state_dict(), name="state")
>>> merged = merge(state_dicts)
>>> compressor.load_state_dict(shard(merged, rank=0, size=1))
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

# Of a state dict of LocalSteps: what ranks need not have in common.
_OWN = ("local", "steps", "pending", "exchanges", "equal")
_SHARD = re.compile(r"shard\d+of\d+(?=\.)")  # with FSDP2, names of states begin with the shard's place
_OF_ONE_SHARD = 'those of one shard: merge the ranks of mesh["replicate"], or save one of each rank'
_OF_ONE_SAVE = "the same on all ranks: merge those that all ranks have saved at the same time"


def merge(state_dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the state dicts of all ranks, in rank order. Fields that are the same on all ranks are stored once.

    Raises:
        ValueError: not a list of state dicts, or state dicts of different methods, shards or exchanges.
    """
    if not state_dicts or isinstance(state_dicts, Mapping):
        got = "a single state dict" if state_dicts else "no state dicts"
        raise ValueError(f"merge: got {got}, expected a list of one for each rank")
    if all("compressor" in state_dict for state_dict in state_dicts):  # of LocalSteps
        _check_equal("shards", [state_dict.get("shard", "") for state_dict in state_dicts], _OF_ONE_SHARD)
        for name in ("fragments", "next"):
            _check_equal(name, [state_dict[name] for state_dict in state_dicts], _OF_ONE_SAVE)
        _check_equal("exchanges", [_received(state_dict) for state_dict in state_dicts], _OF_ONE_SAVE)
        compressors = merge([state_dict["compressor"] for state_dict in state_dicts])
        common = {key: value for key, value in state_dicts[0].items() if key not in (*_OWN, "compressor")}
        ranks = [{key: state_dict[key] for key in _OWN} for state_dict in state_dicts]
        return {"common": common, "ranks": ranks, "compressor": compressors}
    methods = [state_dict.get("method") for state_dict in state_dicts]
    if len(set(methods)) > 1:
        raise ValueError(f"merge: got the states of {methods}, expected those of one method")
    _check_equal("shards", [_shards(state_dict) for state_dict in state_dicts], _OF_ONE_SHARD)
    halves = [split(state_dict) for state_dict in state_dicts]
    return {"method": methods[0], "common": halves[0][0], "ranks": [own for _, own in halves]}


def shard(merged: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Get one rank's state dict, for `load_state_dict`, from a merged one.

    In a group of another size than the saved one, rank-local fields (residuals) are dropped with a warning. With local
    steps, all ranks then go on at the step of rank 0.

    Raises:
        ValueError: not a result of `merge`, or no such rank.
    """
    if "common" not in merged or "ranks" not in merged:
        raise ValueError(f"shard: got a dict of {sorted(merged)}, expected what gradzip.checkpoint.merge returned")
    if not 0 <= rank < size:
        raise ValueError(f"shard: got rank = {rank} of {size}, expected one from 0 to {size - 1}")
    saved = merged["ranks"]
    if "compressor" in merged:
        own = dict(saved[rank if size == len(saved) else 0])
        if size != len(saved):
            own["local"], own["equal"] = None, False
            if own["pending"] is not None:
                own["pending"] = own["pending"] | {"diverged": [False]}
        return {**merged["common"], **own, "compressor": shard(merged["compressor"], rank, size)}
    if size == len(saved):
        return join(merged["common"], saved[rank], rank, size)
    warnings.warn(f"shard: the states of {len(saved)} ranks for {size}: residuals are dropped", stacklevel=2)
    return join(merged["common"], None, rank, size)


def split(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a state dict into the fields that are the same on all ranks, and the rank-local ones."""
    if "parts" in state_dict:
        halves = [split(part) for part in state_dict["parts"]]
        return {**state_dict, "parts": [common for common, _ in halves]}, {"parts": [own for _, own in halves]}
    local, states = state_dict["rank_local"], state_dict["states"].items()
    common = {name: {k: v for k, v in fields.items() if k not in local} for name, fields in states}
    own = {name: {k: v for k, v in fields.items() if k in local} for name, fields in states}
    return {**state_dict, "states": common}, {"states": own}


def join(common: Mapping[str, Any], own: Mapping[str, Any] | None, rank: int, size: int) -> dict[str, Any]:
    """Join the two results of `split` to the state dict of a rank. own: None without the rank-local fields."""
    if "parts" in common:
        owns = [None] * len(common["parts"]) if own is None else own["parts"]
        return {**common, "parts": [join(c, o, rank, size) for c, o in zip(common["parts"], owns)]}
    owned = {} if own is None else own["states"]
    place = {"rank": rank, "size": size}
    return {**common, "states": {n: {**v, **owned.get(n, {}), **place} for n, v in common["states"].items()}}


def _check_equal(what: str, of_ranks: Sequence[Any], expected: str) -> None:
    """Raise ValueError if ranks differ."""
    found = list(dict.fromkeys(of_ranks))
    if len(found) > 1:
        raise ValueError(f"merge: got state dicts with {what} {found}, expected {expected}")


def _received(state_dict: Mapping[str, Any]) -> int:
    """The exchanges whose averages are in the global parameters. A rank may have one that it has not applied yet."""
    pending = state_dict["pending"]
    return int(state_dict["exchanges"] + (pending is not None and pending["changed"]))


def _shards(state_dict: Mapping[str, Any]) -> str:
    """The places of the shards in the names of a compressor's states."""
    names = [name for part in state_dict.get("parts", [state_dict]) for name in part["states"]]
    return ", ".join(sorted({match[0] for match in map(_SHARD.match, names) if match}))
