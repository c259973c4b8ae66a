"""Measure a training step without communication."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradzip.advice.cost import Layer, Step
from gradzip.advice.measure import Moment, moment, now, seconds_between


def measure_step(model: nn.Module, train: Callable[[], object], repeats: int = 5) -> Step:
    """Measure when each gradient of a training step is ready, and how long the step takes, without communication.

    Times are medians. On a CUDA device they are those of events, and nothing waits for the device before the last step.

    Args:
        model: on one device. Its layers are the parameters that get a gradient, named as in `named_parameters`.
        train: runs one step: forward pass, backward pass and optimizer. It is called `repeats + 2` times.
        repeats: steps to measure.

    Raises:
        ValueError: no parameter gets a gradient.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    device = next(iter(named.values())).device if named else torch.device("cpu")
    times: dict[str, list[Moment]] = {name: [] for name in named}

    def hook(name: str) -> Callable[[Tensor], None]:
        return lambda _: times[name].append(moment(device))

    handles = [p.register_post_accumulate_grad_hook(hook(name)) for name, p in named.items()]
    steps = []
    try:
        for _ in range(repeats + 2):
            start = moment(device)
            train()
            steps.append((start, moment(device)))
    finally:
        for handle in handles:
            handle.remove()
    now(device)
    seconds = statistics.median(seconds_between(*step) for step in steps[2:])
    ready = {
        name: statistics.median(seconds_between(begin, mark) for (begin, _), mark in zip(steps[2:], marks[2:]))
        for name, marks in times.items()
        if len(marks) == len(steps)
    }
    if not ready:
        raise ValueError("measure_step: got a model of which no parameter gets one gradient a step, expected some")
    layers = [Layer(name, tuple(named[name].shape), min(t, seconds)) for name, t in ready.items()]
    return Step(tuple(sorted(layers, key=lambda layer: layer.ready)), seconds)
