"""benchmarks.gradiveq_runs: what a layer hands back, keeps and sends."""

import pytest
import torch

from benchmarks import gradiveq_runs
from benchmarks.gradiveq_runs import ALWAYS, Layer, Variant

SHAPE = torch.Size((16, 16, 3, 3))
SLICES, K = 3, 768  # best_slice_size: 16 × 16 × 3


@pytest.fixture(autouse=True)
def _warm_up(monkeypatch):
    monkeypatch.setattr(gradiveq_runs, "WARM_UP", 2)


def gradients(number):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator) for _ in range(number)]


@pytest.mark.parametrize("fresh", [True, False])
def test_what_is_not_sent_is_the_residual_and_bytes_are_counted(fresh):
    layer = Layer(Variant(samples=4, compressed=ALWAYS if fresh else 9, decay=1.0, fresh=fresh), SHAPE)
    assert layer.size == K
    given, back = torch.zeros(SHAPE, dtype=torch.float64), torch.zeros(SHAPE, dtype=torch.float64)
    of_steps = gradients(2 + 4 + 9)
    for gradient in of_steps:
        back += layer.average(gradient)
        given += gradient
    left = gradiveq_runs.unflatten(layer.residual.view(-1), SHAPE).clone()
    assert left.abs().max() > 1 and (given - back - left).abs().max() < 1e-4
    d = (4 - 1) * SLICES  # as many as centred samples have dimensions
    assert layer.sent == 6 * SLICES * K + 9 * (SLICES * d + (K - d if fresh else 0))
    if not fresh:  # the next sample has the whole residual
        assert torch.equal(layer.average(of_steps[0]), of_steps[0] + left) and not layer.residual.any()


def test_bases_lose_nothing_of_gradients_in_their_span():
    layer = Layer(Variant(samples=4, compressed=9), SHAPE)
    first, second, *_ = gradients(2)
    factors = torch.rand(15, 2, generator=torch.Generator().manual_seed(1))
    for a, b in factors.tolist():
        assert (layer.average(a * first + b * second) - (a * first + b * second)).abs().max() < 1e-3
    assert len(layer.lost) == 9 and max(layer.lost) < 1e-6


def test_half_of_the_bytes_are_sent_as_float16():
    wide, half = (
        Layer(Variant(samples=4, compressed=ALWAYS, decay=1.0, fresh=True, half=h), SHAPE) for h in (False, True)
    )
    of_steps = gradients(2 + 4 + 3)
    for gradient in of_steps[:6]:
        assert torch.equal(half.average(gradient), gradient.half().float())
        wide.average(gradient)
    for gradient in of_steps[6:]:
        assert (half.average(gradient) - wide.average(gradient)).abs().max() < 0.02
    assert half.sent == wide.sent / 2
