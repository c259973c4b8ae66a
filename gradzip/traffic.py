"""What a rank sends, and the time that compression takes."""

from __future__ import annotations

from dataclasses import dataclass

from .collectives import Collective, RingSum, Scope, ToHost


@dataclass
class Traffic:
    """Bytes that one rank has sent, bytes of the same gradients uncompressed, and the time that compression took.

    `seconds` is the time of the thread that runs the methods: it compresses, decompresses and updates states, and does
    not wait. Rings compress while they communicate: only what comes before and after them counts. On a device it is
    the time to launch the work.

    What collectives among the ranks of a node send (scope "node") is counted in `bytes_in_node`, and not in
    `bytes_sent`, which is what may travel between nodes.
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
    """Bytes that one rank hands to the collective. An all-reduce counts once, whatever its algorithm sends."""
    if isinstance(collective, ToHost):
        return 0
    if isinstance(collective, RingSum):
        return sum(collective.numels) * collective.dtype.itemsize
    return collective.tensor.numel() * collective.tensor.element_size()
