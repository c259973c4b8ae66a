"""n workers in one process, without a network: for tests, convergence studies and reference results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..averaging import averaged
from ..collectives import AllToAll, Broadcast, Collective, Gather, RingSum, ToHost, among
from ..compressor import Compressor
from ..fusion import FusedRoutine
from ..ops.arrays import takes_arrays
from ..routines import Done, Routine, advance
from ..traffic import Traffic, sent_nbytes


def run(collectives: Sequence[Collective], node_size: int = 1) -> list:
    """Run one collective of every rank, in rank order; return the ranks' results. node_size: ranks of a node."""
    kinds = {type(c) for c in collectives}
    if len({c.scope for c in collectives}) == 1 and collectives[0].scope != "all":
        size, scope = len(collectives), collectives[0].scope
        nodes = [range(first, first + node_size) for first in range(0, size, node_size)]
        groups = nodes if scope == "node" else [range(place, size, node_size) for place in range(node_size)]
        results: list = [None] * size
        for group in groups:
            of_group = run([among("all", collectives[rank]) for rank in group])
            for rank, result in zip(group, of_group):
                results[rank] = result
        return results
    if len(kinds) != 1 or len({c.scope for c in collectives}) != 1:
        raise RuntimeError(f"ranks ask for different collectives: {sorted(k.__name__ for k in kinds)}")
    if kinds == {RingSum}:
        return _ring_sum([c for c in collectives if isinstance(c, RingSum)])
    if kinds == {AllToAll}:
        sent = [c.parts for c in collectives if isinstance(c, AllToAll)]
        if any(len(parts) != len(sent) for parts in sent):
            raise RuntimeError(f"an all-to-all of {len(sent)} ranks: got {[len(p) for p in sent]} parts, one per rank")
        return [list(received) for received in zip(*sent)]
    tensors = [c.tensor for c in collectives if not isinstance(c, RingSum)]
    if kinds == {ToHost}:
        return [tensor.cpu() for tensor in tensors]
    if kinds == {Gather}:
        return [list(tensors) for _ in tensors]
    if kinds == {Broadcast}:
        return [tensors[0].clone() for _ in tensors]
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    total /= len(tensors)
    return [total.clone() for _ in tensors]


def _ring_sum(rings: Sequence[RingSum]) -> list[None]:
    """Start each segment at another rank, and add it up around the ring: the same bits as `engines.ring`."""
    size = len(rings)
    if len({ring.numels for ring in rings}) != 1:
        raise RuntimeError(f"a ring of {size} ranks: got segments of {[r.numels for r in rings]}, expected equal ones")
    for i in range(len(rings[0].numels)):
        total = rings[i % size].encode(i).clone()
        for hop in range(1, size):
            total = rings[(i + hop) % size].add(i, total)
        for ring in rings:
            ring.decode(i, total)
    return [None] * size


def drive(
    routines: Sequence[Routine | FusedRoutine], traffics: Sequence[Traffic] | None = None, node_size: int = 1
) -> list:
    """Run one routine (or fused routine) per rank to its end, in lock-step; return the ranks' results.

    traffics: count the bytes that the ranks send; not for fused routines. node_size: ranks of a node, for scopes.
    """
    results: list = [None] * len(routines)
    while True:
        collectives = [advance(routine, result) for routine, result in zip(routines, results)]
        done = [c.result for c in collectives if isinstance(c, Done)]
        if len(done) == len(routines):
            return done
        if done:
            raise RuntimeError(f"{len(done)} of {len(routines)} ranks are done while others wait for a collective")
        for traffic, collective in zip(traffics or (), collectives):
            traffic.count(sent_nbytes(collective), collective.scope)
        if isinstance(collectives[0], list):
            results = [list(of_rank) for of_rank in zip(*[run(of_ranks, node_size) for of_ranks in zip(*collectives)])]
        else:
            results = run(collectives, node_size)


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
        routines = [
            averaged(compressor, grad.detach().clone(), name, rank, len(grads))
            for rank, (compressor, grad) in enumerate(zip(self.compressors, grads))
        ]
        averages = drive(routines, [compressor.traffic for compressor in self.compressors], self._node_size)
        finite = bool(averages[0].isfinite().all())
        for compressor in self.compressors:
            if finite:
                compressor.end_step(None)
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
