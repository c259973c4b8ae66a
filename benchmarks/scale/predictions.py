"""What gradzip.cost says of the measured bucket, and of large models on fast links with many ranks.

The first follows from the link and the cost of each method on one matrix, both measured in the same job. `LayerCost`
extrapolates the latter from two ranks to those of the job, as in `gradzip advise`. The second follows from bytes alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

import gradzip
from benchmarks.scale.variants import AUTO, GATHER, GBITS, PROJECTED, RANKS, SCATTER, with_exchange
from gradzip.cli.decision import FP16, FP32, MARGIN
from gradzip.cli.layer_costs import LayerCost
from gradzip.cli.models import MODELS, step_of
from gradzip.cost import JOINED, Compressed, Link, exchange, predict
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
    """Predict an average of the measured bucket from the link and the codecs of the job with as many ranks."""
    about = results["provenance"]
    count, shape = about["parameters"], torch.Size([about["side"]] * 2)
    link = Link(**results["links"][str(ranks)])
    if variant.endswith(AUTO):
        variant = with_exchange(variant, chosen(results, variant, shape, count, ranks))
    own = layer_cost(results["codecs"][variant][str(ranks)]).among(ranks)
    sizes: Counter[tuple[int, str]] = Counter()
    for number, (kind, nbytes) in enumerate(own.rounds):
        sizes[number, kind] += count * nbytes  # type: ignore[assignment]
    communication = sum(link.operation + link.core_seconds(kind, nbytes) for (_, kind), nbytes in sizes.items())
    # A link has the time that a core takes, of which a rank has a share.
    seconds = count * (own.encode + own.decode) + communication * min(1.0, about["cores"] / ranks)
    return Bucket(seconds, sum(link.sent_nbytes(kind, nbytes) for (_, kind), nbytes in sizes.items()))


def layer_cost(entry: Mapping[str, Any]) -> LayerCost:
    rounds = tuple((kind, nbytes) for kind, nbytes in entry["rounds"])
    return LayerCost(Compressed(rounds, entry["encode"], entry["decode"]), entry["decode_rank"])


def chosen(results: Mapping[str, Any], variant: str, shape: torch.Size, count: int, ranks: int) -> str:
    """The exchange that "auto" chooses for a bucket of `count` gradients, which some methods join."""
    gathered = layer_cost(results["codecs"][with_exchange(variant, GATHER)][str(ranks)]).compressed
    joined = gradzip.parse(variant).joined_shape(shape) is not None
    return SCATTER if scatter_pays(gathered.nbytes * (count if joined else 1), ranks) else GATHER


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
