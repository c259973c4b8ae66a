"""What methods take on GPUs that are not here: times that were measured on one of them, and scaled for others.

devices.json has the numbers and their sources. `python -m benchmarks.devices --write` takes them from
benchmarks/results.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..advice.cost import Layer
from ..advice.measure import LayerCost

FILE = Path(__file__).with_name("devices.json")

ASSUMED = "h100"  # the GPU of the measured steps


@functools.cache
def _stored() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(FILE.read_text())
    return stored


def names() -> list[str]:
    """The GPUs that are known."""
    return list(_stored()["gpus"])


@dataclass(frozen=True)
class Costs:
    """What a method takes on a GPU.

    gradient: seconds for each gradient, of host time. element: seconds for each element. rank: seconds for each element
    and rank, to decode gathered payloads.
    """

    gradient: float
    element: float
    rank: float


@dataclass(frozen=True)
class Device:
    """A GPU.

    name: as in the data sheet. measured: whether kernels were timed on it. Else their times are those of `ASSUMED`,
    scaled by the bandwidth of memory; so are those of a few methods on a GPU that is.
    """

    key: str
    name: str
    measured: bool

    def costs(self, method: str) -> Costs | None:
        """What a method takes; None if it was measured on no GPU. method: a spec; arguments may be left out."""
        stored = _stored()["methods"]
        found = stored.get(method) or stored.get(method.partition(":")[0])
        return found and Costs(found["gradient"], self._seconds(found["element"]), self._seconds(found["rank"]))

    def layers(self, method: str, layers: Sequence[Layer], sizes: Sequence[LayerCost]) -> list[LayerCost]:
        """The costs of a method on layers. sizes: with the bytes of its rounds.

        Half of the work is before the first round. Layers that bypass compression, in one all-reduce, take nothing.

        Raises:
            ValueError: the method was measured on no GPU.
        """
        costs = self.costs(method)
        if costs is None:
            known = ", ".join(_stored()["methods"])
            raise ValueError(f"got {method}, which was measured on no GPU, expected one of {known}")
        found = []
        for layer, size in zip(layers, sizes):
            if [kind for kind, _ in size.rounds] == ["all_reduce"] and size.nbytes == 4 * layer.numel:
                found.append(size)
                continue
            half, rank = costs.element * layer.numel / 2, costs.rank * layer.numel
            found.append(replace(size, encode=costs.gradient + half, decode=half + 2 * rank, decode_rank=rank))
        return found

    def _seconds(self, by_gpu: Mapping[str, float]) -> float:
        gpus = _stored()["gpus"]
        scaled = by_gpu[ASSUMED] * gpus[ASSUMED]["bandwidth"] / gpus[self.key]["bandwidth"]
        return by_gpu.get(self.key, scaled)

    @property
    def words(self) -> str:
        """How its times are known, in a few words."""
        measured = "times of methods measured on one"
        scaled = f"times of methods scaled from an {ASSUMED.upper()}'s by the bandwidth of memory"
        return f"{self.name}: {measured if self.measured else scaled}"


def device(key: str) -> Device:
    """A GPU by its name in `names`."""
    measured = _stored()["source"]["kernels"]
    return Device(key, _stored()["gpus"][key]["name"], key in measured)
