"""Replicas that are made to differ, under horovodrun or torchrun. Saves the errors of each rank."""

import os
import sys
from pathlib import Path

import torch

import gradzip


def connect():
    """Initialize Horovod or torch.distributed. Returns the rank."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        torch.distributed.init_process_group("gloo")
        return torch.distributed.get_rank()
    import horovod.torch as hvd

    hvd.init()
    return hvd.rank()


def error_of(function):
    """The text of the RuntimeError that a function raises, or ""."""
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return ""


def flip(tensor, bit):
    """Flip a bit of the first element."""
    first = tensor.detach().view(-1)[:1].view(torch.uint8)
    first[bit // 8] ^= 1 << bit % 8


def flips(rank):
    """A monitor's errors for many kinds of tensors, after flips of single bits on the last rank."""
    torch.manual_seed(0)
    tensors = {
        "scalar": torch.tensor(1.5),
        "nan": torch.full((5,), float("nan")),
        "transposed": torch.randn(4, 6).t(),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "empty": torch.empty(0, 3),
        "half": torch.randn(7).half(),
        "double": torch.randn(7).double(),
        "count": torch.tensor(7),
        "flags": torch.tensor([True, False, True]),
    }
    monitor = gradzip.ReplicaMonitor(tensors.items())
    errors = {"": error_of(monitor.check)}
    for name in ("scalar", "nan", "double", "count"):
        if rank == 2:
            flip(tensors[name], 0)
        errors[name] = error_of(monitor.check)
        monitor.broadcast()
        errors[f"{name}, repaired"] = error_of(monitor.check)
    if rank == 2:
        tensors["transposed"][5, 3] += 1
        tensors["channels_last"] = tensors["channels_last"].contiguous()  # the same numbers in another memory layout
        monitor.parameters = tensors
    errors["transposed"] = error_of(monitor.check)
    monitor.broadcast()
    errors["repaired"] = error_of(monitor.check)
    return errors, tensors


def trained(rank):
    """Errors of monitors of the parameters, and of all tensors: with equal replicas, with buffers that differ, and with
    a flipped bit in a momentum, before and after the next step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    momenta = [(f"momentum {i}", s["momentum_buffer"]) for i, s in enumerate(optimizer.state.values())]
    of_parameters = gradzip.ReplicaMonitor(model.named_parameters())
    errors = [
        error_of(monitor.check)
        for monitor in (of_parameters, gradzip.ReplicaMonitor([*model.state_dict().items(), *momenta]))
    ]
    model(torch.randn(8, 6) * (1 + rank) + rank)
    errors += [
        error_of(monitor.check) for monitor in (of_parameters, gradzip.ReplicaMonitor(model.state_dict().items()))
    ]
    if rank == 1:
        flip(momenta[0][1], 22)
    errors += [error_of(monitor.check) for monitor in (of_parameters, gradzip.ReplicaMonitor(momenta))]
    optimizer.step()
    return [*errors, error_of(of_parameters.check)]


def main():
    folder = Path(sys.argv[1])
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 5).bfloat16(), torch.nn.Linear(0, 0))
    unconnected = error_of(gradzip.ReplicaMonitor(model.named_parameters(), check_every=1).step)
    rank = connect()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    monitor = gradzip.ReplicaMonitor(model.named_parameters(), check_every=3)
    messages = [error_of(monitor.step) for _ in range(3)]
    with torch.no_grad():
        model[1].weight[2, 3] += rank  # differs on all ranks but 0
    messages += [error_of(monitor.step) for _ in range(3)]
    repairing = gradzip.ReplicaMonitor(model.named_parameters(), check_every=2, broadcast_every=2)
    messages += [error_of(repairing.step) for _ in range(2)]
    state = {"unconnected": unconnected, "messages": messages, "weight": model[1].weight.detach()}
    state |= {"flips": flips(rank), "trained": trained(rank)}
    torch.save(state, folder / f"{rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        os._exit(0)  # now: a torch thread that frees a Python object during shutdown aborts the process


if __name__ == "__main__":
    main()
