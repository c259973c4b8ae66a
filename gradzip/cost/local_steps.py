"""Local steps: ranks train alone for some steps between two exchanges, as with `gradzip.outer.LocalSteps`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .link import Link
from .step import Compressed, Step


@dataclass(frozen=True)
class Exchange:
    """An exchange of parameter differences.

    step_seconds: of a training step without communication.
    seconds: of the exchange: compression, and collectives that nothing hides.
    nbytes: bytes that one rank sends in it.
    """

    step_seconds: float
    seconds: float
    nbytes: float

    def every(self, share: float = 0.9) -> int:
        """The least number of steps between two exchanges at which computation is `share` of the time.

        Raises:
            ValueError: `share` is not in (0, 1).

        >>> Exchange(step_seconds=0.1, seconds=1.0, nbytes=1e8).every(0.9)
        90
        """
        if not 0 < share < 1:
            raise ValueError(f"Exchange.every: got share = {share!r}, expected a number in (0, 1)")
        # Rounding must not add a step.
        return max(1, math.ceil(share / (1 - share) * self.seconds / self.step_seconds * (1 - 1e-12)))

    @property
    def hidden_by(self) -> int:
        """The least number of steps that take as long as the exchange: as many hide one in the background."""
        return max(1, math.ceil(self.seconds / self.step_seconds))


def exchange(step: Step, layers: Sequence[Compressed], link: Link) -> Exchange:
    """Predict an exchange of the differences of all layers, with one collective of each kind of each round.

    Args:
        layers: the cost of each of the step's layers; a difference has the shape of a gradient.

    Raises:
        ValueError: the number of `layers` differs from that of the step, or a step takes no time.
    """
    if len(layers) != len(step.layers) or not step.seconds > 0:
        raise ValueError(
            f"exchange: got {len(layers)} compressed layers and a step of {step.seconds} s, expected one for each of "
            f"{len(step.layers)} and a step > 0 s"
        )
    sizes: Counter[tuple[int, str]] = Counter()
    for layer in layers:
        for number, (kind, nbytes) in enumerate(layer.rounds):
            sizes[number, kind] += nbytes  # type: ignore[assignment]
    seconds = sum(layer.encode + layer.decode for layer in layers)
    if link.ranks > 1:
        seconds += sum(link.operation + link.seconds(kind, nbytes) for (_, kind), nbytes in sizes.items())
    return Exchange(step.seconds, seconds, sum(link.sent_nbytes(kind, n) for (_, kind), n in sizes.items()))
