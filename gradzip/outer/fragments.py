"""Streaming: which parts of a model are exchanged when, and how long an exchange may take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Schedule:
    """When fragments are exchanged, and applied.

    Args:
        every: steps between two exchanges of a fragment.
        fragments: number of parts of the model, which take turns.
        delay: steps between the start of an exchange and its end.
        blend: weight of the local parameters, when the global ones are applied.
        what: for errors.

    At most one exchange is in progress at a time: it ends before the turn of the next fragment, or with it.

    Raises:
        ValueError: these numbers do not go together.
    """

    every: int = 30
    fragments: int = 1
    delay: int = 0
    blend: float = 0.0
    what: str = "LocalSteps"

    def __post_init__(self) -> None:
        every, fragments, got = self.every, self.fragments, f"{self.what}: got"
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0)):
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{got} {name} = {value!r}, expected an integer >= {least}")
        if fragments > every:
            raise ValueError(f"{got} fragments = {fragments} and every = {every}, expected at most one fragment a step")
        if self.delay * fragments >= every:
            most = every / fragments
            raise ValueError(f"{got} delay = {self.delay}, expected less than every / fragments = {most:g}")
        blend: Any = self.blend
        if isinstance(blend, bool) or not isinstance(blend, (int, float)) or not 0 <= blend <= 1:
            raise ValueError(f"{got} blend = {blend!r}, expected a number from 0 to 1")

    def turn(self, fragment: int) -> int:
        """The step of a round, from 1 to `every`, after which a fragment is exchanged."""
        return (fragment + 1) * self.every // self.fragments


def layer_of(name: str) -> str:
    """The layer of a parameter: its name up to the first number, as blocks.3, or else the module that has it.

    A parameter of the model itself is a layer of its own.
    """
    numbered = re.match(r"(.*?\.)??\d+(?=\.|$)", name)
    return numbered[0] if numbered else name.rpartition(".")[0] or name


def cut(parameters: Mapping[str, Tensor], fragments: int, what: str) -> list[list[str]]:
    """Cut a model into fragments of whole layers, with about as many bytes each. Returns their parameters' names.

    Layers go one by one, in the order of the model, to the fragment that has the fewest bytes so far. Of equal layers,
    each gets every `fragments`-th one: the strided pattern of Streaming DiLoCo.
    """
    layers: dict[str, list[str]] = {}
    for name in parameters:
        layers.setdefault(layer_of(name), []).append(name)
    if len(layers) < fragments:
        raise ValueError(f"{what}: got fragments = {fragments}, expected at most the {len(layers)} layers of the model")
    sizes = [(0, 0, i) for i in range(fragments)]  # bytes, layers, number of the fragment
    members: list[set[str]] = [set() for _ in range(fragments)]
    for names in layers.values():
        nbytes, count, i = min(sizes)
        members[i].update(names)
        sizes[i] = nbytes + sum(parameters[name].nbytes for name in names), count + 1, i
    return [[name for name in parameters if name in of_fragment] for of_fragment in members]
