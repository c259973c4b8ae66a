"""Sparse averages divide by the number of all ranks, not of those that send an element."""

import torch

import gradzip


def minimize(average, lr, steps):
    """The distance from the minimum of a sum of quadratics, different on four workers, mean over the last 100 steps.

    average: of the gradients of the four workers.
    """
    generator = torch.Generator().manual_seed(0)
    curvature = torch.rand(4, 32, 32, generator=generator) * 2 + 0.1
    minima = torch.randn(4, 32, 32, generator=generator) * torch.tensor([0.2, 1.1, 2.1, 3.0]).view(4, 1, 1)
    best = (curvature * minima).sum(0) / curvature.sum(0)
    x, distances = torch.zeros(32, 32), []
    for _ in range(steps):
        x = x - lr * average(list(curvature * (x - minima)))
        distances.append(((x - best).norm() / best.norm()).item())
    return sum(distances[-100:]) / 100


def over_contributing_ranks():
    """Top-k with error feedback, divided by the number of workers that send the element, in plain torch."""
    residuals = torch.zeros(4, 1024)

    def average(gradients):
        corrected = residuals + torch.stack(gradients).view(4, -1)
        kept = corrected.abs().topk(102, 1).indices
        sent = torch.zeros(4, 1024).scatter_(1, kept, corrected.gather(1, kept))
        residuals.copy_(corrected - sent)
        return (sent.sum(0) / (sent != 0).sum(0).clamp(min=1)).view(32, 32)

    return average


def test_the_mean_over_all_ranks_comes_nearer_to_the_minimum():
    """The mean over those that send an element gives those more weight that send it alone.

    Its steps are up to four times as large, so it gets a quarter of the learning rate, too.
    """
    group = gradzip.LocalGroup(gradzip.TopK(theta=0.9), 4)
    ours = minimize(lambda gradients: group.average(gradients, "w")[0], 0.02, 1000)
    theirs = [minimize(over_contributing_ranks(), lr, 1000) for lr in (0.02, 0.005)]
    assert ours < 0.05 and min(theirs) > 1.8 * ours, (ours, theirs)
