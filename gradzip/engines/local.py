"""Collectives of ranks that are routines of one process, run in lock-step without a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..collectives import AllToAll, Collective, Gather, Mean, RingSum, ToHost, among
from ..collectives.fusion import FusedRoutine
from ..collectives.routines import Done, Routine, advance
from ..collectives.traffic import Traffic, wire_shares


def run(collectives: Sequence[Collective], node_size: int = 1) -> list:
    """Run one collective of every rank, in rank order; return the ranks' results. node_size: ranks of a node."""
    kinds, scopes, size = {type(c) for c in collectives}, {c.scope for c in collectives}, len(collectives)
    if len(kinds) != 1 or len(scopes) != 1:
        raise RuntimeError(f"ranks ask for different collectives: {sorted(k.__name__ for k in kinds)}")
    if scopes != {"all"}:
        nodes = [range(first, first + node_size) for first in range(0, size, node_size)]
        groups = nodes if scopes == {"node"} else [range(place, size, node_size) for place in range(node_size)]
        results: list = [None] * size
        for group in groups:
            of_group = run([among("all", collectives[rank]) for rank in group])
            for rank, result in zip(group, of_group):
                results[rank] = result
        return results
    alike: Any = collectives  # of one type
    if kinds == {RingSum}:
        return _ring_sum(alike)
    if kinds == {AllToAll}:
        sent = [c.parts for c in alike]
        if any(len(parts) != size for parts in sent):
            raise RuntimeError(f"an all-to-all of {size} ranks: got {[len(p) for p in sent]} parts, one per rank")
        return [list(received) for received in zip(*sent)]
    if kinds == {Mean}:
        return _mean(alike)
    tensors = [c.tensor for c in alike]
    if kinds == {ToHost}:
        return [tensor.cpu() for tensor in tensors]
    if kinds == {Gather}:
        return [list(tensors) for _ in tensors]
    return [tensors[0].clone() for _ in tensors]  # Broadcast


def _mean(means: Sequence[Mean]) -> list[Tensor]:
    size = len(means)
    first, *others = [mean.addend(size) for mean in means]
    total = first.clone()
    for addend in others:
        total += addend
    average = means[0].average(total, size)
    return [average.clone() for _ in means]


def _ring_sum(rings: Sequence[RingSum]) -> list[None]:
    """Start each segment at another rank, and add it up around the ring: the same bits as `engines.ring`."""
    size = len(rings)
    if len({ring.numels for ring in rings}) != 1:
        raise RuntimeError(f"a ring of {size} ranks: got segments of {[r.numels for r in rings]}, expected equal ones")
    for i in range(len(rings[0].numels)):
        total = rings[i % size].encode(i).clone()
        for hop in range(1, size):
            total += rings[(i + hop) % size].encode(i)
        for ring in rings:
            ring.decode(i, total)
    return [None] * size


def drive(
    routines: Sequence[Routine | FusedRoutine], traffics: Sequence[Traffic] | None = None, node_size: int = 1
) -> list:
    """Run one routine (or fused routine) per rank to its end, in lock-step; return the ranks' results.

    traffics: count what the ranks hand to collectives and send. node_size: ranks of a node, for scopes.
    """
    results: list = [None] * len(routines)
    sizes = {"all": len(routines), "node": node_size, "peers": len(routines) // node_size}
    shares = {scope: wire_shares(size) for scope, size in sizes.items()}
    while True:
        collectives = [advance(routine, result) for routine, result in zip(routines, results)]
        done = [c.result for c in collectives if isinstance(c, Done)]
        if len(done) == len(routines):
            return done
        if done:
            raise RuntimeError(f"{len(done)} of {len(routines)} ranks are done while others wait for a collective")
        for traffic, of_rank in zip(traffics or (), collectives):
            for collective in of_rank if isinstance(of_rank, list) else [of_rank]:
                traffic.count_collective(collective, shares[collective.scope][type(collective)])
        if isinstance(collectives[0], list):
            results = [list(of_rank) for of_rank in zip(*[run(of_ranks, node_size) for of_ranks in zip(*collectives)])]
        else:
            results = run(collectives, node_size)
