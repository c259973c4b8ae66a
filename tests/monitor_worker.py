"""Replicas that are made to differ, under horovodrun or torchrun; saves what each rank was told."""

import os
import sys
from pathlib import Path

import torch

import gradzip


def connect():
    """This rank's number."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        torch.distributed.init_process_group("gloo")
        return torch.distributed.get_rank()
    import horovod.torch as hvd

    hvd.init()
    return hvd.rank()


def told(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return ""


def main():
    folder = Path(sys.argv[1])
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 5).bfloat16(), torch.nn.Linear(0, 0))
    unconnected = told(gradzip.ReplicaMonitor(model.named_parameters(), check_every=1).step)
    rank = connect()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    monitor = gradzip.ReplicaMonitor(model.named_parameters(), check_every=3)
    messages = [told(monitor.step) for _ in range(3)]
    with torch.no_grad():
        model[1].weight[2, 3] += rank  # of rank 0 by nothing
    messages += [told(monitor.step) for _ in range(3)]
    healing = gradzip.ReplicaMonitor(model.named_parameters(), check_every=2, broadcast_every=2)
    messages += [told(healing.step) for _ in range(2)]
    state = {"unconnected": unconnected, "messages": messages, "weight": model[1].weight.detach()}
    torch.save(state, folder / f"{rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        os._exit(0)  # at once: a thread of torch's that lets go of a Python object too late would abort the process


if __name__ == "__main__":
    main()
