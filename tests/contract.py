"""Shared by the contract tests: every registered method, gradients, and expected averages."""

import zlib
from dataclasses import MISSING, fields

import torch

import gradzip
from gradzip.registry import registered

# Specs by method name, with the method's `example` arguments.
EXAMPLES = {name: f"{name}:{method.example}".removesuffix(":") for name, method in registered().items()}
SPECS = list(EXAMPLES.values())

# Names of the methods that have no defaults for all of their arguments.
INCOMPLETE = {
    name
    for name, method in registered().items()
    if any(f.init and f.default is MISSING and f.default_factory is MISSING for f in fields(method))
}

SHAPES = {"b": (48,), "v": (32, 8, 3, 3), "w": (64, 48)}
STEPS = 3
AMP_STEPS = 7
OVERFLOWS = 2  # the step in which one gradient of the last rank is not finite
AMP_SCALES = [1024.0] * 3 + [512.0] * 3 + [1024.0]  # with GradScaler(init_scale=1024.0, growth_interval=3)

TIMEOUT = 280  # seconds for all scenarios; far more than needed, less than pytest's limit of 300


def gradient(name, rank, step, shape=None):
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{rank}/{step}".encode()))
    return torch.randn(shape or SHAPES[name], generator=generator)


def each(steps, of_rank, names=SHAPES, size=2):
    """Gradients of_rank(name, rank, step) of each step: [{name: [of rank 0, ...]}, ...]."""
    return [{name: [of_rank(name, r, step) for r in range(size)] for name in names} for step in steps]


def method_for(spec, name, shape):
    """The compressor of a parameter, for a LocalGroup of it alone. Rules of PerLayer see no prefix."""
    compressor = gradzip.parse(spec)
    return compressor.method_for(name, shape) if compressor.selects_by_name else compressor


def expected(spec, gradients, prefix=""):
    """The averages of the last step, from a `LocalGroup` for each parameter."""
    groups = {
        name: gradzip.LocalGroup(method_for(spec, name, grads[0].shape), len(grads))
        for step in gradients
        for name, grads in step.items()
    }
    for step in gradients:
        averages = {name: groups[name].average(grads, prefix + name)[0] for name, grads in step.items()}
    return averages


def assert_equal_states(a, b):
    """Assert that two state dicts are equal to the bit."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal_states(a[key], b[key])
    elif isinstance(a, list):
        for x, y in zip(a, b, strict=True):
            assert_equal_states(x, y)
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
