"""What gradzip.advice.cost says of the measured bucket, and of large models on fast links with many ranks.

The first follows from the link and the cost of each method on one matrix, both measured in the same job. `LayerCost`
extrapolates the latter from two ranks to those of the job, as in `gradzip advise`. The second follows from bytes alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import gradzip
from benchmarks.common.results import link_of
from benchmarks.scale.variants import AUTO, GATHER, GBITS, PROJECTED, RANKS, SCATTER, with_exchange
from gradzip.advice.advice import FP16, FP32, MARGIN
from gradzip.advice.cost import JOINED, Compressed, Link, exchange, predict
from gradzip.advice.measure import LayerCost
from gradzip.cli.models import MODELS, step_of
from gradzip.methods.base.gather import scatter_pays

ENOUGH = 0.9  # share of the speed without communication
EVERY = 30  # local steps between two exchanges, as in docs/outer.md
LOCAL = (FP32, "block-float")  # what exchanges of local steps are projected with
NOTHING = 1e-9  # seconds of a step that hides no communication

# Rounds of `PROJECTED` for gradients of each shape, by variant.
Sizes = Mapping[str, Mapping[tuple[int, ...], tuple[tuple[str, float], ...]]]


class Bucket(NamedTuple):
    """What one rank needs for one average of the measured bucket."""

    cpu_seconds: float
    sent_nbytes: float


def bucket(results: Mapping[str, Any], variant: str, ranks: int) -> Bucket:
    """Predict an average of the measured bucket from the link and the codecs of the job with as many ranks.

    Without a link of so many, from that of the most ranks.
    """
    own, count = codec(results, variant, ranks), results["provenance"]["parameters"]
    links = results["links"]
    found = link_of(links.get(str(ranks)) or links[max(links, key=int)])
    link = replace(found, ranks=ranks)
    communication = sum(
        link.operation + link.core_seconds(kind, nbytes) for (_, kind), nbytes in joined_rounds(own, count).items()
    )
    # A link has the time that a core takes, of which a rank has a share.
    share = min(1.0, results["provenance"]["cores"] / found.ranks)
    return Bucket(count * (own.encode + own.decode) + communication * share, sent_nbytes(results, variant, ranks))


def sent_nbytes(results: Mapping[str, Any], variant: str, ranks: int) -> float:
    """The bytes that a rank sends for the bucket, with any number of ranks."""
    link = Link(ranks, 1.0, 0.0)
    sizes = joined_rounds(codec(results, variant, ranks), results["provenance"]["parameters"])
    return sum(link.sent_nbytes(kind, nbytes) for (_, kind), nbytes in sizes.items())


def codec(results: Mapping[str, Any], variant: str, ranks: int) -> Compressed:
    """The cost of one of the bucket's matrices, as measured in the job with as many ranks, or with the most."""
    if variant.endswith(AUTO):
        variant = with_exchange(variant, chosen(results, variant, ranks))
    of_ranks = results["codecs"][variant]
    return layer_cost(of_ranks.get(str(ranks)) or of_ranks[max(of_ranks, key=int)]).among(ranks)


def joined_rounds(cost: Compressed, count: int) -> dict[tuple[int, str], float]:
    """The collectives of a bucket of `count` gradients: bytes by round and kind."""
    return {(number, kind): count * nbytes for number, (kind, nbytes) in enumerate(cost.rounds)}


def layer_cost(entry: Mapping[str, Any]) -> LayerCost:
    rounds = tuple((kind, nbytes) for kind, nbytes in entry["rounds"])
    return LayerCost(rounds, entry["encode"], entry["decode"], entry["decode_rank"])


def chosen(results: Mapping[str, Any], variant: str, ranks: int) -> str:
    """The exchange that "auto" chooses for the bucket, whose gradients methods join."""
    about = results["provenance"]
    joins = gradzip.parse(variant).groups_by(torch.Size([about["side"]] * 2)) is not None
    payload = codec(results, with_exchange(variant, GATHER), ranks).nbytes
    return SCATTER if scatter_pays(payload * (about["parameters"] if joins else 1), ranks) else GATHER


def project(sizes: Sizes, models: Sequence[str], latency: float) -> list[dict[str, Any]]:
    """The projection to `RANKS` and `GBITS`, in seconds and bytes, with codecs that take no time.

    Args:
        sizes: of all shapes of the models.
        latency: seconds of a message.

    Returns:
        For each model, link and number of ranks: "seconds" of communication by variant, nothing of it hidden;
        "least_step", the shortest step without communication that keeps `ENOUGH` of its speed; "local_step", the same
        with an exchange every `EVERY` local steps; "rate", the bytes of gradients that a device must encode and decode
        in a second to save more than the margin of error over fp16 (None if no rate is enough).
    """
    return [
        {"model": model, "gbit": gbit, "ranks": ranks, **_cell(sizes, model, Link(ranks, gbit * 1e9 / 8, latency))}
        for model in models
        for gbit in GBITS
        for ranks in RANKS
    ]


def _cell(sizes: Sizes, model: str, link: Link) -> dict[str, Any]:
    parameters = list(MODELS[model]())
    dense = 4 * sum(p.numel for p in parameters)
    seconds, least, local, rate = {}, {}, {}, {}
    for variant in PROJECTED:
        # In the order of the layers of `step_of`.
        layers = [Compressed(sizes[variant][p.shape]) for p in reversed(parameters)]

        def share(step_seconds: float, layers: Sequence[Compressed] = layers) -> float:
            """Of the ideal speed."""
            found = predict(step_of(parameters, step_seconds), layers, link, **JOINED["ddp"])
            return found.compute / found.seconds

        seconds[variant] = NOTHING / share(NOTHING) - NOTHING
        least[variant] = _least(lambda s, share=share: share(s) >= ENOUGH, seconds[variant])
        if variant in LOCAL:
            step = exchange(step_of(parameters, 1.0), layers, link)
            local[variant] = ENOUGH / (1 - ENOUGH) * step.seconds / EVERY
    for variant in PROJECTED[2:]:
        saved = (1 - MARGIN) * min(seconds[FP32], seconds[FP16]) - seconds[variant]
        rate[variant] = dense / saved if saved > 0 else None
    return {"seconds": seconds, "least_step": least, "local_step": local, "rate": rate}


def _least(holds: Callable[[float], bool], about: float) -> float:
    """The least positive number, to a percent, for which something holds. about: its order of magnitude."""
    low, high = about / 64, about * 64
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
