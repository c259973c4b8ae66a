"""Measure the cost of methods on the layers of a model, from a few gradients, in seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..methods.base.compressor import Compressor
from .cost import Compressed, Layer
from .measure import Clock, measure_gradients, now

# Larger layers are measured at a smaller size.
LARGEST = 1 << 21


@dataclass(frozen=True)
class LayerCost:
    """The cost of a method on one layer, in a group of any size.

    compressed: cost with two ranks.
    decode_rank: decoding seconds for each further rank.
    """

    compressed: Compressed
    decode_rank: float = 0.0

    def among(self, ranks: int) -> Compressed:
        """The cost in a group of that many ranks."""
        decode = self.compressed.decode + self.decode_rank * max(0, ranks - 2)
        return replace(self.compressed, decode=decode)


def measure_layers(
    compressor: Compressor, layers: Sequence[Layer], device: torch.device, clock: Clock = now
) -> list[LayerCost]:
    """Measure a method on gradients of normally distributed numbers, one for each shape among the layers.

    A layer of more than `LARGEST` elements is measured at two smaller sizes. Times are extrapolated in proportion to
    the number of elements, and bytes by their growth between the two sizes. clock: as for `measure_gradients`.
    """
    found: dict[tuple[Any, ...], LayerCost] = {}
    names: dict[tuple[Any, ...], str] = {}  # of the layers to measure
    keys = []
    for layer in layers:
        like = torch.empty(layer.shape, device="meta")
        method = compressor.method_for(layer.name, like.shape)
        keys.append((id(method), layer.shape))
        if method.bypasses(like):
            found[keys[-1]] = LayerCost(Compressed((("all_reduce", 4.0 * layer.numel),)))
        else:
            names.setdefault(keys[-1], layer.name)
    large = {name: _gradient(_shrunk(shape), device) for (_, shape), name in names.items()}
    two = measure_gradients(compressor, large, ranks=2, repeats=4, clock=clock)
    gathered = {name: g for name, g in large.items() if any(k == "all_gather" for k, _ in two[name].compressed.rounds)}
    four = measure_gradients(compressor, gathered, ranks=4, repeats=2, clock=clock)
    shrunk = {name: _gradient(_shrunk(s, 1), device) for (_, s), name in names.items() if _shrunk(s) != s}
    small = measure_gradients(compressor, shrunk, ranks=2, repeats=2, clock=clock)
    for key, name in names.items():
        compressed = two[name].compressed
        rank = max(0.0, four[name].compressed.decode - compressed.decode) / 2 if name in four else 0.0
        if name in small:
            numels = shrunk[name].numel(), large[name].numel(), math.prod(key[1])
            compressed = _scaled(compressed, small[name].compressed, numels)
            rank *= numels[2] / numels[1]
        found[key] = LayerCost(compressed, rank)
    return [found[key] for key in keys]


def _scaled(large: Compressed, small: Compressed, numels: tuple[int, int, int]) -> Compressed:
    """The cost on a gradient of `numels[2]` elements, from those on gradients of `numels[0]` and `numels[1]`."""
    sizes = zip(small.rounds, large.rounds)
    rounds = tuple((kind, _extrapolated(numels, of_small, of_large)) for (_, of_small), (kind, of_large) in sizes)
    times = numels[2] / numels[1]
    return Compressed(rounds, large.encode * times, large.decode * times)


def _extrapolated(numels: tuple[int, int, int], small: float, large: float) -> float:
    """Bytes at `numels[2]` elements: a + b n, or a + b sqrt(n) if they grow as slowly as those of low-rank factors."""
    power = 1.0 if large / small > (numels[1] / numels[0]) ** 0.75 else 0.5
    x, y, z = (n**power for n in numels)
    return large + (large - small) * (z - y) / (y - x)


def _shrunk(shape: tuple[int, ...], more: int = 0) -> tuple[int, ...]:
    """Halve rows and columns until there are at most `LARGEST` elements, and then `more` times. Kernels stay."""
    halvings = max(0, math.ceil(math.log2(math.prod(shape) / LARGEST) / 2)) + more
    rows, columns = (max(1, n >> halvings) for n in shape[:2])
    return (rows, columns, *shape[2:])


def _gradient(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
