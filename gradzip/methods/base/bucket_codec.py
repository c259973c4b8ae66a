"""The base class of codecs whose kernels take all gradients of a bucket in one call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ... import ops
from ...collectives.routines import Local, Routine
from ...memory.state import Key
from .gather import header_only
from .sum_codec import SumCodec


@dataclass
class BucketCodec(SumCodec):
    """A codec that also encodes several gradients in one call. Subclasses define `encode_all` in place of `encode`.

    On a device, a call takes all gradients of a bucket (`Local`).
    """

    @abstractmethod
    def encode_all(self, gradients: list[tuple[Tensor, Key]]) -> list[Tensor]:
        """`encode` for several gradients."""

    def seal(self, seals: Sequence[ops.Seal]) -> list[Tensor]:
        # A gradient that the host knows is not finite gets the payload of `non_finite`.
        known = [one.magnitudes is not None and ops.known_non_finite(one.magnitudes) for one in seals]
        return super().seal([header_only(s.numel, s.payload.device) if bad else s for s, bad in zip(seals, known)])

    def encode(self, grad: Tensor, key: Key) -> Tensor:
        return self.encode_all([(grad, key)])[0]

    def encoded(self, grad: Tensor, key: Key) -> Routine:
        return (yield Local(self.encode_all, grad.device, (grad, key)))
