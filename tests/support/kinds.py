"""Kinds of methods, found by running them. Suites run one method of each kind by default, and all with --long.

A method joins its kind when it is registered. Suites that need other samples choose by property (`examples`).
"""

import contextlib
import functools
from typing import NamedTuple

import pytest
import torch

import gradzip
from gradzip.collectives import Gather, ToHost
from gradzip.engines.local import drive
from gradzip.methods.base.gather import GatherCompressor
from gradzip.methods.base.group import averaged
from gradzip.methods.base.registry import registered
from gradzip.methods.spec import unparse
from gradzip.watch.replay import recorded

STEPS = 4  # after which methods with phases compress
SHAPE = (32, 8, 3, 3)


class Observed(NamedTuple):
    """What a method does in a few steps of two ranks."""

    steps: tuple[tuple[str, ...], ...]  # the collectives of each step, in order
    lengths: frozenset[tuple[int, ...]]  # of payloads, of each rank and step
    fields: frozenset[str]  # of the state that it keeps


@functools.cache
def observed(spec):
    compressors = [gradzip.parse(spec) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    steps, lengths = [], set()
    for _ in range(STEPS):
        seen = [[], []]
        grads = [torch.randn(SHAPE, generator=generator) for _ in seen]
        routines = [averaged(c, grad, "w", rank, 2) for rank, (c, grad) in enumerate(zip(compressors, grads))]
        drive([recorded(routine, own.append) for routine, own in zip(routines, seen)])
        seen = [[c for c in own if not isinstance(c, ToHost)] for own in seen]
        lengths |= {tuple(c.tensor.numel() for c in own if isinstance(c, Gather)) for own in seen}
        steps.append(tuple(type(c).__name__ for c in seen[0]))
        for compressor in compressors:
            compressor.end_step(None, ["w"])
            compressor.complete_step(["w"])
    kept = [vars(state) for part in compressors[0].parts for state in part.states.values()]
    fields = frozenset(name for state in kept for name, value in state.items() if value is not None)
    return Observed(tuple(steps), frozenset(lengths), fields)


@functools.cache
def kind(spec):
    """The kind of routine that a method is."""
    compressor = gradzip.parse(spec)
    if compressor.parts != [compressor]:
        return "composite"
    if compressor.averaged_momentum is not None:
        return "momentum"
    steps, lengths, _ = observed(spec)
    if any("RingSum" in step for step in steps):
        return "RingSum"
    if "AllToAll" in steps[-1]:
        return "AllToAll"
    if compressor.vectors and compressor.groups_by(torch.Size(SHAPE)) is not None:
        return f"one vector, {', '.join(steps[-1])}"
    if "Gather" in steps[-1]:
        return "Gather, varying" if len(lengths) > 1 else "Gather, fixed"
    return ", ".join(steps[-1])


def examples(condition=lambda compressor: True):
    """The examples of all methods whose compressors meet a condition, the first one of each method first."""
    specs = [*FIRST, *(spec for method in registered().values() for spec in method.examples[1:])]
    return [spec for spec in specs if condition(gradzip.parse(spec))]


FIRST = [method.examples[0] for method in registered().values()]
ALL = examples()
FIRST_OF_KIND = {}
for _spec in ALL:
    FIRST_OF_KIND.setdefault(kind(_spec), _spec)
SAMPLE = [*FIRST_OF_KIND.values()]


def shared(front_end):
    """The specs that one of two front ends runs, 0 or 1: one of each kind, and every second other method."""
    others = [spec for spec in FIRST if spec not in SAMPLE]
    return [*SAMPLE, *others[front_end::2]]


def batches(specs=ALL):
    """Specs that a job runs together: the sample, and all others."""
    others = [spec for spec in specs if spec not in SAMPLE]
    return [SAMPLE, *(others[i : i + 14] for i in range(0, len(others), 14))]


def exchanged():
    """The first example of each method that gathers payloads and takes part in other exchanges, with each of them."""
    specs = []
    for method in registered().values():
        for exchange in ("scatter_reduce", "auto") if issubclass(method, GatherCompressor) else ():
            for example in method.examples:
                spec = f"{example}{',' if ':' in example else ':'}exchange={exchange}"
                with contextlib.suppress(ValueError):
                    gradzip.parse(spec)
                    specs.append(spec)
                    break
    return specs


def collectives(compressor):
    """The names of the collectives that a compressor, or what it is made of, asks for."""
    return {name for part in compressor.parts for step in observed(unparse(part)).steps for name in step}


def exact(compressor):
    """Whether the order in which an engine adds numbers does not matter to a method: it adds none."""
    return collectives(compressor).isdisjoint({"Mean", "RingSum"})


def jobs(specs, sizes=(2, 3)):
    """Parameters for pytest: numbers of ranks and specs; the largest number has those that run with --long."""
    small = [pytest.param(size, spec, id=f"{size}-{spec}") for size in sizes for spec in SAMPLE]
    others = (spec for spec in specs if spec not in SAMPLE)
    return [*small, *(pytest.param(sizes[-1], s, marks=pytest.mark.long, id=f"{sizes[-1]}-{s}") for s in others)]


def params(specs=ALL, default=SAMPLE):
    """Parameters for pytest: specs, of which only those in `default` run without --long."""
    return [pytest.param(spec, marks=[pytest.mark.long] * (spec not in default), id=spec) for spec in specs]
