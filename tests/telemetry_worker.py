"""Trains with and without a monitor, under horovodrun or torchrun. Saves the parameters, and what was reported."""

import os
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import gradzip
from monitor_worker import connect

STEPS = 5


def train(rank, size, compressor):
    """The parameters after some steps of a small net with several buckets."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = model
    if torch.distributed.is_initialized():
        trained = DistributedDataParallel(model, bucket_cap_mb=0.1)
        named = model.named_parameters()
        trained.register_comm_hook(gradzip.ddp.HookState(compressor, named_parameters=named), gradzip.ddp.hook)
    else:
        import horovod.torch as hvd

        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compressor)
    for step in range(STEPS):
        torch.manual_seed(size * step + rank)
        optimizer.zero_grad()
        trained(torch.randn(16, 128)).square().mean().backward()
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def main():
    rank, size = connect(), 2
    plain = train(rank, size, gradzip.FFTRange(theta=0.5, error_feedback=True))
    compressor = gradzip.FFTRange(theta=0.5, error_feedback=True)
    reports = {}
    monitor = gradzip.Monitor(
        lambda tag, value, step: reports.setdefault(tag, {}).update({step: float(value)}), every=2
    )
    if rank == 0:
        monitor.watch(compressor)
    parameters = train(rank, size, compressor)
    results = {"parameters": parameters, "not watched": plain, "reports": reports, "steps": monitor.steps}
    torch.save(results, Path(sys.argv[1]) / f"{rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        os._exit(0)  # now: a torch thread that frees a Python object during shutdown aborts the process


if __name__ == "__main__":
    main()
