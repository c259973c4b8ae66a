"""Bytes that a rank hands to collectives and sends to other ranks, and the time that compression takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from .cost import sent_share
from .requests import AllToAll, Broadcast, Collective, Gather, Mean, RingSum, Scope, ToHost


@dataclass
class Traffic:
    """Bytes and seconds of one rank's compression so far.

    Attributes:
        bytes_sent: bytes handed to collectives, without those of the scope "node". They hardly depend on the number of
            ranks: an all-reduce and a gather count once.
        bytes_wire: bytes sent to other ranks, without those of the scope "node". With p ranks, a gathered payload is
            sent p - 1 times, and 2 (p - 1) / p of what is all-reduced, as by a ring.
        bytes_dense: bytes of the same gradients uncompressed.
        seconds: time in the methods' own code, without waiting. A ring's work during communication does not count. On a
            device this is the time to launch the work.
        bytes_in_node: bytes handed to collectives of the scope "node".
    """

    bytes_sent: int = 0
    bytes_dense: int = 0
    seconds: float = 0.0
    bytes_in_node: int = 0
    bytes_wire: float = 0.0

    def count(self, nbytes: int, wire_share: float, scope: Scope = "all") -> None:
        """Count what this rank hands to a collective. wire_share: bytes that it sends for each of them."""
        if scope == "node":
            self.bytes_in_node += nbytes
        else:
            self.bytes_sent += nbytes
            self.bytes_wire += wire_share * nbytes

    def count_collective(self, collective: Collective, wire_share: float) -> None:
        """Count a collective of this rank. wire_share: as of `count`."""
        self.count(sent_nbytes(collective), wire_share, collective.scope)

    @property
    def ratio(self) -> float:
        """Compression ratio: uncompressed bytes for each byte handed to collectives."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else 1.0

    def wire_ratio(self, ranks: int) -> float:
        """Bytes that `ranks` ranks would send each in an uncompressed all-reduce, for each byte on the wire.

        For averages of gradients. FSDP2's collectives (`gradzip.fsdp.quantize`) replace no all-reduce.
        """
        dense = sent_share("all_reduce", ranks) * self.bytes_dense
        return dense / self.bytes_wire if self.bytes_wire else 1.0


def wire_shares(ranks: int) -> Mapping[type[Collective], float]:
    """Bytes that a rank sends for each byte that it hands to a collective, on average over the ranks, by its kind."""
    reduced, gathered, parts = (sent_share(kind, ranks) for kind in ("all_reduce", "all_gather", "all_to_all"))
    return {Mean: reduced, RingSum: reduced, Gather: gathered, AllToAll: parts, Broadcast: parts, ToHost: 0.0}


def sent_nbytes(collective: Collective) -> int:
    """Bytes that one rank hands to a collective. An all-reduce counts once, whatever its algorithm sends."""
    if isinstance(collective, ToHost):
        return 0
    if isinstance(collective, RingSum):
        return sum(collective.numels) * collective.dtype.itemsize
    return collective.tensor.nbytes


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of a dense or sparse tensor."""
    return tensor._indices().nbytes + tensor._values().nbytes if tensor.is_sparse else tensor.nbytes
