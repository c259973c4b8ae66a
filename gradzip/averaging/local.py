"""n workers in one process, without a network: for tests, convergence studies and reference results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..engines.local import drive
from ..methods.base.compressor import Compressor
from ..ops.arrays import takes_arrays
from .routine import averaged


@dataclass
class Worker:
    """What `Compressor.join_group` sees of a worker in a LocalGroup."""

    rank: int
    size: int
    local_size: int

    def node_size(self, what: str) -> int:
        return self.local_size

    def set_nodes(self, node_size: int) -> None:
        self.local_size = node_size


class LocalGroup:
    """A group of `size` workers in one process, each with its own clone of the compressor and its state.

    Args:
        size: the number of workers, each a node of its own; or (nodes, workers on each node).

    >>> import gradzip, torch
    >>> group = gradzip.LocalGroup(gradzip.NoCompression(), size=2)
    >>> group.average([torch.tensor([1.0]), torch.tensor([2.0])], name="weight")[0]
    tensor([1.5000])
    >>> group.bytes_sent
    4
    """

    def __init__(self, compressor: Compressor, size: int | tuple[int, int]) -> None:
        if not isinstance(compressor, Compressor):
            raise TypeError(f"LocalGroup: got {compressor!r}, expected a compressor, such as gradzip.TopK()")
        shape = size if isinstance(size, tuple) else (size, 1)
        if len(shape) != 2 or not all(isinstance(n, int) and n >= 1 for n in shape):
            raise ValueError(f"LocalGroup: got size = {size!r}, expected an integer >= 1, or a pair (nodes, workers)")
        self.compressors = [compressor.clone() for _ in range(math.prod(shape))]
        workers = [Worker(rank, math.prod(shape), shape[1]) for rank in range(math.prod(shape))]
        for own, worker in zip(self.compressors, workers):
            own.join_group(worker)
        self._node_size = workers[0].local_size

    @property
    def bytes_sent(self) -> int:
        """Payload bytes per rank so far, of the rank that sent most, without those within nodes."""
        return max(c.traffic.bytes_sent for c in self.compressors)

    def average(self, grads: Sequence[Tensor], name: str) -> list[Tensor]:
        """Average the ranks' gradients in one step of the parameter `name`, which counts if the average is finite.

        Args:
            grads: one gradient per rank, of equal shapes and dtypes. They are not changed.

        Returns each rank's average: identical tensors.
        """
        if len(grads) != len(self.compressors):
            raise ValueError(f"LocalGroup.average: got {len(grads)} gradients, expected {len(self.compressors)}")
        if others := [type(g).__name__ for g in grads if not isinstance(g, Tensor)]:
            raise TypeError(f"LocalGroup.average: got a gradient of type {others[0]}, expected tensors")
        if len({(g.shape, g.dtype) for g in grads}) != 1:
            kinds = [f"{g.dtype} {tuple(g.shape)}" for g in grads]
            raise ValueError(f"LocalGroup.average: got gradients {', '.join(kinds)}, expected equal types and shapes")
        for compressor in self.compressors:
            compressor.memory.loss_scale.begin_step()
        routines = [
            averaged(compressor, grad.detach().clone(), name, rank, len(grads))
            for rank, (compressor, grad) in enumerate(zip(self.compressors, grads))
        ]
        averages = drive(routines, [compressor.traffic for compressor in self.compressors], self._node_size)
        finite = bool(averages[0].isfinite().all())
        for compressor in self.compressors:
            if finite:
                compressor.end_step(None, [name])
            else:
                compressor.skip_step()
        return averages


@takes_arrays
def simulate(compressor: Compressor, grads: Sequence[Tensor], name: str = "gradient") -> list[Tensor]:
    """One step of a fresh `LocalGroup`. Takes and returns arrays of other libraries as `gradzip.ops` does."""
    return LocalGroup(compressor, len(grads)).average(grads, name)


@takes_arrays
def roundtrip(compressor: Compressor, grad: Tensor, name: str = "gradient") -> tuple[Tensor, int]:
    """Compress and decompress a gradient: one step of one fresh rank.

    Returns (what peers would see of the gradient, bytes sent). Takes and returns arrays of other libraries as
    `gradzip.ops` does.
    """
    group = LocalGroup(compressor, 1)
    return group.average([grad], name)[0], group.bytes_sent
