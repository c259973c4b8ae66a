"""What methods do, found by running them for a few steps."""

import functools
from typing import NamedTuple

import torch

import gradzip
from gradzip.collectives import Gather, ToHost
from gradzip.engines.local import drive
from gradzip.methods.base.group import averaged
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


def collectives(compressor):
    """The names of the collectives that a compressor, or what it is made of, asks for."""
    return {name for part in compressor.parts for step in observed(unparse(part)).steps for name in step}


def exact(compressor):
    """Whether the order in which an engine adds numbers does not matter to a method: it adds none."""
    return collectives(compressor).isdisjoint({"Mean", "RingSum"})
