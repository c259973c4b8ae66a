"""What ranks hand to collectives, by kind of collective, and how many bytes of it are on the wire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import gradzip
from gradzip.collectives import AllToAll, Broadcast, Collective, Gather, Mean, RingSum
from gradzip.collectives.cost import sent_share
from gradzip.collectives.traffic import sent_nbytes

KINDS: Mapping[type[Collective], str] = {
    Mean: "reduced", RingSum: "reduced", AllToAll: "scattered", Gather: "gathered", Broadcast: "broadcast",
}  # fmt: skip
TOLERANCE = 1 / 20  # averages may be coded in more bytes than a rank's own


class Counts(gradzip.Traffic):
    """Bytes of a worker of a `LocalGroup` by kind of collective: fields of `Bytes`."""

    def __init__(self, handed: Mapping[str, int] | None = None) -> None:
        super().__init__(sum((handed or {}).values()))
        self.handed: Counter[str] = Counter(handed)

    def count_collective(self, collective: Collective, wire_share: float) -> None:
        super().count_collective(collective, wire_share)
        nbytes = sent_nbytes(collective)
        if nbytes and collective.scope != "node":
            self.handed[KINDS[type(collective)]] += nbytes


@dataclass(frozen=True)
class Bytes:
    """What a rank hands to collectives: to averages, to all-to-alls, to gathers, and to broadcasts.

    Args:
        ranks: as many as have handed it over.
    """

    reduced: float = 0.0
    scattered: float = 0.0
    gathered: float = 0.0
    broadcast: float = 0.0
    ranks: int = field(default=4, kw_only=True)

    @classmethod
    def of(cls, handed: Mapping[str, int], ranks: int, steps: int = 1) -> Bytes:
        """What such ranks have handed over in a step, on average. handed: of `Counts`."""
        kinds = ("reduced", "scattered", "gathered", "broadcast")
        return cls(*(handed.get(kind, 0) / steps for kind in kinds), ranks=ranks)

    @property
    def handed(self) -> float:
        return self.reduced + self.scattered + self.gathered + self.broadcast

    @property
    def of_all(self) -> float:
        """What goes to all other ranks. Gathers after an all-to-all are of a partition each."""
        rest = self.gathered - self.scattered / self.ranks
        return rest if rest > TOLERANCE * self.scattered else 0.0

    def on_the_wire(self, ranks: int) -> float:
        """Bytes that a rank sends to others, among so many."""
        partitions = self.ranks * (self.gathered - self.of_all)
        of_partitions = sent_share("all_to_all", ranks) * (self.scattered + partitions + self.broadcast)
        return sent_share("all_reduce", ranks) * self.reduced + of_partitions + (ranks - 1) * self.of_all
