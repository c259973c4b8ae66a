"""The compression ratio above which compression pays."""

from __future__ import annotations

import math
from dataclasses import replace

from .link import Link


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
