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


def flip(tensor, bit):
    """Flips a bit of its first element."""
    first = tensor.detach().view(-1)[:1].view(torch.uint8)
    first[bit // 8] ^= 1 << bit % 8


def flips(rank):
    """What a monitor says of tensors of many kinds, and after each of some flips on the last rank alone."""
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
    said = {"": told(monitor.check)}
    for name in ("scalar", "nan", "double", "count"):
        if rank == 2:
            flip(tensors[name], 0)
        said[name] = told(monitor.check)
        monitor.broadcast()
        said[f"{name}, mended"] = told(monitor.check)
    if rank == 2:
        tensors["transposed"][5, 3] += 1
        tensors["channels_last"] = tensors["channels_last"].contiguous()  # the same numbers, in another order
        monitor.parameters = tensors
    said["transposed"] = told(monitor.check)
    monitor.broadcast()
    said["mended"] = told(monitor.check)
    return said, tensors


def trained(rank):
    """What monitors of the parameters alone and of all there is say: of averages over a batch, which differ, and of a
    bit of the momentum, before and after the step that it spoils."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    momenta = [(f"momentum {i}", s["momentum_buffer"]) for i, s in enumerate(optimizer.state.values())]
    alone = gradzip.ReplicaMonitor(model.named_parameters())
    said = [told(monitor.check) for monitor in (alone, gradzip.ReplicaMonitor([*model.state_dict().items(), *momenta]))]
    model(torch.randn(8, 6) * (1 + rank) + rank)
    said += [told(monitor.check) for monitor in (alone, gradzip.ReplicaMonitor(model.state_dict().items()))]
    if rank == 1:
        flip(momenta[0][1], 22)
    said += [told(monitor.check) for monitor in (alone, gradzip.ReplicaMonitor(momenta))]
    optimizer.step()
    return [*said, told(alone.check)]


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
    state |= {"flips": flips(rank), "trained": trained(rank)}
    torch.save(state, folder / f"{rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        os._exit(0)  # at once: a thread of torch's that lets go of a Python object too late would abort the process


if __name__ == "__main__":
    main()
