"""Assignments of methods to parameters: what the cost model proposes, and measured steps decide among."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..cost import Compressed, Layer, Link, Step, predict, uncompressed

# A parameter's name and shape.
ParameterKey = tuple[str, tuple[int, ...]]

NONE = 0  # index of the part that averages gradients uncompressed

# A mixed assignment minimizes encoding + decoding + weight * communication of each layer. Communication that overlaps
# with the backward pass counts only in part.
WEIGHTS = (1.0, 0.3, 0.1)

# The model's error is some tens of percent: assignments that it finds slower than the fastest simple one by this factor
# are not tried.
TOO_SLOW = 1.5

# A mixed assignment is tried before one with a single method only if the model finds it faster by this factor.
MIXED = 0.98


@dataclass
class Assignment:
    """A method for each parameter.

    Args:
        title: for the log and the report.
        methods: indices of the parts of `Auto`. Other parameters are averaged uncompressed.
        seconds: measured time of a step.
        predicted: the cost model's time of a step.
        wanted: the methods to use where their errors are allowed. None: `methods`.
    """

    title: str
    methods: dict[ParameterKey, int]
    seconds: float | None = None
    predicted: float | None = None
    wanted: dict[ParameterKey, int] | None = field(default=None, compare=False)

    @property
    def compressing(self) -> dict[ParameterKey, int]:
        """The methods of the parameters that are compressed."""
        return {key: index for key, index in self.methods.items() if index != NONE}

    def is_simple(self, half: int | None) -> bool:
        """Whether all gradients are averaged uncompressed or in 16 bits. half: index of the part for 16 bits."""
        return set(self.methods.values()) <= {NONE, half}


@dataclass(frozen=True)
class Option:
    """The cost and the error of a method on one layer. error: |x - decoded| / |x|."""

    compressed: Compressed
    error: float


@dataclass(frozen=True)
class Measured:
    """A layer, as measured by one rank. options: by index of the part, for the parts that compress the layer."""

    key: ParameterKey
    ready: float
    options: Mapping[int, Option]


@dataclass(frozen=True)
class Profile:
    """The measurements of all ranks: the slowest rank's times, and the largest errors."""

    layers: Mapping[str, Measured]  # by name of the state, in the order in which gradients are ready
    link: Link
    bucket_nbytes: float | None
    fusion_nbytes: float | None

    @property
    def step(self) -> Step:
        layers = tuple(Layer(name, layer.key[1], layer.ready) for name, layer in self.layers.items())
        return Step(layers, max((layer.ready for layer in layers), default=0.0))

    def predict(self, assignment: Assignment) -> float:
        """Seconds of a step with an assignment."""
        step = self.step
        compressed = []
        for layer in step.layers:
            measured = self.layers[layer.name]
            option = measured.options.get(assignment.methods.get(measured.key, NONE))
            compressed.append(uncompressed(layer) if option is None else option.compressed)
        buckets = {"bucket_nbytes": self.bucket_nbytes, "fusion_nbytes": self.fusion_nbytes}
        return predict(step, compressed, self.link, **buckets).seconds


def to_line(layers: Mapping[str, Measured]) -> bytes:
    """One rank's measurements as a line of JSON."""
    plain = {
        name: [
            *(layer.key[0], list(layer.key[1]), layer.ready),
            {i: [(c := o.compressed).rounds, c.encode, c.decode, o.error] for i, o in layer.options.items()},
        ]
        for name, layer in layers.items()
    }
    return json.dumps(plain).encode() + b"\n"


def merge_lines(lines: Sequence[bytes]) -> dict[str, Measured]:
    """The slowest rank's times and the largest errors, from the lines of all ranks. Equal lines give equal results.

    Layers and methods that some rank has not measured are left out.
    """
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
    # A NaN, the error on a gradient that is not finite, counts as the largest error: it is below no limit.
    return Option(Compressed(rounds, encode, decode), max((o[3] for o in options), key=lambda e: (e != e, e)))


def with_errors_below(layers: Mapping[str, Measured], limit: float | None) -> dict[str, Measured]:
    """The layers without the methods whose error is above the limit, or NaN."""
    limit = float("inf") if limit is None else limit
    return {
        name: replace(layer, options={i: o for i, o in layer.options.items() if o.error <= limit})
        for name, layer in layers.items()
    }


def adapt(assignment: Assignment, layers: Mapping[str, Measured], specs: Sequence[str], half: int | None) -> Assignment:
    """The assignment with its wanted methods where they are allowed, and 16 bits or none elsewhere."""
    own = specs.index(assignment.title) if assignment.title in specs else None
    kept = assignment.methods if assignment.wanted is None else assignment.wanted
    methods = dict(assignment.methods)
    for layer in reversed(list(layers.values())):
        wanted = kept.get(layer.key, NONE) if own is None else own
        choices = [] if wanted == NONE else [i for i in (wanted, half) if i is not None and i in layer.options]
        methods[layer.key] = choices[0] if choices else NONE
    return replace(assignment, methods=methods, wanted=kept)


def uniform(profile: Profile, title: str, *indices: int) -> Assignment:
    """The first of these methods that compresses a layer, for every layer."""
    methods = {
        layer.key: next((i for i in indices if i in layer.options), NONE)
        for layer in reversed(list(profile.layers.values()))
    }
    return Assignment(title, methods)


def mixed(profile: Profile, weight: float) -> Assignment:
    """The fastest method of each layer. weight: of communication, as in `WEIGHTS`."""

    def seconds(layer: Measured, index: int) -> float:
        option = layer.options.get(index)
        compressed = uncompressed(Layer("", layer.key[1], 0.0)) if option is None else option.compressed
        sent = sum(profile.link.seconds(kind, nbytes) for kind, nbytes in compressed.rounds)
        return compressed.encode + compressed.decode + weight * sent

    methods = {
        layer.key: min([NONE, *sorted(layer.options)], key=partial(seconds, layer))
        for layer in reversed(list(profile.layers.values()))
    }
    return Assignment("mixed", methods)


def proposals(profile: Profile, specs: Sequence[str], half: int | None, most: int) -> list[Assignment]:
    """The assignments to try: the simple ones, then the fastest ones by the model.

    Args:
        specs: of the parts.
        half: index of the part that averages in 16 bits, if there is one.
        most: number of assignments besides the simple ones.
    """
    candidates = [uniform(profile, specs[NONE])]
    if half is not None:
        candidates.append(uniform(profile, specs[half], half))
    number_simple = len(candidates)
    fall_back = () if half is None else (half,)
    candidates += [uniform(profile, specs[i], i, *fall_back) for i in range(1, len(specs)) if i != half]
    candidates.append(min((mixed(profile, weight) for weight in WEIGHTS), key=profile.predict))
    times = [profile.predict(candidate) for candidate in candidates]
    limit = TOO_SLOW * min(times[:number_simple])
    times[-1] /= MIXED
    proposed: list[Assignment] = []
    order = [*range(number_simple), *sorted(range(number_simple, len(times)), key=times.__getitem__)]
    for i in order:
        candidate, candidate.predicted = candidates[i], profile.predict(candidates[i])
        known = any(candidate.compressing == other.compressing for other in proposed)
        if not known and (i < number_simple or (times[i] <= limit and len(proposed) < number_simple + most)):
            proposed.append(candidate)
    return proposed
