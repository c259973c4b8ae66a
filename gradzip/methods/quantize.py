"""Unbiased stochastic rounding to a few levels: QSGD and TernGrad."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..collectives.routines import Local, Routine
from ..memory.state import Key
from ..ops import groups
from ..ops import tensors as ops
from .base.compressor import is_number
from .base.gather import CodedSum, GatherCompressor, all_finite, from_rank, part_lengths
from .base.group import Group
from .base.list_codec import ListCodec
from .base.registry import register

_STREAM = struct.Struct("<QB7x")  # length of the coded levels in bytes; whether they are Elias-coded


@register("qsgd", number=16, examples=["", "coding=packed", "coding=always_elias", "bits=8,norm=max,bucket=7"])
@dataclass
class QSGD(GatherCompressor):
    """Rounds each element at random to a multiple of norm / s, where norm is that of its bucket.

    With s = 2^(bits - 1) - 1 and u_i uniform in [0, 1), g_i is decoded as

        norm * sign(g_i) * level_i / s,    level_i = floor(s |g_i| / norm + u_i)

    Unbiased. The variance is (norm / s)^2 sum f_i (1 - f_i), where f_i is the fractional part of s |g_i| / norm.

    Args:
        bits: bits of a level, 2 to 16, sign included. The papers' "1-bit QSGD" has s = 1, signs and zeros: it is
            ``bits=2`` here.
        bucket: number of neighbouring elements that share a norm. Front ends compress the gradients of a bucket as one
            vector, as the paper does, so elements of two gradients may share a norm.
        norm: "l2", as in the paper's theory (most levels are 0), or "max", as in its experiments (less variance, more
            bytes).
        coding: "packed" codes each level in `bits` bits. "elias" codes runs of zeros, and levels, in Elias gamma code,
            if that is shorter than "packed". On a device "elias" is "packed", because the host would have to wait for
            the length of each payload in the backward pass. "always_elias" waits, which may pay on slow networks.
        seed: of the u_i.

    Payload: header; a float32 norm for each bucket; levels. 48 + 4 ceil(n / bucket) + n bits / 8 bytes, padded to 16;
    at most that with Elias codes.

    Within `Momentum` on a device, a step is skipped if a norm is above 2^127, as one is if a magnitude is.

    Deterministic for a seed. Waits for a CUDA device with coding="always_elias" only.

    Source: Alistarh, Grubic, Li, Tomioka, Vojnovic, QSGD: Communication-Efficient SGD via Gradient Quantization and
    Encoding, NeurIPS 2017, sections 3.1 and 3.2.
    """

    bits: int = 4
    bucket: int = 512
    norm: str = "l2"
    coding: str = "elias"
    seed: int = 0

    unbiased = True
    undone_on_device = True
    reads_half = sums_parts = True

    def __post_init__(self) -> None:
        super().__post_init__()
        ops.check_quantizer(self.bits, self.bucket, self.norm, 0, "QSGD")
        codings = ("elias", "packed", "always_elias")
        self.check("coding", self.coding in codings, "'elias', 'packed' or 'always_elias'")
        self.fixed_nbytes = self.coding != "always_elias"
        self.writes_half = self.fixed_nbytes  # Elias codes are added to float32

    @property
    def capture_needs(self) -> str | None:
        return None if self.fixed_nbytes else "coding='elias'"

    def encode_lists(self, lists: Sequence[Sequence[Tensor]], keys: Sequence[Key]) -> list[Tensor]:
        vectors = list(map(itemgetter(0), lists))
        numels = list(map(Tensor.numel, vectors))
        if self.coding == "always_elias" or (self.coding == "elias" and not vectors[0].is_cuda):
            coded, fields = zip(*map(self._elias, vectors, keys))
            return self.seal_vectors(coded, numels, fields, groups.abs_max(vectors))
        norms_ends, nbytes = self._ends(groups.numels(vectors))
        payloads = ops.new_payloads((norms_ends + nbytes).tolist(), vectors[0].device)
        norms = groups.addresses(payloads) + np.uint64(ops.HEADER_NBYTES)
        packed, own_keys = norms + norms_ends.astype(np.uint64), list(map(attrgetter("bits"), keys))
        most = torch.empty(len(vectors), dtype=torch.float32, device=vectors[0].device)
        groups.quantize_packed(vectors, self.bits, self.bucket, self.norm, own_keys, packed, norms, most)
        magnitudes = most.split_with_sizes([1] * len(vectors))
        return self.seal_vectors(payloads, numels, map(_STREAM.pack, nbytes, itertools.repeat(False)), magnitudes)

    def _elias(self, grad: Tensor, key: Key) -> tuple[Tensor, bytes]:
        """The payload of a vector, Elias-coded unless packed levels are shorter, to be sealed; and its fields."""
        numel, arguments = grad.numel(), (self.bits, self.bucket, self.norm, key.bits)
        norms_end, packed_nbytes = self._ends(numel)
        space = self.workspace.empty("stream", (ops.elias_capacity(numel, self.bits),), torch.uint8, grad.device)
        stream, norms = ops.elias_quantize(grad.float(), *arguments, out=space)
        nbytes = min(stream.numel(), packed_nbytes)
        payload = ops.new_payload(norms_end + nbytes, grad.device)
        own_norms, levels, _ = payload[ops.HEADER_NBYTES :].tensor_split((norms_end, norms_end + nbytes))
        if stream.numel() > nbytes:
            ops.quantize_packed(grad, *arguments, out=levels, norms=own_norms.view(torch.float32))
        else:
            own_norms.copy_(norms.view(torch.uint8))
            levels.copy_(stream)
        return payload, _STREAM.pack(nbytes, stream.numel() == nbytes)

    def fields_of(self, shapes: Sequence[torch.Size], key: Key) -> bytes:
        return _STREAM.pack(self._ends(sum(map(math.prod, shapes)))[1], False)

    def _ends(self, numel: Any) -> tuple[Any, Any]:
        """Bytes of the norms of so many elements, and of their packed levels. numel: a number, or an array of them."""
        return 4 * ops.num_buckets(numel, self.bucket), ops.packed_nbytes(numel, self.bits)

    def combine(self, payloads: Sequence[ops.Payload], group: Group) -> Routine:
        if group.may_hold and self.norm == "l2":  # norms may be above all elements, and so may levels of them
            numels = part_lengths(group.numel, group.size) if group.state.scattered else [group.numel] * group.size
            ends = (self._ends(numel)[0] for numel in numels)
            norms = [payload.body[:end].view(torch.float32) for payload, end in zip(payloads, ends)]
            group.numbers.append(ops.largest_magnitudes(norms).mul_(2))  # finite if no average is above 2^127
        return super().combine(payloads, group)

    def sum_all(self, sums: Sequence[CodedSum]) -> None:
        for coded in sums:
            (out,) = coded.outs
            numel = out.numel() if coded.parts == 1 else part_lengths(out.numel(), coded.parts)
            norms_end, packed_nbytes = self._ends(numel)
            claimed, elias = zip(*map(_STREAM.unpack, map(attrgetter("fields"), coded.payloads)))
            nbytes = np.where(elias, np.array(claimed, object), packed_nbytes)
            norms = ops.body_addresses(coded.payloads, norms_end + nbytes)
            levels, arguments = norms + np.uint64(norms_end), (out, self.bits, self.bucket, coded.weight)
            # Neighbours that are coded alike, usually all of them, are added in one call.
            for is_elias, run in itertools.groupby(range(len(elias)), elias.__getitem__):
                first, *others = run
                own, add = slice(first, first + 1 + len(others)), coded.add or first > 0
                if is_elias:
                    failed = groups.elias_decode_sum(levels[own], nbytes[own], norms[own], *arguments, add)
                    problem = ops.BAD_STREAM
                else:
                    failed = groups.quantize_decode_sum(levels[own], norms[own], *arguments, add, coded.parts)
                    problem = ops.BAD_NORM
                if failed:
                    raise ops.PayloadError(problem, first + failed - 1)


@register("terngrad", number=17, examples=["", "shared_scale=False"])
@dataclass
class TernGrad(ListCodec):
    """Rounds each element at random to -scale, 0 or scale.

    The gradient is clipped, c_i = sign(g_i) min(|g_i|, clip * sigma), and decoded as

        scale * sign(g_i) * Bernoulli(|c_i| / scale),    scale = max |c_i|

    The expectation is c, and the variance sum |c_i| (scale - |c_i|).

    Args:
        clip: clip magnitudes at clip * sigma; None does not clip. sigma^2 is the second moment, mean(g^2). With the
            paper's central moment, a constant gradient would be clipped to 0.
        shared_scale: use the maximum over all ranks as the scale ("scaler sharing"), gathered in a first round. False
            uses each rank's own scale.
        seed: of the Bernoulli draws.

    Payload: header; the scale of each gradient of the group, float32; five elements of a gradient to a byte, 1.6 bits
    for each. Scales and the bytes of a gradient are padded to 16 bytes. For one gradient: 64 + ceil(n / 5) bytes,
    padded to 16. With `shared_scale`, a header and scales more.

    Deterministic for a seed.

    Source: Wen, Xu, Yan, Wu, Wang, Chen, Li, TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
    Learning, NeurIPS 2017.
    """

    clip: float | None = 2.5
    shared_scale: bool = True
    seed: int = 0

    reads_half = True
    kernel = "ternary_decode_add"
    problem = "got a byte above 242, the largest that five trits make"
    code_nbytes = staticmethod(ops.ternary_nbytes)

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.clip is None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared_scale:
            expected = "'gather', or shared_scale=False: each partition has its own scale"
            self.check("exchange", self.exchange == "gather", expected)
            self.rounds = 2
        self.check("clip", self.clip is None or (is_number(self.clip) and self.clip > 0), "None or a number > 0")

    def encoded(self, group: Group, key: Key) -> Routine:
        parts = group.parts
        largest = self._largest(parts)
        if not self.shared_scale:
            return self._pack([parts], [key], largest, largest)[0], []
        headers = yield self.gather(self._header(largest, group.numel), group.numel)
        # On a device, headers are opened with the payloads: the host need not wait for the scales.
        later = largest.is_cuda
        if not later:
            opened = self.open_all(headers, [group.numel] * group.size, group.size)
            if not all_finite(opened):
                # Both rounds all the same: ranks with another chunk of the gradient do not see these headers.
                return self.non_finite(group.numel, group.device), []
            layout = self.layout([parts])
            try:
                self.bodies(layout._replace(nbytes=[int(layout.codes[0])]), [opened])  # without codes
            except ops.PayloadError as error:
                raise from_rank(error, group.size) from None
        payload = yield Local(self._pack_shared, group.device, (parts, key, largest, headers))
        return payload, headers if later else []

    def encode_lists(self, lists: Sequence[Sequence[Tensor]], keys: Sequence[Key]) -> list[Tensor]:
        largest = self._largest(list(itertools.chain(*lists)))
        return self._pack(lists, keys, largest, largest)

    def encode_average(self, parts: Sequence[Tensor], key: Key) -> Tensor:
        # Ranks have clipped before. Clipping again would take a third of a sparse gradient, whose sigma is small.
        largest = torch.cat(ops.abs_max_all(parts))
        return self._pack([parts], [key], largest, largest)[0]

    def _largest(self, parts: Sequence[Tensor]) -> Tensor:
        """max |c_i| of each clipped part, float32. Not finite if the part is not, or its norm overflows."""
        largest = torch.cat(ops.abs_max_all(parts))
        if self.clip is None:
            return largest
        norms = _norms(parts)
        roots = np.sqrt(self.layout([parts]).numels).tolist()
        clips = self.clip * torch.cat(torch._foreach_div(norms.double().split(1), roots))
        clipped = torch.minimum(largest.double(), clips).float()
        return torch.where(norms >= torch.finfo(torch.float32).max, math.inf, clipped)

    def _header(self, largest: Tensor, numel: int) -> Tensor:
        """The payload of a first round: each rank's own scales."""
        payload = ops.new_payload(largest.nbytes, largest.device)
        payload[ops.HEADER_NBYTES :][: largest.nbytes].view(torch.float32).copy_(largest)
        return self.seal(ops.Seal(payload, numel, magnitudes=largest))

    def _pack_shared(self, of: list[tuple[Sequence[Tensor], Key, Tensor, Sequence[Tensor]]]) -> list[Tensor]:
        """The payloads of several groups' parts: with the largest magnitudes of these, and the headers of all ranks."""
        parts, keys, largest, headers = zip(*of)
        heads = zip(*headers)  # by rank
        numbers = [head[ops.HEADER_NBYTES :][: own.nbytes] for of_rank in heads for head, own in zip(of_rank, largest)]
        own = torch.cat(largest)
        scales = torch.cat(numbers).view(torch.float32).view(-1, own.numel()).amax(0)
        return self._pack(parts, keys, own, scales)

    def _pack(
        self, lists: Sequence[Sequence[Tensor]], keys: Sequence[Key], largest: Tensor, scales: Tensor
    ) -> list[Tensor]:
        """The payloads of lists of parts, given the largest magnitudes of all clipped ones, and the scales."""
        layout, parts, counts = self.layout(lists), list(itertools.chain(*lists)), list(map(len, lists))
        payloads, begin = self.new_payloads(layout, largest.device)
        self.write_numbers(layout, payloads, scales)
        clips = torch.where(largest > 0, largest, math.inf)  # all is 0: nothing to clip
        own_keys = groups.keys_of([key.bits for key in keys], counts)
        groups.ternary_packed(parts, scales, clips, own_keys, begin + layout.codes)
        return self.seal_all(layout, payloads, itertools.repeat(bytes(16)), scales.split_with_sizes(counts))


def _norms(parts: Sequence[Tensor]) -> Tensor:
    """The L2 norms of tensors (float32). On a device, in one call of torch, which adds in another order."""
    if not parts[0].is_cuda:
        return torch.cat([ops.bucket_norms(part) for part in parts])
    return torch.stack(torch._foreach_norm(list(parts), dtype=torch.float64)).float()
