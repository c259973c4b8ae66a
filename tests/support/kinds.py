"""Kinds of methods, found by running them. Suites run one method of each kind by default, and all with --long.

A method joins its kind when it is registered. Suites that need other samples choose by property (`examples`).
"""

import contextlib
import dataclasses
import functools

import pytest
import torch

import gradzip
from gradzip.methods.base.gather import GatherCompressor
from gradzip.methods.base.registry import registered
from gradzip.methods.spec import unparse
from observed import SHAPE, observed


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


def without_residuals(condition=lambda compressor: True):
    """The examples of all methods, without error feedback if they have the choice, that meet a condition."""
    specs = []
    for spec in ALL:
        compressor = gradzip.parse(spec)
        if "error_feedback" in {f.name for f in dataclasses.fields(compressor)}:
            if getattr(compressor, "residual_decay", 1.0) != 1:
                compressor = dataclasses.replace(compressor, residual_decay=1.0)
            compressor = dataclasses.replace(compressor, error_feedback=False)
        if not compressor.keeps_residual and condition(compressor):
            specs.append(unparse(compressor))
    return list(dict.fromkeys(specs))


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


def batches(specs=ALL, default=SAMPLE):
    """Specs that a job runs together: those that run without --long, and all others."""
    others = [spec for spec in specs if spec not in default]
    return [default, *(others[i : i + 14] for i in range(0, len(others), 14))]


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


def jobs(specs, sizes=(3, 2)):
    """Parameters for pytest: numbers of ranks and specs. Without --long, the first number and one method of a kind."""
    cases = [*((sizes[0], spec) for spec in specs), *((size, spec) for size in sizes[1:] for spec in SAMPLE)]
    short = {(sizes[0], spec) for spec in SAMPLE}
    return [pytest.param(*c, marks=[pytest.mark.long] * (c not in short), id=f"{c[0]}-{c[1]}") for c in cases]


def with_other_exchanges(specs):
    """The examples of methods, and those that gather payloads with the other exchange, too."""
    for spec in specs:
        yield spec
        compressor = gradzip.parse(spec)
        gathers = isinstance(compressor, GatherCompressor) and compressor.exchange == "gather"
        if gathers and not getattr(compressor, "shared_scale", False):
            yield unparse(dataclasses.replace(compressor, exchange="scatter_reduce"))


def params(specs=ALL, default=SAMPLE):
    """Parameters for pytest: specs, of which only those in `default` run without --long."""
    return [pytest.param(spec, marks=[pytest.mark.long] * (spec not in default), id=spec) for spec in specs]
