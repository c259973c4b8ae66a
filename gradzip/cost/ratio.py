"""The compression ratio above which compression pays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .link import Link
from .simulation import predict
from .step import Compressed, Layer, Step, uncompressed


def compression_cost(
    nbytes: float,
    *,
    conversion: float = math.inf,
    transform: float = math.inf,
    packing: float = math.inf,
    selection: float = math.inf,
) -> float:
    """Seconds to compress a message of `nbytes`. Arguments: throughputs of the primitives in bytes per second.

    M (2 / T_m + 1 / T_f + 1 / T_p + 1 / T_s), equation (1) of HPDC 2020: precision conversion runs twice.
    """
    return nbytes * (2 / conversion + 1 / transform + 1 / packing + 1 / selection)


def minimal_ratio(link: Link, nbytes: float, seconds: float, kind: str = "all_reduce") -> float:
    """The compression ratio k above which compression pays, without overlap; infinity if it never does.

    Compression pays if compressing, decompressing and sending M / k bytes take less time than an all-reduce of M bytes.
    With two ranks, an all-reduce, no latency and `seconds` twice `compression_cost`, this is equation (4) of HPDC 2020:
    k > 1 / (1 - 2 T_comm (2 / T_m + 1 / T_f + 1 / T_p + 1 / T_s)).

    Args:
        nbytes: M, the size of the uncompressed gradient.
        seconds: time to compress and decompress the gradient.
        kind: the collective of the compressed gradient, as for `Link.seconds`.

    >>> link = Link(ranks=2, bandwidth=1.25e9, latency=0.0)  # 10 Gb/s
    >>> cost = compression_cost(1e9, conversion=35e9, transform=20e9, packing=10e9, selection=10e9)
    >>> round(minimal_ratio(link, 1e9, 2 * cost), 2)
    4.31
    """
    saved = link.all_reduce(nbytes) - seconds - link.messages(kind) * link.latency
    return replace(link, latency=0.0).seconds(kind, nbytes) / saved if saved > 0 else math.inf


def least_ratio(
    step: Step,
    layers: Sequence[Compressed],
    link: Link,
    limit: float,
    *,
    bucket_nbytes: float | None = None,
    fusion_nbytes: float | None = None,
) -> float:
    """The compression ratio k at which a step with a method takes `limit` seconds; infinity if none does.

    This is `minimal_ratio` with overlap, by bisection. The method takes the encoding and decoding times of `layers`. It
    sends 4 numel / k bytes of each layer that it compresses, divided among its rounds as in `layers`. A result below 1
    means that the method may send more bytes than the gradients have.

    Args:
        limit: seconds of the step without the method.
    """

    def seconds(ratio: float) -> float:
        scaled = [_with_ratio(layer, c, ratio) for layer, c in zip(step.layers, layers)]
        return predict(step, scaled, link, bucket_nbytes=bucket_nbytes, fusion_nbytes=fusion_nbytes).seconds

    low, high = 2.0**-10, 2.0**20
    if seconds(high) > limit:
        return math.inf
    if seconds(low) <= limit:
        return low
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if seconds(middle) <= limit else (middle, high)
    return high


def _with_ratio(layer: Layer, compressed: Compressed, ratio: float) -> Compressed:
    if compressed.rounds == uncompressed(layer).rounds:
        return compressed  # bypasses compression
    total = sum(nbytes for _, nbytes in compressed.rounds) or 1.0
    rounds = tuple((kind, 4 * layer.numel / ratio * nbytes / total) for kind, nbytes in compressed.rounds)
    return Compressed(rounds, compressed.encode, compressed.decode)
