"""Averages by node: each rank takes a chunk of its node's average, and averages it with its peers on other nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .requests import AllToAll, Gather, ToHost, among
from .routines import Done, Local, Routine, step


@dataclass(frozen=True)
class NodeChunks:
    """The chunks of a gradient, one for each rank of a node. All chunks of a gradient have the same shape.

    Args:
        node, nodes: the number of this rank's node, and of nodes.
        place, places: this rank's number within its node, and the number of ranks on each node.
        method: the compressor that averages chunks between nodes.
    """

    node: int
    nodes: int
    place: int
    places: int
    method: Any  # a Compressor, which needs this module

    def shape(self, shape: torch.Size) -> tuple[int, ...]:
        """The shape of a chunk of a gradient of this shape: rows, so that methods for matrices get matrices.

        With fewer rows than ranks, it is a piece of the flat gradient. The last chunks are padded with zeros.
        """
        if len(shape) > 1 and shape[0] >= self.places:
            return (-(-shape[0] // self.places), *shape[1:])
        return (-(-shape.numel() // self.places),)

    def bypasses(self, grad: Tensor) -> bool:
        """Whether all ranks average a gradient of this shape uncompressed: with one node, or if its chunks bypass."""
        if self.nodes == 1:
            return True
        return self.method.bypasses(torch.empty(self.shape(grad.shape), dtype=grad.dtype, device="meta"))

    def own(self, grad: Tensor) -> Tensor:
        """This rank's chunk of a gradient, float32."""
        return self._chunks(grad)[self.place].view(self.shape(grad.shape))

    def _chunks(self, grad: Tensor) -> Tensor:
        """The chunks of a gradient as rows, float32."""
        flat = grad.float().contiguous().view(-1)
        padding = self.places * math.prod(self.shape(grad.shape)) - flat.numel()
        return (torch.cat([flat, flat.new_zeros(padding)]) if padding else flat).view(self.places, -1)

    def scatter(self, grad: Tensor) -> Routine:
        """Coroutine: this rank's chunk of the average over its node, float32, in memory of its own.

        Adds the ranks' gradients in rank order, and divides the sum, in float32.
        """
        chunks, shape = self._chunks(grad), self.shape(grad.shape)
        sizes = (4 * chunks.shape[1],) * self.places
        sent = AllToAll(chunks.view(-1).view(torch.uint8), sizes, same_length=True, scope="node")
        first, *others = [part.view(torch.float32) for part in (yield sent)]
        total = first.clone()
        for part in others:
            total += part
        return total.div_(self.places).view(shape)

    def gather(self, chunk: Tensor, finite: bool, grad: Tensor) -> Routine:
        """Coroutine: write the chunks of the node's ranks to `grad`, if all are finite. Returns whether they are.

        chunk: its average over the nodes. finite: whether that is finite.
        """
        flag = chunk.new_full((1,), float(finite))
        received = yield Gather(torch.cat([chunk.view(-1), flag]).view(torch.uint8), same_length=True, scope="node")
        chunks = torch.cat(received).view(torch.float32).view(self.places, -1)
        flags = chunks[:, -1]
        if flags.device.type != "cpu":
            flags = yield ToHost(flags.contiguous())
        if not bool(flags.all()):
            return False
        grad.copy_(chunks[:, :-1].reshape(-1)[: grad.numel()].view(grad.shape))
        return True


def among_peers(routine: Routine) -> Routine:
    """The same routine, among the ranks with this rank's place on all nodes."""
    result = None
    while not isinstance(item := step(routine, result), Done):
        result = yield item if isinstance(item, Local) else among("peers", item)
    return item.result
