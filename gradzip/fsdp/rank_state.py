"""What one rank saves, in the form that distributed checkpoints need: bytes under a key of its own."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

from ..memory.state_dict import in_line


def saved(key: str, state: Mapping[str, Any]) -> dict[str, bytes]:
    """The state dict of a rank. key: one that no other rank has. state: plain tensors and numbers."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return {key: buffer.getvalue()}


def loaded(key: str, state_dict: Any, what: str) -> dict[str, Any]:
    """The state that `saved` has got.

    what: the class, for errors.

    Raises:
        ValueError: the state dict has none of this rank, or other bytes.
    """
    what = f"{what}.load_state_dict"
    if not (isinstance(state_dict, Mapping) and key in state_dict):
        got = f"the states of {sorted(state_dict)}" if isinstance(state_dict, Mapping) else in_line(state_dict)
        expected = f"expected those of {key!r}: load them on as many ranks, with the same mesh, or begin without"
        raise ValueError(f"{what}: got {got}, {expected}")
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(state_dict[key]), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises those of pickle, zipfile and its own
        got = f"{key!r} as what torch.load cannot read ({in_line(error)})"
        raise ValueError(f"{what}: got {got}, expected bytes of state_dict()") from None
    return state
