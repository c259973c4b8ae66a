"""States of parameters that a flat method averages as one vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .compressor import State, split_shards


class JointState(State):
    """The state of several parameters' gradients, one behind the other in a tensor of shape (1, elements).

    Which parameters are together changes: DDP rebuilds its buckets after the first step. So states come from those of
    single parameters, and are taken apart into such again; that is also how they are saved.
    """

    def __init__(self, name: str, members: Mapping[str, torch.Size]) -> None:
        super().__init__(name)
        self.members = dict(members)  # shapes, in order

    @classmethod
    def of(cls, name: str, members: Mapping[str, torch.Size], states: Mapping[str, State]) -> JointState:
        """From the states of those members that have one."""
        joint = cls(name, members)
        kept = {member: _folded(state) for member, state in states.items()}
        for key in dict.fromkeys(key for values in kept.values() for key in values):
            values = {member: of_member[key] for member, of_member in kept.items() if key in of_member}
            some = next(iter(values.values()))
            if isinstance(some, Tensor):
                parts = [
                    values[member].reshape(-1) if member in values else some.new_zeros(shape.numel())
                    for member, shape in members.items()
                ]
                vars(joint)[key] = torch.cat(parts).view(1, -1)
            else:  # the same for all, unless a bucket has skipped a step
                vars(joint)[key] = sum(values.values()) if key == "payload_nbytes" else max(values.values())
        return joint

    def apart(self) -> dict[str, State]:
        """The states of the members, in memory of their own."""
        states = {member: State(member, self.rank, self.size) for member in self.members}
        numels = {member: shape.numel() for member, shape in self.members.items()}
        for key, value in _folded(self).items():
            if isinstance(value, Tensor):
                pieces = value.view(-1).split(list(numels.values()))
                values = [piece.view(shape).clone() for piece, shape in zip(pieces, self.members.values())]
            elif key == "payload_nbytes":
                values = [value * numel // sum(numels.values()) for numel in numels.values()]
            else:
                values = [value] * len(numels)
            for state, part in zip(states.values(), values):
                vars(state)[key] = part
        return states

    def by_parameter(self) -> dict[str, dict[str, Any]]:
        return {member: state.state_dict() for member, state in self.apart().items()}


def _folded(state: State) -> dict[str, Any]:
    """What a state keeps, with what this rank owes as the owner of a shard made part of its own residual.

    The owner's residual was left over from an average, of which this rank's gradient is but one of `size` parts.
    """
    values = state.state_dict()
    values.pop("members", None)
    owner = values.pop("owner_residual", None)
    if owner is not None:
        values["residual"] = values["residual"].clone()
        shards = split_shards(values["residual"], state.size)
        # As where it is used: the group may have another size than when it was saved.
        if state.rank < len(shards) and shards[state.rank].shape == owner.shape:
            shards[state.rank].add_(owner, alpha=state.size)
    return values
