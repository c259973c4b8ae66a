"""Plans: a method for each parameter. The cost model proposes plans; measured steps decide among them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..cost import Compressed, Layer, Link, Step, predict, uncompressed

# A parameter's name and shape.
Key = tuple[str, tuple[int, ...]]

NONE = 0  # index of the part that averages gradients as they are

# A mixed plan minimizes encoding + decoding + weight * communication of each layer. Where communication overlaps with
# the backward pass, only a part of it counts.
WEIGHTS = (1.0, 0.3, 0.1)

# The model is right within some tens of percent: plans that it finds slower than this are not tried.
TOO_SLOW = 1.5

# A mixed plan is tried before one with a single method only if the model finds it faster by this factor.
MIXED = 0.98


@dataclass
class Plan:
    """A method for each parameter.

    Args:
        title: for people.
        methods: indices of the parts of `Auto`. Parameters that are not among them are averaged as they are.
        seconds: measured for a step with this plan.
        predicted: by the cost model.
        wanted: the methods that it has where their errors allow it. None: `methods`.
    """

    title: str
    methods: dict[Key, int]
    seconds: float | None = None
    predicted: float | None = None
    wanted: dict[Key, int] | None = field(default=None, compare=False)

    @property
    def compressing(self) -> dict[Key, int]:
        """The parameters that are not averaged as they are."""
        return {key: index for key, index in self.methods.items() if index != NONE}


@dataclass(frozen=True)
class Option:
    """A method on one layer. error: |x - decoded| / |x|."""

    compressed: Compressed
    error: float


@dataclass(frozen=True)
class Measured:
    """A layer, as one rank measured it. options: by index of the part, for parts that compress it."""

    key: Key
    ready: float
    options: Mapping[int, Option]


@dataclass(frozen=True)
class Profile:
    """What all ranks have agreed on: the slowest rank's times, and the largest errors."""

    layers: Mapping[str, Measured]  # by name of the state, in the order in which gradients are ready
    link: Link
    bucket_nbytes: float | None
    fusion_nbytes: float | None

    @property
    def step(self) -> Step:
        layers = tuple(Layer(name, layer.key[1], layer.ready) for name, layer in self.layers.items())
        return Step(layers, max((layer.ready for layer in layers), default=0.0))

    def predict(self, plan: Plan) -> float:
        """Seconds of a step with a plan."""
        step = self.step
        compressed = []
        for layer in step.layers:
            measured = self.layers[layer.name]
            option = measured.options.get(plan.methods.get(measured.key, NONE))
            compressed.append(uncompressed(layer) if option is None else option.compressed)
        buckets = {"bucket_nbytes": self.bucket_nbytes, "fusion_nbytes": self.fusion_nbytes}
        return predict(step, compressed, self.link, **buckets).seconds


def to_line(layers: Mapping[str, Measured]) -> bytes:
    """A line of JSON of what one rank has measured."""
    plain = {
        name: [
            *(layer.key[0], list(layer.key[1]), layer.ready),
            {i: [(c := o.compressed).rounds, c.encode, c.decode, o.error] for i, o in layer.options.items()},
        ]
        for name, layer in layers.items()
    }
    return json.dumps(plain).encode() + b"\n"


def agree(lines: Sequence[bytes]) -> dict[str, Measured]:
    """The slowest rank's times and the largest errors, from the lines of all ranks. Equal lines give equal results."""
    ranks = [json.loads(line) for line in lines]
    layers = {}
    for name in ranks[0]:
        of_ranks = [rank[name] for rank in ranks if name in rank]
        if len(of_ranks) == len(ranks):
            (first, shape, *_), ready = of_ranks[0], max(layer[2] for layer in of_ranks)
            everywhere = [i for i in of_ranks[0][3] if all(i in layer[3] for layer in of_ranks)]
            options = {int(i): _slowest([layer[3][i] for layer in of_ranks]) for i in everywhere}
            layers[name] = Measured((first, tuple(shape)), ready, options)
    return dict(sorted(layers.items(), key=lambda item: (item[1].ready, item[0])))


def _slowest(options: Sequence[Any]) -> Option:
    rounds = tuple((kind, max(o[0][i][1] for o in options)) for i, (kind, _) in enumerate(options[0][0]))
    encode, decode = (max(o[i] for o in options) for i in (1, 2))
    # A NaN, of a gradient that is not finite, counts as the largest error: it is not below any limit.
    return Option(Compressed(rounds, encode, decode), max((o[3] for o in options), key=lambda e: (e != e, e)))


def with_errors_below(layers: Mapping[str, Measured], limit: float | None) -> dict[str, Measured]:
    """The layers without methods whose error is above the limit, or not a number."""
    limit = float("inf") if limit is None else limit
    return {
        name: replace(layer, options={i: o for i, o in layer.options.items() if o.error <= limit})
        for name, layer in layers.items()
    }


def adapted(plan: Plan, layers: Mapping[str, Measured], titles: Sequence[str], half: int | None) -> Plan:
    """The plan, with methods that are still allowed: where its own is not, 16 bits or none."""
    own = titles.index(plan.title) if plan.title in titles else None
    kept = plan.methods if plan.wanted is None else plan.wanted
    methods = dict(plan.methods)
    for layer in reversed(list(layers.values())):
        wanted = kept.get(layer.key, NONE) if own is None else own
        choices = [] if wanted == NONE else [i for i in (wanted, half) if i is not None and i in layer.options]
        methods[layer.key] = choices[0] if choices else NONE
    return replace(plan, methods=methods, wanted=kept)


def is_simple(plan: Plan, half: int | None) -> bool:
    """Whether a plan averages all gradients as they are, or in 16 bits. half: index of the part that does that."""
    return set(plan.methods.values()) <= {NONE, half}


def uniform(profile: Profile, title: str, *indices: int) -> Plan:
    """A plan with one method for all layers, and with the next one where it does not apply."""
    methods = {
        layer.key: next((i for i in indices if i in layer.options), NONE)
        for layer in reversed(list(profile.layers.values()))
    }
    return Plan(title, methods)


def mixed(profile: Profile, weight: float) -> Plan:
    """A plan with the fastest method of each layer."""

    def seconds(layer: Measured, index: int) -> float:
        option = layer.options.get(index)
        compressed = uncompressed(Layer("", layer.key[1], 0.0)) if option is None else option.compressed
        sent = sum(profile.link.seconds(kind, nbytes) for kind, nbytes in compressed.rounds)
        return compressed.encode + compressed.decode + weight * sent

    methods = {
        layer.key: min([NONE, *sorted(layer.options)], key=partial(seconds, layer))
        for layer in reversed(list(profile.layers.values()))
    }
    return Plan("mixed", methods)


def proposals(profile: Profile, titles: Sequence[str], half: int | None, most: int) -> list[Plan]:
    """The plans to try, the fastest by the model first.

    Args:
        titles: of the parts.
        half: index of the part that averages in 16 bits, if there is one.
        most: plans besides those without compression and with 16 bits, which are always tried.
    """
    candidates = [uniform(profile, titles[NONE])]
    if half is not None:
        candidates.append(uniform(profile, titles[half], half))
    number_simple = len(candidates)
    fall_back = () if half is None else (half,)
    candidates += [uniform(profile, titles[i], i, *fall_back) for i in range(1, len(titles)) if i != half]
    candidates.append(min((mixed(profile, weight) for weight in WEIGHTS), key=profile.predict))
    times = [profile.predict(plan) for plan in candidates]
    limit = TOO_SLOW * min(times[:number_simple])
    times[-1] /= MIXED
    plans: list[Plan] = []
    order = [*range(number_simple), *sorted(range(number_simple, len(times)), key=times.__getitem__)]
    for i in order:
        plan, plan.predicted = candidates[i], profile.predict(candidates[i])
        known = any(plan.compressing == other.compressing for other in plans)
        if not known and (i < number_simple or (times[i] <= limit and len(plans) < number_simple + most)):
            plans.append(plan)
    return plans
