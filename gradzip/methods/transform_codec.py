"""Payloads of the largest coefficients of an orthonormal transform, as range-based floats."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..gather import GatherCompressor, attribute_payload_errors, payload_source
from ..schedule import Theta, check_theta
from ..state import Key, State


@dataclass
class TransformCodec(GatherCompressor):
    """A codec that transforms a gradient, and keeps the coefficients of largest magnitude as range-based floats.

    The ranks' coefficients are added up before they are transformed back: a step needs one inverse transform for any
    world size. Since the transform is orthonormal, the squared error is the sum of squares of what was dropped, and the
    squared errors of rounding.
    """

    theta: Theta = 0.85
    bits: int = 10
    mantissa: int | None = None
    value_range: float | tuple[float, float] | None = None

    rounding = "nearest"  # methods declare it as a hyper-parameter

    def __post_init__(self) -> None:
        super().__post_init__()
        check_theta(self.theta)
        ops.check_format(self.bits, self.mantissa)
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(
                f"{type(self).__name__}: got rounding = {self.rounding!r}, expected 'nearest' or 'stochastic'"
            )
        self._limits()
        self.clamped: int | Tensor = 0  # values clamped to a fixed value_range so far; a 0-dim tensor on CUDA

    @abstractmethod
    def part(self, payload: ops.Payload, numel: int) -> tuple[ops.Transform, ops.TransformPart]:
        """The transform of a gradient of `numel` elements, and the coefficients that its payload holds, still coded.

        Raises:
            PayloadError: `encode` of this codec cannot have written the payload.
        """

    # --- encoding

    def select(
        self, x: Tensor, transform: ops.Transform, k: int, bitmap: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The status bitmap of the k largest groups of coefficients of x (flat), and these coefficients."""
        groups = transform.groups(x.numel())
        scratch = functools.partial(self.workspace.empty, device=x.device)
        if bitmap is None:
            bitmap = scratch("bitmap", (ops.bitmap_nbytes(groups),), torch.uint8)
        candidates = ops.transform_scratch_numel(x.numel(), transform, k, x.device)
        return ops.transform_select(
            x, transform, k, bitmap,
            values=scratch("values", (k * transform.group,), torch.float32),
            scratch=scratch("candidates", (candidates,), torch.float32),
        )  # fmt: skip

    def quantize(self, values: Tensor, out: Tensor, key: Key) -> ops.RangeFloat:
        """Write the codes of values to `out`, and return their format."""
        number = ops.RangeFloat.fit(values, self.bits, self.mantissa, self._limits())
        noise = key.bits if self.rounding == "stochastic" else None
        self.clamped = self.clamped + number.encode_packed(values, out, noise)
        return number

    def _limits(self) -> tuple[float, float] | None:
        """The fixed range, in float32, or None. Raises ValueError."""
        if self.value_range is None:
            return None
        pair = self.value_range if isinstance(self.value_range, tuple) else (self.value_range, self.value_range)
        if len(pair) == 2 and all(isinstance(v, (int, float)) for v in pair):
            low, high = pair if isinstance(self.value_range, tuple) else (-pair[0], pair[0])
            # As float32, which values are compared with: 1e-60 rounds to 0, and 1e39 to infinity.
            low, high = torch.tensor([low, high], dtype=torch.float32, device="cpu").tolist()
            if -math.inf < low <= 0 <= high < math.inf and low < high:
                return low, high
        raise ValueError(
            f"{type(self).__name__}: got value_range = {self.value_range!r}, expected r > 0, or (min <= 0, max >= 0)"
        )

    # --- decoding

    def format_of(self, payload: ops.Payload) -> ops.RangeFloat:
        """The format of a payload's numbers, from the last 8 bytes of its fields. Raises PayloadError."""
        number = ops.RangeFloat.from_wire(payload.fields[8:])
        if number.bits != self.bits:
            raise ops.PayloadError(f"corrupt payload: it claims {number.bits} bits, expected {self.bits}")
        return number

    def decode(self, payloads: list[Tensor], numel: int) -> Tensor:
        out = self.workspace.empty("average", (numel,), torch.float32, payloads[0].device)
        transform: ops.Transform | None = None
        parts: list[ops.TransformPart] = []
        for rank, buffer in enumerate(payloads):
            with attribute_payload_errors(payload_source(rank, len(payloads))):
                payload = self.open(buffer, numel)
                if payload.flags & ops.NON_FINITE:
                    continue
                its_transform, part = self.part(payload, numel)
                if parts and its_transform != transform:
                    raise ops.PayloadError(f"corrupt payload: it claims {its_transform}, those before it {transform}")
                transform = its_transform
                parts.append(part)
        if transform is None or len(parts) < len(payloads):
            return out.fill_(math.nan)
        corrupt = self.inverse(parts, transform, out, 1.0 / len(payloads))
        if corrupt is not None:
            with attribute_payload_errors(payload_source(corrupt, len(payloads))):
                raise _miscounted(parts[corrupt])
        return out

    def decode_add(self, payload: ops.Payload, out: Tensor, weight: float) -> None:
        transform, part = self.part(payload, out.numel())
        if self.inverse([part], transform, out, weight, add=True) is not None:
            raise _miscounted(part)

    def inverse(
        self, parts: list[ops.TransformPart], transform: ops.Transform, out: Tensor, weight: float, add: bool = False
    ) -> int | None:
        """Set `out` to weight * the gradient that has the sum of the parts as coefficients, or add it.

        Returns the index of the first part whose bitmap does not have k bits set, or None.
        """
        return ops.transform_decode(parts, transform, out, weight, add)

    def subtract_transmitted(self, state: State) -> None:
        # The base class decodes to another tensor first. This gives the same bits.
        for payload, part in self.transmitted_parts(state):
            self.decode_add(self.open(payload, part.numel()), part, -1.0)


def _miscounted(part: ops.TransformPart) -> ops.PayloadError:
    return ops.PayloadError(f"corrupt payload: its bitmap does not mark the {part.k} coefficients it claims")
