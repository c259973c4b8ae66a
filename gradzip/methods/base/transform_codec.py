"""The base class of codecs that send the largest coefficients of a transform, as range-based floats."""

from __future__ import annotations

import functools
import itertools
import math
import struct
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...memory.state import Key
from ...ops import groups
from ...ops import tensors as ops
from ..topk import num_kept
from .error_feedback import ErrorFeedback
from .gather import CodedSum, GatherCompressor
from .schedule import Theta, check_theta, theta_at

# k; the transform's lengths less one; bytes of padding. The header's other 8 bytes hold the range float.
_FIELDS = struct.Struct("<I3sB")
_ROW = np.dtype([("k", "<u4"), ("axes", "S3"), ("padding", "u1"), ("number", "V8")])  # the same for NumPy

_ALIGN = 64  # elements, of vectors in the workspace

_bitmap_capacity = functools.lru_cache(maxsize=256)(ops.bitmap_code_capacity)
_scratch_numel = functools.lru_cache(maxsize=256)(ops.transform_scratch_numel)


class _Plan(NamedTuple):
    """What follows from the transform and the size of a gradient."""

    transform: ops.Transform
    axes: bytes  # the transform's lengths less one
    numel: int  # of the signal
    groups: int
    segment: int


class CodedParts(NamedTuple):
    """Payloads of several gradients, equally many of each, parsed: coefficients, and their coded status bitmaps."""

    plans: Sequence[_Plan]  # of each gradient
    bodies: Sequence[Tensor]
    k: np.ndarray  # of each payload, int64
    codes_end: np.ndarray  # bytes of the coefficients' codes, which begin the body
    stream_nbytes: np.ndarray  # bytes of the bitmap's stream, which follows
    formats: np.ndarray | None  # of the codes: struct RangeFloat; None: they are to be read on the device


@dataclass
class TransformCodec(ErrorFeedback, GatherCompressor):
    """A codec that transforms a gradient, and keeps the coefficients of largest magnitude as range-based floats.

    The ranks' coefficients are added before they are transformed back, so a step needs one inverse transform for any
    world size. The transform is orthonormal, so the squared error is the sum of the squares of the dropped coefficients
    and of the rounding errors.

    Payload: header; k groups of range floats; the coded status bitmap of all groups (gradzip/ops/bitmap_code.py).
    """

    theta: Theta = 0.85
    bits: int = 10
    mantissa: int | None = None
    value_range: float | tuple[float, float] | None = None

    fixed_nbytes = True
    undone_on_device = True
    rounding = "nearest"  # methods declare it as a hyper-parameter

    def __post_init__(self) -> None:
        super().__post_init__()
        check_theta(self.theta)
        ops.check_format(self.bits, self.mantissa)
        self.check("rounding", self.rounding in ("nearest", "stochastic"), "'nearest' or 'stochastic'")
        self._range = self._limits()
        self._plans: dict[Any, _Plan] = {}  # by shape, to encode; by axes and number of elements, to decode
        self._clamped: dict[torch.device, Tensor] = {}  # counts, to which kernels add, also in captured steps

    @property
    def clamped(self) -> int:
        """Number of values that were clamped to a fixed `value_range` so far. Waits for the devices."""
        return sum(int(count) for count in self._clamped.values())

    @abstractmethod
    def transform_for(self, shape: torch.Size) -> ops.Transform:
        """The transform of a gradient of that shape."""

    @abstractmethod
    def transform_with_lengths(self, lengths: tuple[int, ...]) -> ops.Transform | None:
        """The transform with axes of these lengths, which a payload claims; None if there is none."""

    def signals(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """The inputs of the transform for gradients (contiguous): flat, of `signal_numel` elements and one type."""
        return [grad.reshape(-1) for grad in grads]

    def signal_numel(self, numel: int) -> int:
        """The size of the signal for a gradient of `numel` elements."""
        return numel

    def row_length(self, transform: ops.Transform, numel: int) -> int:
        """How many elements of a gradient of `numel` elements a coefficient adds to: by how much more they may grow."""
        return transform.length

    def _plan(self, key: Any, transform: ops.Transform, numel: int) -> _Plan:
        """The plan for a gradient of `numel` elements, which `_plans` is to have by that key."""
        n, axes = self.signal_numel(numel), bytes([length - 1 for length in transform.lengths])
        plan = self._plans[key] = _Plan(transform, axes, n, transform.groups(n), transform.segment(n))
        return plan

    # --- encoding

    def _plan_and_k(self, shape: torch.Size, key: Key) -> tuple[_Plan, int]:
        """The plan of a gradient of this shape, and how many of its coefficients are sent."""
        plan = self._plans.get(shape) or self._plan(shape, self.transform_for(shape), shape.numel())
        return plan, num_kept(theta_at(self.theta, key.step), plan.groups)

    known_fields = 0x007F  # the padding and the range float depend on the data

    def fields_of(self, shapes: Sequence[torch.Size], key: Key) -> bytes:
        plan, k = self._plan_and_k(shapes[0], key)
        return _FIELDS.pack(k, plan.axes, 0) + bytes(8)

    def encode_lists(self, lists: Sequence[Sequence[Tensor]], keys: Sequence[Key]) -> list[Tensor]:
        grads = [*itertools.chain.from_iterable(lists)]
        plans, ks = zip(*map(self._plan_and_k, map(attrgetter("shape"), grads), keys))
        if max(ks) >= 1 << 32:
            raise ValueError(
                f"{type(self).__name__}: got {max(ks)} coefficients to send, expected less than 2^32: give a larger "
                "theta"
            )
        xs, transform = self.signals(grads), plans[0].transform  # partitions of a group have one transform
        device, on_device = xs[0].device, xs[0].is_cuda
        bitmap_nbytes, kept, room, codes_ends, ends = [], [], [], [], []
        for plan, k in zip(plans, ks):
            bitmap_nbytes.append(-(-plan.groups // 8))
            kept.append(k * transform.group)
            room.append(_scratch_numel(plan.numel, transform, k, device))
            codes_ends.append(ops.packed_nbytes(kept[-1], self.bits))
            # On a device, room for the longest stream, so that nothing waits to learn its length.
            ends.append(codes_ends[-1] + _bitmap_capacity(plan.groups, plan.segment, k if on_device else None))
        bitmaps = self._cut("bitmaps", bitmap_nbytes, torch.uint8, device)
        values = self._cut("values", kept, torch.float32, device)
        scratch = self._cut("candidates", room, torch.float32, device)
        groups.transform_select(xs, transform.code, ks, bitmaps, values, scratch)
        payloads, begin = ops.new_payloads(ends, device, streams=True), ops.HEADER_NBYTES
        codes, outs = [], []
        for payload, codes_end, end in zip(payloads, codes_ends, ends):
            codes.append(payload[begin : begin + codes_end])
            outs.append(payload[begin + codes_end : begin + end])
        counts, segments = list(map(attrgetter("groups"), plans)), list(map(attrgetter("segment"), plans))
        nbytes = groups.bitmap_code_write(bitmaps, counts, segments, outs)
        numbers = groups.range_float_fit(values, self.bits, self.mantissa, self._range)
        noise = [key.bits for key in keys] if self.rounding == "stochastic" else None
        if (clamped := self._clamped.get(device)) is None:
            clamped = self._clamped[device] = torch.zeros((), dtype=torch.int64, device=device)
        groups.range_float_encode(values, numbers, self.bits, noise, codes, clamped)
        # Check the kept coefficients, which include those that are not finite: a transform may overflow even if the
        # gradient is finite, and so may its inverse.
        magnitudes = groups.abs_max(values)
        lengths = [self.row_length(transform, grad.numel()) for grad in grads]
        if max(lengths) > 1:
            torch._foreach_mul_(list(magnitudes), lengths)
        seals = [
            ops.Seal(
                payload, grad.numel(), _FIELDS.pack(k, plan.axes, 0), 0, magnitude, number,
                stream=ops.Stream(codes_end, written, padding_at=_FIELDS.size - 1),
            )
            for payload, grad, k, plan, magnitude, number, codes_end, written
            in zip(payloads, grads, ks, plans, magnitudes, numbers, codes_ends, nbytes)
        ]  # fmt: skip
        return ops.seal_payloads(seals, method=self.number, digest=self.digest)

    def _cut(self, name: str, numels: Sequence[int], dtype: torch.dtype, device: torch.device) -> Sequence[Tensor]:
        """Memory of the workspace for several vectors."""
        if len(numels) == 1:
            return [self.workspace.empty(name, (numels[0],), dtype, device)]
        starts = [*itertools.accumulate([-(-numel // _ALIGN) * _ALIGN for numel in numels], initial=0)]
        flat = self.workspace.empty(name, (starts[-1],), dtype, device)
        return [flat[start : start + numel] for start, numel in zip(starts, numels)]

    def _limits(self) -> tuple[float, float] | None:
        """The fixed range, in float32, or None. Raises ValueError."""
        if self.value_range is None:
            return None
        pair: Any = self.value_range
        valid = all(isinstance(v, (int, float)) for v in (pair if isinstance(pair, tuple) else (pair,)))
        if valid:
            # As float32, which values are compared with: 1e-60 rounds to 0, and 1e39 to infinity.
            pair = torch.tensor(pair if isinstance(pair, tuple) else (-pair, pair), device="cpu").tolist()
            valid = len(pair) == 2 and -math.inf < pair[0] <= 0 <= pair[1] < math.inf and pair[0] < pair[1]
        self.check("value_range", valid, "r > 0, or (min <= 0, max >= 0)")
        return tuple(pair)

    # --- decoding

    def parse(self, payloads: Sequence[ops.Payload], numels: Sequence[int]) -> CodedParts:
        """Parse payloads of gradients of so many elements, equally many of each, all at once.

        Raises:
            PayloadError: `encode` of this codec cannot have written one; `index` of the exception is its number.
        """
        rows = np.frombuffer(b"".join(map(attrgetter("fields"), payloads)), _ROW)
        each, axes = len(payloads) // len(numels), rows["axes"]
        plans = []
        for i, of_first in enumerate(zip(axes[::each].tolist(), numels)):
            if (plan := self._plans.get(of_first)) is None:
                transform = self.transform_with_lengths(_lengths(of_first[0]))
                if transform is None:
                    got = f"it claims kernels of {_lengths(of_first[0])}, which no transform is for"
                    raise ops.PayloadError(f"corrupt payload: {got}", i * each)
                plan = self._plan(of_first, transform, of_first[1])
            plans.append(plan)
        bodies = list(map(attrgetter("body"), payloads))
        nbytes = groups.numels(bodies)
        on_device = bodies[0].is_cuda  # where the host has not read all fields: streams may be shorter than their room
        formats = None if on_device else ops.words_of_wire(rows["number"].tobytes())
        k, padding = rows["k"].astype(np.int64), rows["padding"].astype(np.int64)
        of_all = np.array(list(map(attrgetter("groups"), plans))).repeat(each)
        codes_end = -(-k * (plans[0].transform.group * self.bits) // 8)
        stream_nbytes = nbytes - codes_end - padding
        bits = np.full(len(rows), self.bits) if formats is None else formats["bits"]
        valid = (bits == self.bits) & (axes == axes[::each].repeat(each)) & (k >= 1) & (k <= of_all)
        valid &= (padding < ops.PAYLOAD_ALIGN) & (stream_nbytes >= 0)
        if False in valid:
            i = int(valid.argmin())
            lengths, first = _lengths(axes[i]), _lengths(axes[i - i % each])
            got = f"its {nbytes[i]} bytes do not hold {k[i]} coefficients"
            if bits[i] != self.bits:
                got = f"it claims {bits[i]} bits, expected {self.bits}"
            elif axes[i] != axes[i - i % each]:
                known = self.transform_with_lengths(lengths) is not None
                got = f"those before it of {first}" if known else "which no transform is for"
                got = f"it claims kernels of {lengths}, {got}"
            elif not 1 <= k[i] <= of_all[i]:
                got = f"it claims {k[i]} of {of_all[i]} coefficients"
            raise ops.PayloadError(f"corrupt payload: {got}", i)
        return CodedParts(plans, bodies, k, codes_end, stream_nbytes, formats)

    def sum_all(self, sums: Sequence[CodedSum]) -> None:
        payloads = [payload for coded in sums for payload in coded.payloads]
        parts = self.parse(payloads, [coded.outs[0].numel() for coded in sums])
        alike: dict[int, list[int]] = {}  # the sums of each transform
        for i, plan in enumerate(parts.plans):
            alike.setdefault(plan.transform.code, []).append(i)
        for numbers in alike.values():
            self._sum_alike(sums, parts, numbers)

    def _sum_alike(self, sums: Sequence[CodedSum], parts: CodedParts, numbers: Sequence[int]) -> None:
        """`sum_all` of the sums of these numbers, which have one transform."""
        each, weight, add = len(sums[0].payloads), sums[0].weight, sums[0].add
        of = np.add.outer(each * np.array(numbers), np.arange(each)).reshape(-1)  # the numbers of their payloads
        plans, outs = [parts.plans[i] for i in numbers], [sums[i].outs[0].view(-1) for i in numbers]
        k, nbytes, codes_end = parts.k[of], parts.stream_nbytes[of], parts.codes_end[of]
        packed = groups.addresses([parts.bodies[i] for i in of])
        counts, segments = np.array([plan[3:] for plan in plans]).repeat(each, axis=0).T
        begins, bitmaps, corrupt = groups.bitmap_code_decode(
            packed + codes_end.astype(np.uint64), nbytes, k, counts, segments, outs[0]
        )
        if corrupt:
            i = corrupt - 1
            got = f"got {nbytes[i]} bytes that are not a bitmap of {counts[i]} elements with {k[i]} set"
            raise ops.PayloadError(f"corrupt bitmap: {got}", int(of[i]))
        codes = begins, packed, codes_end, k
        if parts.formats is not None:
            table = groups.transform_parts(*codes, parts.formats[of])
        else:  # in the header, which ends where the codes begin
            table = groups.transform_parts(*codes, self.bits, packed - np.uint64(8))
        self.inverse(table, plans[0].transform, outs, weight, add)
        del bitmaps  # the table has their addresses

    def inverse(
        self, parts: np.ndarray, transform: ops.Transform, outs: Sequence[Tensor], weight: float, add: bool
    ) -> None:
        """Write weight * the inverse transform of the sum of equally many parts to each of `outs`, or add it.

        parts: a table of `groups.transform_parts`. outs: flat.
        """
        # Cannot fail: `bitmap_code_decode` has checked that a bitmap has as many bits set as its part coefficients. On
        # CUDA it has not: `out` becomes NaN if one has another number.
        groups.transform_decode(parts, transform.code, outs, weight, add)


def _lengths(axes: bytes) -> tuple[int, ...]:
    """The lengths of a transform, from those less one, as in a payload."""
    return tuple([n + 1 for n in axes if n])
