"""The base class of codecs whose decoders compute the sums of several gradients in one call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...collectives.routines import Routine, at_once, jointly
from ...memory.state import State
from .gather import GatherCompressor, attribute_payload_errors, inspected, payload_source


@dataclass
class SumCodec(GatherCompressor):
    """A codec that decodes the payloads of all ranks for several gradients in one call.

    Subclasses define `parse` and `sum_all` in place of `decode_add`. On a device, a call takes all gradients that wait
    for it (`Local`). On a CPU, it takes one gradient at a time, because averages share memory there.
    """

    @abstractmethod
    def parse(self, payload: ops.Payload, numel: int) -> Any:
        """Parse a payload for `sum_all`.

        Raises:
            PayloadError: `encode` of this codec cannot have written the payload.
        """

    @abstractmethod
    def sum_all(self, sums: list[ops.WeightedSum]) -> None:
        """Compute several sums, the terms of each in order: (result of `parse`, weight).

        Raises:
            PayloadError: `encode` of this codec cannot have written a payload. On CUDA, elements become NaN instead.
        """

    def decode_add(self, payload: ops.Payload, out: Tensor, weight: float) -> None:
        self.sum_all([ops.WeightedSum(out.view(-1), [(self.parse(payload, out.numel()), weight)], add=True)])

    def decode(self, payloads: list[Tensor], numel: int) -> Tensor:
        return at_once(self.decoded(payloads, numel))

    def combine(self, payloads: list[Tensor], numel: int, state: State) -> Routine:
        return (yield from self.with_max_abs((yield from self.decoded(payloads, numel))))

    def decoded(self, payloads: list[Tensor], numel: int) -> Routine:
        """Coroutine: `decode`, together with other gradients of the bucket."""
        return (yield from self.mean((yield from self.parsed(payloads, numel)), numel, payloads[0].device))

    def parsed(self, payloads: list[Tensor], numel: int) -> Routine:
        """Coroutine: parse the payloads of all ranks. None stands for one that is not finite."""
        yield from inspected(payloads)
        parsed = []
        for rank, buffer in enumerate(payloads):
            with attribute_payload_errors(payload_source(rank, len(payloads))):
                payload = self.open(buffer, numel)
                parsed.append(None if payload.flags & ops.NON_FINITE else self.parse(payload, numel))
        return parsed

    def mean(self, parsed: Sequence[Any], numel: int, device: torch.device) -> Routine:
        """Coroutine: the mean of parsed payloads (float32, flat). NaN if any of them is None."""
        out = self.new_average(numel, device)
        if None in parsed:
            return out.fill_(torch.nan)
        terms = [(one, 1.0 / len(parsed)) for one in parsed]
        yield from jointly(self._sum_all, device, ops.WeightedSum(out, terms, add=False))
        return out

    def _sum_all(self, sums: list[ops.WeightedSum]) -> list[None]:
        try:
            self.sum_all(sums)
        except ops.PayloadError as error:  # on a CPU, so there is one sum, and its terms are of all ranks
            source = "" if error.index is None else f"{payload_source(error.index, len(sums[0].terms))}: "
            raise ops.PayloadError(f"{source}{error}") from None
        return [None] * len(sums)

    # --- the end of a step

    def apply_averages(self, updates: list[tuple[Tensor, Tensor, Tensor, State]]) -> list[None]:
        gradients, corrected, averages, states = map(list, zip(*updates))
        if self.error_feedback:
            self.store_residuals(corrected, states)
        torch._foreach_copy_(gradients, [a.view(grad.shape) for a, grad in zip(averages, gradients)])
        if self.error_feedback:
            self.subtract_all(states)
        return [None] * len(updates)

    def subtract_all(self, states: list[State]) -> None:
        """`subtract_transmitted` for several gradients."""
        self.sum_all([one for state in states for one in self.corrections(state)])

    def subtract_transmitted(self, state: State) -> None:
        self.subtract_all([state])

    def corrections(self, state: State) -> list[ops.WeightedSum]:
        """The sums that subtract what peers decode from the residual."""
        return [
            ops.WeightedSum(part, [(self.parse(self.open(payload, part.numel()), part.numel()), -1.0)], add=True)
            for payload, part in self.transmitted_parts(state)
        ]
