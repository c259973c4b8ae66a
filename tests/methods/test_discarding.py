"""Averages that are announced to be thrown away (`Compressor.discarding`), with every method."""

import contextlib

import pytest
import torch

import gradzip
import kinds
from contract import SHAPES, gradient

SIZE = 2
STEPS = 6  # after which methods with phases compress


def gradients(step, scale=1.0):
    return [{name: scale * gradient(name, rank, step) for name in SHAPES} for rank in range(SIZE)]


def announced(group):
    """A context in which all ranks announce that they throw averages away."""
    stack = contextlib.ExitStack()
    for compressor in group.compressors:
        stack.enter_context(compressor.discarding())
    return stack


def equal(ours, theirs):
    return all(torch.equal(a[name], b[name]) for a, b in zip(ours, theirs, strict=True) for name in SHAPES)


@pytest.mark.parametrize("spec", kinds.params())
def test_nothing_of_them_comes_back(spec):
    """Other steps have the bits that they have without them. NaNs in them change nothing, either."""
    plain, group = (gradzip.LocalGroup(gradzip.parse(spec), SIZE) for _ in range(2))
    for step in range(STEPS):
        with announced(group):
            for number in (100 + step, 200 + step):
                thrown = group.step(gradients(number))
                assert equal(thrown[:1], thrown[1:])
            if step == 3:
                group.step(gradients(300, float("nan")))
        assert equal(group.step(gradients(step)), plain.step(gradients(step)))


@pytest.mark.parametrize("spec", kinds.params(kinds.examples(lambda c: c.keeps_residual and not c.averaged_momentum)))
def test_nothing_of_residuals_is_in_them(spec):
    group = gradzip.LocalGroup(gradzip.parse(spec), SIZE)
    for step in range(STEPS):
        group.step(gradients(step))
    zeros = gradients(0, 0.0)
    with announced(group):
        averages = group.step(zeros)
    most = max(average.abs().max() for of_rank in averages for average in of_rank.values())
    assert most < 1e-20  # the least magnitude of a block
    assert any(average.any() for average in group.step(zeros)[0].values())  # residuals are sent otherwise
