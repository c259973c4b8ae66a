"""Shared by the contract suites: every registered method, its gradients, and the expected averages."""

import zlib

import torch

import gradzip
from gradzip.registry import registered

# With the arguments that each method registers for this purpose.
EXAMPLES = {name: f"{name}:{method.example}".removesuffix(":") for name, method in registered().items()}
SPECS = list(EXAMPLES.values())
SHAPES = {"b": (48,), "v": (32, 8, 3, 3), "w": (64, 48)}
STEPS = 3
AMP_STEPS = 7
OVERFLOWS = 2  # in this step, on the last rank, in one parameter
AMP_SCALES = [1024.0] * 3 + [512.0] * 3 + [1024.0]  # of a GradScaler(init_scale=1024.0, growth_interval=3) then

TIMEOUT = 280  # seconds for all scenarios, which take far less where nothing else runs; pytest's own limit is 300


def gradient(name, rank, step, shape=None):
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{rank}/{step}".encode()))
    return torch.randn(shape or SHAPES[name], generator=generator)


def each(steps, of_rank, names=SHAPES, size=2):
    """Gradients that `of_rank(name, rank, step)` gives, of every step: [{name: [of rank 0, ...]}, ...]."""
    return [{name: [of_rank(name, r, step) for r in range(size)] for name in names} for step in steps]


def expected(spec, gradients, prefix=""):
    """A LocalGroup's averages of the last step."""
    group = gradzip.LocalGroup(gradzip.parse(spec), len(next(iter(gradients[0].values()))))
    for step in gradients:
        averages = {name: group.average([g.clone() for g in grads], prefix + name)[0] for name, grads in step.items()}
    return averages


def assert_equal_states(a, b):
    """State dicts, bit for bit."""
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
