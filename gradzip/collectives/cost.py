"""The cost of collectives: one rank's connection, the time of collectives on it, and what front ends join."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

# By kind of collective, for p ranks: the number of consecutive messages, and the bytes that a rank sends for each byte
# of `nbytes`. Numbers of messages: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in
# MPICH, IJHPCA 2005; an all-to-all exchanges its messages in pairs.
_COLLECTIVES: dict[str, Callable[[int], tuple[int, float]]] = {
    "all_reduce": lambda p: (2 * math.ceil(math.log2(p)), 2 * (p - 1) / p),
    "all_reduce_half": lambda p: (2 * math.ceil(math.log2(p)), 2 * (p - 1) / p),
    "all_gather": lambda p: (math.ceil(math.log2(p)), p - 1),
    "all_gather_partitions": lambda p: (math.ceil(math.log2(p)), (p - 1) / p),
    "all_to_all": lambda p: (p - 1, (p - 1) / p),
    "reduce_scatter": lambda p: (math.ceil(math.log2(p)), (p - 1) / p),
}


@dataclass(frozen=True)
class Link:
    """One rank's connection, as measured or as given.

    Args:
        ranks: the world size.
        bandwidth: bytes per second that one rank can send while it receives as much; with several ranks on a node, all
            of them together, to other nodes.
        latency: seconds for one message.
        operation: seconds that the training thread loses for each collective, for example to start it.
        core_per_byte: seconds of the training thread's core for each byte that the rank sends, for copies and
            additions; 0 if other cores do that.
        background: share of the core that the engine takes all the time, as Horovod's cycles do. In [0, 1).
        half: extra seconds for each byte sent in a 16-bit all-reduce ("all_reduce_half"): some engines add such numbers
            slowly on a CPU.
        per_node: ranks on each node, which share the node's connection; a divisor of `ranks`.
        within: bytes per second that one rank can send to others of its node while it receives as much.
        tree: whether an all-reduce adds within nodes first, as NCCL's trees over NVLink do. Else it is a ring of all
            ranks.

    Raises:
        ValueError: a number is out of its range.
    """

    ranks: int
    bandwidth: float
    latency: float
    operation: float = 0.0
    core_per_byte: float = 0.0
    background: float = 0.0
    half: float = 0.0
    per_node: int = 1
    within: float = math.inf
    tree: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.ranks, int) and self.ranks >= 1):
            raise ValueError(f"Link: got ranks = {self.ranks!r}, expected an integer >= 1")
        if not (isinstance(self.per_node, int) and self.per_node >= 1) or self.ranks % self.per_node:
            raise ValueError(f"Link: got per_node = {self.per_node!r}, expected a divisor of ranks = {self.ranks}")
        for name in ("bandwidth", "within"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Link: got {name} = {getattr(self, name)!r}, expected bytes per second > 0")
        for name in ("latency", "operation", "core_per_byte", "half"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"Link: got {name} = {getattr(self, name)!r}, expected a finite number >= 0")
        if not 0 <= self.background < 1:
            raise ValueError(f"Link: got background = {self.background!r}, expected a share in [0, 1)")

    @property
    def nodes(self) -> int:
        return self.ranks // self.per_node

    def within_node(self) -> Link:
        """The link between the ranks of a node."""
        return replace(self, ranks=self.per_node)

    def between_nodes(self) -> Link:
        """The link of a rank to its peers on other nodes, while all ranks of its node send to theirs."""
        return replace(self, ranks=self.nodes, per_node=1, bandwidth=self.bandwidth / self.per_node)

    def all_reduce(self, nbytes: float) -> float:
        """Seconds of an all-reduce of `nbytes`: 2 (p - 1) / p of them are sent, as by a ring."""
        return self.seconds("all_reduce", nbytes)

    def all_gather(self, nbytes: float) -> float:
        """Seconds of an all-gather of `nbytes` of each rank."""
        return self.seconds("all_gather", nbytes)

    def all_to_all(self, nbytes: float) -> float:
        """Seconds of an all-to-all in which each rank sends `nbytes` in equal parts, one to each rank."""
        return self.seconds("all_to_all", nbytes)

    def seconds(self, kind: str, nbytes: float) -> float:
        """Seconds of a collective.

        Args:
            kind: "all_reduce", "all_reduce_half" (of float16 or bfloat16), "reduce_scatter", "all_gather",
                "all_gather_partitions" or "all_to_all"; after "node " among the ranks of a node, after "peers " among
                those with the same place on all nodes.
            nbytes: of this rank; for "all_gather_partitions", of all ranks together.
        """
        link, kind = self._scoped(kind)
        sent = link.sent_nbytes(kind, nbytes)
        inside = sent / link.within if link.per_node > 1 else 0.0
        outside = link.shared_nbytes(kind, nbytes) / link.bandwidth
        # A collective's chunks are on both links at once.
        return link.messages(kind) * link.latency + max(inside, outside) + link._half(kind) * sent

    def core_seconds(self, kind: str, nbytes: float) -> float:
        """Seconds of the training thread's core that a collective takes while it runs."""
        return (self.core_per_byte + (self._half(kind) if self.core_per_byte else 0.0)) * self.sent_nbytes(kind, nbytes)

    def _scoped(self, kind: str) -> tuple[Link, str]:
        """The link of the ranks that join a collective, and its kind."""
        scope, _, plain = kind.rpartition(" ")
        if not scope:
            return self, kind
        return (self.within_node() if scope == "node" else self.between_nodes()), plain

    def _half(self, kind: str) -> float:
        return self.half if kind.endswith("all_reduce_half") else 0.0

    def messages(self, kind: str) -> int:
        """Number of consecutive messages of a collective."""
        link, kind = self._scoped(kind)
        return _COLLECTIVES[kind](link.ranks)[0] if link.ranks > 1 else 0

    def sent_nbytes(self, kind: str, nbytes: float) -> float:
        """Bytes that one rank sends in a collective (ICDCS 2023, Table II). Arguments: as for `seconds`."""
        link, kind = self._scoped(kind)
        return sent_share(kind, link.ranks) * nbytes

    def shared_nbytes(self, kind: str, nbytes: float) -> float:
        """Bytes that a node sends to other nodes in a collective of all ranks. Arguments: as for `seconds`.

        With p ranks, m on each of N nodes:

            ring        as many as one rank sends: the ring leaves each node once
            tree        2 (N - 1) / N of an all-reduce, as with one rank on each node (Sanders, Speck, Träff, Two-tree
                        Algorithms for Full Bandwidth Broadcast, Reduction and Scan, Parallel Computing 2009)
            all_to_all  m (p - m) / p: all but the parts for ranks of the same node, of each rank
        """
        if self.nodes == 1:
            return 0.0
        if kind == "all_to_all":
            return self.per_node * (self.ranks - self.per_node) / self.ranks * nbytes
        if self.tree and kind in ("all_reduce", "all_reduce_half"):
            return 2 * (self.nodes - 1) / self.nodes * nbytes
        return self.sent_nbytes(kind, nbytes)


def sent_share(kind: str, ranks: int) -> float:
    """Bytes that a rank sends in a collective for each of its bytes. kind: as for `Link.seconds`."""
    return _COLLECTIVES[kind](ranks)[1] if ranks > 1 else 0.0


# How much front ends join by default: arguments of `gradzip.advice.cost.predict`.
JOINED: dict[str, dict[str, float]] = {
    "ddp": {"bucket_nbytes": 25 << 20},
    "horovod": {"bucket_nbytes": 25 << 20, "fusion_nbytes": 128 << 20},
}

# Size of DDP's first bucket, so that communication starts early, and of Horovod's last one, so that little is left to
# send after the backward pass.
SMALL_BUCKET_NBYTES = 1 << 20

# Averages of so many bytes are sent alone, without a copy: they are worth a collective, as such buckets are.
ALONE_NBYTES = SMALL_BUCKET_NBYTES


def cut(sizes: Iterable[int], nbytes: float, *, large_alone: bool) -> list[list[int]]:
    """Split gradients into buckets of at least `nbytes`, as front ends do. Returns the indices of each bucket.

    Args:
        sizes: bytes of each gradient.
        nbytes: size of a bucket. The first one is full at `SMALL_BUCKET_NBYTES`, if that is less. 0 makes one bucket
            for each gradient; infinity makes one bucket of all after the first one.
        large_alone: whether a gradient of `nbytes` or more is a bucket of its own, as with Horovod. DDP adds it to the
            gradients before it.

    >>> cut([1 << 20] * 6, 2 << 20, large_alone=True)
    [[0], [1, 2], [3, 4], [5]]
    >>> cut([1000, 4 << 20, 1000], 2 << 20, large_alone=True), cut([1000, 4 << 20, 1000], 2 << 20, large_alone=False)
    ([[0], [1], [2]], [[0, 1], [2]])
    """
    buckets: list[list[int]] = []
    missing = 0.0  # bytes until the bucket is full
    for number, size in enumerate(sizes):
        if missing <= 0 or (large_alone and size >= nbytes):
            missing = nbytes if buckets else min(nbytes, SMALL_BUCKET_NBYTES)
            buckets.append([])
        buckets[-1].append(number)
        missing -= size
    return buckets
