"""Bytes that a rank sends, and the time that compression takes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .requests import Collective, RingSum, Scope, ToHost


@dataclass
class Traffic:
    """Bytes and seconds of one rank's compression so far.

    Attributes:
        bytes_sent: bytes sent, without those of the scope "node".
        bytes_dense: bytes of the same gradients uncompressed.
        seconds: time in the methods' own code, without waiting. A ring's work during communication does not count. On a
            device this is the time to launch the work.
        bytes_in_node: bytes sent in the scope "node".
    """

    bytes_sent: int = 0
    bytes_dense: int = 0
    seconds: float = 0.0
    bytes_in_node: int = 0

    def count(self, nbytes: int, scope: Scope = "all") -> None:
        """Count bytes that this rank sends."""
        if scope == "node":
            self.bytes_in_node += nbytes
        else:
            self.bytes_sent += nbytes

    @property
    def ratio(self) -> float:
        """Compression ratio: uncompressed bytes for each byte sent."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else 1.0


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
