"""A ring all-reduce of payloads that cannot be added: they are decoded and encoded again at every hop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import ops
from .codec import Codec
from .collectives import RingSum
from .state import Key


def codec_ring(codec: Codec, x: Tensor, segments: Sequence[slice], key: Key) -> RingSum:
    """The RingSum of a codec: decode, add and encode at every hop. Each of the n encodings of an element adds an error.

    An inf or a NaN makes its segment NaN on all ranks.

    Args:
        codec: the length of its payloads must depend on the number of elements alone, as that of
            `QSGD(coding="packed")`, because peers have to know it.
        x: float32, contiguous; replaced by the sum over the ranks.
        segments: `ring_segments` of the flat `x`.
        key: of the random draws; those for a segment have the name ``name[segment]``.
    """
    flat = x.view(-1)
    lengths = {s.stop - s.start for s in segments}
    nbytes = {numel: codec.encode(flat.new_zeros(numel), key).numel() for numel in lengths}

    def encode(i: int, values: Tensor) -> Tensor:
        payload = codec.encode(values, key._replace(name=f"{key.name}[{i}]"))
        missing = nbytes[values.numel()] - payload.numel()
        if missing < 0:
            raise ValueError(
                f"codec_ring: got a payload of {payload.numel()} bytes for {values.numel()} elements, expected "
                f"{nbytes[values.numel()]} as for zeros; take a codec of one length, such as QSGD(coding='packed')"
            )
        return torch.nn.functional.pad(payload, (0, missing)) if missing else payload

    def decode_payload(i: int, payload: Tensor) -> Tensor:
        return codec.decode([ops.first_payload(payload)], segments[i].stop - segments[i].start)

    def decode(i: int, total: Tensor) -> None:
        flat[segments[i]] = decode_payload(i, total)

    return RingSum(
        numels=tuple(nbytes[s.stop - s.start] for s in segments),
        encode=lambda i: encode(i, flat[segments[i]]),
        decode=decode,
        merge=lambda i, partial: encode(i, decode_payload(i, partial).add_(flat[segments[i]])),
        dtype=torch.uint8,
        device=x.device,
    )
