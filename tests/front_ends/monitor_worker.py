"""Scenarios for test_monitor.py, on two ranks: trains with and without a monitor."""

import torch

import gradzip
from harness import data_parallel, main, scenario

STEPS = 5


def train(rank, size, compressor):
    """The parameters after some steps of a small net with several buckets."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    module, optimizer = data_parallel(model, sgd, compressor, bucket_cap_mb=0.1)
    for step in range(STEPS):
        torch.manual_seed(size * step + rank)
        optimizer.zero_grad()
        module(torch.randn(16, 128)).square().mean().backward()
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@scenario
def not_watched(rank, size):
    return train(rank, size, gradzip.FFTRange(theta=0.5, error_feedback=True))


@scenario
def watched_on_rank_0(rank, size):
    """Return the parameters, what was reported, and the monitor's number of steps."""
    compressor = gradzip.FFTRange(theta=0.5, error_feedback=True)
    reports = {}
    monitor = gradzip.Monitor(
        lambda tag, value, step: reports.setdefault(tag, {}).update({step: float(value)}), every=2
    )
    if rank == 0:
        monitor.watch(compressor)
    return train(rank, size, compressor), reports, monitor.steps


if __name__ == "__main__":
    main()
